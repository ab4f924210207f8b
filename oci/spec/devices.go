package spec

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func checkDevices(devices []*cri.Device) error {
	seen := map[string]*cri.Device{}
	for i, d := range devices {
		field := fmt.Sprintf("devices[%d]", i)
		if err := checkAbsolute(field+".container_path", d.GetContainerPath()); err != nil {
			return err
		}
		if err := checkAbsolute(field+".host_path", d.GetHostPath()); err != nil {
			return err
		}
		if err := checkPermissions(field+".permissions", d.GetPermissions()); err != nil {
			return err
		}
		at := path.Clean(d.GetContainerPath())
		if other := seen[at]; other != nil && other.GetHostPath() != d.GetHostPath() {
			return Invalid(field+".container_path", at, "another device ("+other.GetHostPath()+") has it already")
		}
		seen[at] = d
	}
	return nil
}

func checkPermissions(field, p string) error {
	if p == "" || strings.Trim(p, "rwm") != "" || len(p) > 3 {
		return Invalid(field, p, `must be one or more of "r", "w" and "m"`)
	}
	for _, c := range []string{"r", "w", "m"} {
		if strings.Count(p, c) > 1 {
			return Invalid(field, p, c+" is repeated")
		}
	}
	return nil
}

// devices lists the device nodes and cgroup rules beyond those that every
// runtime adds itself (null, zero, full, random, urandom, tty, ptmx). A
// requested device beats the host's at the same path.
func (b *builder) devices() ([]rspec.LinuxDevice, []rspec.LinuxDeviceCgroup) {
	hostDevices := b.privileged() && !b.in.Options.PrivilegedWithoutHostDevices
	allowAll := b.privileged() && (hostDevices || b.in.Options.PrivilegedAllDevicesAllowed)
	rules := []rspec.LinuxDeviceCgroup{{Allow: allowAll, Access: "rwm"}}
	rules = append(rules, b.base.Linux.Resources.Devices...)
	for _, r := range b.in.Resolved.DeviceRules {
		rules = append(rules, cloneRule(r))
	}
	var nodes []rspec.LinuxDevice
	if b.taken()["/dev"] {
		// A /dev of the request's has its nodes; making more would write into the host's.
		return nil, rules
	}
	if hostDevices {
		nodes = addDevices(nodes, b.in.Resolved.HostDevices)
	}
	nodes = addDevices(nodes, b.base.Linux.Devices)
	moved := b.movedDevices()
	return slices.DeleteFunc(addDevices(nodes, b.in.Resolved.Devices), func(d rspec.LinuxDevice) bool { return moved[d.Path] != "" }), rules
}

// movedDevices are the requested devices of a pod with a user namespace that have
// another path on the node than in the container: container's path to node's. No
// node can be made there, so OCI runtimes bind the node's, and they look for it at
// the container's path; these must be mounts.
func (b *builder) movedDevices() map[string]string {
	moved := map[string]string{}
	if b.modes.userNS == nil || b.taken()["/dev"] {
		return moved
	}
	for _, node := range b.in.Resolved.Devices {
		longest := 0
		for _, d := range b.config.GetDevices() {
			at := path.Clean(d.GetContainerPath())
			rest, ok := strings.CutPrefix(node.Path, at)
			if !ok || rest != "" && rest[0] != '/' || len(at) < longest {
				continue
			}
			longest = len(at)
			if source := path.Clean(d.GetHostPath()) + rest; source != node.Path {
				moved[node.Path] = source
			} else {
				delete(moved, node.Path)
			}
		}
	}
	return moved
}

func (b *builder) deviceMounts() []rspec.Mount {
	moved := b.movedDevices()
	var list []rspec.Mount
	for _, at := range slices.Sorted(maps.Keys(moved)) {
		list = append(list, rspec.Mount{Destination: at, Type: "bind", Source: moved[at], Options: []string{"bind", "rprivate", "nosuid", "noexec"}})
	}
	return list
}

func addDevices(list, more []rspec.LinuxDevice) []rspec.LinuxDevice {
	at := map[string]int{}
	for i, d := range list {
		at[d.Path] = i
	}
	for _, d := range more {
		d = cloneDevice(d)
		if i, ok := at[d.Path]; ok {
			list[i] = d
			continue
		}
		at[d.Path] = len(list)
		list = append(list, d)
	}
	return slices.Clip(list)
}

func cloneDevice(d rspec.LinuxDevice) rspec.LinuxDevice {
	d.FileMode, d.UID, d.GID = clone(d.FileMode), clone(d.UID), clone(d.GID)
	return d
}

func cloneRule(r rspec.LinuxDeviceCgroup) rspec.LinuxDeviceCgroup {
	r.Major, r.Minor = clone(r.Major), clone(r.Minor)
	return r
}

func clone[T any](p *T) *T {
	if p == nil {
		return nil
	}
	v := *p
	return &v
}
