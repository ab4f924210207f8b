package runtime

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"berth/image/rootfs"
	"berth/network"
	"berth/oci"
	"berth/runtime/operation"
	"berth/sandbox"
	"berth/sandbox/namespaces"
)

// leftovers are the objects of an earlier daemon that have to go, found before
// this one makes any.
type leftovers struct {
	halfMade   []*sandbox.Container // a crash interrupted their creation
	orphans    []*sandbox.Container // the record of their pod is lost
	neverReady []*sandbox.Sandbox
	rebooted   []*sandbox.Sandbox // the boot they ran in is over, their network is not given back
}

func (s *Service) findLeftovers() leftovers {
	var l leftovers
	for _, c := range s.Records.Containers.List() {
		if c.MadeAt == 0 {
			l.halfMade = append(l.halfMade, c)
		} else if !s.sandboxKnown(c.SandboxID) {
			l.orphans = append(l.orphans, c)
		}
	}
	for _, sb := range s.Records.Sandboxes.List() {
		if sb.ReadyAt == 0 && sb.StoppedAt == 0 {
			l.neverReady = append(l.neverReady, sb)
		} else if sb.BootID != s.bootID && sb.Network != nil {
			l.rebooted = append(l.rebooted, sb)
		}
	}
	return l
}

// behindRestore undoes, while requests are served, what an earlier daemon left:
// CNI plugins, the OCI runtime and unmounts may take their time. Nothing of it is
// seen in lists but containers that still run.
func (s *Service) behindRestore(ctx context.Context) {
	l := s.findLeftovers()
	s.behind(func() {
		defer close(s.beginning.tidied)
		r := operation.Request{Verb: "Tidy", Object: "all"}
		_ = s.operations.Track(ctx, r, func(ctx context.Context, op *operation.Operation) error {
			s.tidy(ctx, op, l)
			return nil
		})
	})
}

func (s *Service) tidy(ctx context.Context, op *operation.Operation, l leftovers) {
	op.Step("remove what was half made")
	s.removeHalfMade(ctx, l)
	op.Step("remove containers of lost pods")
	s.removeOrphans(ctx, l.orphans)
	op.Step("give back networks")
	s.returnNetworks(ctx, l.rebooted)
	op.Step("collect networks")
	s.collectNetwork(ctx)
	op.Step("sweep leftovers")
	s.sweep(ctx, l.orphans)
	op.Step("end plugins and commands")
	s.endLeft(ctx)
}

// removeHalfMade undoes creations that a crash interrupted. What cannot be
// undone now stays, not ready, for StopPodSandbox and RemovePodSandbox.
func (s *Service) removeHalfMade(ctx context.Context, l leftovers) {
	each(s, l.halfMade, func(c *sandbox.Container) {
		if err := s.removeContainer(ctx, c.ID); err != nil {
			s.troubled(logrus.Fields{"container": c.ID}, err, "remove a container that was never made")
		}
	})
	each(s, l.neverReady, func(sb *sandbox.Sandbox) {
		open, err := s.locks.Lock(ctx, sb.ID)
		if err != nil {
			return // the daemon ends
		}
		defer open()
		if err := s.removeSandbox(ctx, sb.ID); err != nil {
			s.markStopped(sb.ID)
			s.troubled(logrus.Fields{"sandbox": sb.ID}, err, "remove a sandbox that was never ready")
		}
	})
}

// removeOrphans ends containers of pods whose record is lost: nobody can name the
// pod any more, and the kubelet makes another.
func (s *Service) removeOrphans(ctx context.Context, orphans []*sandbox.Container) {
	each(s, orphans, func(c *sandbox.Container) {
		fields := logrus.Fields{"container": c.ID, "sandbox": c.SandboxID}
		s.Log.WithFields(fields).Warn("the record of the container's pod is lost; the container is killed and removed")
		if err := s.removeContainer(ctx, c.ID); err != nil {
			s.troubled(fields, err, "remove a container whose pod is lost")
		}
	})
}

// returnNetworks runs CNI DEL for pods that a reboot ended, and for those that
// only CNI's cache knows. What fails stays for StopPodSandbox, and the next start.
func (s *Service) returnNetworks(ctx context.Context, rebooted []*sandbox.Sandbox) {
	ctx, cancel := context.WithTimeout(ctx, operationLimit)
	defer cancel()
	each(s, rebooted, func(sb *sandbox.Sandbox) {
		open, err := s.locks.Lock(ctx, sb.ID)
		if err != nil {
			return
		}
		defer open()
		if sb, err = s.Records.Sandboxes.Get(sb.ID); err != nil {
			return // removed meanwhile
		}
		if err := s.teardownNetwork(ctx, sb); err != nil {
			s.troubled(logrus.Fields{"sandbox": sb.ID}, err, "give back the network of a pod of an earlier boot")
		}
	})
	cached, err := s.Network.Cached()
	if err != nil {
		s.troubled(nil, err, "find networks of pods whose record is lost")
	}
	each(s, cached, func(a network.Attachment) {
		if s.sandboxKnown(a.Pod.ID) {
			return
		}
		s.Log.WithField("sandbox", a.Pod.ID).Warn("the record of a pod is lost; its network is given back")
		if err := s.Network.Teardown(ctx, a.Pod, a.Result); err != nil {
			s.troubled(logrus.Fields{"sandbox": a.Pod.ID}, err, "give back the network of a pod whose record is lost")
		}
	})
}

// endLeft ends what CNI plugins and commands of an earlier daemon have left for pods
// and containers. For a pod that is there its own DEL does.
func (s *Service) endLeft(ctx context.Context) {
	each(s, s.Leash.Left(), func(id string) {
		if s.sandboxKnown(id) {
			return
		}
		if err := s.Leash.Settle(ctx, id, time.Duration(s.Config().CNI.Timeout)); err != nil {
			s.troubled(logrus.Fields{"of": id}, err, "end what an earlier daemon has run")
		}
	})
}

// collectNetwork lets plugins remove what is left of pods that no record names,
// where the operator wants it. Pods wait for it, see awaitCollected.
func (s *Service) collectNetwork(ctx context.Context) {
	defer close(s.beginning.collected)
	if !s.Config().CNI.GCAtStart {
		return
	}
	var keep []string
	for _, sb := range s.Records.Sandboxes.List() {
		if sb.Network != nil {
			keep = append(keep, sb.ID)
		}
	}
	done := map[*network.Manager]bool{}
	for _, m := range append([]*network.Manager{s.Network}, slices.Collect(maps.Values(s.Networks))...) {
		if done[m] {
			continue
		}
		done[m] = true
		if err := m.GC(ctx, keep); err != nil {
			s.troubled(nil, err, "CNI GC")
		}
	}
}

// awaitCollected keeps CNI's ADD from running beside its GC, which would remove
// what ADD makes.
func (s *Service) awaitCollected(ctx context.Context) error {
	if !s.Config().CNI.GCAtStart {
		return nil
	}
	select {
	case <-s.beginning.collected:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for CNI GC of the daemon's start: %w", ctx.Err())
	}
}

// sweep removes what no record names: an object whose record was removed, or
// never written, in the instant of a crash, or cannot be read. A container that
// nobody can name any more is killed: the kubelet makes another.
func (s *Service) sweep(ctx context.Context, orphans []*sandbox.Container) {
	each(s, s.unknownIDs(orphans), func(id string) {
		if err := s.sweepObject(ctx, id); err != nil {
			s.troubled(logrus.Fields{"path": s.bundleDir(id)}, err, "sweep a leftover")
		}
	})
}

// unknownIDs are the ids without a record that something of this daemon's names:
// its directories, the OCI runtimes, the monitor, records that were moved away, and
// those of containers whose pod's record is lost.
func (s *Service) unknownIDs(orphans []*sandbox.Container) []string {
	ids := map[string]bool{}
	for _, kind := range []string{"containers", "namespaces", "sandboxes"} {
		entries, err := os.ReadDir(filepath.Join(s.Config().State, kind))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			s.troubled(nil, err, "find leftovers")
		}
		for _, e := range entries {
			ids[e.Name()] = true
			if _, err := s.Records.Containers.Get(e.Name()); err != nil && kind == "containers" {
				if pod := podOfBundle(s.bundleDir(e.Name())); pod != "" {
					ids[pod] = true
				}
			}
		}
	}
	for _, rt := range s.allRuntimes() {
		of, err := rt.IDs()
		if err != nil {
			s.troubled(nil, err, "find leftovers")
		}
		for _, id := range of {
			ids[id] = true
		}
	}
	for _, id := range s.lostIDs(orphans) {
		ids[id] = true
	}
	for id := range ids {
		if _, err := s.Records.Containers.Get(id); err == nil || s.sandboxKnown(id) {
			delete(ids, id)
		}
	}
	return slices.Sorted(maps.Keys(ids))
}

// lostIDs are ids whose record cannot be read, or is only named by another.
func (s *Service) lostIDs(orphans []*sandbox.Container) []string {
	var ids []string
	for _, p := range s.Problems {
		ids = append(ids, filepath.Base(p.Path))
	}
	for _, path := range s.beginning.quarantined {
		ids = append(ids, sandbox.QuarantinedID(path))
	}
	for _, c := range orphans {
		ids = append(ids, c.SandboxID)
	}
	return slices.DeleteFunc(ids, func(id string) bool { return !sandbox.IsID(id) })
}

func (s *Service) sandboxKnown(id string) bool {
	_, err := s.Records.Sandboxes.Get(id)
	return err == nil
}

// sweepObject removes every trace of an id, be it a container's or a pod's.
// Idempotent.
func (s *Service) sweepObject(ctx context.Context, id string) error {
	for _, rt := range s.allRuntimes() { // which one made it nobody knows
		if err := rt.Delete(ctx, id); err != nil {
			return err
		}
	}
	bundle, shm := s.bundleDir(id), s.shmPath(id)
	if err := unlink(bundle, s.namespaceDir(id), filepath.Dir(shm)); err != nil {
		return err
	}
	if err := rootfs.Unmount(s.rootfsDir(id)); err != nil {
		return err
	}
	if err := unmountVolumes(bundle); err != nil {
		return err
	}
	if err := unmountBelow(bundle, filepath.Dir(shm)); err != nil {
		return err
	}
	if err := oci.RemoveBundle(bundle); err != nil {
		return err
	}
	if err := namespaces.Release(s.namespaceDir(id)); err != nil {
		return err
	}
	if err := namespaces.UnmountShm(shm); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Dir(shm)); err != nil {
		return err
	}
	return s.removePodCgroup(ctx, defaultCgroup+"/"+id)
}

// unlink removes what stands in the place of directories that are about to be deleted
// and is none: a link would lead the deletion elsewhere.
func unlink(dirs ...string) error {
	for _, dir := range dirs {
		if info, err := os.Lstat(dir); err != nil || info.IsDir() {
			continue
		}
		if err := os.Remove(dir); err != nil {
			return fmt.Errorf("remove what is in the place of a directory: %w", err)
		}
	}
	return nil
}

// unmountBelow unmounts all that is mounted below directories that are about to be
// deleted, the last one first: deleting must never reach into a mount.
func unmountBelow(dirs ...string) error {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !slices.ContainsFunc(dirs, func(dir string) bool { return strings.HasPrefix(m.Mountpoint, dir+"/") }), false
	})
	if err != nil {
		return fmt.Errorf("find mounts of a leftover: %w", err)
	}
	for _, m := range slices.Backward(mounts) {
		if err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("unmount %s of a leftover: %w", m.Mountpoint, err)
		}
	}
	return nil
}
