package resolve

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"berth/sandbox/outside"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestDeviceOfHost(t *testing.T) {
	nodes, rules, err := resolveDevices(outside.Here{}, []*cri.Device{{ContainerPath: "/dev/mine/", HostPath: "/dev/null", Permissions: "mr"}})
	if err != nil || len(nodes) != 1 || len(rules) != 1 {
		t.Fatalf("%v, %v, %v", nodes, rules, err)
	}
	n, r := nodes[0], rules[0]
	if n.Path != "/dev/mine" || n.Type != "c" || n.Major != 1 || n.Minor != 3 || n.FileMode.Perm() != 0o666 || *n.UID != 0 {
		t.Errorf("node %+v", n)
	}
	if !r.Allow || r.Type != "c" || *r.Major != 1 || *r.Minor != 3 || r.Access != "rm" {
		t.Errorf("rule %+v", r)
	}
}

func TestBadDevices(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "file"), "x")
	link(t, "nowhere", filepath.Join(dir, "dangling"))
	for at, begins := range map[string]string{
		filepath.Join(dir, "absent"):   "does not exist",
		filepath.Join(dir, "dangling"): "does not exist",
		filepath.Join(dir, "file"):     "is no device",
		dir:                            "is a directory without devices",
	} {
		good := &cri.Device{ContainerPath: "/a", HostPath: "/dev/null", Permissions: "r"}
		_, _, err := resolveDevices(outside.Here{}, []*cri.Device{good, {ContainerPath: "/b", HostPath: at, Permissions: "r"}})
		want := fmt.Sprintf("devices[1].host_path %q: %s", at, begins)
		if !errors.Is(err, ErrInvalid) || err.Error() != want {
			t.Errorf("%v; want %s", err, want)
		}
	}
}

func paths(nodes []rspec.LinuxDevice) []string {
	var list []string
	for _, n := range nodes {
		list = append(list, n.Path)
	}
	slices.Sort(list)
	return list
}

func TestHostDevices(t *testing.T) {
	nodes, err := hostDevices(outside.Here{}, "/dev")
	if err != nil {
		t.Fatal(err)
	}
	list := paths(nodes)
	if !slices.Contains(list, "/dev/null") || !slices.Contains(list, "/dev/urandom") {
		t.Errorf("null and urandom are not in %v", list)
	}
	for _, p := range list {
		if p == "/dev/console" || p == "/dev/ptmx" || strings.HasPrefix(p, "/dev/pts/") {
			t.Errorf("%s is in the list", p)
		}
	}
	if _, err := hostDevices(outside.Here{}, "/no/such/dev"); err == nil {
		t.Error("no error for a missing folder")
	}
}

// TestDeviceNumbers checks against the kernel's layout.
func TestDeviceNumbers(t *testing.T) {
	for dev, want := range map[uint64][2]int64{
		0x103: {1, 3}, 0xfd00: {253, 0}, 0x12345: {0x123, 0x45}, 0xfffff000_000fff00: {0xffffffff, 0},
		0x00000fff_fff000ff: {0, 0xffffffff},
	} {
		major, minor := numbers(dev)
		if [2]int64{major, minor} != want {
			t.Errorf("%#x: %d:%d, want %d:%d", dev, major, minor, want[0], want[1])
		}
	}
}
