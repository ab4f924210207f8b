package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/oci"
	"berth/oci/monitor"
	"berth/sandbox"
)

// The OCI runtime makes what is missing of a pod's cgroup_parent, in each hierarchy
// by itself. Those directories go with the last pod that needs them, those that were
// there before stay: they are the kubelet's, or systemd's.

// claimCgroups tells, for each hierarchy by its mount point, the topmost directory
// on the way to dir that is missing, or that another pod has claimed so.
func (s *Service) claimCgroups(dir string) (map[string]string, error) {
	hierarchies, err := monitor.CgroupRoots()
	if err != nil {
		return nil, err
	}
	claims := map[string]string{}
	for _, sb := range s.Records.Sandboxes.List() { // before the look: what goes with a pod goes before its record
		if sb.BootID != s.bootID {
			continue
		}
		for root, top := range sb.CgroupsMade {
			if mine, ok := claims[root]; inCgroup(dir, top) && (!ok || inCgroup(mine, top)) {
				claims[root] = top
			}
		}
	}
	for _, root := range hierarchies {
		top := missingBelow(root, dir)
		if mine, ok := claims[root]; top != "" && (!ok || inCgroup(mine, top)) {
			claims[root] = top
		}
	}
	return claims, nil
}

// missingBelow is the topmost directory on the way to dir that is not below root;
// empty when all are.
func missingBelow(root, dir string) string {
	path := ""
	for part := range strings.SplitSeq(strings.TrimPrefix(dir, "/"), "/") {
		path += "/" + part
		if _, err := os.Stat(root + path); errors.Is(err, os.ErrNotExist) {
			return path
		}
	}
	return ""
}

// inCgroup tells whether a cgroup is another one or below it.
func inCgroup(dir, other string) bool { return dir == other || strings.HasPrefix(dir, other+"/") }

// removeMadeCgroups removes what a pod has claimed and no other pod needs, as far as
// it is empty. What is not is in use by others now. Idempotent.
func (s *Service) removeMadeCgroups(sb *sandbox.Sandbox) error {
	if sb.BootID != s.bootID {
		return nil // those went with their boot
	}
	others := s.Records.Sandboxes.Select(func(o *sandbox.Sandbox) bool { return o.ID != sb.ID && o.BootID == s.bootID })
	for root, top := range sb.CgroupsMade {
		for dir := sb.CgroupParent; inCgroup(dir, top); dir = filepath.Dir(dir) {
			if slices.ContainsFunc(others, func(o *sandbox.Sandbox) bool { return inCgroup(o.CgroupParent, dir) }) {
				break // it has the claim too
			}
			err := os.Remove(root + dir)
			if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY) {
				break
			}
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("remove cgroup %s that was made for the pod: %w", root+dir, err)
			}
		}
	}
	return nil
}

// forget removes what a pod has claimed and then its record, of one pod at a time: of
// two that go at once each would leave to the other what they share. Idempotent.
func (s *Service) forget(sb *sandbox.Sandbox) error {
	s.forgetting.Lock()
	defer s.forgetting.Unlock()
	if err := s.removeMadeCgroups(sb); err != nil {
		return err
	}
	return s.Records.Sandboxes.Remove(sb.ID)
}

// podOfBundle is the id of the pod whose own cgroup a container's bundle names;
// empty when that is not berth's to remove, or not known.
func podOfBundle(bundle string) string {
	spec, err := oci.ReadSpec(bundle)
	if err != nil || spec.Linux == nil {
		return ""
	}
	rest, ok := strings.CutPrefix(spec.Linux.CgroupsPath, defaultCgroup+"/")
	if id, _, below := strings.Cut(rest, "/"); ok && below && sandbox.IsID(id) {
		return id
	}
	return ""
}
