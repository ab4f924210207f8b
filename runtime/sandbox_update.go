package runtime

import (
	"context"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox"
)

// UpdatePodSandboxResources is told what the pod as a whole has now, after the
// kubelet has changed the pod's cgroup (KEP-1287). It is kept in the record and
// shown; what is left out stays as it was. NotFound for an unknown pod,
// FailedPrecondition for one that is not ready or where an NRI plugin refuses,
// ResourceExhausted, and nothing changed, when the disk does not take the record.
func (s *Service) UpdatePodSandboxResources(ctx context.Context, req *cri.UpdatePodSandboxResourcesRequest) (*cri.UpdatePodSandboxResourcesResponse, error) {
	sb, err := s.findSandbox(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if err := checkPodResources("", req.GetOverhead(), req.GetResources()); err != nil {
		return nil, err
	}
	open, err := s.locks.Lock(ctx, sb.ID)
	if err != nil {
		return nil, err
	}
	defer open()
	if sb, err = s.findSandbox(sb.ID); err != nil {
		return nil, err
	}
	if !sb.Ready(s.bootID) {
		return nil, fmt.Errorf("%w: pod sandbox %s is not ready", errPrecondition, sb.ID)
	}
	if err := s.plugins.UpdatePodSandbox(ctx, sb.ID, req.GetOverhead(), req.GetResources()); err != nil {
		return nil, err
	}
	if err := s.updateSandbox(sb, req.GetOverhead(), req.GetResources()); err != nil {
		return nil, err
	}
	s.plugins.PostUpdatePodSandbox(ctx, sb.ID)
	return &cri.UpdatePodSandboxResourcesResponse{}, nil
}

// updateSandbox makes a pod's new resources known. The caller holds the pod's
// lock.
func (s *Service) updateSandbox(sb *sandbox.Sandbox, overhead, resources *cri.LinuxContainerResources) error {
	_, err := s.Records.Sandboxes.TryUpdate(sb.ID, func(sb *sandbox.Sandbox) {
		if overhead != nil {
			sb.Overhead = &sandbox.Config[*cri.LinuxContainerResources]{Message: overhead}
		}
		if resources != nil {
			sb.Resources = &sandbox.Config[*cri.LinuxContainerResources]{Message: resources}
		}
	})
	return err
}
