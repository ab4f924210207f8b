package runtime

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	rspec "github.com/opencontainers/runtime-spec/specs-go"

	"berth/image/rootfs"
	"berth/oci"
	"berth/oci/spec"
	"berth/sandbox"
	"berth/sandbox/namespaces"
)

// probeIDs is a user namespace to try things with.
var probeIDs = &spec.IDMap{UIDs: rspec.LinuxIDMapping{HostID: 65536, Size: 65536}, GIDs: rspec.LinuxIDMapping{HostID: 65536, Size: 65536}}

// podIDs is the user namespace of a sandbox whose request was checked before its
// record was written; nil for none.
func podIDs(sb *sandbox.Sandbox) *spec.IDMap {
	ids, err := spec.SandboxIDMap(sb.Config.Message)
	if err != nil {
		return nil
	}
	return ids
}

func namespaceIDs(ids *spec.IDMap) *namespaces.IDMaps {
	if ids == nil {
		return nil
	}
	return &namespaces.IDMaps{UIDs: procRanges([]rspec.LinuxIDMapping{ids.UIDs}), GIDs: procRanges([]rspec.LinuxIDMapping{ids.GIDs})}
}

func procRanges(list []rspec.LinuxIDMapping) []syscall.SysProcIDMap {
	var out []syscall.SysProcIDMap
	for _, r := range list {
		out = append(out, syscall.SysProcIDMap{ContainerID: int(r.ContainerID), HostID: int(r.HostID), Size: int(r.Size)})
	}
	return out
}

// rootfsIDs shift a container's root filesystem into its pod's user namespace.
func (s *Service) rootfsIDs(sb *sandbox.Sandbox) *rootfs.IDs {
	ids := podIDs(sb)
	if ids == nil {
		return nil
	}
	return &rootfs.IDs{
		UserNS: namespaces.Path(s.namespaceDir(sb.ID), namespaces.User),
		UID:    int(ids.HostUID(0)), GID: int(ids.HostGID(0)),
	}
}

// rootOf is who root of a container is on the node.
func (s *Service) rootOf(c *sandbox.Container) oci.Root {
	sb, err := s.Records.Sandboxes.Get(c.SandboxID)
	if err != nil {
		return oci.Root{} // the pod is being removed, and with it what asks
	}
	return oci.Root{UID: podIDs(sb).HostUID(0), GID: podIDs(sb).HostGID(0)}
}

// checkMappedMounts tries the id-mapped mounts of a container, so that a
// filesystem that has none is named; the OCI runtime would say "invalid argument".
func (s *Service) checkMappedMounts(sb *sandbox.Sandbox, in spec.ContainerInput) error {
	for i, m := range in.Config.GetMounts() {
		uids, gids, ofPod := spec.MountMappings(m, podIDs(sb))
		if len(uids) == 0 || m.GetImage() != nil {
			continue
		}
		field := fmt.Sprintf("mounts[%d]", i)
		var userNS *os.File
		var err error
		if ofPod {
			userNS, err = os.Open(in.Namespaces.User)
		} else {
			userNS, err = namespaces.OpenUser(namespaces.IDMaps{UIDs: procRanges(uids), GIDs: procRanges(gids)})
		}
		if err != nil {
			return fmt.Errorf("%s.uidMappings: %w", field, err)
		}
		err = rootfs.CheckIDMap(in.Resolved.MountSources[i], userNS)
		_ = userNS.Close()
		if errors.Is(err, rootfs.ErrNoIDMap) {
			return spec.Unsupported(field+".host_path", m.GetHostPath(), err.Error())
		}
		if err != nil {
			return fmt.Errorf("%s.host_path: %w", field, err)
		}
	}
	return nil
}
