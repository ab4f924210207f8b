package runtime

import (
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox"
)

// Events follow the records. A container or sandbox passes milestones (made,
// running, ended) and in the end its record goes; the change of the record that
// passes one is the event, whichever flow makes it: a request, an exit, or the
// restore after a restart. So no flow emits events, none can forget to, and
// their order is the order of the changes.
//
//	           CREATED            STARTED           STOPPED              DELETED
//	container  it can be started  its process runs  its init has ended   it is removed
//	sandbox    callers can see it it is ready       it is no more ready  it is removed
//
// A container that never ran has no STARTED; one that is removed was stopped
// before, where it ran. A sandbox is its pod's container of the same id, as in
// the other runtimes: container_id is the sandbox's.

const (
	// eventQueue is how many events wait for one subscriber that does not read.
	eventQueue = 4096
	// foundFor is how long after its start the daemon tells new subscribers what
	// it found: exits that came while there was no daemon.
	foundFor = time.Minute
)

// events hands out events to subscribers. It never waits for one.
type events struct {
	mu          sync.Mutex
	subscribers map[*subscriber]bool // guarded by mu, as all here
	stamps      map[string]int64     // time of the last event by object
	found       []*event             // before serving; nil when foundFor is over
	servingAt   time.Time            // zero before
	dropped     uint64               // events that subscribers have not got, ever
}

// subscriber is one stream of events.
type subscriber struct {
	queue   chan *event
	dropped uint64 // guarded by events.mu
}

// event is one event with the records of its pod at that moment. They never
// change, so its message can be made when it is sent.
type event struct {
	id         string
	kind       cri.ContainerEventType
	at         int64
	sandbox    *sandbox.Sandbox     // nil when it is gone
	containers []*sandbox.Container // newest first
}

// GetContainerEvents streams events from now on, until the client or the daemon
// goes; in the first minute of a daemon the exits it found come first. The
// header goes out as soon as no event can be missed. A client that reads too
// slowly loses the events that do not fit in its queue: that is logged, and
// counted in the verbose Status.
func (s *Service) GetContainerEvents(_ *cri.GetEventsRequest, stream grpc.ServerStreamingServer[cri.ContainerEventResponse]) error {
	sub := s.events.subscribe(time.Now())
	defer s.unsubscribe(sub)
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	for {
		select {
		case e := <-sub.queue:
			if err := stream.Send(s.eventMessage(e)); err != nil {
				if stream.Context().Err() != nil {
					return nil
				}
				return err
			}
		case <-stream.Context().Done():
			return nil
		case <-s.closing:
			return nil
		}
	}
}

func (s *Service) unsubscribe(sub *subscriber) {
	if lost := s.events.unsubscribe(sub); lost > 0 {
		s.Log.WithField("dropped", lost).Warn("a subscriber of container events left, having missed some")
	}
}

func (s *Service) eventMessage(e *event) *cri.ContainerEventResponse {
	m := &cri.ContainerEventResponse{
		ContainerId: e.id, ContainerEventType: e.kind, CreatedAt: e.at, ContainersStatuses: s.containerStatuses(e.containers),
	}
	if e.sandbox != nil {
		m.PodSandboxStatus = s.sandboxStatus(e.sandbox)
	}
	return m
}

// containerChanged is told every change of a container's record.
func (s *Service) containerChanged(old, now *sandbox.Container) {
	s.publish(old.ID, kinds(containerPassed(old), containerPassed(now)), func() (*sandbox.Sandbox, []*sandbox.Container) {
		sb, err := s.Records.Sandboxes.Get(old.SandboxID)
		if err != nil {
			sb = nil
		}
		return sb, s.visibleContainersOf(old.SandboxID)
	})
}

// sandboxChanged is told every change of a sandbox's record.
func (s *Service) sandboxChanged(old, now *sandbox.Sandbox) {
	s.publish(old.ID, kinds(sandboxPassed(old), sandboxPassed(now)), func() (*sandbox.Sandbox, []*sandbox.Container) {
		if now == nil {
			return old, s.visibleContainersOf(old.ID)
		}
		return now, s.visibleContainersOf(old.ID)
	})
}

// passed are the milestones that a record tells, by the number of their event;
// all are false before the first, when nobody may know of the object.
type passed [cri.ContainerEventType_CONTAINER_STOPPED_EVENT + 1]bool

// containerPassed reads a container's record; nil is one that is gone.
func containerPassed(c *sandbox.Container) *passed {
	if c == nil {
		return nil
	}
	if c.MadeAt == 0 {
		return &passed{}
	}
	return &passed{true, c.StartedAt != 0 && c.Reason != reasonStart, c.FinishedAt != 0}
}

// sandboxPassed reads a sandbox's record; nil is one that is gone.
func sandboxPassed(sb *sandbox.Sandbox) *passed {
	if sb == nil {
		return nil
	}
	return &passed{visibleSandbox(sb), sb.ReadyAt != 0, sb.StoppedAt != 0}
}

// kinds are the events that lie between two states of a record, in order.
func kinds(old, now *passed) []cri.ContainerEventType {
	var out []cri.ContainerEventType
	if now == nil {
		if old[cri.ContainerEventType_CONTAINER_CREATED_EVENT] {
			out = append(out, cri.ContainerEventType_CONTAINER_DELETED_EVENT)
		}
		return out
	}
	for kind := range now {
		if now[kind] && !old[kind] {
			out = append(out, cri.ContainerEventType(kind))
		}
	}
	return out
}

// publish gives events of one object to every subscriber. pod is asked for the
// records that go with them only if there is one.
func (s *Service) publish(id string, kinds []cri.ContainerEventType, pod func() (*sandbox.Sandbox, []*sandbox.Container)) {
	if len(kinds) == 0 {
		return
	}
	if slow := s.events.publish(id, kinds, time.Now(), pod); slow > 0 {
		s.Log.WithField("subscribers", slow).Warn("a subscriber of container events does not read; events are dropped")
	}
}

// publish is Service.publish; it reports how many subscribers have now begun to
// lose events.
func (h *events) publish(id string, kinds []cri.ContainerEventType, now time.Time, pod func() (*sandbox.Sandbox, []*sandbox.Container)) (slow int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var sb *sandbox.Sandbox
	var containers []*sandbox.Container
	if len(h.subscribers) > 0 || h.servingAt.IsZero() {
		sb, containers = pod()
	}
	for _, kind := range kinds {
		// Never back within one object, whatever the clock does.
		at := max(now.UnixNano(), h.stamps[id]+1)
		h.stamps[id] = at
		if kind == cri.ContainerEventType_CONTAINER_DELETED_EVENT {
			delete(h.stamps, id)
		}
		e := &event{id: id, kind: kind, at: at, sandbox: sb, containers: containers}
		if h.servingAt.IsZero() && len(h.found) < eventQueue {
			h.found = append(h.found, e)
		}
		for sub := range h.subscribers {
			if !sub.give(e) {
				h.dropped++
				if sub.dropped++; sub.dropped == 1 {
					slow++
				}
			}
		}
	}
	return slow
}

func (s *subscriber) give(e *event) bool {
	select {
	case s.queue <- e:
		return true
	default:
		return false
	}
}

// serve ends the time in which events are found: from now on there may be
// subscribers.
func (h *events) serve(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.servingAt = now
}

func (h *events) subscribe(now time.Time) *subscriber {
	sub := &subscriber{queue: make(chan *event, eventQueue)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if now.Sub(h.servingAt) > foundFor {
		h.found = nil
	}
	for _, e := range h.found {
		sub.give(e) // they fit: the queue is empty and as long
	}
	h.subscribers[sub] = true
	return sub
}

// unsubscribe returns how many events the subscriber has lost.
func (h *events) unsubscribe(sub *subscriber) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.subscribers, sub)
	return sub.dropped
}

// eventCounts is what the verbose Status tells of the events.
type eventCounts struct {
	Subscribers int    `json:"subscribers"`
	Waiting     int    `json:"waiting"` // in all queues
	Dropped     uint64 `json:"dropped"` // since the daemon's start
}

func (h *events) counts() eventCounts {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := eventCounts{Subscribers: len(h.subscribers), Dropped: h.dropped}
	for sub := range h.subscribers {
		c.Waiting += len(sub.queue)
	}
	return c
}
