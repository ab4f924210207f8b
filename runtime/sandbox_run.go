package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/network"
	"berth/oci"
	"berth/oci/spec"
	"berth/runtime/operation"
	"berth/runtime/resolve"
	"berth/sandbox"
	"berth/sandbox/namespaces"
)

// RunPodSandbox brings up a pod's namespaces and network. The same metadata
// again joins a running attempt or returns the ready sandbox; AlreadyExists when
// that is another pod, see samePod.
func (s *Service) RunPodSandbox(ctx context.Context, req *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error) {
	if err := s.checkSandbox(req); err != nil {
		return nil, err
	}
	name := sandbox.SandboxName(req.GetConfig().GetMetadata())
	id, err := s.operations.Do(ctx, operation.Request{
		Key: "run " + name, Verb: "RunPodSandbox", Object: name, Limit: operationLimit,
	}, func(ctx context.Context, op *operation.Operation) (string, error) {
		if old, err := s.Records.Sandboxes.Named(name); err == nil {
			if old.Ready(s.bootID) {
				return old.ID, nil
			}
			if err := s.makeRoom(ctx, op, old); err != nil {
				return "", err
			}
		}
		return s.runSandbox(ctx, op, req)
	})
	if err == nil {
		err = s.samePod(id, req)
	}
	if err != nil {
		return nil, err
	}
	return &cri.RunPodSandboxResponse{PodSandboxId: id}, nil
}

// makeRoom removes what an earlier attempt of the same name could not undo. A
// pod that was ready once is its owner's to remove.
func (s *Service) makeRoom(ctx context.Context, op *operation.Operation, old *sandbox.Sandbox) error {
	if old.ReadyAt != 0 {
		return fmt.Errorf("%w: %q is %s, which is not ready; remove it first", sandbox.ErrNameInUse, old.Name, old.ID)
	}
	op.Step("remove what an earlier attempt left")
	open, err := s.locks.Lock(ctx, old.ID)
	if err != nil {
		return err
	}
	defer open()
	if err := s.removeSandbox(ctx, old.ID); err != nil {
		return fmt.Errorf("remove what an earlier attempt at %s left, %s: %w", old.Name, old.ID, err)
	}
	return nil
}

// runSandbox is a pod's birth, one step after the other. Whatever fails, the
// pod is removed again; if that fails too (CNI DEL), its record stays, not
// ready, for a later StopPodSandbox or RemovePodSandbox to finish.
func (s *Service) runSandbox(ctx context.Context, op *operation.Operation, req *cri.RunPodSandboxRequest) (id string, err error) {
	sb, err := s.newSandbox(req)
	if err != nil {
		return "", err
	}
	open, err := s.locks.Lock(ctx, sb.ID)
	if err != nil {
		return "", err
	}
	defer open()

	op.Step("make the log directory")
	if err := s.makeLogDirectory(ctx, req.GetConfig().GetLogDirectory()); err != nil {
		return "", err
	}
	if err := s.labelSandbox(sb); err != nil {
		return "", err
	}
	op.Step("plan network")
	if err := s.planNetwork(sb); err != nil {
		s.releaseLabels(sb)
		return "", err
	}
	op.Step("write record")
	if err := s.Records.Sandboxes.Create(sb); err != nil {
		s.releaseLabels(sb)
		return "", errors.Join(err, s.HostPorts.Close(sb.ID))
	}
	if err := s.bringUp(ctx, op, sb); err != nil {
		err = fmt.Errorf("run sandbox %s at step %s: %w", sb.Name, op.Broken(), err)
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), operationLimit)
		defer cancel()
		if uerr := s.removeSandbox(undo, sb.ID); uerr != nil {
			s.markStopped(sb.ID)
			err = fmt.Errorf("%w; and undoing it: %w", err, uerr)
		}
		return "", err
	}
	return sb.ID, nil
}

// bringUp has every effect of a sandbox; removeSandbox undoes all of them.
func (s *Service) bringUp(ctx context.Context, op *operation.Operation, sb *sandbox.Sandbox) error {
	op.Step("write pod files")
	if err := s.writePodFiles(ctx, sb); err != nil {
		return err
	}
	op.Step("pin namespaces")
	if err := namespaces.Pin(s.namespaceSpec(sb)); err != nil {
		return err
	}
	if sb.Namespaces().GetIpc() != cri.NamespaceMode_NODE {
		op.Step("mount shm")
		shm := namespaces.Shm{Size: s.Config().Runtime.ShmSize, UID: podIDs(sb).HostUID(0), GID: podIDs(sb).HostGID(0), Context: podLabels(sb).Mount}
		if err := namespaces.MountShm(s.shmPath(sb.ID), shm); err != nil {
			return err
		}
	}
	if sb.Network != nil {
		op.Step("network setup")
		if err := s.setupNetwork(ctx, op, sb); err != nil {
			return err
		}
	}
	if sb.Namespaces().GetPid() == cri.NamespaceMode_POD {
		op.Step("start pause")
		if err := s.startPause(ctx, sb); err != nil {
			return err
		}
	}
	op.Step("ask NRI plugins")
	if err := s.plugins.RunPodSandbox(ctx, sb.ID); err != nil {
		return err
	}
	return s.recordReady(op, sb.ID)
}

// recordReady makes the pod visible. A pod whose ready record is not on the
// disk would be taken for half made by the next daemon, with all that runs in
// it; so this must fail as any step does, and nobody shall have seen it.
func (s *Service) recordReady(op *operation.Operation, id string) error {
	steps := op.Steps()
	op.Step("write ready record")
	_, err := s.Records.Sandboxes.TryUpdate(id, func(sb *sandbox.Sandbox) {
		sb.ReadyAt = time.Now().UnixNano()
		for _, st := range steps {
			sb.Steps = append(sb.Steps, sandbox.Step{Name: st.Name, Nanoseconds: st.Took.Nanoseconds()})
		}
	})
	if err == nil {
		s.plugins.Settled(id)
	}
	return err
}

func (s *Service) newSandbox(req *cri.RunPodSandboxRequest) (*sandbox.Sandbox, error) {
	id := newID()
	handler, err := s.handlerName(req.GetRuntimeHandler())
	if err != nil {
		return nil, err
	}
	sb := &sandbox.Sandbox{
		ID:        id,
		Name:      sandbox.SandboxName(req.GetConfig().GetMetadata()),
		Handler:   req.GetRuntimeHandler(),
		Runtime:   handler,
		Config:    sandbox.Config[*cri.PodSandboxConfig]{Message: req.GetConfig()},
		BootID:    s.bootID,
		CreatedAt: time.Now().UnixNano(),
	}
	sb.CgroupParent, sb.CgroupMade, err = s.cgroupParent(id, req.GetConfig().GetLinux().GetCgroupParent())
	if err == nil && !sb.CgroupMade && !bySystemd(sb) {
		sb.CgroupsMade, err = s.claimCgroups(sb.CgroupParent)
	}
	return sb, err
}

func (s *Service) namespaceSpec(sb *sandbox.Sandbox) namespaces.Spec {
	n := sb.Namespaces()
	c := sb.Config.Message
	hostNetwork := n.GetNetwork() == cri.NamespaceMode_NODE
	out := namespaces.Spec{
		Dir:     s.namespaceDir(sb.ID),
		Net:     !hostNetwork,
		UTS:     !hostNetwork,
		IPC:     n.GetIpc() != cri.NamespaceMode_NODE,
		User:    namespaceIDs(podIDs(sb)),
		Sysctls: c.GetLinux().GetSysctls(),
	}
	if !hostNetwork {
		out.Hostname = hostnameOf(sb)
		out.DefaultSysctls = s.Config().Runtime.UnprivilegedPorts
	}
	return out
}

// hostnameOf is the pod's hostname: as asked for, else the id's beginning.
func hostnameOf(sb *sandbox.Sandbox) string {
	if h := sb.Config.Message.GetHostname(); h != "" {
		return h
	}
	return sb.ID[:12]
}

func (s *Service) podNetwork(sb *sandbox.Sandbox) network.PodNetwork {
	c := sb.Config.Message
	p := network.PodNetwork{
		ID: sb.ID, Name: c.GetMetadata().GetName(), Namespace: c.GetMetadata().GetNamespace(), UID: c.GetMetadata().GetUid(),
		NetNS:        namespaces.Path(s.namespaceDir(sb.ID), "net"),
		CgroupParent: sb.CgroupParent, Annotations: c.GetAnnotations(),
		PortMappings: c.GetPortMappings(), DNS: c.GetDnsConfig(),
	}
	return p
}

// planNetwork picks the CNI configuration, so that the record names it before
// ADD has an effect, and claims the pod's host ports.
func (s *Service) planNetwork(sb *sandbox.Sandbox) error {
	if sb.Namespaces().GetNetwork() == cri.NamespaceMode_NODE {
		return nil
	}
	plan, err := s.networkFor(sb).Plan(s.podNetwork(sb))
	if err != nil {
		return err
	}
	if sb.Network, err = json.Marshal(plan); err != nil {
		return fmt.Errorf("write network plan: %w", err)
	}
	return s.claimPorts(sb, plan)
}

func (s *Service) setupNetwork(ctx context.Context, op *operation.Operation, sb *sandbox.Sandbox) error {
	var plan network.Result
	if err := json.Unmarshal(sb.Network, &plan); err != nil {
		return fmt.Errorf("read network plan: %w", err)
	}
	if err := s.awaitCollected(ctx); err != nil {
		return err
	}
	result, err := s.networkFor(sb).Setup(ctx, s.podNetwork(sb), &plan)
	if err != nil {
		return err
	}
	raw, err := json.Marshal(result)
	if err != nil {
		return fmt.Errorf("write network result: %w", err)
	}
	if _, err = s.Records.Sandboxes.Update(sb.ID, func(sb *sandbox.Sandbox) { sb.Network, sb.IPs = raw, result.IPs }); err != nil {
		return err
	}
	if err := namespaces.ApplyLinkSysctls(s.namespaceSpec(sb)); err != nil || !result.UnmappedPorts {
		return err
	}
	op.Step("open host ports")
	return s.openPorts(sb.ID, result)
}

// startPause runs the one process a pod may need: PID 1 of its shared PID
// namespace.
func (s *Service) startPause(ctx context.Context, sb *sandbox.Sandbox) error {
	rt, err := s.runtimeOfPod(sb)
	if err != nil {
		return err
	}
	profile, err := resolve.SandboxSeccomp(s.Outside.For(ctx), sb.Config.Message)
	if err != nil {
		return err
	}
	if err := resolve.SandboxAppArmor(sb.Config.Message, s.Host); err != nil {
		return err
	}
	rootfs, err := s.Pause()
	if err != nil {
		return err
	}
	sp, err := spec.Pause(spec.PauseInput{
		Options: s.specOptions(sb), Labels: pauseLabels(sb),
		ID: sb.ID, Sandbox: sb.Config.Message, Host: s.host(), Rootfs: rootfs, SeccompProfile: profile,
		Namespaces: s.joinedNamespaces(sb), CgroupsPath: cgroupsPath(sb, sb.ID),
	})
	if err != nil {
		return err
	}
	bundle := s.bundleDir(sb.ID)
	if err := s.makeBundle(sb, sb.ID); err != nil {
		return err
	}
	if err := oci.WriteBundle(bundle, sp); err != nil {
		return err
	}
	p, err := s.createInRuntime(ctx, rt, oci.CreateRequest{ID: sb.ID, Bundle: bundle, SystemdCgroup: bySystemd(sb)})
	if err != nil {
		return fmt.Errorf("create pause: %w", err)
	}
	if _, err := s.Records.Sandboxes.Update(sb.ID, func(sb *sandbox.Sandbox) {
		sb.Pause = &sandbox.Process{PID: p.PID, StartTime: p.StartTime}
	}); err != nil {
		return err
	}
	if err := rt.Start(ctx, sb.ID); err != nil {
		return fmt.Errorf("start pause: %w", err)
	}
	return nil
}

// joinedNamespaces are the pod's namespaces as paths; empty ones are the node's.
func (s *Service) joinedNamespaces(sb *sandbox.Sandbox) spec.Namespaces {
	dir, n := s.namespaceDir(sb.ID), sb.Namespaces()
	var out spec.Namespaces
	if n.GetNetwork() != cri.NamespaceMode_NODE {
		out.Net, out.UTS = namespaces.Path(dir, "net"), namespaces.Path(dir, "uts")
	}
	if n.GetIpc() != cri.NamespaceMode_NODE {
		out.IPC = namespaces.Path(dir, "ipc")
	}
	if podIDs(sb) != nil {
		out.User = namespaces.Path(dir, namespaces.User)
	}
	return out
}

// checkPins looks whether a ready sandbox's namespaces are still there. Without
// one no container can be made and no connection forwarded, ever again: such a
// sandbox is NotReady, so that the kubelet makes another. errPrecondition says so.
func (s *Service) checkPins(sb *sandbox.Sandbox) error {
	spec := s.namespaceSpec(sb)
	for kind, own := range map[string]bool{namespaces.Net: spec.Net, namespaces.IPC: spec.IPC, namespaces.UTS: spec.UTS,
		namespaces.User: spec.User != nil} {
		if own && !namespaces.Pinned(namespaces.Path(spec.Dir, kind)) {
			if now, err := s.Records.Sandboxes.Get(sb.ID); err == nil && now.Ready(s.bootID) { // nobody is stopping it
				s.Log.WithField("sandbox", sb.ID).Warnf("its %s namespace is no longer pinned; the sandbox is not ready", kind)
				s.markStopped(sb.ID)
			}
			return fmt.Errorf("%w: pod sandbox %s is not ready: its %s namespace is gone", errPrecondition, sb.ID, kind)
		}
	}
	return nil
}

// markStopped makes a sandbox NotReady for good. A disk that refuses the
// record does not matter: memory tells it, and a restart finds no ready time.
func (s *Service) markStopped(id string) {
	_, err := s.Records.Sandboxes.Update(id, func(sb *sandbox.Sandbox) {
		if sb.StoppedAt == 0 {
			sb.StoppedAt = time.Now().UnixNano()
		}
	})
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		s.Log.WithError(err).WithField("sandbox", id).Warn("record of a stopped sandbox")
	}
}
