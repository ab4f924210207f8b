package runtime

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/oci/spec"
	"berth/runtime/nri"
	"berth/runtime/operation"
	"berth/sandbox"
)

// UpdateContainerResources changes the limits of a created or running
// container: all of them or, on error, none. Fields that are zero stay as they are.
func (s *Service) UpdateContainerResources(ctx context.Context, req *cri.UpdateContainerResourcesRequest) (*cri.UpdateContainerResourcesResponse, error) {
	c, err := s.findContainer(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	if req.GetLinux() == nil {
		return nil, fmt.Errorf("%w: linux is missing", errInvalid)
	}
	if err := s.updatable(c); err != nil {
		return nil, err
	}
	if _, err := spec.UpdateResources(req.GetLinux(), s.Host); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, operationLimit)
	defer cancel()
	ctx, early := operation.Early(ctx)
	defer early()
	update, err := s.plugins.UpdateContainer(ctx, c.ID, req.GetLinux())
	if err != nil {
		return nil, err
	}
	open, err := s.locks.Lock(ctx, c.ID)
	if err != nil {
		return nil, err
	}
	defer open()
	if err := s.updateResources(ctx, update); err != nil {
		return nil, err
	}
	s.plugins.PostUpdateContainer(ctx, c.ID)
	return &cri.UpdateContainerResourcesResponse{}, nil
}

// updatable refuses containers that have no limits any more.
func (s *Service) updatable(c *sandbox.Container) error {
	if st := c.State(s.bootID); st == cri.ContainerState_CONTAINER_EXITED {
		return fmt.Errorf("%w: container %s is %s", errPrecondition, c.ID, st)
	}
	return nil
}

// updateResources changes the limits of a container, all or none, and records
// them. The caller holds the container's lock.
func (s *Service) updateResources(ctx context.Context, u nri.Update) error {
	c, err := s.findContainer(u.ID)
	if err != nil {
		return err
	}
	if err := s.updatable(c); err != nil {
		return err
	}
	rt, err := s.runtimeOf(c)
	if err != nil {
		return err
	}
	resources, err := spec.UpdateResources(u.Resources, s.Host)
	if err != nil {
		return err
	}
	u.AddMore(resources)
	if err := rt.Update(ctx, c.ID, resources); err != nil {
		err = fmt.Errorf("update resources of container %s: %w", c.ID, blameLimit(err, "linux.", u.Resources))
		return errors.Join(err, s.restoreResources(ctx, rt, c))
	}
	merged := mergeResources(c.EffectiveResources(), u.Resources)
	_, err = s.Records.Containers.TryUpdate(c.ID, func(c *sandbox.Container) {
		c.Resources = &sandbox.Config[*cri.LinuxContainerResources]{Message: merged}
	})
	if err != nil { // limits that the next daemon would not know of
		return errors.Join(err, s.restoreResources(ctx, rt, c))
	}
	return nil
}

// restoreResources puts the limits in force back after a refused update: the OCI
// runtime applies one controller after the other and keeps those that worked.
func (s *Service) restoreResources(ctx context.Context, rt oci.Runtime, c *sandbox.Container) error {
	resources, err := spec.UpdateResources(c.EffectiveResources(), s.Host)
	if err == nil {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), killPatience)
		defer cancel()
		err = rt.Update(limited, c.ID, resources)
	}
	if err != nil {
		return fmt.Errorf("restore resources of container %s: %w", c.ID, err)
	}
	return nil
}

// mergeResources lays the fields set in change over those of old.
func mergeResources(old, change *cri.LinuxContainerResources) *cri.LinuxContainerResources {
	out := &cri.LinuxContainerResources{}
	if old != nil {
		proto.Merge(out, old)
	}
	if len(change.GetHugepageLimits()) > 0 {
		out.HugepageLimits = nil // lists are replaced, not joined
	}
	proto.Merge(out, change)
	return out
}
