package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/sandbox/leakcheck"
)

// life is one pod of one worker, from its birth to its end. All that it does is
// drawn before it begins.
type life struct {
	*world
	worker, number int
	draw           *rand.Rand // for the plan alone
	config         *cri.PodSandboxConfig
	pod            string
	boxes          []*box
	plan           []step
}

// box is a container, and what must become of it.
type box struct {
	name, kind, id string
	config         *cri.ContainerConfig
	code           int32 // that it ends with, by itself or on SIGTERM
	lines          int   // that it logs before it ends by itself
	rotated        int   // its log
	ended          bool
	removed        bool
}

// The kinds of containers.
const (
	counter  = "counter"  // logs numbers until SIGTERM
	cat      = "cat"      // repeats what an attached client says
	stubborn = "stubborn" // ignores SIGTERM
	short    = "short"    // logs some numbers and ends
	greedy   = "greedy"   // takes more memory than it may
)

type step struct {
	name string
	do   func(context.Context) error
}

// isPod tells a pod's name from a container's, which has a dash.
func isPod(name string) bool { return !strings.Contains(name, "-") }

// newLife draws a life.
func newLife(w *world, worker, number int) *life {
	l := &life{world: w, worker: worker, number: number, draw: rand.New(rand.NewPCG(w.seed, uint64(worker)<<32|uint64(number)))}
	name := fmt.Sprintf("w%dl%d", worker, number)
	options := &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}
	switch n := l.draw.IntN(10); {
	case n < 2:
		options.Pid = cri.NamespaceMode_POD
	case n < 3:
		options.Pid = cri.NamespaceMode_NODE
	}
	l.config = &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: name, Namespace: "soak", Uid: name}, LogDirectory: filepath.Join(w.LogDir(), name),
		Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: options}},
	}
	if l.draw.IntN(3) == 0 {
		options.Network = cri.NamespaceMode_NODE
	} else {
		l.config.Hostname = name
		if l.draw.IntN(4) == 0 {
			l.config.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: int32(18000 + worker)}}
		}
	}
	l.boxes = append(l.boxes, l.box(counter))
	for range l.draw.IntN(3) {
		l.boxes = append(l.boxes, l.box([]string{counter, cat, stubborn, short, short, greedy}[l.draw.IntN(6)]))
	}
	l.plan = l.steps()
	return l
}

// box draws a container of a kind.
func (l *life) box(kind string) *box {
	b := &box{kind: kind, name: fmt.Sprintf("%s-%s%d", l.config.GetMetadata().GetName(), kind, len(l.boxes)), code: int32(3 + l.draw.IntN(100))}
	script := ""
	switch kind {
	case counter:
		script = fmt.Sprintf("trap 'exit %d' TERM; n=0; while :; do seq $n $((n+%d)); n=$((n+%d)); sleep 0.3; done", b.code, 49, 50)
	case cat:
		script = fmt.Sprintf("trap 'exit %d' TERM; echo 0; while read -r l; do echo got $l; done; while :; do sleep 0.3; done", b.code)
	case stubborn:
		b.code = 137
		script = "trap '' TERM; echo 0; while :; do sleep 0.3; done"
	case short:
		b.lines = 1 + l.draw.IntN(3000)
		script = fmt.Sprintf("seq 0 %d; sleep 0.%d; exit %d", b.lines-1, l.draw.IntN(9), b.code)
	case greedy:
		b.code = 137
		script = "exec dd if=/dev/zero of=/dev/null bs=64M"
	}
	b.config = &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: b.name}, Image: &cri.ImageSpec{Image: images.Busybox},
		Command: []string{"sh", "-c", script}, LogPath: kind + b.name + ".log", Stdin: kind == cat,
		Linux: &cri.LinuxContainerConfig{
			Resources:       &cri.LinuxContainerResources{MemoryLimitInBytes: 64 << 20},
			SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: l.config.GetLinux().GetSecurityContext().GetNamespaceOptions()},
		},
	}
	if kind == greedy {
		b.config.Linux.Resources.MemoryLimitInBytes = 15 << 20
	}
	if l.draw.IntN(4) == 0 {
		b.config.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
	}
	return b
}

// steps draws what the life does, from the pod's start to its removal.
func (l *life) steps() []step {
	plan := []step{{"RunPodSandbox", l.run}}
	for _, b := range l.boxes {
		plan = append(plan, step{"CreateContainer", func(ctx context.Context) error { return l.create(ctx, b) }},
			step{"StartContainer", func(ctx context.Context) error { return l.start(ctx, b) }})
	}
	for range 3 + l.draw.IntN(9) {
		plan = append(plan, l.use())
	}
	for _, b := range l.boxes {
		if b.kind == short || b.kind == greedy {
			plan = append(plan, step{"wait for an exit", func(ctx context.Context) error { return l.waitExit(ctx, b) }})
		}
		if l.draw.IntN(3) > 0 { // else the pod's end is its end
			plan = append(plan, step{"StopContainer", func(ctx context.Context) error { return l.stop(ctx, b) }})
			if l.draw.IntN(2) == 0 {
				plan = append(plan, step{"RemoveContainer", func(ctx context.Context) error { return l.remove(ctx, b) }})
			}
		}
	}
	return append(plan, step{"StopPodSandbox", l.stopPod}, step{"RemovePodSandbox", l.removePod}, step{"read the logs", l.logs})
}

// live runs the life. A life that went wrong is cleared away.
func (l *life) live(ctx context.Context) {
	for _, s := range l.plan {
		err := s.do(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			l.bad("life %d of worker %d, %s: %v", l.number, l.worker, s.name, err)
			l.clear(ctx)
			return
		}
	}
	l.mu.Lock()
	l.world.life++
	l.mu.Unlock()
}

// clear removes what a life that went wrong has left.
func (l *life) clear(ctx context.Context) {
	name := l.config.GetMetadata().GetName()
	l.model.set(name, moving)
	for _, b := range l.boxes {
		l.model.set(b.name, moving)
	}
	if l.pod == "" {
		return
	}
	for _, send := range []func(context.Context) error{
		func(ctx context.Context) error {
			_, err := l.rt.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: l.pod})
			return err
		},
		func(ctx context.Context) error {
			_, err := l.rt.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: l.pod})
			return err
		},
	} {
		if err := l.request(ctx, "clear away", send); err != nil {
			l.bad("clear away after a wrong life: %v", err)
		}
	}
}

func (l *life) run(ctx context.Context) error {
	name := l.config.GetMetadata().GetName()
	l.model.set(name, moving)
	err := l.request(ctx, "RunPodSandbox", func(ctx context.Context) error {
		res, err := l.rt.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: l.config})
		l.pod = res.GetPodSandboxId()
		return err
	})
	if err == nil {
		l.model.set(name, ready)
	}
	return err
}

func (l *life) create(ctx context.Context, b *box) error {
	l.model.set(b.name, moving)
	err := l.request(ctx, "CreateContainer", func(ctx context.Context) error {
		res, err := l.rt.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: l.pod, Config: b.config, SandboxConfig: l.config})
		b.id = res.GetContainerId()
		return err
	})
	if err == nil {
		l.model.set(b.name, created)
	}
	return err
}

// start starts a container and waits until it has set its trap. A start that a
// crash cut off may have happened: the kubelet looks before it asks again.
func (l *life) start(ctx context.Context, b *box) error {
	l.model.set(b.name, moving)
	err := l.request(ctx, "StartContainer", func(ctx context.Context) error {
		if s, err := l.status(ctx, b); err != nil || s.GetStartedAt() != 0 {
			return err
		}
		_, err := l.rt.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: b.id})
		return err
	})
	if err != nil || b.kind == short || b.kind == greedy {
		return err
	}
	for end := time.Now().Add(leakcheck.Patience(time.Minute)); ; time.Sleep(20 * time.Millisecond) {
		if info, err := os.Stat(l.logPath(b)); err == nil && info.Size() > 0 {
			l.model.set(b.name, running)
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s has said nothing for a minute", b.name)
		}
	}
}

func (l *life) status(ctx context.Context, b *box) (*cri.ContainerStatus, error) {
	res, err := l.rt.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: b.id})
	return res.GetStatus(), err
}

// waitExit waits for a container's own end.
func (l *life) waitExit(ctx context.Context, b *box) error {
	for end := time.Now().Add(leakcheck.Patience(time.Minute)); ; time.Sleep(50 * time.Millisecond) {
		done := false
		err := l.request(ctx, "ContainerStatus", func(ctx context.Context) error {
			s, err := l.status(ctx, b)
			done = s.GetState() == cri.ContainerState_CONTAINER_EXITED
			return err
		})
		if err != nil {
			return err
		}
		if done {
			return l.exited(ctx, b, b.code)
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s does not end", b.name)
		}
	}
}

// exited checks how a container ended; it may be with any of the codes.
func (l *life) exited(ctx context.Context, b *box, codes ...int32) error {
	return l.request(ctx, "ContainerStatus", func(ctx context.Context) error {
		s, err := l.status(ctx, b)
		if err != nil {
			return err
		}
		l.model.set(b.name, exited)
		b.ended = true
		right := s.GetState() == cri.ContainerState_CONTAINER_EXITED && s.GetFinishedAt() >= s.GetStartedAt()
		known := false
		for _, c := range codes {
			known = known || s.GetExitCode() == c
		}
		if !right || !known || (b.kind == greedy) != (s.GetReason() == "OOMKilled") {
			return fmt.Errorf("%s is %s with code %d, %s %q, from %d to %d; want exited with one of %v", b.name, s.GetState(), s.GetExitCode(), s.GetReason(), s.GetMessage(),
				s.GetStartedAt(), s.GetFinishedAt(), codes)
		}
		return nil
	})
}

func (l *life) stop(ctx context.Context, b *box) error {
	if !b.ended {
		l.model.set(b.name, moving)
	}
	grace := int64(60)
	if b.kind == stubborn {
		grace = 1
	}
	err := l.request(ctx, "StopContainer", func(ctx context.Context) error {
		_, err := l.rt.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: b.id, Timeout: grace})
		return err
	})
	if err != nil {
		return err
	}
	return l.exited(ctx, b, b.code)
}

func (l *life) remove(ctx context.Context, b *box) error {
	l.model.set(b.name, moving)
	err := l.request(ctx, "RemoveContainer", func(ctx context.Context) error {
		_, err := l.rt.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: b.id})
		return err
	})
	if err == nil {
		l.model.set(b.name, gone)
		b.removed = true
	}
	return err
}

// stopPod ends the pod and what runs in it still, which has no time to end by
// itself.
func (l *life) stopPod(ctx context.Context) error {
	name := l.config.GetMetadata().GetName()
	l.model.set(name, moving)
	for _, b := range l.boxes {
		if !b.ended {
			l.model.set(b.name, moving)
		}
	}
	err := l.request(ctx, "StopPodSandbox", func(ctx context.Context) error {
		_, err := l.rt.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: l.pod})
		return err
	})
	if err != nil {
		return err
	}
	l.model.set(name, notReady)
	for _, b := range l.boxes {
		if !b.ended {
			err = errors.Join(err, l.exited(ctx, b, b.code, 137))
		}
	}
	return err
}

func (l *life) removePod(ctx context.Context) error {
	l.model.set(l.config.GetMetadata().GetName(), moving)
	for _, b := range l.boxes {
		if !b.removed {
			l.model.set(b.name, moving)
		}
	}
	err := l.request(ctx, "RemovePodSandbox", func(ctx context.Context) error {
		_, err := l.rt.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: l.pod})
		return err
	})
	if err != nil {
		return err
	}
	l.model.set(l.config.GetMetadata().GetName(), gone)
	for _, b := range l.boxes {
		l.model.set(b.name, gone)
		err = errors.Join(err, l.request(ctx, "status of what is gone", func(ctx context.Context) error {
			_, err := l.status(ctx, b)
			switch status.Code(err) {
			case codes.NotFound:
				return nil
			case codes.OK:
				return fmt.Errorf("%s has a status after its removal", b.name)
			}
			return err
		}))
	}
	return err
}
