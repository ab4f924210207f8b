package nri

import (
	"context"

	"github.com/containerd/nri/pkg/api"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// RunPodSandbox tells plugins of a pod whose namespaces and network are there
// and whose record does not show it yet. An error refuses the pod; the caller
// undoes it, stop and removal are told to those plugins that took it.
func (p *Plugins) RunPodSandbox(ctx context.Context, id string) error {
	if p == nil {
		return nil
	}
	defer p.hold()()
	p.put(id, born)
	if p.none() {
		return nil
	}
	pod, err := p.Node.Pod(id)
	if err != nil {
		return err
	}
	return p.refusal("RunPodSandbox", p.adaptation.RunPodSandbox(ctx, &api.RunPodSandboxRequest{Pod: pod.api()}))
}

// UpdatePodSandbox asks plugins about new resources of a pod, before they are
// recorded. An error refuses the update.
func (p *Plugins) UpdatePodSandbox(ctx context.Context, id string, overhead, resources *cri.LinuxContainerResources) error {
	if p == nil {
		return nil
	}
	defer p.hold()()
	if p.none() {
		return nil
	}
	pod, err := p.Node.Pod(id)
	if err != nil {
		return err
	}
	_, err = p.adaptation.UpdatePodSandbox(ctx, &api.UpdatePodSandboxRequest{
		Pod: pod.api(), OverheadLinuxResources: fromCRI(overhead), LinuxResources: fromCRI(resources)})
	return p.refusal("UpdatePodSandbox", err)
}

// PostUpdatePodSandbox tells plugins that a pod's resources were recorded.
func (p *Plugins) PostUpdatePodSandbox(ctx context.Context, id string) {
	p.tellPod("PostUpdatePodSandbox", id, func(pod *api.PodSandbox) error {
		return p.adaptation.PostUpdatePodSandbox(ctx, &api.PostUpdatePodSandboxRequest{Pod: pod})
	})
}

// StopPodSandbox tells plugins, once, that a pod's containers have ended and
// its network and namespaces go. Failures are logged.
func (p *Plugins) StopPodSandbox(ctx context.Context, id string) {
	p.tellPodOnce("StopPodSandbox", id, stopped, func(pod *api.PodSandbox) error {
		return p.adaptation.StopPodSandbox(ctx, &api.StopPodSandboxRequest{Pod: pod})
	})
}

// RemovePodSandbox tells plugins, once, that a pod is gone but for its record,
// which the caller removes next, and then calls Forget. Failures are logged.
func (p *Plugins) RemovePodSandbox(ctx context.Context, id string) {
	p.tellPodOnce("RemovePodSandbox", id, removed, func(pod *api.PodSandbox) error {
		return p.adaptation.RemovePodSandbox(ctx, &api.RemovePodSandboxRequest{Pod: pod})
	})
}

// tellPod calls plugins with a pod they know of and logs what fails.
func (p *Plugins) tellPod(event, id string, call func(*api.PodSandbox) error) {
	p.tellPodOnce(event, id, 0, call)
}

// tellPodOnce also marks the pod and does nothing when it was marked.
func (p *Plugins) tellPodOnce(event, id string, m mark, call func(*api.PodSandbox) error) {
	if p == nil {
		return
	}
	defer p.hold()()
	if p.none() {
		p.leave(id, m)
		return
	}
	pod, err := p.Node.Pod(id)
	if err != nil || !pod.Ready && !p.marked(id, born) || m != 0 && !p.put(id, m) {
		return
	}
	p.logFailure(event, id, call(pod.api()))
}

// leave keeps an object whose removal nobody is told of out of what a plugin is
// given that connects before the record is gone.
func (p *Plugins) leave(id string, m mark) {
	if m == removed {
		p.put(id, removed)
	}
}

func (p *Plugins) logFailure(event, id string, err error) {
	if err != nil {
		p.Log(Warning, id+": "+p.refusal(event, err).Error())
	}
}
