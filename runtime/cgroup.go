package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"unicode"

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
	if s.Config().Runtime.CgroupDriver == config.Systemd {
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
	if parent == "" {
		return nil
	}
	if err := checkCgroup(parent); err != nil {
		return fmt.Errorf("%w: %s %w", errInvalid, cgroupParentField, err)
	}
	return nil
}

// checkCgroup says what is wrong with the path of a cgroup.
func checkCgroup(path string) error {
	switch {
	case strings.HasSuffix(filepath.Clean(path), ".slice"):
		return fmt.Errorf("%q is a systemd slice, but berth's cgroup driver is cgroupfs: set the kubelet's cgroupDriver to cgroupfs", path)
	case strings.ContainsFunc(path, unicode.IsControl):
		return fmt.Errorf("%q has a control character", path)
	case !strings.HasPrefix(path, "/"):
		return fmt.Errorf("%q is not absolute", path)
	case filepath.Clean(path) == "/":
		return fmt.Errorf("%q is the root cgroup", path)
	case slices.Contains(strings.Split(path, "/"), ".."):
		return fmt.Errorf("%q has \"..\"", path)
	}
	return nil
}

// containerCgroup is a container's own cgroup: below its pod's, unless an NRI
// plugin moved it.
func containerCgroup(sb *sandbox.Sandbox, c *sandbox.Container) string {
	if c.Cgroup != "" {
		return c.Cgroup
	}
	return cgroupDir(sb, c.ID)
}

// movedCgroup is the directory of the cgroup that an NRI plugin names in a
// specification, in the form that the pod's cgroup driver has.
func movedCgroup(sb *sandbox.Sandbox, path string) (string, error) {
	if !bySystemd(sb) {
		return path, checkCgroup(path)
	}
	parts := strings.Split(path, ":")
	if len(parts) != 3 || strings.Contains(parts[1]+parts[2], "/") || parts[2] == "" {
		return "", fmt.Errorf("%q is not slice:prefix:name, as the cgroup driver systemd has it", path)
	}
	dir, err := oci.SliceDir(parts[0])
	if err != nil {
		return "", err
	}
	return dir + "/" + parts[1] + "-" + parts[2] + ".scope", nil
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
	hierarchies, err := monitor.CgroupRoots()
	if err != nil {
		return err
	}
	for _, root := range hierarchies {
		err := os.Remove(filepath.Join(root, defaultCgroup))
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.EBUSY) && !errors.Is(err, syscall.ENOTEMPTY) {
			return fmt.Errorf("remove cgroup %s: %w", defaultCgroup, err)
		}
	}
	return nil
}

// removeOwnCgroup removes the cgroup of a container or pause. The OCI runtime's
// delete has done so, unless a crash came between the making of the cgroup and
// of the runtime's own state. Idempotent.
func removeOwnCgroup(ctx context.Context, id, cgroup string) error {
	if err := monitor.RemoveCgroups(ctx, cgroup); err != nil {
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
