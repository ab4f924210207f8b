package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// listEvery is the pause between two looks at the lists.
const listEvery = 150 * time.Millisecond

// State of a pod or container as its worker knows it. The names of all are
// different, so one map has both.
const (
	moving   = "moving" // a request about it runs, or it may end by itself
	ready    = "SANDBOX_READY"
	notReady = "SANDBOX_NOTREADY"
	created  = "CONTAINER_CREATED"
	running  = "CONTAINER_RUNNING"
	exited   = "CONTAINER_EXITED"
	gone     = "gone"
)

// fact is one state, told apart from the same state at another time.
type fact struct {
	state string
	at    int // grows with each change
}

// model is what must be on the node.
type model struct {
	mu     sync.Mutex
	facts  map[string]fact // by name, guarded by mu
	clock  int             // guarded by mu
	images map[string]bool // references that are there, guarded by mu
}

func newModel() *model { return &model{facts: map[string]fact{}, images: map[string]bool{}} }

// set states what holds from now on.
func (m *model) set(name, state string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.clock++
	m.facts[name] = fact{state, m.clock}
}

// image states whether a reference is there.
func (m *model) image(reference string, there bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.images, reference)
	if there {
		m.images[reference] = true
	}
}

func (m *model) imagesNow() map[string]bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.images)
}

func (m *model) now() map[string]fact {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.facts)
}

// differs compares a list with what held before and still holds after it.
func differs(list map[string]string, before, after map[string]fact, kind func(string) bool) (wrong []string) {
	for name, b := range before {
		if !kind(name) || after[name] != b || b.state == moving {
			continue
		}
		switch says, listed := list[name]; {
		case !listed && b.state != gone:
			wrong = append(wrong, fmt.Sprintf("%s is %s and not listed", name, b.state))
		case listed && says != b.state:
			wrong = append(wrong, fmt.Sprintf("%s is %s and listed as %s", name, b.state, says))
		}
	}
	for name := range list {
		if _, known := after[name]; !known {
			wrong = append(wrong, name+" is listed, nobody made it")
		}
	}
	return wrong
}

// watchLists compares the lists with the model again and again.
func (w *world) watchLists(ctx context.Context) {
	for i := 0; ctx.Err() == nil; i++ {
		for what, list := range map[string]func(context.Context, bool) (map[string]string, error){"pods": w.listPods, "containers": w.listContainers} {
			before, disturbances, began := w.model.now(), w.disturbances.Load(), time.Now()
			got, err := list(ctx, i%2 == 0)
			after := w.model.now()
			undisturbed := disturbances%2 == 0 && w.disturbances.Load() == disturbances
			switch {
			case ctx.Err() != nil:
				return
			case err != nil && (undisturbed || status.Code(err) != codes.Unavailable):
				w.bad("list %s: %v", what, err)
			case err == nil:
				w.count("list "+what, time.Since(began))
				for _, text := range differs(got, before, after, func(name string) bool { return isPod(name) == (what == "pods") }) {
					w.bad("%s", text)
				}
			}
		}
		time.Sleep(listEvery)
	}
}

// listPods lists names and states, at once or in parts.
func (w *world) listPods(ctx context.Context, parts bool) (map[string]string, error) {
	list := map[string]string{}
	if !parts {
		res, err := w.rt.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
		for _, p := range res.GetItems() {
			list[p.GetMetadata().GetName()] = p.GetState().String()
		}
		return list, err
	}
	stream, err := w.rt.StreamPodSandboxes(ctx, &cri.StreamPodSandboxesRequest{})
	for err == nil {
		var part *cri.StreamPodSandboxesResponse
		part, err = stream.Recv()
		for _, p := range part.GetPodSandboxes() {
			list[p.GetMetadata().GetName()] = p.GetState().String()
		}
	}
	return list, whole(err)
}

func (w *world) listContainers(ctx context.Context, parts bool) (map[string]string, error) {
	list := map[string]string{}
	if !parts {
		res, err := w.rt.ListContainers(ctx, &cri.ListContainersRequest{})
		for _, c := range res.GetContainers() {
			list[c.GetMetadata().GetName()] = c.GetState().String()
		}
		return list, err
	}
	stream, err := w.rt.StreamContainers(ctx, &cri.StreamContainersRequest{})
	for err == nil {
		var part *cri.StreamContainersResponse
		part, err = stream.Recv()
		for _, c := range part.GetContainers() {
			list[c.GetMetadata().GetName()] = c.GetState().String()
		}
	}
	return list, whole(err)
}

// whole is the error of a stream that did not come to its end.
func whole(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
