package spec

import (
	"fmt"
	"path"
	"slices"
	"strings"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// RROUnsupported begins the error of a recursive read-only mount that this node
// cannot make; it is one of cri-api's error words.
const RROUnsupported = "RROUnsupported"

// bindOptions that a request may ask for, and their opposites in no way.
var bindOptions = []string{"noexec", "nodev", "nosuid"}

func checkMounts(mounts []*cri.Mount, ids *IDMap) error {
	for i, m := range mounts {
		field := fmt.Sprintf("mounts[%d]", i)
		err := checkMount(field, m)
		if err == nil && m.GetImage() != nil {
			err = checkImageMappings(field, m, ids)
		}
		if m.GetImage() != nil {
			err = ImageVolume(err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func checkMount(field string, m *cri.Mount) error {
	if err := checkContainerPath(field+".container_path", m.GetContainerPath()); err != nil {
		return err
	}
	if err := checkMountSource(field, m); err != nil {
		return err
	}
	if err := checkMountMappings(field, m); err != nil {
		return err
	}
	return checkMountOptions(field, m)
}

// inProc are the files in /proc that may be mounted over: what lxcfs shows in
// place of the kernel's own, and two that tools for checkpoints and FIPS need.
// runc refuses any other, as security profiles are written through /proc.
var inProc = []string{
	"cpuinfo", "diskstats", "meminfo", "stat", "swaps", "uptime", "loadavg", "slabinfo",
	"sys/kernel/ns_last_pid", "sys/crypto/fips_enabled",
}

func checkContainerPath(field, p string) error {
	if err := checkAbsolute(field, p); err != nil {
		return err
	}
	clean := path.Clean(p)
	if clean == "/" {
		return Invalid(field, p, "would hide the container's root filesystem")
	}
	if name, below := strings.CutPrefix(clean, "/proc/"); below && !slices.Contains(inProc, name) {
		return Invalid(field, p, "lies inside /proc")
	}
	return nil
}

func checkMountSource(field string, m *cri.Mount) error {
	if m.GetImage() != nil {
		return checkImageMount(field, m)
	}
	if m.GetImageSubPath() != "" {
		return Invalid(field+".image_sub_path", m.GetImageSubPath(), "needs image")
	}
	return checkAbsolute(field+".host_path", m.GetHostPath())
}

func checkMountOptions(field string, m *cri.Mount) error {
	switch m.GetPropagation() {
	case cri.MountPropagation_PROPAGATION_PRIVATE, cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER, cri.MountPropagation_PROPAGATION_BIDIRECTIONAL:
	default:
		return Invalid(field+".propagation", m.GetPropagation(), "no such mode")
	}
	if m.GetRecursiveReadOnly() {
		if !m.GetReadonly() {
			return Invalid(field+".recursive_read_only", true, "needs readonly")
		}
		if m.GetPropagation() != cri.MountPropagation_PROPAGATION_PRIVATE {
			return Invalid(field+".recursive_read_only", true, "needs propagation PROPAGATION_PRIVATE, not "+m.GetPropagation().String())
		}
	}
	for _, o := range m.GetMountOptions() {
		if !slices.Contains(bindOptions, o) {
			return Invalid(field+".mount_options", o, "must be one of "+strings.Join(bindOptions, ", "))
		}
	}
	return nil
}

// mounts lists default and requested mounts in the order of their depth, so
// that none is hidden by a mount on a folder above it; equal depth keeps the
// order of the request, so that of two mounts on one place the later wins.
func (b *builder) mounts() ([]rspec.Mount, error) {
	requested := b.config.GetMounts()
	if len(b.in.Resolved.MountSources) != len(requested) {
		return nil, fmt.Errorf("list %d mounts: %d sources were resolved", len(requested), len(b.in.Resolved.MountSources))
	}
	taken := b.taken()
	list := b.volumeMounts()
	for _, m := range b.baseMounts(append(b.systemMounts(), b.fileMounts()...)) {
		// Whoever brings a /dev of his own (the host's, mostly) brings what is in it.
		if taken[m.Destination] || taken["/dev"] && strings.HasPrefix(m.Destination, "/dev/") {
			continue
		}
		list = append(list, m)
	}
	list = append(list, b.deviceMounts()...)
	for i, m := range requested {
		if m.GetSelinuxRelabel() && b.in.Host.SELinuxEnabled && b.in.Labels.Mount == "" {
			b.warn("mounts[%d]: not relabelled: this host has SELinux, but the key runtime.selinux is off", i)
		}
		list = append(list, b.idMapped(m, bindMount(m, b.in.Resolved.MountSources[i])))
	}
	slices.SortStableFunc(list, func(x, y rspec.Mount) int {
		return depth(x.Destination) - depth(y.Destination)
	})
	return list, nil
}

// taken are the places of the requested mounts.
func (b *builder) taken() map[string]bool {
	taken := map[string]bool{}
	for _, m := range b.config.GetMounts() {
		taken[path.Clean(m.GetContainerPath())] = true
	}
	return taken
}

func depth(p string) int { return strings.Count(p, "/") }

// systemMounts are the kernel's filesystems. A privileged container may write
// to /sys and its cgroups.
func (b *builder) systemMounts() []rspec.Mount {
	access := "ro"
	if b.privileged() {
		access = "rw"
	}
	cgroupAccess := access
	if b.in.Options.CgroupWritable && b.in.Host.CgroupV2 {
		cgroupAccess = "rw"
	}
	return []rspec.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		b.sysfs(access),
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: b.devptsOptions()},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", cgroupAccess}},
	}
}

// sysfs shows the devices of a network namespace; the kernel lets root of a user
// namespace mount it only for one that is under it. So a pod with a user namespace
// on the node's network gets the node's /sys bound, and with it all that is mounted
// below; none of it may be written to where /sys may not.
func (b *builder) sysfs(access string) rspec.Mount {
	if b.modes.userNS == nil || b.modes.network != cri.NamespaceMode_NODE {
		return rspec.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", access}}
	}
	if access == "ro" {
		access = "rro"
	}
	return rspec.Mount{Destination: "/sys", Type: "bind", Source: "/sys", Options: []string{"rbind", "rprivate", "nosuid", "noexec", "nodev", access}}
}

// ttyGroup owns terminals, by an old convention of distributions.
const ttyGroup = 5

func (b *builder) devptsOptions() []string {
	options := []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"}
	if b.modes.userNS.checkGroupMapped("", ttyGroup) != nil {
		return options
	}
	return append(options, fmt.Sprintf("gid=%d", ttyGroup))
}

// fileMounts are the pod's own files. They are writable where the root is:
// programs that edit /etc/hosts expect it.
func (b *builder) fileMounts() []rspec.Mount {
	access := "rw"
	if b.security.GetReadonlyRootfs() {
		access = "ro"
	}
	var list []rspec.Mount
	add := func(source, destination string, options ...string) {
		if source != "" {
			list = append(list, rspec.Mount{
				Destination: destination, Type: "bind", Source: source,
				Options: append([]string{"rbind", "rprivate"}, options...),
			})
		}
	}
	add(b.in.Files.Hosts, "/etc/hosts", access)
	add(b.in.Files.Hostname, "/etc/hostname", access)
	add(b.in.Files.ResolvConf, "/etc/resolv.conf", access)
	shm := b.in.Files.Shm
	if b.modes.ipc == cri.NamespaceMode_NODE {
		shm = "/dev/shm"
	}
	// /dev/shm stays writable under a read-only root, as it is memory.
	add(shm, "/dev/shm", "nosuid", "nodev", "noexec", "rw")
	return list
}

func bindMount(m *cri.Mount, source string) rspec.Mount {
	options := []string{"rbind"}
	switch m.GetPropagation() {
	case cri.MountPropagation_PROPAGATION_BIDIRECTIONAL:
		options = append(options, "rshared")
	case cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER:
		options = append(options, "rslave")
	default:
		options = append(options, "rprivate")
	}
	switch {
	case m.GetRecursiveReadOnly():
		options = append(options, "rro")
	case m.GetReadonly():
		options = append(options, "ro")
	default:
		options = append(options, "rw")
	}
	for _, o := range bindOptions {
		if slices.Contains(m.GetMountOptions(), o) {
			options = append(options, o)
		}
	}
	return rspec.Mount{
		Destination: path.Clean(m.GetContainerPath()),
		Type:        "bind",
		Source:      source,
		Options:     options,
	}
}

// rootfsPropagation lets mount events through the container's root as far as
// its mounts need them; empty is the runtime's default, which lets none out.
func (b *builder) rootfsPropagation() string {
	propagation := ""
	for _, m := range b.config.GetMounts() {
		switch m.GetPropagation() {
		case cri.MountPropagation_PROPAGATION_BIDIRECTIONAL:
			return "rshared"
		case cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER:
			propagation = "rslave"
		}
	}
	return propagation
}
