package rootfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
	"berth/sandbox/namespaces"
)

// userNS is the file of a user namespace that maps 1000 users from 200000 and
// groups from 300000 on.
func userNS(t *testing.T) *IDs {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "ns")
	m := namespaces.IDMaps{
		UIDs: []syscall.SysProcIDMap{{HostID: 200000, Size: 1000}}, GIDs: []syscall.SysProcIDMap{{HostID: 300000, Size: 1000}},
	}
	if err := namespaces.Pin(namespaces.Spec{Dir: dir, User: &m}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := namespaces.Release(dir); err != nil {
			t.Error(err)
		}
	})
	return &IDs{UserNS: namespaces.Path(dir, namespaces.User), UID: 200000, GID: 300000}
}

// needIDMap skips where the kernel cannot do what is tested, by trying it.
func needIDMap(t *testing.T, ids *IDs) {
	t.Helper()
	f, err := os.Open(ids.UserNS)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	dir := t.TempDir()
	if err := CheckIDMap(dir, f); errors.Is(err, ErrNoIDMap) {
		t.Skipf("skipped: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
}

// bothMapped runs a test with the mount call of new and of old kernels.
func bothMapped(t *testing.T, test func(t *testing.T)) {
	t.Run("lowerdir+", test)
	t.Run("one string", func(t *testing.T) {
		known := legacyOverlay
		legacyOverlay = func() bool { return true }
		defer func() { legacyOverlay = known }()
		test(t)
	})
}

func give(t *testing.T, path string, uid, gid int) {
	t.Helper()
	if err := os.Lchown(path, uid, gid); err != nil {
		t.Fatal(err)
	}
}

func ownerOf(t *testing.T, path string) string {
	t.Helper()
	st, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	sys := st.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d:%d", sys.Uid, sys.Gid)
}

// mountsBelow lists the mounts of this process on a directory or below.
func mountsBelow(t *testing.T, dir string) []string {
	t.Helper()
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); f[4] == dir || strings.HasPrefix(f[4], dir+"/") {
			list = append(list, f[4])
		}
	}
	return list
}

func TestMappedLayers(t *testing.T) {
	leakcheck.Start(t)
	ids := userNS(t)
	needIDMap(t, ids)
	low := fill(t, t.TempDir(), map[string]string{"root": "r", "user": "u", "far": "f", "d/x": "x"})
	top := fill(t, t.TempDir(), map[string]string{"user": "U"})
	give(t, low+"/far", 5000, 5000)
	give(t, top+"/user", 5, 7)
	bothMapped(t, func(t *testing.T) {
		m := at(t.TempDir())
		m.Layers, m.IDs = []string{low, top}, ids
		if err := Create(m); err != nil {
			t.Fatal(err)
		}
		defer Unmount(m.Target)
		if list := mountsBelow(t, filepath.Dir(m.Target)); len(list) != 1 || list[0] != m.Target {
			t.Errorf("mounted: %q, want the root filesystem alone", list)
		}
		for name, want := range map[string]string{
			".": "200000:300000", "root": "200000:300000", "d/x": "200000:300000", "user": "200005:300007", "far": "65534:65534",
		} {
			if got := ownerOf(t, filepath.Join(m.Target, name)); got != want {
				t.Errorf("%s belongs to %s, want %s", name, got, want)
			}
		}
		// A copy goes up with the shifted owner; the layer keeps its own.
		if err := os.Chmod(m.Target+"/user", 0o600); err != nil {
			t.Fatal(err)
		}
		if got := ownerOf(t, m.Upper+"/user"); got != "200005:300007" {
			t.Errorf("the copy belongs to %s", got)
		}
		if got := ownerOf(t, top+"/user"); got != "5:7" {
			t.Errorf("the layer's file belongs to %s", got)
		}
		// What nobody in the container owns, nobody may change.
		if err := os.Chmod(m.Target+"/far", 0o600); !errors.Is(err, unix.EOVERFLOW) && !errors.Is(err, unix.EPERM) {
			t.Errorf("a file of an id that is not mapped was changed: %v", err)
		}
	})
}

// TestMappedLayersShareTheirFiles mounts the same layers three times at once.
func TestMappedLayersShareTheirFiles(t *testing.T) {
	leakcheck.Start(t)
	first, second := userNS(t), userNS(t)
	needIDMap(t, first)
	low := fill(t, t.TempDir(), map[string]string{"f": "x"})
	var inodes []uint64
	for _, ids := range []*IDs{nil, first, second} {
		m := at(t.TempDir())
		m.Layers, m.IDs = []string{low}, ids
		if err := Create(m); err != nil {
			t.Fatal(err)
		}
		defer Unmount(m.Target)
		var st unix.Stat_t
		if err := unix.Stat(m.Target+"/f", &st); err != nil {
			t.Fatal(err)
		}
		inodes = append(inodes, st.Ino)
	}
	var st unix.Stat_t
	if err := unix.Stat(low+"/f", &st); err != nil {
		t.Fatal(err)
	}
	for i, ino := range inodes {
		if ino != st.Ino {
			t.Errorf("mount %d shows inode %d, the layer has %d", i, ino, st.Ino)
		}
	}
}

// TestMappedLayersHideTheSame: whiteouts, opaque directories and repeated layers
// mean the same with shifted owners.
func TestMappedLayersHideTheSame(t *testing.T) {
	leakcheck.Start(t)
	ids := userNS(t)
	needIDMap(t, ids)
	low := fill(t, t.TempDir(), map[string]string{"gone": "l", "kept": "l", "d/low": "l", "opaque/low": "l"})
	top := fill(t, t.TempDir(), map[string]string{"d/top": "t", "opaque/top": "t"})
	if err := unix.Mknod(top+"/gone", unix.S_IFCHR, 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setxattr(top+"/opaque", "trusted.overlay.opaque", []byte("y"), 0); err != nil {
		t.Fatal(err)
	}
	want := "d d/low d/top kept opaque opaque/top"
	bothMapped(t, func(t *testing.T) {
		for _, readonly := range []bool{false, true} {
			m := at(t.TempDir())
			m.Layers, m.IDs, m.ReadOnly = []string{low, top, low, top}, ids, readonly
			if err := Create(m); err != nil {
				t.Fatal(err)
			}
			defer Unmount(m.Target)
			var got []string
			err := filepath.WalkDir(m.Target, func(p string, _ fs.DirEntry, err error) error {
				if name := strings.TrimPrefix(p, m.Target); name != "" {
					got = append(got, name[1:])
				}
				return err
			})
			if err != nil || strings.Join(got, " ") != want {
				t.Errorf("read-only %v: %q, want %q (%v)", readonly, got, want, err)
			}
			if got := ownerOf(t, m.Target); got != "200000:300000" {
				t.Errorf("read-only %v: the root belongs to %s", readonly, got)
			}
			if err := os.WriteFile(m.Target+"/new", nil, 0o600); errors.Is(err, unix.EROFS) != readonly {
				t.Errorf("read-only %v: writing: %v", readonly, err)
			}
		}
	})
}

func TestMappedImageWithoutLayers(t *testing.T) {
	leakcheck.Start(t)
	ids := userNS(t)
	needIDMap(t, ids)
	m := at(t.TempDir())
	m.IDs = ids
	for range 2 { // again, over what the first has left
		if err := Create(m); err != nil {
			t.Fatal(err)
		}
		if got := ownerOf(t, m.Target); got != "200000:300000" {
			t.Errorf("the root belongs to %s", got)
		}
		if err := Unmount(m.Target); err != nil {
			t.Fatal(err)
		}
	}
}

func TestManyMappedLayers(t *testing.T) {
	leakcheck.Start(t)
	ids := userNS(t)
	needIDMap(t, ids)
	base := t.TempDir()
	var layers []string
	for i := range 200 {
		layers = append(layers, fill(t, filepath.Join(base, fmt.Sprint(i+1), "diff"), map[string]string{fmt.Sprint("f", i): "x"}))
	}
	bothMapped(t, func(t *testing.T) {
		m := at(t.TempDir())
		m.Layers, m.IDs = layers, ids
		if err := Create(m); err != nil {
			t.Fatal(err)
		}
		defer Unmount(m.Target)
		if list, err := os.ReadDir(m.Target); err != nil || len(list) != len(layers) {
			t.Errorf("%d files, want %d (%v)", len(list), len(layers), err)
		}
	})
}

// TestNoIDMap names what cannot be mapped, and mounts nothing.
func TestNoIDMap(t *testing.T) {
	leakcheck.Start(t)
	ids := userNS(t)
	needIDMap(t, ids)
	m := at(t.TempDir())
	m.Layers, m.IDs = []string{"/proc/sys"}, ids
	if err := Create(m); !errors.Is(err, ErrNoIDMap) || !strings.Contains(err.Error(), "/proc/sys") {
		t.Errorf("a layer on proc: %v, want ErrNoIDMap with its name", err)
	}
	m.Layers, m.IDs = []string{t.TempDir()}, &IDs{UserNS: "/nonexistent/user"}
	if err := Create(m); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "/nonexistent/user") {
		t.Errorf("no user namespace: %v", err)
	}
	// The caller's own user namespace shifts nothing; the kernel refuses it.
	m.IDs = &IDs{UserNS: "/proc/self/ns/user"}
	if err := Create(m); err == nil {
		t.Error("layers were mapped by the node's own user namespace")
	}
	if list := mountsBelow(t, filepath.Dir(m.Target)); len(list) != 0 {
		t.Errorf("still mounted: %q", list)
	}
}

func TestCheckIDMap(t *testing.T) {
	leakcheck.Start(t)
	ids := userNS(t)
	needIDMap(t, ids)
	f, err := os.Open(ids.UserNS)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := CheckIDMap("/proc/sys", f); !errors.Is(err, ErrNoIDMap) || !strings.Contains(err.Error(), "/proc/sys") {
		t.Errorf("proc: %v", err)
	}
	if err := CheckIDMap("/nonexistent", f); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("nothing: %v", err)
	}
	// A new tmpfs says the same as one that is mounted.
	dir := t.TempDir()
	if err := unix.Mount("t", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	mounted, fresh := CheckIDMap(dir, f), CheckIDMapTmpfs(f)
	if (mounted == nil) != (fresh == nil) || fresh != nil && !errors.Is(fresh, ErrNoIDMap) {
		t.Errorf("a mounted tmpfs: %v; a new one: %v", mounted, fresh)
	}
}

// TestNoThreadKeepsAMountNamespace: the threads that mount in namespaces of their
// own end, and with them what they held.
func TestNoThreadKeepsAMountNamespace(t *testing.T) {
	leakcheck.Start(t)
	ids := userNS(t)
	needIDMap(t, ids)
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		m := at(t.TempDir())
		m.Layers, m.IDs = []string{fill(t, t.TempDir(), map[string]string{"f": "x"})}, ids
		if err := Create(m); err != nil {
			t.Fatal(err)
		}
		if err := Unmount(m.Target); err != nil {
			t.Fatal(err)
		}
	}
	elsewhere := func() (found string) {
		links, err := filepath.Glob("/proc/self/task/*/ns/mnt")
		if err != nil || len(links) == 0 {
			t.Fatal("no threads", err)
		}
		for _, link := range links {
			if got, err := os.Readlink(link); err == nil && got != own {
				found = link + " is " + got
			}
		}
		return found
	}
	for end := time.Now().Add(leakcheck.Patience(5 * time.Second)); elsewhere() != ""; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s, the process's is %s", elsewhere(), own)
		}
	}
}

func BenchmarkMappedRootfs(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("needs root")
	}
	dir := b.TempDir()
	ns := filepath.Join(dir, "ns")
	one := []syscall.SysProcIDMap{{HostID: 200000, Size: 65536}}
	if err := namespaces.Pin(namespaces.Spec{Dir: ns, User: &namespaces.IDMaps{UIDs: one, GIDs: one}}); err != nil {
		b.Fatal(err)
	}
	defer namespaces.Release(ns)
	var layers []string
	for i := range 8 {
		layers = append(layers, filepath.Join(dir, fmt.Sprint(i)))
		if err := os.Mkdir(layers[i], 0o755); err != nil {
			b.Fatal(err)
		}
	}
	for name, ids := range map[string]*IDs{"plain": nil, "mapped": {UserNS: namespaces.Path(ns, namespaces.User), UID: 200000, GID: 200000}} {
		b.Run(name, func(b *testing.B) {
			m := at(dir)
			m.Layers, m.IDs = layers, ids
			for b.Loop() {
				if err := Create(m); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if err := Unmount(m.Target); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
