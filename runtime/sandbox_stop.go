package runtime

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/runtime/operation"
	"berth/sandbox"
	"berth/sandbox/namespaces"
)

// StopPodSandbox kills what runs in a pod and gives its network back. It may
// be called any number of times, also for a pod that is gone.
func (s *Service) StopPodSandbox(ctx context.Context, req *cri.StopPodSandboxRequest) (*cri.StopPodSandboxResponse, error) {
	sb, err := s.Records.Sandboxes.Find(req.GetPodSandboxId())
	if errors.Is(err, sandbox.ErrNotFound) {
		return &cri.StopPodSandboxResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	_, err = s.operations.Do(ctx, operation.Request{
		Key: "stop " + sb.ID, Verb: "StopPodSandbox", Object: sb.Name, Limit: operationLimit,
	}, func(ctx context.Context, op *operation.Operation) (string, error) {
		op.Step("wait for the pod's lock")
		open, err := s.locks.Lock(ctx, sb.ID)
		if err != nil {
			return "", err
		}
		defer open()
		err = s.stopSandbox(ctx, sb.ID)
		if errors.Is(err, sandbox.ErrNotFound) { // a removal was first
			return "", nil
		}
		return "", err
	})
	if err != nil {
		return nil, err
	}
	return &cri.StopPodSandboxResponse{}, nil
}

// stopSandbox takes a pod's effects away, in the opposite order of bringUp.
// Every step is idempotent; the caller holds the sandbox's lock. From its
// first lines on no container can be made in the pod. One that never came up is
// not marked: nobody has seen it, and nobody shall while it is undone.
func (s *Service) stopSandbox(ctx context.Context, id string) error {
	op := operation.From(ctx)
	if sb, err := s.Records.Sandboxes.Get(id); err == nil && visibleSandbox(sb) {
		s.markStopped(id)
	}
	s.podLife.end(id)
	op.Step("stop containers")
	if err := s.stopContainersOf(ctx, id); err != nil {
		return err
	}
	op.Step("tell NRI plugins")
	s.plugins.StopPodSandbox(ctx, id)
	sb, err := s.Records.Sandboxes.Get(id)
	if err != nil {
		return err
	}
	op.Step("stop pause")
	if err := s.stopPause(ctx, sb); err != nil {
		return err
	}
	op.Step("network teardown")
	if err := s.teardownNetwork(ctx, sb); err != nil {
		return err
	}
	op.Step("release namespaces")
	if err := namespaces.UnmountShm(s.shmPath(id)); err != nil {
		return err
	}
	return namespaces.Release(s.namespaceDir(id))
}

// stopContainersOf kills a pod's containers at the same time, without grace.
func (s *Service) stopContainersOf(ctx context.Context, sandboxID string) error {
	var g errgroup.Group
	for _, c := range s.Records.ContainersOf(sandboxID) {
		g.Go(func() error { return s.stopContainer(ctx, c.ID, 0) })
	}
	return g.Wait()
}

// stopPause kills and deletes the pod's PID 1, once; after that the record no
// longer names it. A record without it may still have one in the OCI runtime,
// if a crash came in between, so that is deleted in any case.
func (s *Service) stopPause(ctx context.Context, sb *sandbox.Sandbox) error {
	if sb.Namespaces().GetPid() != cri.NamespaceMode_POD {
		return nil
	}
	rt, err := s.runtimeOfPod(sb)
	if err != nil {
		return err
	}
	if sb.Pause != nil && sb.BootID == s.bootID {
		if err := s.killPause(ctx, rt, sb.ID); err != nil {
			return fmt.Errorf("kill pause of %s: %w", sb.ID, err)
		}
	}
	if err := rt.Delete(ctx, sb.ID); err != nil {
		return err
	}
	if err := removeOwnCgroup(ctx, sb.ID, cgroupDir(sb, sb.ID)); err != nil {
		return err
	}
	if err := oci.RemoveBundle(s.bundleDir(sb.ID)); err != nil {
		return err
	}
	if sb.Pause == nil {
		return nil
	}
	if _, err := s.Records.Sandboxes.Update(sb.ID, func(sb *sandbox.Sandbox) { sb.Pause = nil }); err != nil {
		s.Log.WithError(err).WithField("sandbox", sb.ID).Warn("record of a stopped pause")
	}
	return nil
}

// killPause ends the pod's PID 1 and waits for that, unless an earlier attempt has
// had the OCI runtime forget it: its exit would be waited for in vain.
func (s *Service) killPause(ctx context.Context, rt oci.Runtime, id string) error {
	gone := s.exits.of(id)
	if err := rt.KillAll(ctx, id); err != nil {
		return err
	}
	if err := rt.Signal(id, syscall.SIGKILL); errors.Is(err, oci.ErrNotFound) {
		return nil
	}
	return s.awaitExit(ctx, rt, id, gone, killPatience)
}

// teardownNetwork takes the host ports back and runs CNI DEL once, and remembers
// that it is done. Until then the record keeps what DEL needs. Ports that a plugin
// maps are free behind DEL, others before, so that a DEL that fails holds none.
func (s *Service) teardownNetwork(ctx context.Context, sb *sandbox.Sandbox) error {
	r, err := networkOf(sb)
	if err != nil {
		return err
	}
	if r == nil || r.UnmappedPorts {
		if err := s.HostPorts.Close(sb.ID); err != nil {
			return err
		}
	}
	if r == nil {
		return nil
	}
	if err := s.networkFor(sb).Teardown(ctx, s.podNetwork(sb), r); err != nil {
		return err
	}
	if err := s.HostPorts.Close(sb.ID); err != nil {
		return err
	}
	_, err = s.Records.Sandboxes.Update(sb.ID, func(sb *sandbox.Sandbox) { sb.Network = nil })
	if err != nil {
		s.Log.WithError(err).WithField("sandbox", sb.ID).Warn("record of a released network")
	}
	return nil
}

// awaitExit waits until the init of id has ended. Its exit is also asked of
// the kernel each second, so that a lost notice cannot wedge a stop.
func (s *Service) awaitExit(ctx context.Context, rt oci.Runtime, id string, gone <-chan struct{}, patience time.Duration) error {
	limit := time.NewTimer(patience)
	defer limit.Stop()
	ask := time.NewTicker(time.Second)
	defer ask.Stop()
	for {
		if e, ok := rt.Exited(id); ok {
			s.Exited(e)
			return nil
		}
		select {
		case <-gone:
			return nil
		case <-ask.C:
		case <-limit.C:
			return s.unkillable(id)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
