package stats

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Device is what was read from and written to one disk, since the cgroup was made.
type Device struct {
	Major, Minor uint32
	Bytes, Count map[string]uint64 // by operation, in the kernel's words: "Read", "Write", "Discard", "Sync", …
}

// Name is the device's file, such as /dev/sda, else its numbers: two devices
// never have the same.
func (d Device) Name() string {
	if name := DeviceName(d.Major, d.Minor); name != "" {
		return name
	}
	return fmt.Sprintf("%d:%d", d.Major, d.Minor)
}

var deviceNames sync.Map // [2]uint32 to string

// DeviceName is the file of a block device by its numbers; empty when the
// kernel knows no such device. The first answer stays.
func DeviceName(major, minor uint32) string {
	key := [2]uint32{major, minor}
	if name, ok := deviceNames.Load(key); ok {
		return name.(string)
	}
	name := ""
	text, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/uevent", major, minor))
	if err != nil {
		return "" // not remembered: it may come yet
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "DEVNAME="); ok {
			name = "/dev/" + strings.TrimSpace(value)
		}
	}
	deviceNames.Store(key, name)
	return name
}

// Filesystem is the state of the filesystem that a directory lies on.
type Filesystem struct {
	Device                   string // its file; empty when it lies on none
	Bytes, Inodes, InodeFree uint64
}

// SameFilesystem tells whether two directories lie on one filesystem.
func SameFilesystem(a, b string) (bool, error) {
	var device [2]uint64
	for i, dir := range []string{a, b} {
		var st unix.Stat_t
		if err := unix.Stat(dir, &st); err != nil {
			return false, fmt.Errorf("look at filesystem of %s: %w", dir, err)
		}
		device[i] = st.Dev
	}
	return device[0] == device[1], nil
}

// ReadFilesystem looks at the filesystem below a directory.
func ReadFilesystem(dir string) (Filesystem, error) {
	var fs unix.Statfs_t
	var st unix.Stat_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return Filesystem{}, fmt.Errorf("look at filesystem of %s: %w", dir, err)
	}
	if err := unix.Stat(dir, &st); err != nil {
		return Filesystem{}, fmt.Errorf("look at filesystem of %s: %w", dir, err)
	}
	return Filesystem{Device: DeviceName(unix.Major(st.Dev), unix.Minor(st.Dev)),
		Bytes: fs.Blocks * uint64(fs.Bsize), Inodes: fs.Files, InodeFree: fs.Ffree}, nil
}

// devices1 reads version 1: lines "8:0 Read 4096".
func devices1(dir string) []Device {
	var out []Device
	add := func(file string, into func(*Device) map[string]uint64) {
		_ = read(filepath.Join(dir, file), func(b []byte) error {
			for line := range bytes.Lines(b) {
				parts := bytes.Fields(line)
				if len(parts) != 3 { // the sum over all devices
					continue
				}
				n, err := parseUint(parts[2])
				if d := deviceOf(&out, parts[0]); d != nil && err == nil {
					into(d)[string(parts[1])] = n
				}
			}
			return nil
		})
	}
	add("blkio.throttle.io_service_bytes_recursive", func(d *Device) map[string]uint64 { return d.Bytes })
	add("blkio.throttle.io_serviced_recursive", func(d *Device) map[string]uint64 { return d.Count })
	return out
}

// words2 are version 2's names of what version 1 calls by words.
var words2 = map[string]struct {
	operation string
	bytes     bool
}{
	"rbytes": {"Read", true}, "wbytes": {"Write", true}, "dbytes": {"Discard", true},
	"rios": {"Read", false}, "wios": {"Write", false}, "dios": {"Discard", false},
}

// devices2 reads version 2: lines "8:0 rbytes=1 wbytes=2 …".
func devices2(path string) []Device {
	var out []Device
	_ = read(path, func(b []byte) error {
		for line := range bytes.Lines(b) {
			parts := bytes.Fields(line)
			if len(parts) < 2 {
				continue
			}
			d := deviceOf(&out, parts[0])
			for _, part := range parts[1:] {
				key, value, _ := bytes.Cut(part, []byte("="))
				word, known := words2[string(key)]
				n, err := parseUint(value)
				switch {
				case d == nil || !known || err != nil:
				case word.bytes:
					d.Bytes[word.operation] = n
				default:
					d.Count[word.operation] = n
				}
			}
		}
		return nil
	})
	return out
}

// deviceOf finds or adds the device "8:0"; nil when that is no device.
func deviceOf(all *[]Device, numbers []byte) *Device {
	major, minor, ok := bytes.Cut(numbers, []byte(":"))
	ma, err1 := parseUint(major)
	mi, err2 := parseUint(minor)
	if !ok || err1 != nil || err2 != nil {
		return nil
	}
	i := slices.IndexFunc(*all, func(d Device) bool { return d.Major == uint32(ma) && d.Minor == uint32(mi) })
	if i < 0 {
		i = len(*all)
		*all = append(*all, Device{Major: uint32(ma), Minor: uint32(mi), Bytes: map[string]uint64{}, Count: map[string]uint64{}})
	}
	return &(*all)[i]
}
