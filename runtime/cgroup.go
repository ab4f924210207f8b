package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"
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

// cgroupHierarchies are the mount points of all cgroup hierarchies.
func cgroupHierarchies() ([]string, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("find cgroup hierarchies: %w", err)
	}
	var out []string
	for _, m := range mounts {
		out = append(out, m.Mountpoint)
	}
	return out, nil
}

// removeCgroup removes a pod's own cgroup, in which every container's has been
// removed before, and the default parent with the last pod. Idempotent.
func removeCgroup(parent string) error {
	roots, err := cgroupHierarchies()
	if err != nil {
		return err
	}
	for _, root := range roots {
		if err := removeEmpty(filepath.Join(root, parent)); err != nil {
			return fmt.Errorf("remove cgroup of the pod: %w", err)
		}
		err := os.Remove(filepath.Join(root, defaultCgroup))
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.EBUSY) && !errors.Is(err, syscall.ENOTEMPTY) {
			return fmt.Errorf("remove cgroup %s: %w", defaultCgroup, err)
		}
	}
	return nil
}

// removeEmpty removes a cgroup directory and those below it.
func removeEmpty(dir string) error {
	err := syscall.Rmdir(dir)
	if err == nil || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	entries, rerr := os.ReadDir(dir)
	if rerr != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeEmpty(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := syscall.Rmdir(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove cgroup %s: %w", dir, err)
	}
	return nil
}
