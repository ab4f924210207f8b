package cases

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// brief is the life of a pod whose daemon is killed in one of its calls.
type brief struct {
	*env
	config    *cri.PodSandboxConfig
	pod, main string // ids
}

// briefCalls are the calls of that life in order. Each may be made again.
var briefCalls = []struct {
	name string
	call func(b *brief) error
}{
	{"RunPodSandbox", func(b *brief) error {
		res, err := b.rt.RunPodSandbox(b.ctx, &cri.RunPodSandboxRequest{Config: b.config})
		b.pod = res.GetPodSandboxId()
		return err
	}},
	{"CreateContainer", func(b *brief) error {
		res, err := b.rt.CreateContainer(b.ctx, &cri.CreateContainerRequest{PodSandboxId: b.pod, Config: command("main", "sleep 1000"), SandboxConfig: b.config})
		b.main = res.GetContainerId()
		return err
	}},
	{"StartContainer", func(b *brief) error {
		_, err := b.rt.StartContainer(b.ctx, &cri.StartContainerRequest{ContainerId: b.main})
		if status.Code(err) == codes.FailedPrecondition && b.status(b.main).GetState() == cri.ContainerState_CONTAINER_RUNNING {
			return nil // the first call has done it
		}
		return err
	}},
	{"StopContainer", func(b *brief) error {
		_, err := b.rt.StopContainer(b.ctx, &cri.StopContainerRequest{ContainerId: b.main})
		return err
	}},
	{"RemoveContainer", func(b *brief) error {
		_, err := b.rt.RemoveContainer(b.ctx, &cri.RemoveContainerRequest{ContainerId: b.main})
		return err
	}},
	{"StopPodSandbox", func(b *brief) error {
		_, err := b.rt.StopPodSandbox(b.ctx, &cri.StopPodSandboxRequest{PodSandboxId: b.pod})
		return err
	}},
	{"RemovePodSandbox", func(b *brief) error {
		_, err := b.rt.RemovePodSandbox(b.ctx, &cri.RemovePodSandboxRequest{PodSandboxId: b.pod})
		return err
	}},
}

// killed lives once, with the daemon killed some time after a call began. The same
// call is made again after the restart, then the rest of the life goes on.
func (b *brief) killed(in string, after time.Duration) {
	b.Helper()
	for _, c := range briefCalls {
		if c.name == in {
			over := make(chan struct{})
			go func(first brief) { // of its answer nothing is known
				defer close(over)
				_ = c.call(&first)
			}(*b)
			time.Sleep(after)
			if err := b.Kill(); err != nil {
				b.Fatal(err)
			}
			<-over
			if err := b.Launch(b.ctx); err != nil {
				b.Fatal(err)
			}
		}
		if err := c.call(b); err != nil {
			b.Fatalf("daemon killed %v after %s began: %s: %v", after, in, c.name, err)
		}
	}
	b.empty("a life with a kill in " + in)
}

// TestB107KilledAtAnyMoment kills the daemon at moments that no step of its own
// marks, 10 ms apart. BERTH_KILLS sets how many for each call; the report's are 40.
func TestB107KilledAtAnyMoment(t *testing.T) {
	moments := figure(t, "BERTH_KILLS", 3)
	for _, c := range briefCalls {
		t.Run(c.name, func(t *testing.T) {
			e := start(t, node.Options{})
			e.pull(images.Busybox)
			for i := range moments {
				b := &brief{env: e, config: e.sandbox()}
				b.killed(c.name, 10*time.Millisecond*time.Duration(i))
			}
			if left := e.leases(); len(left) != 0 {
				t.Errorf("leases %q are left", left)
			}
		})
	}
}
