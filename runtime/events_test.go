package runtime

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	logtest "github.com/sirupsen/logrus/hooks/test"
	"google.golang.org/grpc/metadata"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/sandbox"
)

func (s *stream[T]) SendHeader(metadata.MD) error { return nil }

// word is an event's kind in short: CREATED, STARTED, STOPPED, DELETED.
func word(k cri.ContainerEventType) string {
	return strings.TrimSuffix(strings.TrimPrefix(k.String(), "CONTAINER_"), "_EVENT")
}

// What a change of a record means, milestone by milestone.
func TestEventsOfChanges(t *testing.T) {
	none, made := &sandbox.Container{}, &sandbox.Container{MadeAt: 1}
	started := &sandbox.Container{MadeAt: 1, StartedAt: 2}
	ended := &sandbox.Container{MadeAt: 1, StartedAt: 2, FinishedAt: 3}
	refused := &sandbox.Container{MadeAt: 1, StartedAt: 2, FinishedAt: 3, Reason: reasonStart}
	killed := &sandbox.Container{MadeAt: 1, FinishedAt: 3}
	for _, tc := range []struct {
		old, now *sandbox.Container
		want     string
	}{
		{none, none, ""},
		{none, made, "CREATED"},
		{none, &sandbox.Container{FinishedAt: 3}, ""},
		{&sandbox.Container{FinishedAt: 3}, killed, "CREATED STOPPED"},
		{made, made, ""},
		{made, started, "STARTED"},
		{started, ended, "STOPPED"},
		{made, ended, "STARTED STOPPED"},
		{made, refused, "STOPPED"},
		{made, killed, "STOPPED"},
		{ended, ended, ""},
		{ended, nil, "DELETED"},
		{made, nil, "DELETED"},
		{none, nil, ""},
	} {
		var got []string
		for _, k := range kinds(containerPassed(tc.old), containerPassed(tc.now)) {
			got = append(got, word(k))
		}
		if strings.Join(got, " ") != tc.want {
			t.Errorf("%+v to %+v: %q, want %q", tc.old, tc.now, got, tc.want)
		}
	}
	for _, tc := range []struct {
		old, now *sandbox.Sandbox
		want     string
	}{
		{&sandbox.Sandbox{}, &sandbox.Sandbox{IPs: []string{"::1"}}, ""},
		{&sandbox.Sandbox{}, &sandbox.Sandbox{ReadyAt: 1}, "CREATED STARTED"},
		{&sandbox.Sandbox{}, &sandbox.Sandbox{StoppedAt: 1}, "CREATED STOPPED"}, // could not be undone
		{&sandbox.Sandbox{ReadyAt: 1}, &sandbox.Sandbox{ReadyAt: 1, StoppedAt: 2}, "STOPPED"},
		{&sandbox.Sandbox{ReadyAt: 1, StoppedAt: 2}, nil, "DELETED"},
		{&sandbox.Sandbox{}, nil, ""},
	} {
		var got []string
		for _, k := range kinds(sandboxPassed(tc.old), sandboxPassed(tc.now)) {
			got = append(got, word(k))
		}
		if strings.Join(got, " ") != tc.want {
			t.Errorf("%+v to %+v: %q, want %q", tc.old, tc.now, got, tc.want)
		}
	}
}

func newEvents() *events {
	return &events{subscribers: map[*subscriber]bool{}, stamps: map[string]int64{}}
}

// noPod is a pod that nobody asks for.
func noPod() (*sandbox.Sandbox, []*sandbox.Container) { return nil, nil }

const (
	created = cri.ContainerEventType_CONTAINER_CREATED_EVENT
	started = cri.ContainerEventType_CONTAINER_STARTED_EVENT
	stopped = cri.ContainerEventType_CONTAINER_STOPPED_EVENT
	deleted = cri.ContainerEventType_CONTAINER_DELETED_EVENT
)

// Stamps rise within one object although the clock stands still or goes back,
// and forget an object with its end.
func TestStampsRise(t *testing.T) {
	h, now := newEvents(), time.Unix(100_000, 0)
	h.serve(now)
	sub := h.subscribe(now)
	h.publish("a", []cri.ContainerEventType{created, started}, now, noPod)
	h.publish("a", []cri.ContainerEventType{stopped}, now.Add(-time.Hour), noPod)
	h.publish("b", []cri.ContainerEventType{created}, now.Add(-time.Hour), noPod)
	h.publish("a", []cri.ContainerEventType{deleted}, now.Add(time.Second), noPod)
	h.publish("b", []cri.ContainerEventType{deleted}, now, noPod)
	want := []int64{now.UnixNano(), now.UnixNano() + 1, now.UnixNano() + 2, now.Add(-time.Hour).UnixNano(), now.Add(time.Second).UnixNano(), now.UnixNano()}
	for i, at := range want {
		if e := <-sub.queue; e.at != at {
			t.Errorf("event %d is stamped %d, want %d", i, e.at, at)
		}
	}
	if len(h.stamps) != 0 {
		t.Errorf("stamps of deleted objects are kept: %v", h.stamps)
	}
}

// A subscriber that does not read loses what does not fit, and holds up nobody;
// that is said once, and counted.
func TestSlowSubscriberLosesEvents(t *testing.T) {
	log, hook := logtest.NewNullLogger()
	s := &Service{Parts: Parts{Log: log.WithField("", "")}, events: *newEvents()}
	s.events.serve(time.Now())
	slow, fast := s.events.subscribe(time.Now()), s.events.subscribe(time.Now())
	const more = 7
	for i := range eventQueue + more {
		s.publish(fmt.Sprint(i), []cri.ContainerEventType{created}, noPod)
		<-fast.queue
	}
	if got, want := s.events.counts(), (eventCounts{Subscribers: 2, Waiting: eventQueue, Dropped: more}); got != want {
		t.Errorf("counts %+v, want %+v", got, want)
	}
	if n := len(hook.AllEntries()); n != 1 {
		t.Errorf("%d lines in the log, want one", n)
	}
	s.unsubscribe(fast)
	s.unsubscribe(slow)
	if e := hook.LastEntry(); len(hook.AllEntries()) != 2 || e.Data["dropped"] != uint64(more) {
		t.Errorf("at the end the log says %v", e)
	}
	for i := range eventQueue {
		if e := <-slow.queue; e.id != fmt.Sprint(i) {
			t.Fatalf("event %d is of %s", i, e.id)
		}
	}
	if got := s.events.counts(); got != (eventCounts{Dropped: more}) {
		t.Errorf("counts %+v at the end", got)
	}
}

// What a starting daemon finds is for those who come soon; what comes later is
// for those who are there.
func TestEventsFoundAtStart(t *testing.T) {
	h, start := newEvents(), time.Unix(1000, 0)
	h.publish("a", []cri.ContainerEventType{stopped}, start, noPod)
	h.serve(start)
	h.publish("b", []cri.ContainerEventType{stopped}, start, noPod)
	first, second := h.subscribe(start.Add(time.Second)), h.subscribe(start.Add(2*time.Second))
	h.publish("c", []cri.ContainerEventType{stopped}, start, noPod)
	late := h.subscribe(start.Add(foundFor + time.Second))
	for sub, want := range map[*subscriber]string{first: "a c", second: "a c", late: ""} {
		var got []string
		for len(sub.queue) > 0 {
			got = append(got, (<-sub.queue).id)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("got events of %q, want %q", got, want)
		}
	}
	if h.found != nil {
		t.Error("what was found at the start is kept")
	}
}

// Without a subscriber nobody gathers what events would say.
func TestEventsWithoutSubscribersCostNothing(t *testing.T) {
	h := newEvents()
	h.serve(time.Now())
	h.publish("a", []cri.ContainerEventType{created}, time.Now(), func() (*sandbox.Sandbox, []*sandbox.Container) {
		t.Error("the pod was asked for")
		return nil, nil
	})
}

// A stream ends in good order with its client and with the daemon.
func TestEventStreamsEnd(t *testing.T) {
	log, _ := logtest.NewNullLogger()
	s := &Service{Parts: Parts{Log: log.WithField("", "")}, events: *newEvents(), closing: make(chan struct{})}
	ctx, leave := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	for _, ctx := range []context.Context{ctx, t.Context()} {
		go func() {
			ended <- s.GetContainerEvents(&cri.GetEventsRequest{}, &stream[cri.ContainerEventResponse]{ctx: ctx})
		}()
	}
	eventually(t, "two subscribers", func() bool { return s.events.counts().Subscribers == 2 })
	leave()
	if err := <-ended; err != nil {
		t.Errorf("the client left: %v", err)
	}
	eventually(t, "one subscriber", func() bool { return s.events.counts().Subscribers == 1 })
	close(s.closing)
	if err := <-ended; err != nil {
		t.Errorf("the daemon stops: %v", err)
	}
}

// An end that is reported while the start is not recorded waits for that; only
// the first report counts.
func TestStartsHoldExits(t *testing.T) {
	st := starts{running: map[string]*oci.Exit{}}
	if st.hold(oci.Exit{ID: "a"}) {
		t.Error("held without a start")
	}
	st.begin("a")
	if !st.hold(oci.Exit{ID: "a", Code: 3}) || !st.hold(oci.Exit{ID: "a", Code: 4}) || st.hold(oci.Exit{ID: "b"}) {
		t.Error("not what is held")
	}
	if e := st.end("a"); e == nil || e.Code != 3 {
		t.Errorf("held was %v", e)
	}
	st.begin("b")
	if e := st.end("b"); e != nil || st.hold(oci.Exit{ID: "b"}) || st.hold(oci.Exit{ID: "a"}) {
		t.Errorf("a start without an end holds %v", e)
	}
}

// follow checks a stream: each object's events in order, stamps that rise, and
// statuses that agree with the event. It returns each object's words.
func follow(t *testing.T, all []*cri.ContainerEventResponse) map[string]string {
	t.Helper()
	words, last := map[string][]string{}, map[string]*cri.ContainerEventResponse{}
	for _, e := range all {
		id := e.GetContainerId()
		if before := last[id]; before != nil && (e.GetCreatedAt() <= before.GetCreatedAt() || e.GetContainerEventType() <= before.GetContainerEventType()) {
			t.Errorf("%v follows %v", e, before)
		}
		last[id], words[id] = e, append(words[id], word(e.GetContainerEventType()))
		checkStatuses(t, e)
	}
	out := map[string]string{}
	for id, w := range words {
		out[id] = strings.Join(w, " ")
	}
	return out
}

func checkStatuses(t *testing.T, e *cri.ContainerEventResponse) {
	t.Helper()
	sb := e.GetPodSandboxStatus()
	if sb.GetMetadata().GetUid() == "" || sb.GetCreatedAt() == 0 {
		t.Errorf("%v has no full sandbox status", e)
	}
	for _, c := range e.GetContainersStatuses() {
		if c.GetImage().GetImage() == "" || c.GetImageRef() == "" || c.GetImageId() == "" || c.GetMetadata().GetName() == "" || c.GetCreatedAt() == 0 {
			t.Errorf("%v has no full container status", e)
		}
	}
	i := slices.IndexFunc(e.GetContainersStatuses(), func(c *cri.ContainerStatus) bool { return c.GetId() == e.GetContainerId() })
	if e.GetContainerId() == sb.GetId() {
		// One that could not be undone when it failed is created not ready.
		ready := sb.GetState() == cri.PodSandboxState_SANDBOX_READY
		if kind := e.GetContainerEventType(); kind == started && !ready || kind > started && ready {
			t.Errorf("the sandbox is %s at %v", sb.GetState(), e)
		}
		return
	}
	if (i < 0) != (e.GetContainerEventType() == deleted) {
		t.Errorf("%v has a status %d of its container", e, i)
		return
	}
	if i < 0 {
		return
	}
	want := map[cri.ContainerEventType]cri.ContainerState{created: cri.ContainerState_CONTAINER_CREATED,
		started: cri.ContainerState_CONTAINER_RUNNING, stopped: cri.ContainerState_CONTAINER_EXITED}[e.GetContainerEventType()]
	if got := e.GetContainersStatuses()[i].GetState(); got != want {
		t.Errorf("the container is %s at %v", got, e)
	}
}
