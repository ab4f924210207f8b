package runtime

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/runtime/admin"
)

// waiting asks why until an operation of that verb waits for what.
func (n *node) waiting(verb, what string) (op admin.WhyOperation, p admin.WhyWait) {
	n.t.Helper()
	eventually(n.t, verb+" waits for "+what, func() bool {
		r, err := n.why(n.t.Context(), &admin.WhyRequest{})
		must(n.t, err)
		for _, op = range r.Operations {
			for _, p = range op.Waits {
				if op.Verb == verb && p.What == what {
					return true
				}
			}
		}
		return false
	})
	return op, p
}

// A monitor that is stopped is named, to those who ask and those who wait for it.
func TestWhyTellsOfAStoppedMonitor(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	id := n.runContainer(pod, "c", forever)
	pid := n.MonitorPID()
	must(t, unix.Kill(pid, unix.SIGSTOP))
	resume := sync.OnceFunc(func() { must(t, unix.Kill(pid, unix.SIGCONT)) })
	defer resume()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	request := n.container(pod, "other", forever)
	failed := make(chan error, 2)
	go func() {
		_, err := n.CreateContainer(ctx, request)
		failed <- err
	}()
	go func() {
		_, err := n.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: id})
		failed <- err
	}()
	for _, verb := range []string{"CreateContainer", "StopContainer"} {
		if _, w := n.waiting(verb, "berth-monitor"); w.PID != pid || w.State != "T" {
			t.Errorf("%s waits for %+v", verb, w)
		}
	}
	for range 2 {
		n.refused("a request to a stopped monitor", <-failed, codes.DeadlineExceeded, "berth-monitor (pid ", "state T")
	}
	resume()
	n.create(request)
	eventually(t, "the container has ended", func() bool { return n.status(id).GetState() == cri.ContainerState_CONTAINER_EXITED })
	n.removePod(pod)
	n.empty("removal")
}

// Why names the plugin and the command that an operation waits for, as does the
// error of a caller that gives up.
func TestWhyTellsWhatOperationsWaitFor(t *testing.T) {
	n := newNode(t)
	undo := n.tell("hang-ADD")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		_, err := n.RunPodSandbox(ctx, n.bridgePod("web"))
		failed <- err
	}()
	op, p := n.waiting("RunPodSandbox", "CNI plugin bridge ADD")
	if op.Step != "network setup" || op.ID == "" || op.Seconds < op.StepSeconds || p.PID < 2 || p.State == "" || !strings.HasPrefix(op.Object, "web_") {
		t.Errorf("operation %+v", op)
	}
	r, err := n.why(t.Context(), &admin.WhyRequest{Object: op.ID[:12]})
	must(t, err)
	if len(r.Operations) != 1 || len(r.Objects) != 1 || r.Objects[0].State != "being made" {
		t.Errorf("why of the pod: %+v", r)
	}
	err = <-failed
	n.refused("a pod whose plugin hangs", err, codes.DeadlineExceeded)
	if err != nil && !strings.Contains(err.Error(), "waiting for CNI plugin bridge ADD (pid ") {
		t.Errorf("error %v", err)
	}
	undo()
	pod := n.runPod(n.bridgePod("web"))

	undo = n.tell("hang-create")
	made := make(chan struct{})
	go func() { defer close(made); n.create(n.container(pod, "c", forever)) }()
	n.waiting("CreateContainer", "runc create")
	undo()
	<-made
}

// Why knows what failed last, also of an object that is gone, why a container has
// ended and why a pod is not ready.
func TestWhyTellsOfTheEnd(t *testing.T) {
	n := newNode(t)
	undo := n.tell("fail-ADD")
	request := n.bridgePod("web")
	_, err := n.RunPodSandbox(t.Context(), request)
	if err == nil {
		t.Fatal("a failing plugin made a pod")
	}
	r, err := n.why(t.Context(), &admin.WhyRequest{Object: "web_"})
	must(t, err)
	if len(r.Objects) != 1 || r.Objects[0].State != "gone" || r.Objects[0].Failed == nil ||
		r.Objects[0].Failed.Verb != "RunPodSandbox" || r.Objects[0].Failed.Step != "network setup" || !strings.Contains(r.Objects[0].Failed.Error, "was told to") {
		t.Errorf("why of a pod that could not be made: %+v", r)
	}
	undo()
	pod := n.runPod(request)
	c := n.runContainer(pod, "c", "exit 3")
	n.exited(c)
	_, err = n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	r, err = n.why(t.Context(), &admin.WhyRequest{Object: pod})
	must(t, err)
	if len(r.Objects) != 2 || r.Objects[0].State != "not ready" || !strings.Contains(r.Objects[0].Reason, "stopped") || r.Objects[0].Failed != nil ||
		r.Objects[1].State != "exited" || !strings.Contains(r.Objects[1].Reason, "exit code 3") {
		t.Errorf("why of a stopped pod: %+v", r.Objects)
	}
	_, err = n.why(t.Context(), &admin.WhyRequest{Object: "nobody"})
	n.refused("why of nothing", statusOf(err), codes.NotFound)
}
