package runtime

import (
	"context"
	"fmt"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/runtime/operation"
	"berth/sandbox"
)

// startErrorCode is the exit code of a container whose start was refused.
const startErrorCode = 128

// StartContainer lets a created container's process run. A start that the OCI
// runtime or an NRI plugin refuses leaves the container EXITED with code 128, reason StartError
// and the refusal as its message.
func (s *Service) StartContainer(ctx context.Context, req *cri.StartContainerRequest) (*cri.StartContainerResponse, error) {
	c, err := s.findContainer(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	_, err = s.operations.Do(ctx, operation.Request{
		Key: "start " + c.ID, Verb: "StartContainer", Object: c.Name, Limit: operationLimit,
	}, func(ctx context.Context, op *operation.Operation) (string, error) {
		op.Step("wait for the container's lock")
		open, err := s.locks.Lock(ctx, c.ID)
		if err != nil {
			return "", err
		}
		defer open()
		op.Step("start in the OCI runtime")
		return "", s.startContainer(ctx, c.ID)
	})
	if err != nil {
		return nil, err
	}
	return &cri.StartContainerResponse{}, nil
}

func (s *Service) startContainer(ctx context.Context, id string) error {
	c, err := s.Records.Containers.Get(id)
	if err != nil {
		return err
	}
	if st := c.State(s.bootID); st != cri.ContainerState_CONTAINER_CREATED {
		return fmt.Errorf("%w: container %s is %s", errPrecondition, id, st)
	}
	sb, err := s.readySandbox(c.SandboxID)
	if err != nil {
		return err
	}
	rt, err := s.runtimeOfPod(sb)
	if err != nil {
		return err
	}
	s.starts.begin(id)
	defer s.endStart(id)
	at := time.Now().UnixNano()
	err = s.plugins.StartContainer(ctx, id)
	switch {
	case err != nil:
	case c.Restore:
		err = s.startRestored(ctx, rt, sb, c)
	default:
		err = rt.Start(ctx, id)
	}
	if err != nil {
		s.startFailed(c, at, err)
		_ = rt.KillAll(ctx, id) // what is left of it goes with StopContainer or RemoveContainer at the latest
		s.plugins.StopContainer(ctx, id)
		return fmt.Errorf("start container %s: %w", id, err)
	}
	_, err = s.Records.Containers.Update(id, func(c *sandbox.Container) { c.StartedAt = at })
	if err != nil {
		s.Log.WithError(err).WithField("container", id).Warn("record of a started container")
	}
	s.endStart(id) // an end waits for the record, not for plugins
	s.plugins.PostStartContainer(ctx, id)
	return nil
}

// endStart lets ends of a container be recorded again, first of all the one that
// came meanwhile. Idempotent.
func (s *Service) endStart(id string) {
	if e := s.starts.end(id); e != nil {
		s.Exited(*e)
	}
}

func (s *Service) startFailed(c *sandbox.Container, at int64, cause error) {
	_, err := s.Records.Containers.Update(c.ID, func(c *sandbox.Container) {
		c.StartedAt, c.FinishedAt = at, time.Now().UnixNano()
		c.ExitCode, c.Reason, c.Message = startErrorCode, reasonStart, readable(cause.Error())
	})
	if err != nil {
		s.Log.WithError(err).WithField("container", c.ID).Warn("record of a failed start")
	}
}
