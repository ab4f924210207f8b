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
	"berth/runtime/config"
	"berth/sandbox"
)

// defaultCgroup holds the pods that name no cgroup_parent, each in a directory
// of its own below it.
const defaultCgroup = "/berth"

// defaultSlice holds the containers of pods that name no cgroup_parent, where
// systemd makes the cgroups: as those of any service.
const defaultSlice = "system.slice"

// cgroupPrefix begins the names of the scopes that systemd makes.
const cgroupPrefix = "berth"

const cgroupParentField = "config.linux.cgroup_parent"

// cgroupParent is the directory of a pod's cgroup below each hierarchy, and
// whether berth makes and removes it. It refuses what the cgroup driver cannot
// mean: a pod of the other driver would be outside of the kubelet's accounting.
func (s *Service) cgroupParent(sandboxID, parent string) (dir string, made bool, err error) {
	if s.Config.Runtime.CgroupDriver == config.Systemd {
		dir, err := sliceParent(parent)
		return dir, false, err
	}
	if err := checkCgroupParent(parent); err != nil {
		return "", false, err
	}
	if parent == "" {
		return defaultCgroup + "/" + sandboxID, true, nil
	}
	return filepath.Clean(parent), false, nil
}

// sliceParent is the directory of a slice. The kubelet names it alone; a path
// is taken where it is the right one.
func sliceParent(parent string) (string, error) {
	if parent == "" {
		parent = defaultSlice
	}
	if !strings.HasSuffix(parent, ".slice") {
		return "", fmt.Errorf("%w: %s %q is no slice, but berth's cgroup driver is systemd: set the kubelet's cgroupDriver to systemd", errInvalid, cgroupParentField, parent)
	}
	dir, err := oci.SliceDir(filepath.Base(parent))
	if err != nil {
		return "", fmt.Errorf("%w: %s: %w", errInvalid, cgroupParentField, err)
	}
	if strings.Contains(parent, "/") && filepath.Clean("/"+parent) != dir {
		return "", fmt.Errorf("%w: %s %q: systemd has that slice at %s", errInvalid, cgroupParentField, parent, dir)
	}
	return dir, nil
}

// bySystemd tells whether systemd makes the cgroups of a pod's containers. It
// is the pod's own property: the driver may have been another one when it was
// made.
func bySystemd(sb *sandbox.Sandbox) bool { return strings.HasSuffix(sb.CgroupParent, ".slice") }

// cgroupsPath is how a specification names the cgroup of a container or pause.
func cgroupsPath(sb *sandbox.Sandbox, id string) string {
	if bySystemd(sb) {
		return filepath.Base(sb.CgroupParent) + ":" + cgroupPrefix + ":" + id
	}
	return sb.CgroupParent + "/" + id
}

// cgroupDir is the directory, below each hierarchy, of a container's cgroup.
func cgroupDir(sb *sandbox.Sandbox, id string) string {
	if bySystemd(sb) {
		return sb.CgroupParent + "/" + cgroupPrefix + "-" + id + ".scope"
	}
	return sb.CgroupParent + "/" + id
}

// checkCgroupParent refuses what the cgroupfs driver cannot mean.
func checkCgroupParent(parent string) error {
	const field = cgroupParentField
	switch {
	case parent == "":
		return nil
	case strings.HasSuffix(filepath.Clean(parent), ".slice"):
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
	if err := monitor.RemoveCgroups(ctx, cgroupDir(sb, id)); err != nil {
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
