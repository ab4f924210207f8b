package resolve

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
)

// skippedInDev are the parts of a host's /dev that belong to the host alone or
// that every container gets its own of.
var skippedInDev = []string{"pts", "shm", "fd", "mqueue", "console", "ptmx", ".lxc", ".lxd-mounts", ".udev"}

func resolveDevices(requested []*cri.Device) ([]rspec.LinuxDevice, []rspec.LinuxDeviceCgroup, error) {
	var nodes []rspec.LinuxDevice
	var rules []rspec.LinuxDeviceCgroup
	for i, d := range requested {
		found, err := requestedDevices(index("devices", i), d)
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
func requestedDevices(field string, d *cri.Device) ([]rspec.LinuxDevice, error) {
	path, err := filepath.EvalSymlinks(d.GetHostPath())
	var info os.FileInfo
	if err == nil {
		info, err = os.Stat(path)
	}
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, spec.Invalid(field+".host_path", d.GetHostPath(), "does not exist")
	case err != nil:
		return nil, fmt.Errorf("look up %s.host_path %q: %w", field, d.GetHostPath(), err)
	}
	at := filepath.Clean(d.GetContainerPath())
	if info.IsDir() {
		found, err := devicesIn(path, at, skippedInDev[:4])
		if err == nil && len(found) == 0 {
			err = spec.Invalid(field+".host_path", d.GetHostPath(), "is a directory without devices")
		}
		return found, err
	}
	node, ok := device(at, info)
	if !ok {
		return nil, spec.Invalid(field+".host_path", d.GetHostPath(), "is no device")
	}
	return []rspec.LinuxDevice{node}, nil
}

// hostDevices lists the host's device nodes for a privileged container.
func hostDevices(dir string) ([]rspec.LinuxDevice, error) {
	return devicesIn(dir, "/dev", skippedInDev)
}

// devicesIn lists the nodes below a directory as they appear below at. Entries
// of the directory itself whose names are in skip are left out. A node that
// vanishes meanwhile is none.
func devicesIn(dir, at string, skip []string) ([]rspec.LinuxDevice, error) {
	var list []rspec.LinuxDevice
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) && path != dir {
			return nil
		}
		if err != nil {
			return err
		}
		if filepath.Dir(path) == dir && slices.Contains(skip, entry.Name()) {
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		info, err := entry.Info()
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if node, ok := device(filepath.Join(at, strings.TrimPrefix(path, dir)), info); ok {
			list = append(list, node)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list devices in %q: %w", dir, err)
	}
	return list, nil
}

// device describes a block or character device node.
func device(at string, info os.FileInfo) (rspec.LinuxDevice, bool) {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.Mode()&os.ModeDevice == 0 {
		return rspec.LinuxDevice{}, false
	}
	kind := "b"
	if info.Mode()&os.ModeCharDevice != 0 {
		kind = "c"
	}
	mode, uid, gid := info.Mode().Perm(), stat.Uid, stat.Gid
	major, minor := numbers(uint64(stat.Rdev))
	return rspec.LinuxDevice{Path: at, Type: kind, Major: major, Minor: minor, FileMode: &mode, UID: &uid, GID: &gid}, true
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
