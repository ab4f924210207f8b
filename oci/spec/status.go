package spec

import (
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// ToCRIUser is a container's user as ContainerStatus shows it.
func ToCRIUser(u User) *cri.ContainerUser {
	linux := &cri.LinuxContainerUser{Uid: int64(u.UID), Gid: int64(u.GID)}
	for _, g := range rspecUser(u).AdditionalGids {
		linux.SupplementalGroups = append(linux.SupplementalGroups, int64(g))
	}
	return &cri.ContainerUser{Linux: linux}
}

// StatusMounts are a container's mounts as ContainerStatus shows them: as they
// were asked for, in that order. The result shares no memory with the config.
func StatusMounts(config *cri.ContainerConfig) []*cri.Mount {
	var list []*cri.Mount
	for _, m := range config.GetMounts() {
		list = append(list, proto.Clone(m).(*cri.Mount))
	}
	return list
}
