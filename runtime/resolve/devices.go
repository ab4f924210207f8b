package resolve

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
	"berth/sandbox/outside"
)

// skippedInDev are the parts of a host's /dev that belong to the host alone or
// that every container gets its own of.
var skippedInDev = []string{"pts", "shm", "fd", "mqueue", "console", "ptmx", ".lxc", ".lxd-mounts", ".udev"}

func resolveDevices(host outside.Host, requested []*cri.Device) ([]rspec.LinuxDevice, []rspec.LinuxDeviceCgroup, error) {
	var nodes []rspec.LinuxDevice
	var rules []rspec.LinuxDeviceCgroup
	for i, d := range requested {
		found, err := requestedDevices(host, index("devices", i), d)
		if err != nil {
			return nil, nil, err
		}
		for _, n := range found {
			nodes = append(nodes, n)
			rules = append(rules, rule(n, d.GetPermissions()))
		}
	}
	return nodes, rules, nil
}

// requestedDevices is one device, or all those in a directory.
func requestedDevices(host outside.Host, field string, d *cri.Device) ([]rspec.LinuxDevice, error) {
	f, err := host.Find(d.GetHostPath())
	switch {
	case err != nil:
		return nil, fmt.Errorf("look up %s.host_path %q: %w", field, d.GetHostPath(), err)
	case f.Missing:
		return nil, spec.Invalid(field+".host_path", d.GetHostPath(), "does not exist")
	case f.Broken != "":
		return nil, spec.Invalid(field+".host_path", d.GetHostPath(), "symbolic link "+f.Broken+" leads in a circle")
	}
	at := filepath.Clean(d.GetContainerPath())
	if f.Mode.IsDir() {
		found, err := devicesIn(host, f.Path, at, skippedInDev[:4])
		if err == nil && len(found) == 0 {
			err = spec.Invalid(field+".host_path", d.GetHostPath(), "is a directory without devices")
		}
		return found, err
	}
	if f.Mode&os.ModeDevice == 0 {
		return nil, spec.Invalid(field+".host_path", d.GetHostPath(), "is no device")
	}
	return []rspec.LinuxDevice{device(at, f)}, nil
}

// hostDevices lists the host's device nodes for a privileged container.
func hostDevices(host outside.Host, dir string) ([]rspec.LinuxDevice, error) {
	return devicesIn(host, dir, "/dev", skippedInDev)
}

// devicesIn lists the nodes below a directory as they appear below at. Entries
// of the directory itself whose names are in skip are left out. A node that
// vanishes meanwhile is none.
func devicesIn(host outside.Host, dir, at string, skip []string) ([]rspec.LinuxDevice, error) {
	found, err := host.Devices(dir, skip)
	if err != nil {
		return nil, fmt.Errorf("list devices in %q: %w", dir, err)
	}
	var list []rspec.LinuxDevice
	for _, e := range found {
		list = append(list, device(filepath.Join(at, e.Rel), e.Found))
	}
	return list, nil
}

// device describes a block or character device node.
func device(at string, f outside.Found) rspec.LinuxDevice {
	kind := "b"
	if f.Mode&os.ModeCharDevice != 0 {
		kind = "c"
	}
	mode, uid, gid := f.Mode.Perm(), f.UID, f.GID
	major, minor := numbers(f.Rdev)
	return rspec.LinuxDevice{Path: at, Type: kind, Major: major, Minor: minor, FileMode: &mode, UID: &uid, GID: &gid}
}

// numbers takes a device number of stat(2) apart: 12 and 20 bits in the low
// half, the rest in the high half.
func numbers(dev uint64) (major, minor int64) {
	major = int64(dev>>8&0xfff | dev>>32&0xfffff000)
	minor = int64(dev&0xff | dev>>12&0xffffff00)
	return major, minor
}

func rule(n rspec.LinuxDevice, permissions string) rspec.LinuxDeviceCgroup {
	major, minor, access := n.Major, n.Minor, ""
	for _, p := range []string{"r", "w", "m"} {
		if strings.Contains(permissions, p) {
			access += p
		}
	}
	return rspec.LinuxDeviceCgroup{Allow: true, Type: n.Type, Major: &major, Minor: &minor, Access: access}
}
