package nri

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"
)

// turns lets batches of updates go one after the other, in the order in which
// they were asked for. Its zero value is ready.
type turns struct {
	mu   sync.Mutex
	last chan struct{} // closed when the newest batch is done, guarded by mu
}

// take gives the next turn: it has come when before is closed, and is over when
// done is.
func (t *turns) take() (before <-chan struct{}, done chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	previous := t.last
	if previous == nil {
		previous = make(chan struct{})
		close(previous)
	}
	t.last = make(chan struct{})
	return previous, t.last
}

// batch takes a turn for updates that plugins ask for. The func applies them,
// which blocks, and returns those that failed and may not; it must be called
// once, without a hold on synchronisation.
func (p *Plugins) batch(updates []*api.ContainerUpdate) func(context.Context) []*api.ContainerUpdate {
	if len(updates) == 0 {
		return func(context.Context) []*api.ContainerUpdate { return nil }
	}
	before, done := p.turns.take()
	return func(ctx context.Context) []*api.ContainerUpdate {
		defer close(done)
		<-before // ends: every batch before is bounded, see apply
		var failed []*api.ContainerUpdate
		for _, u := range updates {
			if u == nil {
				continue
			}
			if err := p.apply(ctx, u); err != nil {
				level := Warning
				if u.GetIgnoreFailure() {
					level = Debug
				} else {
					failed = append(failed, u)
				}
				p.Log(level, fmt.Sprintf("update of container %s that an NRI plugin asked for: %v", u.GetContainerId(), err))
			}
		}
		return failed
	}
}

func (p *Plugins) apply(ctx context.Context, u *api.ContainerUpdate) error {
	update, err := fromUpdate(u)
	if err != nil {
		return err
	}
	return p.Node.UpdateContainer(ctx, update)
}

// unsolicited applies updates that a plugin asks for on its own.
func (p *Plugins) unsolicited(ctx context.Context, updates []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) {
	return p.batch(updates)(ctx), nil
}

// synchronize gives a new plugin all there is. The adaptation holds hooks off
// meanwhile; so the updates that the plugin asks for are applied behind.
func (p *Plugins) synchronize(ctx context.Context, give adaptation.SyncCB) error {
	pods, containers := p.snapshot()
	updates, err := give(ctx, pods, containers)
	if err != nil {
		return fmt.Errorf("synchronise an NRI plugin: %w", err)
	}
	p.applyBehind(ctx, updates)
	return nil
}

// applyBehind applies updates without waiting for it.
func (p *Plugins) applyBehind(ctx context.Context, updates []*api.ContainerUpdate) {
	if len(updates) > 0 {
		apply := p.batch(updates) // takes its turn now
		go apply(context.WithoutCancel(ctx))
	}
}

// snapshot is all that exists: what records show, and what is being born. The
// marks are read first: what is born then and shown later is in the list.
func (p *Plugins) snapshot() (pods []*api.PodSandbox, containers []*api.Container) {
	var births []string
	p.mu.Lock()
	for id, m := range p.marks {
		if m&born != 0 {
			births = append(births, id)
		}
	}
	p.mu.Unlock()
	podIDs, containerIDs := p.Node.List()
	seen := map[string]bool{}
	for _, id := range append(podIDs, births...) {
		if pod, err := p.Node.Pod(id); err == nil && !seen[id] && !p.marked(id, removed) {
			pods = append(pods, pod.api())
			seen[id] = true
		}
	}
	for _, id := range append(containerIDs, births...) {
		if c, err := p.Node.Container(id); err == nil && !seen[id] && !p.marked(id, removed) {
			containers = append(containers, c.api())
			seen[id] = true
		}
	}
	return pods, containers
}

// callPlugin stands around each call of a plugin. It keeps a plugin that does
// not even read from holding the caller beyond its deadline, and finds the
// evictions in the answers, which the adaptation drops.
func (p *Plugins) callPlugin(ctx context.Context, req *ttrpc.Request, resp *ttrpc.Response, info *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
	answer, done := &ttrpc.Response{}, make(chan error, 1)
	go func() { done <- invoke(ctx, req, answer) }() // ends at the latest when the plugin's connection is closed
	select {
	case <-ctx.Done():
		return ctx.Err()
	case err := <-done:
		if err != nil {
			return err
		}
	}
	resp.Status, resp.Payload = answer.Status, answer.Payload
	var create api.CreateContainerResponse
	var update api.UpdateContainerResponse
	switch info.FullMethod[strings.LastIndexByte(info.FullMethod, '/')+1:] {
	case "CreateContainer":
		if proto.Unmarshal(answer.Payload, &create) == nil {
			p.evict(create.GetEvict())
		}
	case "UpdateContainer":
		if proto.Unmarshal(answer.Payload, &update) == nil {
			p.evict(update.GetEvict())
		}
	}
	return nil
}

// calledByPlugin finds the evictions in a plugin's own request.
func (p *Plugins) calledByPlugin(ctx context.Context, unmarshal ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
	return method(ctx, func(v any) error {
		if err := unmarshal(v); err != nil {
			return err
		}
		if r, ok := v.(*api.UpdateContainersRequest); ok {
			p.evict(r.GetEvict())
		}
		return nil
	})
}

func (p *Plugins) evict(evictions []*api.ContainerEviction) {
	for _, e := range evictions {
		p.Node.Evict(e.GetContainerId(), e.GetReason())
	}
}
