package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"unicode"

	"github.com/moby/sys/mountinfo"

	"berth/oci"
	"berth/oci/monitor"
	"berth/sandbox"
)

// defaultCgroup holds the pods that name no cgroup_parent, each in a directory
// of its own below it.
const defaultCgroup = "/berth"

// checkCgroupParent refuses what the cgroupfs driver cannot mean.
func checkCgroupParent(parent string) error {
	const field = "config.linux.cgroup_parent"
	switch {
	case parent == "":
		return nil
	case strings.HasSuffix(parent, ".slice"):
		return fmt.Errorf("%w: %s %q is a systemd slice, but berth's cgroup driver is cgroupfs: set the kubelet's cgroupDriver to cgroupfs", errInvalid, field, parent)
	case strings.ContainsFunc(parent, unicode.IsControl):
		return fmt.Errorf("%w: %s %q has a control character", errInvalid, field, parent)
	case !strings.HasPrefix(parent, "/"):
		return fmt.Errorf("%w: %s %q is not absolute", errInvalid, field, parent)
	case filepath.Clean(parent) == "/":
		return fmt.Errorf("%w: %s %q is the root cgroup", errInvalid, field, parent)
	}
	for _, part := range strings.Split(parent, "/") {
		if part == ".." {
			return fmt.Errorf("%w: %s %q has \"..\"", errInvalid, field, parent)
		}
	}
	return nil
}

// removePodCgroup removes a pod's own cgroup, in which every container's has
// been removed before, and the default parent with the last pod. Idempotent.
func (s *Service) removePodCgroup(ctx context.Context, parent string) error {
	if err := monitor.RemoveCgroups(ctx, parent); err != nil {
		return fmt.Errorf("remove cgroup of the pod: %w", err)
	}
	if !s.creating.TryLock() {
		return nil // a create may be about to use the parent; it goes with a later pod
	}
	defer s.creating.Unlock()
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return fmt.Errorf("find cgroup hierarchies: %w", err)
	}
	for _, m := range mounts {
		err := os.Remove(filepath.Join(m.Mountpoint, defaultCgroup))
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.EBUSY) && !errors.Is(err, syscall.ENOTEMPTY) {
			return fmt.Errorf("remove cgroup %s: %w", defaultCgroup, err)
		}
	}
	return nil
}

// removeOwnCgroup removes the cgroup of a container or pause. The OCI runtime's
// delete has done so, unless a crash came between the making of the cgroup and
// of the runtime's own state. Idempotent.
func removeOwnCgroup(ctx context.Context, sb *sandbox.Sandbox, id string) error {
	if err := monitor.RemoveCgroups(ctx, sb.CgroupParent+"/"+id); err != nil {
		return fmt.Errorf("remove cgroup of %s: %w", id, err)
	}
	return nil
}

// createInRuntime has the OCI runtime make a container, and with it the
// cgroups on the way to its own, which nobody may remove meanwhile.
func (s *Service) createInRuntime(ctx context.Context, rt oci.Runtime, r oci.CreateRequest) (oci.Process, error) {
	s.creating.RLock()
	defer s.creating.RUnlock()
	return rt.Create(ctx, r)
}
