package nri

import (
	"context"
	"fmt"

	"github.com/containerd/nri/pkg/api"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Adjusted says what plugins changed of a container's specification.
type Adjusted struct {
	Any       bool
	Resources *cri.LinuxContainerResources // the limits that were set; nil when there are none
}

// CreateContainer shows plugins a container that is being made and applies
// their adjustments to its specification and the updates they ask of other
// containers. An error refuses the container; the specification is then of no
// use, and the caller undoes the container.
func (p *Plugins) CreateContainer(ctx context.Context, id string, sp *rspec.Spec) (Adjusted, error) {
	if p == nil {
		return Adjusted{}, nil
	}
	reply, apply, err := p.askCreate(ctx, id, sp)
	if err != nil || reply == nil {
		return Adjusted{}, err
	}
	apply(ctx)
	out, err := p.adjust(sp, reply.GetAdjust())
	if err != nil {
		return out, fmt.Errorf("%w: CreateContainer: %w", ErrRefused, err)
	}
	return out, nil
}

func (p *Plugins) askCreate(ctx context.Context, id string, sp *rspec.Spec) (*api.CreateContainerResponse, func(context.Context) []*api.ContainerUpdate, error) {
	defer p.hold()()
	p.put(id, born)
	if p.none() {
		return nil, nil, nil
	}
	c, pod, err := p.describe(id)
	if err != nil {
		return nil, nil, err
	}
	c.Spec = sp
	reply, err := p.adaptation.CreateContainer(ctx, &api.CreateContainerRequest{Pod: pod.api(), Container: c.api()})
	if err != nil {
		return nil, nil, p.refusal("CreateContainer", err)
	}
	return reply, p.batch(reply.GetUpdate()), nil
}

// PostCreateContainer tells plugins that a container was made and its record
// shows it. Failures are logged.
func (p *Plugins) PostCreateContainer(ctx context.Context, id string) {
	p.tell("PostCreateContainer", id, 0, func(pod *api.PodSandbox, c *api.Container) error {
		return p.adaptation.PostCreateContainer(ctx, &api.PostCreateContainerRequest{Pod: pod, Container: c})
	})
}

// StartContainer asks plugins before a container is started. An error refuses
// the start.
func (p *Plugins) StartContainer(ctx context.Context, id string) error {
	if p == nil {
		return nil
	}
	defer p.hold()()
	if p.none() {
		return nil
	}
	c, pod, err := p.describe(id)
	if err != nil {
		return err
	}
	return p.refusal("StartContainer", p.adaptation.StartContainer(ctx, &api.StartContainerRequest{Pod: pod.api(), Container: c.api()}))
}

// PostStartContainer tells plugins that a container was started. Failures are
// logged.
func (p *Plugins) PostStartContainer(ctx context.Context, id string) {
	p.tell("PostStartContainer", id, 0, func(pod *api.PodSandbox, c *api.Container) error {
		return p.adaptation.PostStartContainer(ctx, &api.PostStartContainerRequest{Pod: pod, Container: c})
	})
}

// UpdateContainer asks plugins about an update of a container's limits. What is
// returned is to be applied in its place; updates of other containers have been
// applied. An error refuses the update. The caller holds no container's lock.
func (p *Plugins) UpdateContainer(ctx context.Context, id string, r *cri.LinuxContainerResources) (Update, error) {
	asked := Update{ID: id, Resources: r}
	if p == nil {
		return asked, nil
	}
	reply, err := p.askUpdate(ctx, id, r)
	if err != nil || reply == nil {
		return asked, err
	}
	var others []*api.ContainerUpdate
	for _, u := range reply.GetUpdate() {
		switch {
		case u == nil: // NRI's way to say that the update itself is unchanged
		case u.GetContainerId() != id:
			others = append(others, u)
		default:
			if asked, err = fromUpdate(u); err != nil {
				return asked, fmt.Errorf("%w: UpdateContainer: %w", ErrRefused, err)
			}
		}
	}
	p.batch(others)(ctx)
	return asked, nil
}

func (p *Plugins) askUpdate(ctx context.Context, id string, r *cri.LinuxContainerResources) (*api.UpdateContainerResponse, error) {
	defer p.hold()()
	if p.none() {
		return nil, nil
	}
	c, pod, err := p.describe(id)
	if err != nil {
		return nil, err
	}
	reply, err := p.adaptation.UpdateContainer(ctx, &api.UpdateContainerRequest{Pod: pod.api(), Container: c.api(), LinuxResources: fromCRI(r)})
	return reply, p.refusal("UpdateContainer", err)
}

// PostUpdateContainer tells plugins that a container's limits were changed.
// Failures are logged.
func (p *Plugins) PostUpdateContainer(ctx context.Context, id string) {
	p.tell("PostUpdateContainer", id, 0, func(pod *api.PodSandbox, c *api.Container) error {
		return p.adaptation.PostUpdateContainer(ctx, &api.PostUpdateContainerRequest{Pod: pod, Container: c})
	})
}

// StopContainer tells plugins, once, that a container has ended, whoever ended
// it. Updates they ask of others are applied behind. Failures are logged. The
// caller holds the container's lock, so that no start or removal comes between.
func (p *Plugins) StopContainer(ctx context.Context, id string) {
	p.tell("StopContainer", id, stopped, func(pod *api.PodSandbox, c *api.Container) error {
		reply, err := p.adaptation.StopContainer(ctx, &api.StopContainerRequest{Pod: pod, Container: c})
		p.applyBehind(ctx, reply.GetUpdate())
		return err
	})
}

// RemoveContainer tells plugins, once, that a container is gone but for its
// record, which the caller removes next, and then calls Forget. Failures are
// logged.
func (p *Plugins) RemoveContainer(ctx context.Context, id string) {
	p.tell("RemoveContainer", id, removed, func(pod *api.PodSandbox, c *api.Container) error {
		return p.adaptation.RemoveContainer(ctx, &api.RemoveContainerRequest{Pod: pod, Container: c})
	})
}

// tell calls plugins with a container they know of, once if there is a mark for
// it, and logs what fails.
func (p *Plugins) tell(event, id string, m mark, call func(*api.PodSandbox, *api.Container) error) {
	if p == nil {
		return
	}
	defer p.hold()()
	if p.none() {
		p.leave(id, m)
		return
	}
	c, pod, err := p.describe(id)
	if err != nil || !c.Made && !p.marked(id, born) || m != 0 && !p.put(id, m) {
		return
	}
	p.logFailure(event, id, call(pod.api(), c.api()))
}

func (p *Plugins) describe(id string) (Container, Pod, error) {
	c, err := p.Node.Container(id)
	if err != nil {
		return c, Pod{}, err
	}
	pod, err := p.Node.Pod(c.PodID)
	return c, pod, err
}
