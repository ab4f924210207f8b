package resolve

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox/leakcheck"
	"berth/sandbox/outside"
)

// TestPropagationRoot looks at real mounts: private, slave and shared.
func TestPropagationRoot(t *testing.T) {
	leakcheck.Start(t)
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []struct {
		name  string
		flags []uintptr
	}{
		{"private", []uintptr{syscall.MS_PRIVATE}}, {"shared", []uintptr{syscall.MS_SHARED}}, {"slave", []uintptr{syscall.MS_SHARED, syscall.MS_SLAVE}},
	} {
		at := filepath.Join(dir, m.name)
		if err := os.Mkdir(at, 0o755); err != nil {
			t.Fatal(err)
		}
		mountTmpfs(t, at)
		for _, f := range m.flags {
			if m.name == "slave" && f == syscall.MS_SLAVE {
				// A slave needs a peer to be the slave of.
				bind(t, at, filepath.Join(dir, "peer"))
			}
			if err := syscall.Mount("", at, "", f, ""); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.MkdirAll(filepath.Join(at, "sub/dir"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	const slave, shared = cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER, cri.MountPropagation_PROPAGATION_BIDIRECTIONAL
	for _, c := range []struct {
		at   string
		mode cri.MountPropagation
		ok   bool
	}{
		{"private", cri.MountPropagation_PROPAGATION_PRIVATE, true}, {"private", slave, false}, {"private", shared, false},
		{"slave", slave, true}, {"slave", shared, false}, {"shared", slave, true}, {"shared", shared, true},
		{"shared/sub/dir", shared, true}, {"private/sub/dir", shared, false}, {"slave/sub", slave, true},
	} {
		_, err := resolveSources(Request{Config: &cri.ContainerConfig{Mounts: []*cri.Mount{
			{ContainerPath: "/c", HostPath: filepath.Join(dir, c.at), Propagation: c.mode}}}})
		if (err == nil) != c.ok || err != nil && (!errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), "mounts[0].propagation ")) {
			t.Errorf("%s as %s: %v", c.at, c.mode, err)
		}
	}
	// A mount over a shared one hides it.
	mountTmpfs(t, filepath.Join(dir, "shared"))
	if err := syscall.Mount("", filepath.Join(dir, "shared"), "", syscall.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	over := &cri.Mount{ContainerPath: "/c", Propagation: shared}
	if err := checkSource("mounts[0]", filepath.Join(dir, "shared"), over); !errors.Is(err, ErrInvalid) {
		t.Errorf("under a private mount: %v", err)
	}
}

func mountTmpfs(t *testing.T, at string) {
	t.Helper()
	if err := syscall.Mount("tmpfs", at, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	unmountLater(t, at)
}

func bind(t *testing.T, from, to string) {
	t.Helper()
	if err := os.MkdirAll(to, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount(from, to, "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	unmountLater(t, to)
}

func unmountLater(t *testing.T, at string) {
	t.Cleanup(func() {
		if err := syscall.Unmount(at, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", at, err)
		}
	})
}

// TestDeviceDirectoryRoot makes nodes in folders and lists them.
func TestDeviceDirectoryRoot(t *testing.T) {
	leakcheck.Start(t)
	dir := t.TempDir()
	for name, dev := range map[string]int{"one": 0x103, "sub/two": 0x0812, "sub/deep/three": 0x105, "fd": 0x103, "console": 0x501} {
		path := filepath.Join(dir, name)
		kind := uint32(syscall.S_IFCHR)
		if name == "sub/two" {
			kind = syscall.S_IFBLK
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mknod(path, kind|0o640, dev); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(dir, "sub/file"), "x")
	link(t, "/dev/null", filepath.Join(dir, "link"))
	link(t, dir, filepath.Join(dir, "way"))
	nodes, rules, err := resolveDevices(outside.Here{}, []*cri.Device{{ContainerPath: "/dev/x", HostPath: filepath.Join(dir, "way"), Permissions: "w"}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for i, n := range nodes {
		got = append(got, fmt.Sprintf("%s %s%d:%d", n.Path, n.Type, n.Major, n.Minor))
		if *rules[i].Major != n.Major || *rules[i].Minor != n.Minor || rules[i].Access != "w" || rules[i].Type != n.Type {
			t.Errorf("rule %+v for node %+v", rules[i], n)
		}
	}
	slices.Sort(got)
	want := []string{"/dev/x/console c5:1", "/dev/x/one c1:3", "/dev/x/sub/deep/three c1:5", "/dev/x/sub/two b8:18"}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	host, err := hostDevices(outside.Here{}, dir)
	if err != nil || len(host) != 3 || paths(host)[0] != "/dev/one" {
		t.Errorf("as a host's: %v, %v", paths(host), err)
	}
}
