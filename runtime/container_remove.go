package runtime

import (
	"context"
	"errors"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/rootfs"
	"berth/oci"
	"berth/runtime/operation"
	"berth/sandbox"
)

// RemoveContainer kills a container where needed and removes it. Idempotent;
// nil for one that is gone.
func (s *Service) RemoveContainer(ctx context.Context, req *cri.RemoveContainerRequest) (*cri.RemoveContainerResponse, error) {
	c, err := s.Records.Containers.Find(req.GetContainerId())
	if errors.Is(err, sandbox.ErrNotFound) {
		return &cri.RemoveContainerResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	_, err = s.operations.Do(ctx, operation.Request{
		Key: "remove " + c.ID, Verb: "RemoveContainer", Object: c.Name, Limit: operationLimit,
	}, func(ctx context.Context, op *operation.Operation) (string, error) {
		return "", s.removeContainer(ctx, c.ID)
	})
	if err != nil {
		return nil, err
	}
	return &cri.RemoveContainerResponse{}, nil
}

// removeContainer is the one way back from any state of a container: after a
// failed CreateContainer, at a restart, with its sandbox, or on request. It
// undoes make in the opposite order. Idempotent.
func (s *Service) removeContainer(ctx context.Context, id string) error {
	op := operation.From(ctx)
	op.Step("stop the container")
	if err := s.stopContainer(ctx, id, 0); err != nil {
		return err
	}
	op.Step("wait for the container's lock")
	open, err := s.locks.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer open()
	c, err := s.Records.Containers.Get(id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	rt, err := s.runtimeOf(c)
	if err != nil {
		return err
	}
	op.Step("delete in the OCI runtime")
	if err := rt.Delete(ctx, id); err != nil {
		return err
	}
	if sb, err := s.Records.Sandboxes.Get(c.SandboxID); err == nil {
		if err := removeOwnCgroup(ctx, id, containerCgroup(sb, c)); err != nil {
			return err
		}
	}
	op.Step("unmount rootfs and image volumes")
	if err := rootfs.Unmount(s.rootfsDir(id)); err != nil {
		return err
	}
	if err := unmountVolumes(s.bundleDir(id)); err != nil {
		return err
	}
	if err := oci.RemoveBundle(s.bundleDir(id)); err != nil {
		return err
	}
	op.Step("remove the container's record")
	s.exits.forget(id)
	s.plugins.RemoveContainer(ctx, id)
	err = s.Records.Containers.Remove(id)
	if _, gone := s.Records.Containers.Get(id); gone == nil {
		return err
	}
	s.plugins.Forget(id)
	s.Images.Release(id)
	return err
}
