package main

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// liar is a daemon that says what a test has it say.
type liar struct {
	cri.RuntimeServiceClient
	pods       []*cri.PodSandbox
	containers []*cri.Container
	status     *cri.ContainerStatus
	pid        int
}

func (l *liar) ListPodSandbox(context.Context, *cri.ListPodSandboxRequest, ...grpc.CallOption) (*cri.ListPodSandboxResponse, error) {
	return &cri.ListPodSandboxResponse{Items: l.pods}, nil
}

func (l *liar) ListContainers(context.Context, *cri.ListContainersRequest, ...grpc.CallOption) (*cri.ListContainersResponse, error) {
	return &cri.ListContainersResponse{Containers: l.containers}, nil
}

func (l *liar) PodSandboxStatus(context.Context, *cri.PodSandboxStatusRequest, ...grpc.CallOption) (*cri.PodSandboxStatusResponse, error) {
	return &cri.PodSandboxStatusResponse{Status: &cri.PodSandboxStatus{State: cri.PodSandboxState_SANDBOX_READY}}, nil
}

func (l *liar) ContainerStatus(context.Context, *cri.ContainerStatusRequest, ...grpc.CallOption) (*cri.ContainerStatusResponse, error) {
	return &cri.ContainerStatusResponse{Status: l.status, Info: map[string]string{"info": fmt.Sprintf(`{"pid": %d}`, l.pid)}}, nil
}

const someID = "0123456789abcdef"

func (l *liar) has(state cri.ContainerState) {
	l.containers = []*cri.Container{{Id: someID, Metadata: &cri.ContainerMetadata{Name: "one"}, State: state}}
	l.status = &cri.ContainerStatus{Id: someID, State: state, CreatedAt: 1, StartedAt: 2, FinishedAt: 3, Reason: "Completed"}
}

// Each kind of untruth is noticed, and the truth is none.
func TestWatcherNoticesEveryLie(t *testing.T) {
	const running, exited = cri.ContainerState_CONTAINER_RUNNING, cri.ContainerState_CONTAINER_EXITED
	sleep := exec.Command("sleep", "1000")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sleep.Process.Kill(); _ = sleep.Wait() })
	pod := &cri.PodSandbox{Id: someID, Metadata: &cri.PodSandboxMetadata{Name: "p"}, State: cri.PodSandboxState_SANDBOX_NOTREADY}
	for want, tell := range map[string]func(l *liar, w *watcher, look func()){
		"": func(l *liar, w *watcher, look func()) {
			l.pid = sleep.Process.Pid
			l.has(running)
			look()
			w.mayGo(someID)
			l.containers = nil
		},
		"listed no longer": func(l *liar, _ *watcher, look func()) { l.has(running); look(); l.containers = nil },
		"listed again": func(l *liar, w *watcher, look func()) {
			l.has(exited)
			w.mayGo(someID)
			look()
			l.containers = nil
			look()
			l.has(exited)
		},
		"in state 1 after it was in 2": func(l *liar, _ *watcher, look func()) { l.has(exited); look(); l.has(running) },
		"its process 4194304 is gone": func(l *liar, w *watcher, look func()) {
			l.pid = 1 << 22
			l.has(running)
			look()
			w.known[someID].dead = time.Now().Add(-time.Hour)
		},
		"has ended, but its process": func(l *liar, _ *watcher, look func()) {
			l.pid = sleep.Process.Pid
			l.has(running)
			look()
			l.has(exited)
		},
		"its status says CONTAINER_RUNNING": func(l *liar, _ *watcher, _ func()) { l.has(exited); l.status.State = running },
		"and ended at 1":                    func(l *liar, _ *watcher, _ func()) { l.has(exited); l.status.FinishedAt = 1 },
		"for no reason":                     func(l *liar, _ *watcher, _ func()) { l.has(exited); l.status.Reason = "" },
		"its network namespace is gone": func(l *liar, _ *watcher, _ func()) {
			pod.State = cri.PodSandboxState_SANDBOX_READY
			l.pods = []*cri.PodSandbox{pod}
		},
		"comes behind its deletion": func(l *liar, w *watcher, _ func()) {
			l.has(exited)
			w.event(t.Context(), &cri.ContainerEventResponse{ContainerId: someID, ContainerEventType: cri.ContainerEventType_CONTAINER_DELETED_EVENT})
			w.event(t.Context(), &cri.ContainerEventResponse{ContainerId: someID, ContainerEventType: cri.ContainerEventType_CONTAINER_STOPPED_EVENT})
		},
		"comes behind its end": func(l *liar, w *watcher, _ func()) {
			l.has(exited)
			w.event(t.Context(), &cri.ContainerEventResponse{ContainerId: someID, ContainerEventType: cri.ContainerEventType_CONTAINER_STOPPED_EVENT})
			w.event(t.Context(), &cri.ContainerEventResponse{ContainerId: someID, ContainerEventType: cri.ContainerEventType_CONTAINER_STARTED_EVENT})
		},
		"but its status says CONTAINER_RUNNING": func(l *liar, w *watcher, _ func()) {
			l.pid = sleep.Process.Pid
			l.has(running)
			w.event(t.Context(), &cri.ContainerEventResponse{ContainerId: someID, ContainerEventType: cri.ContainerEventType_CONTAINER_STOPPED_EVENT,
				ContainersStatuses: []*cri.ContainerStatus{{Id: someID, State: exited}}})
		},
	} {
		l := &liar{}
		w := watch(l, t.TempDir())
		look := func() { w.look(t.Context()) }
		tell(l, w, look)
		look()
		got := w.took()
		if want == "" && len(got) != 0 || want != "" && !slices.ContainsFunc(got, func(lie string) bool { return strings.Contains(lie, want) }) {
			t.Errorf("want %q, the watcher tells %q", want, got)
		}
	}
}
