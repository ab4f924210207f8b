package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/runtime/operation"
	"berth/sandbox"
)

// RemovePodSandbox stops a pod where needed and removes it with its
// containers. Idempotent; nil for a pod that is gone.
func (s *Service) RemovePodSandbox(ctx context.Context, req *cri.RemovePodSandboxRequest) (*cri.RemovePodSandboxResponse, error) {
	sb, err := s.Records.Sandboxes.Find(req.GetPodSandboxId())
	if errors.Is(err, sandbox.ErrNotFound) {
		return &cri.RemovePodSandboxResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	_, err = s.operations.Do(ctx, operation.Request{
		Key: "remove " + sb.ID, Verb: "RemovePodSandbox", Object: sb.Name, Limit: operationLimit,
	}, func(ctx context.Context, op *operation.Operation) (string, error) {
		op.Step("wait for the pod's lock")
		open, err := s.locks.Lock(ctx, sb.ID)
		if err != nil {
			return "", err
		}
		defer open()
		return "", s.removeSandbox(ctx, sb.ID)
	})
	if err != nil {
		return nil, err
	}
	return &cri.RemovePodSandboxResponse{}, nil
}

// removeSandbox is the one way back from any state of a sandbox: after a
// failed RunPodSandbox, at a restart, or on request. Idempotent. The caller
// holds the sandbox's lock.
func (s *Service) removeSandbox(ctx context.Context, id string) error {
	op := operation.From(ctx)
	sb, err := s.Records.Sandboxes.Get(id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := s.stopSandbox(ctx, id); err != nil {
		return err
	}
	op.Step("remove containers")
	for _, c := range s.Records.ContainersOf(id) {
		if err := s.removeContainer(ctx, c.ID); err != nil {
			return err
		}
	}
	op.Step("remove cgroup")
	if sb.CgroupMade {
		if err := s.removePodCgroup(ctx, sb.CgroupParent); err != nil {
			return err
		}
	}
	op.Step("remove record")
	if err := os.RemoveAll(filepath.Dir(s.shmPath(id))); err != nil {
		return fmt.Errorf("remove state of %s: %w", id, err)
	}
	if err := s.networkFor(sb).Forget(id); err != nil {
		return err
	}
	s.exits.forget(id)
	s.plugins.RemovePodSandbox(ctx, id)
	err = s.forget(sb)
	if _, gone := s.Records.Sandboxes.Get(id); gone == nil {
		return err
	}
	s.plugins.Forget(id)
	s.releaseLabels(sb)
	return err
}
