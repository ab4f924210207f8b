package main

import (
	"context"
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// follow reads the daemon's events until ctx ends, from each daemon that comes,
// and compares them with what its status says.
func (w *watcher) follow(ctx context.Context) {
	for ctx.Err() == nil {
		stream, err := w.runtime.GetContainerEvents(ctx, &cri.GetEventsRequest{})
		for err == nil {
			var e *cri.ContainerEventResponse
			if e, err = stream.Recv(); err == nil {
				w.event(ctx, e)
			}
		}
		time.Sleep(between)
	}
}

// event wants an object's events in their order, and its status to be at least as
// far as the event says.
func (w *watcher) event(ctx context.Context, e *cri.ContainerEventResponse) {
	kind := e.GetContainerEventType()
	w.mu.Lock()
	before := w.events[e.GetContainerId()]
	w.events[e.GetContainerId()] = append(before, kind.String())
	w.mu.Unlock()
	if slices.Contains(before, cri.ContainerEventType_CONTAINER_DELETED_EVENT.String()) {
		w.lie("event %s of %s comes behind its deletion: %q", kind, e.GetContainerId(), before)
	}
	if kind == cri.ContainerEventType_CONTAINER_STARTED_EVENT && slices.Contains(before, cri.ContainerEventType_CONTAINER_STOPPED_EVENT.String()) {
		w.lie("event %s of %s comes behind its end: %q", kind, e.GetContainerId(), before)
	}
	i := slices.IndexFunc(e.GetContainersStatuses(), func(s *cri.ContainerStatus) bool { return s.GetId() == e.GetContainerId() })
	if i < 0 {
		return // of a pod, or the container is gone since
	}
	if s := e.GetContainersStatuses()[i].GetState(); kind == cri.ContainerEventType_CONTAINER_STOPPED_EVENT && s != cri.ContainerState_CONTAINER_EXITED {
		w.lie("event %s of %s says that it is %s", kind, e.GetContainerId(), s)
	}
	res, err := w.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: e.GetContainerId()})
	if err != nil {
		return // the daemon went, or the container
	}
	now, wants := res.GetStatus().GetState(), cri.ContainerState_CONTAINER_CREATED
	switch kind {
	case cri.ContainerEventType_CONTAINER_STARTED_EVENT:
		wants = cri.ContainerState_CONTAINER_RUNNING
	case cri.ContainerEventType_CONTAINER_STOPPED_EVENT:
		wants = cri.ContainerState_CONTAINER_EXITED
	}
	if now < wants {
		w.lie("event %s of %s, but its status says %s", kind, e.GetContainerId(), now)
	}
}
