package runtime

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// listener reads the node's events until the node closes.
type listener struct {
	mu  sync.Mutex
	all []*cri.ContainerEventResponse // guarded by mu
}

func (n *node) listen() *listener {
	n.t.Helper()
	l := &listener{}
	s := n.Service
	there := s.events.counts().Subscribers
	go func() {
		_ = s.GetContainerEvents(&cri.GetEventsRequest{}, &stream[cri.ContainerEventResponse]{ctx: n.t.Context(), send: func(e *cri.ContainerEventResponse) error {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.all = append(l.all, e)
			return nil
		}})
	}()
	eventually(n.t, "subscribed", func() bool { return s.events.counts().Subscribers == there+1 })
	return l
}

func (l *listener) heard() []*cri.ContainerEventResponse {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.all)
}

// said waits for a number of events and checks them.
func (l *listener) said(t *testing.T, count int) map[string]string {
	t.Helper()
	eventually(t, "all events", func() bool { return len(l.heard()) >= count })
	return follow(t, l.heard())
}

// Every way through a life has its events, in order, with statuses that agree.
func TestEventsOfFlows(t *testing.T) {
	n := newNode(t)
	l := n.listen()
	pod := n.runPod(sharedPIDs(n.bridgePod("web")))
	const whole, unborn = "CREATED STARTED STOPPED DELETED", "CREATED STOPPED DELETED"
	want := map[string]string{pod: whole}

	instant := n.runContainer(pod, "instant", "exit 3")
	n.exited(instant)
	want[instant] = whole
	stopped := n.runContainer(pod, "stopped", forever)
	must(t, n.stop(t.Context(), stopped, 10))
	want[stopped] = whole
	removed := n.runContainer(pod, "removed", forever)
	n.removeContainerOf(removed)
	want[removed] = whole
	never := n.create(n.container(pod, "never", forever))
	n.removeContainerOf(never)
	want[never] = unborn
	refused := n.create(n.container(pod, "refused", forever))
	mend := n.tell("fail-start")
	_, err := n.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: refused})
	n.refused("start", err, codes.Unknown, "fail-start was told to")
	mend()
	want[refused] = unborn
	mend = n.tell("fail-create")
	_, err = n.CreateContainer(t.Context(), n.container(pod, "half", forever))
	n.refused("create", err, codes.FailedPrecondition, "fail-create was told to")
	mend()
	left := n.runContainer(pod, "left", forever)
	want[left] = whole
	n.removePod(pod)
	mend = n.tell("fail-ADD")
	_, err = n.RunPodSandbox(t.Context(), n.bridgePod("unlucky"))
	n.refused("run", err, codes.Unknown, "fail-ADD was told to")
	mend()

	count := 0
	for _, words := range want {
		count += len(words)/8 + 1 // each word has seven letters
	}
	got := l.said(t, count) // nothing of the pod that did not come up
	for id, words := range want {
		if got[id] != words {
			t.Errorf("events of %s: %q, want %q", id, got[id], words)
		}
	}
	if len(got) != len(want) {
		t.Errorf("events of %d objects, want %d: %v", len(got), len(want), got)
	}
}

// Containers that end as soon as they start: the end never overtakes the start.
func TestEventsOfInstantExits(t *testing.T) {
	n := newNode(t)
	l := n.listen()
	pod := n.runPod(n.hostPod("web"))
	var ids []string
	for range 20 {
		id := n.runContainer(pod, "instant", "exit 0")
		n.exited(id)
		n.removeContainerOf(id)
		ids = append(ids, id)
	}
	got := l.said(t, 2+4*len(ids))
	for _, id := range ids {
		if got[id] != "CREATED STARTED STOPPED DELETED" {
			t.Errorf("events of %s: %q", id, got[id])
		}
	}
}

// What ended while there was no daemon is told to those who come soon after.
func TestEventsOfARestart(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	on := n.runContainer(pod, "on", forever)
	id := n.runContainer(pod, "meanwhile", "while [ ! -e /share/go ]; do sleep 0.02; done; exit 9")
	n.restart(func() {
		must(t, os.WriteFile(n.shareFile("go"), nil, 0o600))
		eventually(t, "exit record", func() bool {
			_, err := os.Stat(filepath.Join(n.cfg.State, "containers", id, "exit.json"))
			return err == nil
		})
	})
	l := n.listen()
	if got := l.said(t, 1); got[id] != "STOPPED" || got[on] != "" {
		t.Errorf("events after the restart: %v", got)
	}
	n.removeContainerOf(id)
	if got := l.said(t, 2); got[id] != "STOPPED DELETED" {
		t.Errorf("events after the removal: %v", got)
	}
}
