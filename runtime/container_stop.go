package runtime

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/runtime/operation"
	"berth/sandbox"
)

// killPatience is how long a SIGKILL may take to show before an error tells
// where the process hangs.
const killPatience = 10 * time.Second

// StopContainer sends the stop signal, waits for the grace period and then
// kills every process of the container. Idempotent; nil for a container that
// is gone. Calls for one container share one stop: the shortest grace counts,
// and a caller that gives up changes nothing.
func (s *Service) StopContainer(ctx context.Context, req *cri.StopContainerRequest) (*cri.StopContainerResponse, error) {
	c, err := s.Records.Containers.Find(req.GetContainerId())
	if errors.Is(err, sandbox.ErrNotFound) {
		return &cri.StopContainerResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	if req.GetTimeout() < 0 {
		return nil, fmt.Errorf("%w: timeout %d is negative", errInvalid, req.GetTimeout())
	}
	grace := time.Duration(min(req.GetTimeout(), int64(maxGrace/time.Second))) * time.Second
	if err := s.stopContainer(ctx, c.ID, grace); err != nil {
		return nil, err
	}
	return &cri.StopContainerResponse{}, nil
}

// maxGrace bounds a grace period, so that seconds fit a Duration.
const maxGrace = 10 * 365 * 24 * time.Hour

// stop is one running stop of a container.
type stop struct {
	mu      sync.Mutex
	until   time.Time     // when grace ends, guarded by mu
	shorter chan struct{} // told when until moved; holds one
}

func (st *stop) deadline() time.Time {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.until
}

func (st *stop) shorten(until time.Time) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if until.Before(st.until) {
		st.until = until
		select {
		case st.shorter <- struct{}{}:
		default:
		}
	}
}

// stopContainer joins or begins the stop of a container and waits for it or
// for ctx. The stop itself goes on without its callers.
func (s *Service) stopContainer(ctx context.Context, id string, grace time.Duration) error {
	name := id
	if c, err := s.Records.Containers.Get(id); err == nil {
		name = c.Name
	}
	until := time.Now().Add(grace)
	st := &stop{until: until, shorter: make(chan struct{}, 1)}
	_, err := s.operations.Do(ctx, operation.Request{
		Key: "stop container " + id, Verb: "StopContainer", Object: name, Limit: grace + 2*operationLimit, Quiet: grace,
		Shared: st, Join: func(running any) { running.(*stop).shorten(until) },
	}, func(ctx context.Context, op *operation.Operation) (string, error) {
		err := s.runStop(ctx, op, id, st)
		if err == nil {
			op.Step("tell NRI plugins")
			s.tellStopped(ctx, id)
		}
		return "", err
	})
	if still := (*operation.StillRunning)(nil); errors.As(err, &still) {
		return fmt.Errorf("stop container %s: %w", id, err)
	}
	return err
}

// runStop is the whole stop: signal, grace, kill. It holds the container's
// lock only while it asks for its state, so that exec and status go on.
func (s *Service) runStop(ctx context.Context, op *operation.Operation, id string, st *stop) error {
	op.Step("wait for the container's lock")
	c, rt, err := s.beginStop(ctx, id)
	if err != nil || c == nil {
		return err
	}
	gone := s.exits.of(id)
	if c.State(s.bootID) == cri.ContainerState_CONTAINER_RUNNING && time.Until(st.deadline()) > 0 {
		sig, err := signalNumber(c.StopSignal)
		if err != nil {
			return err
		}
		op.Step("signal and wait for the grace period")
		if err := rt.Signal(id, sig); err != nil && !errors.Is(err, oci.ErrNotRunning) {
			return fmt.Errorf("signal container %s: %w", id, err)
		}
		if err := rt.Resume(id); err != nil { // somebody has paused it: it would sleep through its grace
			return fmt.Errorf("resume container %s: %w", id, err)
		}
		if s.waitGrace(rt, id, st, gone) {
			op.Step("kill what is left")
			return s.endStop(ctx, rt, c)
		}
		if time.Until(st.deadline()) > 0 {
			return fmt.Errorf("stop container %s: %w", id, errClosing)
		}
	}
	op.Step("kill")
	if err := rt.Signal(id, syscall.SIGKILL); err != nil && !errors.Is(err, oci.ErrNotRunning) {
		return fmt.Errorf("kill container %s: %w", id, err)
	}
	if err := s.killAll(ctx, rt, id); err != nil {
		return err
	}
	if err := s.awaitExit(ctx, rt, id, gone, killPatience); err != nil {
		return fmt.Errorf("stop container: %w", err)
	}
	return s.endStop(ctx, rt, c)
}

// beginStop waits for a create or start in progress. A nil container means
// that there is nothing to stop.
func (s *Service) beginStop(ctx context.Context, id string) (*sandbox.Container, oci.Runtime, error) {
	limited, cancel := context.WithTimeout(ctx, operationLimit)
	defer cancel()
	open, err := s.locks.Lock(limited, id)
	if err != nil {
		return nil, nil, err
	}
	defer open()
	c, err := s.Records.Containers.Get(id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	if c.Process == nil || c.State(s.bootID) == cri.ContainerState_CONTAINER_EXITED && !c.SharedPIDs {
		return nil, nil, nil
	}
	rt, err := s.runtimeOf(c)
	if err != nil {
		return nil, nil, err
	}
	if c.State(s.bootID) == cri.ContainerState_CONTAINER_EXITED {
		return nil, nil, s.killAll(ctx, rt, id)
	}
	return c, rt, nil
}

// errClosing: the daemon ends within a grace period. The container lives on, and
// a later daemon is asked again.
var errClosing = errors.New("the daemon is stopping; the container was signalled but not killed")

// waitGrace waits until the init has ended (true), the grace is over or the
// service is closed.
func (s *Service) waitGrace(rt oci.Runtime, id string, st *stop, gone <-chan struct{}) bool {
	ask := time.NewTicker(time.Second)
	defer ask.Stop()
	for {
		if e, ok := rt.Exited(id); ok {
			s.Exited(e)
			return true
		}
		left := time.Until(st.deadline())
		if left <= 0 {
			return false
		}
		limit := time.NewTimer(left)
		select {
		case <-gone:
			limit.Stop()
			return true
		case <-st.shorter:
		case <-limit.C:
		case <-ask.C:
		case <-s.closing:
			limit.Stop()
			return false
		}
		limit.Stop()
	}
}

// endStop sees to it that nothing of the container is left when Stop returns.
func (s *Service) endStop(ctx context.Context, rt oci.Runtime, c *sandbox.Container) error {
	if !c.SharedPIDs {
		return nil
	}
	return s.killAll(ctx, rt, c.ID)
}

func (s *Service) killAll(ctx context.Context, rt oci.Runtime, id string) error {
	limited, cancel := context.WithTimeout(ctx, killPatience)
	defer cancel()
	if err := rt.KillAll(limited, id); err != nil {
		return fmt.Errorf("kill all processes of container %s: %w", id, err)
	}
	return nil
}
