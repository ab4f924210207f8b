package runtime

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/rootfs"
	"berth/network"
	"berth/oci"
	"berth/sandbox"
	"berth/sandbox/namespaces"
)

// Restore brings the records of an earlier daemon in line with the kernel:
// running containers are adopted, those that ended meanwhile get their exits,
// what was half made is removed, and what no record names is swept. It must
// return before the service is served; ctx ends the watch it starts.
func (s *Service) Restore(ctx context.Context) error {
	for _, c := range s.Records.Containers.List() {
		s.holdImages(c)
	}
	if err := s.Images.Sweep(); err != nil {
		s.Log.WithError(err).Warn("sweep images that were removed while a container held them")
	}
	s.reserveLabels()
	if err := s.adopt(ctx); err != nil {
		return err
	}
	s.thaw()
	s.dropHalfRestored(ctx)
	s.settleBoot()
	s.settleNamespaces()
	s.removeHalfMade(ctx)
	s.restorePorts()
	s.collectNetwork(ctx)
	if err := s.sweep(ctx); err != nil {
		return err
	}
	s.readFeatures(ctx)
	s.behind(s.readCheckpoints)
	s.behind(s.watchPulls)
	s.behind(s.preload)
	s.events.serve(time.Now())
	go s.watchExits(ctx)
	return nil
}

// adopt hands each handler its containers and takes the exits it knows.
func (s *Service) adopt(ctx context.Context) error {
	byHandler := map[string][]oci.Handle{}
	for _, sb := range s.Records.Sandboxes.List() {
		if sb.BootID != s.bootID {
			continue
		}
		if p := sb.Pause; p != nil {
			byHandler[sb.Runtime] = append(byHandler[sb.Runtime], oci.Handle{ID: sb.ID, Bundle: s.bundleDir(sb.ID), Process: oci.Process(*p)})
		}
	}
	for _, c := range s.Records.Containers.List() {
		if c.Process != nil && c.BootID == s.bootID {
			byHandler[c.Handler] = append(byHandler[c.Handler], oci.Handle{ID: c.ID, Bundle: s.bundleDir(c.ID), Process: oci.Process(*c.Process)})
		}
	}
	for name, rt := range s.allRuntimes() {
		states, err := rt.Restore(ctx, byHandler[name])
		if err != nil {
			return fmt.Errorf("restore containers of handler %q: %w", name, err)
		}
		for id, st := range states {
			if st.Started {
				s.settleStart(id)
			}
			if st.Exit != nil {
				s.Exited(*st.Exit)
			}
		}
	}
	return nil
}

// settleStart records a start whose daemon ended before it could. It followed
// the creation closely, nobody knows when exactly.
func (s *Service) settleStart(id string) {
	c, err := s.Records.Containers.Get(id)
	if err != nil || c.MadeAt == 0 || c.StartedAt != 0 || c.FinishedAt != 0 {
		return
	}
	if _, err := s.Records.Containers.Update(id, func(c *sandbox.Container) { c.StartedAt = c.MadeAt }); err != nil {
		s.Log.WithError(err).WithField("container", id).Warn("record of a started container")
	}
}

// settleBoot says of containers of an earlier boot why they ended.
func (s *Service) settleBoot() {
	for _, c := range s.Records.Containers.List() {
		if c.BootID == s.bootID || c.FinishedAt != 0 || c.MadeAt == 0 {
			continue
		}
		_, err := s.Records.Containers.Update(c.ID, func(c *sandbox.Container) {
			c.FinishedAt, c.ExitCode = time.Now().UnixNano(), 255
			c.Reason, c.Message = reasonUnknown, "the node was restarted while the container ran"
		})
		if err != nil {
			s.Log.WithError(err).WithField("container", c.ID).Warn("record of a container of an earlier boot")
		}
	}
}

// settleNamespaces makes pods NotReady whose pinned namespaces are gone: the
// state directory was emptied, or somebody unmounted them.
func (s *Service) settleNamespaces() {
	for _, sb := range s.Records.Sandboxes.List() {
		if !sb.Ready(s.bootID) {
			continue
		}
		spec, gone := s.namespaceSpec(sb), ""
		for kind, own := range map[string]bool{namespaces.Net: spec.Net, namespaces.IPC: spec.IPC, namespaces.UTS: spec.UTS,
			namespaces.User: spec.User != nil} {
			if own && !namespaces.Pinned(namespaces.Path(spec.Dir, kind)) {
				gone = kind
			}
		}
		if gone == "" {
			continue
		}
		s.Log.WithField("sandbox", sb.ID).Warnf("its %s namespace is no longer pinned; the sandbox is not ready", gone)
		s.markStopped(sb.ID)
	}
}

// removeHalfMade undoes creations that a crash interrupted. What cannot be
// undone now stays, not ready, for StopPodSandbox and RemovePodSandbox.
func (s *Service) removeHalfMade(ctx context.Context) {
	for _, c := range s.Records.Containers.List() {
		if c.MadeAt != 0 {
			continue
		}
		if err := s.removeContainer(ctx, c.ID); err != nil {
			s.Log.WithError(err).WithField("container", c.ID).Warn("remove a container that was never made")
		}
	}
	for _, sb := range s.Records.Sandboxes.List() {
		if sb.ReadyAt != 0 || sb.StoppedAt != 0 {
			continue
		}
		if err := s.removeSandbox(ctx, sb.ID); err != nil {
			s.markStopped(sb.ID)
			s.Log.WithError(err).WithField("sandbox", sb.ID).Warn("remove a sandbox that was never ready")
		}
	}
}

// collectNetwork lets plugins remove what is left of pods that no record names,
// where the operator wants it.
func (s *Service) collectNetwork(ctx context.Context) {
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
			s.Log.WithError(err).Warn("CNI GC")
		}
	}
}

// sweep removes state that no record names: an object whose record was
// removed, or never written, in the instant of a crash, or cannot be read. A
// container that nobody can name any more is killed: the kubelet makes another.
func (s *Service) sweep(ctx context.Context) error {
	if err := s.sweepDir("containers", s.bundleKnown, func(dir string) error {
		for _, rt := range s.allRuntimes() { // which one made it nobody knows
			if err := rt.Delete(ctx, filepath.Base(dir)); err != nil {
				return err
			}
		}
		if err := rootfs.Unmount(filepath.Join(dir, "rootfs")); err != nil {
			return err
		}
		if err := unmountVolumes(dir); err != nil {
			return err
		}
		return oci.RemoveBundle(dir)
	}); err != nil {
		return err
	}
	if err := s.sweepDir("namespaces", s.sandboxKnown, namespaces.Release); err != nil {
		return err
	}
	return s.sweepDir("sandboxes", s.sandboxKnown, func(dir string) error {
		if err := namespaces.UnmountShm(filepath.Join(dir, "shm")); err != nil {
			return err
		}
		return os.RemoveAll(dir)
	})
}

func (s *Service) sandboxKnown(id string) bool {
	_, err := s.Records.Sandboxes.Get(id)
	return err == nil
}

func (s *Service) bundleKnown(id string) bool {
	_, err := s.Records.Containers.Get(id)
	return err == nil || s.sandboxKnown(id)
}

func (s *Service) sweepDir(kind string, known func(string) bool, remove func(string) error) error {
	dir := filepath.Join(s.Config().State, kind)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("sweep %s: %w", kind, err)
	}
	for _, e := range entries {
		if known(e.Name()) {
			continue
		}
		if err := remove(filepath.Join(dir, e.Name())); err != nil {
			s.Log.WithError(err).WithField("path", filepath.Join(dir, e.Name())).Warn("sweep a leftover")
		}
	}
	return nil
}

var _ cri.RuntimeServiceServer = (*Service)(nil)
