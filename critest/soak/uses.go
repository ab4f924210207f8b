package main

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// use draws one thing to do with a living pod. The first container always runs.
func (l *life) use() step {
	b := l.boxes[0]
	if pick := l.boxes[l.draw.IntN(len(l.boxes))]; pick.kind != short && pick.kind != greedy {
		b = pick
	}
	code, size := l.draw.IntN(100), 1<<l.draw.IntN(18)
	transport := l.draw.IntN(2)
	choice := []struct {
		weight int
		step
	}{
		{12, step{"ExecSync", func(ctx context.Context) error { return l.execSync(ctx, b, code, size) }}},
		{3, step{"ExecSync that is too slow", func(ctx context.Context) error { return l.execSlow(ctx, b) }}},
		{3, step{"ExecSync of nothing", func(ctx context.Context) error { return l.execNothing(ctx, b) }}},
		{8, step{"Exec", func(ctx context.Context) error { return l.exec(ctx, b, transport, code, size) }}},
		{6, step{"Attach", func(ctx context.Context) error { return l.attach(ctx, b, transport) }}},
		{3, step{"Attach and go", func(ctx context.Context) error { return l.vanish(ctx, b) }}},
		{8, step{"rotation", func(ctx context.Context) error { return l.rotate(ctx, b) }}},
		{6, step{"statistics", func(ctx context.Context) error { return l.stats(ctx, b) }}},
		{6, step{"UpdateContainerResources", func(ctx context.Context) error { return l.update(ctx, b, int64(65+code)<<20) }}},
		{4, step{"PodSandboxStatus", l.podStatus}},
		{6, step{"pull", func(ctx context.Context) error { return l.pull(ctx, code%imageCount) }}},
		{4, step{"RemoveImage", func(ctx context.Context) error { return l.removeImage(ctx, code%imageCount) }}},
		{2, step{"broken pull", func(ctx context.Context) error { return l.breakPull(ctx, code%imageCount) }}},
	}
	total := 0
	for _, c := range choice {
		total += c.weight
	}
	at := l.draw.IntN(total)
	for _, c := range choice {
		if at -= c.weight; at < 0 {
			return c.step
		}
	}
	panic("unreachable")
}

func (l *life) execSync(ctx context.Context, b *box, code, size int) error {
	return l.request(ctx, "ExecSync", func(ctx context.Context) error {
		res, err := l.rt.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: b.id, Timeout: 60,
			Cmd: []string{"sh", "-c", fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x; echo no >&2; exit %d", size, code)}})
		if err == nil && (int(res.GetExitCode()) != code || !bytes.Equal(res.GetStdout(), bytes.Repeat([]byte("x"), size)) || string(res.GetStderr()) != "no\n") {
			return fmt.Errorf("code %d, %d bytes, %q; want %d, %d, no", res.GetExitCode(), len(res.GetStdout()), res.GetStderr(), code, size)
		}
		return err
	})
}

// execSlow is killed at its time limit.
func (l *life) execSlow(ctx context.Context, b *box) error {
	return l.request(ctx, "ExecSync that is too slow", func(ctx context.Context) error {
		res, err := l.rt.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: b.id, Timeout: 1, Cmd: []string{"sleep", "1000"}})
		switch status.Code(err) {
		case codes.DeadlineExceeded:
			return nil
		case codes.OK:
			return fmt.Errorf("it ended with %d", res.GetExitCode())
		}
		return err
	})
}

func (l *life) execNothing(ctx context.Context, b *box) error {
	return l.request(ctx, "ExecSync of nothing", func(ctx context.Context) error {
		res, err := l.rt.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: b.id, Timeout: 60, Cmd: []string{"/nope"}})
		switch status.Code(err) {
		case codes.InvalidArgument:
			return nil
		case codes.OK:
			return fmt.Errorf("it ended with %d", res.GetExitCode())
		}
		return err
	})
}

func (l *life) stats(ctx context.Context, b *box) error {
	return l.request(ctx, "statistics", func(ctx context.Context) error {
		one, err := l.rt.ContainerStats(ctx, &cri.ContainerStatsRequest{ContainerId: b.id})
		if err != nil {
			return err
		}
		if one.GetStats().GetAttributes().GetId() != b.id || one.GetStats().GetCpu().GetUsageCoreNanoSeconds().GetValue() == 0 {
			return fmt.Errorf("statistics of %s: %v", b.name, one.GetStats())
		}
		pod, err := l.rt.PodSandboxStats(ctx, &cri.PodSandboxStatsRequest{PodSandboxId: l.pod})
		if err != nil {
			return err
		}
		if pod.GetStats().GetLinux().GetMemory().GetUsageBytes().GetValue() == 0 {
			return fmt.Errorf("statistics of the pod: %v", pod.GetStats())
		}
		metrics, err := l.rt.ListPodSandboxMetrics(ctx, &cri.ListPodSandboxMetricsRequest{})
		if err != nil {
			return err
		}
		for _, m := range metrics.GetPodMetrics() {
			if m.GetPodSandboxId() == l.pod {
				return nil
			}
		}
		return fmt.Errorf("the pod is not among the metrics of %d", len(metrics.GetPodMetrics()))
	})
}

// update changes the memory limit; the container sees it, and so does Status.
func (l *life) update(ctx context.Context, b *box, limit int64) error {
	err := l.request(ctx, "UpdateContainerResources", func(ctx context.Context) error {
		_, err := l.rt.UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{ContainerId: b.id,
			Linux: &cri.LinuxContainerResources{MemoryLimitInBytes: limit}})
		return err
	})
	if err != nil {
		return err
	}
	return l.request(ctx, "ContainerStatus", func(ctx context.Context) error {
		s, err := l.status(ctx, b)
		if err == nil && s.GetResources().GetLinux().GetMemoryLimitInBytes() != limit {
			return fmt.Errorf("the limit is %d, want %d", s.GetResources().GetLinux().GetMemoryLimitInBytes(), limit)
		}
		return err
	})
}

func (l *life) podStatus(ctx context.Context) error {
	return l.request(ctx, "PodSandboxStatus", func(ctx context.Context) error {
		res, err := l.rt.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: l.pod, Verbose: true})
		if err != nil {
			return err
		}
		s := res.GetStatus()
		ip := s.GetNetwork().GetIp()
		own := l.config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork() == cri.NamespaceMode_POD
		if s.GetState() != cri.PodSandboxState_SANDBOX_READY || own != strings.HasPrefix(ip, "10.88.") {
			return fmt.Errorf("it is %s with the address %q", s.GetState(), ip)
		}
		return nil
	})
}
