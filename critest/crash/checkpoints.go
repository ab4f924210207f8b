package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// counts says a number for each tenth of a second into a file.
const counts = "i=0; while :; do i=$((i+1)); echo $i >/tmp/new; mv /tmp/new /tmp/count; sleep 0.1; done"

// checkpointLife is a pod of which one container is written to an archive, and then
// with the pod's state to a directory, from which it goes on in a pod of its own.
func checkpointLife(l *life) {
	l.config = l.podConfig("checkpoint")
	archive := filepath.Join(l.w.dir, "checkpoints", "archive.tar")
	state := filepath.Join(l.w.dir, "checkpoints", "pod")
	l.requests = []request{
		{name: "a place for checkpoints", send: func(context.Context) error {
			return errors.Join(os.RemoveAll(filepath.Dir(state)), os.MkdirAll(state, 0o700))
		}},
		l.run(), l.create("main", logs), l.start("main", logs), l.speaks("main"), l.create("frozen", counts), l.start("frozen", counts), l.counted("frozen"),
		l.checkpoint("frozen", archive), l.counted("frozen"), l.checkpointPod("frozen", state), l.counted("frozen"),
		l.stopPod(), l.removePod(), l.restore("frozen", state), l.restart("with what is restored"), l.start("frozen", counts), l.counted("frozen"), l.stopPod(), l.removePod(),
		{name: "the end of the checkpoints", send: func(context.Context) error { return os.RemoveAll(filepath.Dir(state)) }},
	}
}

// counted waits until a container's number is another than now: it runs.
func (l *life) counted(name string) request {
	return request{name: "the next number of " + name, send: func(ctx context.Context) error {
		for first := ""; ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
			res, err := l.w.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: l.ids[name], Cmd: []string{"sh", "-c", "cat /tmp/count || true"}, Timeout: 30})
			if err != nil {
				return err
			}
			now := string(res.GetStdout())
			if first != "" && now != first {
				return nil
			}
			first = now
		}
		return ctx.Err()
	}}
}

// checkpoint writes an archive. A repetition takes away what a request has written
// whose answer nobody has read, and nothing else may be there.
func (l *life) checkpoint(name, archive string) request {
	send := func(ctx context.Context) error {
		_, err := l.w.Runtime().CheckpointContainer(ctx, &cri.CheckpointContainerRequest{ContainerId: l.ids[name], Location: archive})
		return err
	}
	return request{name: "CheckpointContainer " + name, send: send, again: func(ctx context.Context) error {
		if err := os.Remove(archive); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return send(ctx)
	}}
}

// checkpointPod writes a pod's state, for a repetition to an empty directory again.
func (l *life) checkpointPod(name, state string) request {
	send := func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, patience) // one must be told
		defer cancel()
		_, err := l.w.Runtime().CheckpointPod(ctx, &cri.CheckpointPodRequest{PodSandboxId: l.pod, OutputPath: state, ContainerIds: []string{l.ids[name]}})
		return err
	}
	return request{name: "CheckpointPod", send: send, again: func(ctx context.Context) error {
		if err := errors.Join(os.RemoveAll(state), os.Mkdir(state, 0o700)); err != nil {
			return err
		}
		return send(ctx)
	}}
}

// restore makes the pod again; a repetition takes the pod of a request whose answer
// nobody has read.
func (l *life) restore(name, state string) request {
	send := func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		res, err := l.w.Runtime().RestorePod(ctx, &cri.RestorePodRequest{CheckpointPath: state, Config: l.config,
			ContainerConfigs: []*cri.ContainerConfig{l.container(name, counts)}})
		l.pod = res.GetPodSandboxId()
		for _, c := range res.GetRestoredContainers() {
			l.ids[name] = c.GetContainerId()
		}
		return err
	}
	return request{name: "RestorePod", send: send, again: func(ctx context.Context) error {
		pods, err := l.w.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
		if err != nil {
			return err
		}
		for _, pod := range pods.GetItems() {
			if pod.GetMetadata().GetName() != l.config.GetMetadata().GetName() || pod.GetState() != cri.PodSandboxState_SANDBOX_READY {
				continue
			}
			made, err := l.w.Runtime().ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: pod.GetId()}})
			if err != nil {
				return err
			}
			if len(made.GetContainers()) != 1 {
				return fmt.Errorf("pod %s of a restore has %d containers", pod.GetId(), len(made.GetContainers()))
			}
			l.pod, l.ids[name] = pod.GetId(), made.GetContainers()[0].GetId()
			return nil
		}
		return send(ctx)
	}}
}
