package spec

import cri "k8s.io/cri-api/pkg/apis/runtime/v1"

// ToCRIUser is a container's user as ContainerStatus shows it.
func ToCRIUser(u User) *cri.ContainerUser {
	linux := &cri.LinuxContainerUser{Uid: int64(u.UID), Gid: int64(u.GID)}
	for _, g := range rspecUser(u).AdditionalGids {
		linux.SupplementalGroups = append(linux.SupplementalGroups, int64(g))
	}
	return &cri.ContainerUser{Linux: linux}
}
