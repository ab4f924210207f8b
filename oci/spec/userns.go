package spec

import (
	"fmt"
	"math"
	"slices"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const userNSField = modeFields + ".userns_options"

const (
	// idEnd is beyond the last id: the kernel's type has 32 bits, and its highest
	// value means "no id".
	idEnd = math.MaxUint32
	// maxRanges is how many ranges the kernel takes for one mapping.
	maxRanges = 340
)

// IDMap is a pod's user namespace: a range of users and one of groups, both
// beginning at the pod's 0. A nil *IDMap stands for the node's own ids.
type IDMap struct{ UIDs, GIDs rspec.LinuxIDMapping }

// HostUID is the node's user behind one of the pod's.
func (m *IDMap) HostUID(id uint32) uint32 {
	if m == nil {
		return id
	}
	return m.UIDs.HostID + id
}

// HostGID is the node's group behind one of the pod's.
func (m *IDMap) HostGID(id uint32) uint32 {
	if m == nil {
		return id
	}
	return m.GIDs.HostID + id
}

// SandboxIDMap is the user namespace that a sandbox asks for, nil for none.
// ErrInvalid.
func SandboxIDMap(sandbox *cri.PodSandboxConfig) (*IDMap, error) {
	return userNamespace(sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions())
}

// userNamespace is what the options ask for. A missing struct means none (the
// kubelets that knew no user namespaces sent none), so it is looked at before
// its mode, whose zero value is POD.
func userNamespace(o *cri.NamespaceOption) (*IDMap, error) {
	u := o.GetUsernsOptions()
	if u == nil {
		return nil, nil
	}
	switch u.GetMode() {
	case cri.NamespaceMode_NODE:
		if len(u.GetUids()) > 0 || len(u.GetGids()) > 0 {
			return nil, Invalid(userNSField+".mode", u.GetMode(), "NODE goes with no id mappings")
		}
		return nil, nil
	case cri.NamespaceMode_POD:
	default:
		return nil, Invalid(userNSField+".mode", u.GetMode(), "must be POD or NODE")
	}
	uids, err := podRange("uids", u.GetUids())
	if err != nil {
		return nil, err
	}
	gids, err := podRange("gids", u.GetGids())
	if err != nil {
		return nil, err
	}
	// The kernel lets root of a user namespace mount neither /proc of a PID
	// namespace nor /dev/mqueue of an IPC namespace that is not under it.
	if o.GetPid() == cri.NamespaceMode_NODE {
		return nil, Invalid(userNSField+".mode", u.GetMode(), "does not go with pid NODE")
	}
	if o.GetIpc() == cri.NamespaceMode_NODE {
		return nil, Invalid(userNSField+".mode", u.GetMode(), "does not go with ipc NODE")
	}
	return &IDMap{UIDs: uids, GIDs: gids}, nil
}

// podRange is the one mapping that Kubernetes gives to a pod (KEP-127).
func podRange(name string, list []*cri.IDMapping) (rspec.LinuxIDMapping, error) {
	field := userNSField + "." + name
	if len(list) != 1 {
		return rspec.LinuxIDMapping{}, Invalid(field, fmt.Sprintf("%d mappings", len(list)), "must be exactly one mapping")
	}
	ranges, err := idRanges(field, list)
	if err != nil {
		return rspec.LinuxIDMapping{}, err
	}
	if ranges[0].ContainerID != 0 {
		return ranges[0], Invalid(field+"[0].container_id", ranges[0].ContainerID, "must be 0: a container without root has nobody to set it up")
	}
	return ranges[0], nil
}

// idRanges checks what the kernel would refuse without a reason.
func idRanges(field string, list []*cri.IDMapping) ([]rspec.LinuxIDMapping, error) {
	if len(list) > maxRanges {
		return nil, Invalid(field, fmt.Sprintf("%d mappings", len(list)), fmt.Sprintf("the kernel takes %d at most", maxRanges))
	}
	var ranges []rspec.LinuxIDMapping
	for i, m := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		if m.GetLength() == 0 {
			return nil, Invalid(at+".length", 0, "must be at least 1")
		}
		for _, f := range []struct {
			name  string
			first uint32
		}{{"container_id", m.GetContainerId()}, {"host_id", m.GetHostId()}} {
			if uint64(f.first)+uint64(m.GetLength()) > idEnd {
				return nil, Invalid(at+".length", m.GetLength(), fmt.Sprintf("with %s %d it reaches beyond the last id, %d", f.name, f.first, uint32(idEnd-1)))
			}
		}
		r := rspec.LinuxIDMapping{ContainerID: m.GetContainerId(), HostID: m.GetHostId(), Size: m.GetLength()}
		for j, other := range ranges {
			if overlap(r.ContainerID, other.ContainerID, r.Size, other.Size) || overlap(r.HostID, other.HostID, r.Size, other.Size) {
				return nil, Invalid(at, fmt.Sprintf("%d:%d:%d", r.ContainerID, r.HostID, r.Size), fmt.Sprintf("overlaps with mapping %d", j))
			}
		}
		ranges = append(ranges, r)
	}
	return ranges, nil
}

func overlap(a, b, lengthA, lengthB uint32) bool {
	return uint64(a) < uint64(b)+uint64(lengthB) && uint64(b) < uint64(a)+uint64(lengthA)
}

// sameUserNamespace wants a container that sends namespace options to name the
// user namespace of its pod: the struct's absence means "the node's".
func sameUserNamespace(own *cri.NamespaceOption, pod *IDMap) error {
	m, err := userNamespace(own)
	if err != nil {
		return err
	}
	switch {
	case m == nil && pod == nil, m != nil && pod != nil && *m == *pod:
		return nil
	case own.GetUsernsOptions() == nil:
		return Invalid(userNSField, "", "missing, but the sandbox has a user namespace; a container must ask for the same")
	case m == nil || pod == nil:
		return Invalid(userNSField+".mode", own.GetUsernsOptions().GetMode(), "differs from the sandbox's")
	}
	return Invalid(userNSField, fmt.Sprintf("uids %d:%d, gids %d:%d", m.UIDs.HostID, m.UIDs.Size, m.GIDs.HostID, m.GIDs.Size), "differs from the sandbox's")
}

// checkUserMapped and checkGroupMapped refuse an id that no process in the pod's
// user namespace can have.
func (m *IDMap) checkUserMapped(field string, id int64) error {
	if m == nil || id < int64(m.UIDs.Size) {
		return nil
	}
	return Invalid(field, id, fmt.Sprintf("is not mapped in the pod's user namespace, which has users 0 to %d", m.UIDs.Size-1))
}

func (m *IDMap) checkGroupMapped(field string, id int64) error {
	if m == nil || id < int64(m.GIDs.Size) {
		return nil
	}
	return Invalid(field, id, fmt.Sprintf("is not mapped in the pod's user namespace, which has groups 0 to %d", m.GIDs.Size-1))
}

// checkPropagation refuses what the kernel would do by half: it makes every mount
// a slave of the node's that a less privileged mount namespace gets.
func (m *IDMap) checkPropagation(mounts []*cri.Mount) error {
	for i, mount := range mounts {
		if m != nil && mount.GetPropagation() == cri.MountPropagation_PROPAGATION_BIDIRECTIONAL {
			return Invalid(fmt.Sprintf("mounts[%d].propagation", i), mount.GetPropagation(), "what is mounted in a pod with a user namespace cannot reach the node")
		}
	}
	return nil
}

// userFields is what the security contexts of sandbox and container have in common.
type userFields interface {
	GetRunAsUser() *cri.Int64Value
	GetRunAsGroup() *cri.Int64Value
	GetSupplementalGroups() []int64
}

// checkMapped checks the ids that a request names.
func (m *IDMap) checkMapped(sc userFields) error {
	if err := m.checkUserMapped(security+".run_as_user", sc.GetRunAsUser().GetValue()); err != nil {
		return err
	}
	if err := m.checkGroupMapped(security+".run_as_group", sc.GetRunAsGroup().GetValue()); err != nil {
		return err
	}
	for _, g := range sc.GetSupplementalGroups() {
		if err := m.checkGroupMapped(security+".supplemental_groups", g); err != nil {
			return err
		}
	}
	return nil
}

// checkResolvedUser checks the ids that were found in the image.
func (b *builder) checkResolvedUser() error {
	u, field := b.in.Resolved.User, "image User"
	if name := b.security.GetRunAsUsername(); name != "" {
		field = security + ".run_as_username"
	}
	if err := b.modes.userNS.checkUserMapped(field, int64(u.UID)); err != nil {
		return err
	}
	for _, g := range append([]uint32{u.GID}, u.AdditionalGIDs...) {
		if err := b.modes.userNS.checkGroupMapped("group of "+field, int64(g)); err != nil {
			return err
		}
	}
	return nil
}

// checkMountMappings checks a mount's own mappings; both lists or none.
func checkMountMappings(field string, m *cri.Mount) error {
	uids, gids := m.GetUidMappings(), m.GetGidMappings()
	switch {
	case len(uids) > 0 && len(gids) == 0:
		return Invalid(field+".gidMappings", "", "missing, but uidMappings are given")
	case len(gids) > 0 && len(uids) == 0:
		return Invalid(field+".uidMappings", "", "missing, but gidMappings are given")
	}
	if _, err := idRanges(field+".uidMappings", uids); err != nil {
		return err
	}
	_, err := idRanges(field+".gidMappings", gids)
	return err
}

// MountMappings are a mount's mappings, checked before; nil for none. pod tells
// that they are those of the pod's user namespace.
func MountMappings(m *cri.Mount, ids *IDMap) (uids, gids []rspec.LinuxIDMapping, pod bool) {
	uids, err := idRanges("uidMappings", m.GetUidMappings())
	if err != nil {
		return nil, nil, false
	}
	if gids, err = idRanges("gidMappings", m.GetGidMappings()); err != nil {
		return nil, nil, false
	}
	pod = ids != nil && slices.Equal(uids, []rspec.LinuxIDMapping{ids.UIDs}) && slices.Equal(gids, []rspec.LinuxIDMapping{ids.GIDs})
	return uids, gids, pod
}

// idMapped gives a bind mount the mappings that were asked for, for the mount
// itself and not for mounts below its source, whose filesystems may be unable.
// The pod's own are not written out: "idmap" alone means the user namespace that
// the container joins, which saves the OCI runtime from making one. An image has
// been mounted with the pod's mappings before.
func (b *builder) idMapped(m *cri.Mount, out rspec.Mount) rspec.Mount {
	uids, gids, pod := MountMappings(m, b.modes.userNS)
	if len(uids) == 0 || m.GetImage() != nil {
		return out
	}
	out.Options = append(out.Options, "idmap")
	if !pod {
		out.UIDMappings, out.GIDMappings = uids, gids
	}
	return out
}
