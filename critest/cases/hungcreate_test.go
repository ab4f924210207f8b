package cases

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// The OCI runtime hangs over a create, with a child in a session of its own. Whoever
// stops the pod does not wait for the create's own time, which is minutes: it is ended
// with its child, and says why it has failed.
func TestStopEndsAHungCreate(t *testing.T) {
	path, ctl := hangingRuntime(t)
	e := start(t, node.Options{Runc: path})
	e.pull(images.Busybox)
	config, other := e.sandbox(), e.sandbox()
	pod, neighbor := e.run(config), e.run(other)
	beside := e.startContainer(pod, command("beside", "exec sleep 1000"), config)
	said := make(chan error, 1)
	pid := e.hangsOver(ctl, "create", func() error {
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: command("hung", "true"), SandboxConfig: config})
		said <- err
		return err
	})
	e.soon("StopPodSandbox over a create that hangs", time.Minute, func() error {
		_, err := e.rt.StopPodSandbox(e.ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod})
		return err
	})
	e.refused("the create", <-said, codes.FailedPrecondition, "the pod is stopped", "create in the OCI runtime")
	e.did(ctl, "create", pid)
	if s := e.exited(beside); s.GetExitCode() != 137 {
		t.Errorf("what ran beside it ended with code %d", s.GetExitCode())
	}
	out := e.exec(e.startContainer(neighbor, command("after", "exec sleep 1000"), other), "echo well")
	if out != "well\n" {
		t.Errorf("an exec in another pod says %q", out)
	}
	for _, id := range []string{pod, neighbor} {
		e.removePod(id)
	}
	e.empty("the removal")
}
