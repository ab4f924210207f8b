package layer

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMeasureIsDu(t *testing.T) {
	dir := t.TempDir()
	for i, name := range []string{"a", "b/c/d", "b/c/e", "b/f", "g/h/i/j"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, make([]byte, 10000*i), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(filepath.Join(dir, "b/c/e"), filepath.Join(dir, "g/second")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/", filepath.Join(dir, "b/root")); err != nil {
		t.Fatal(err)
	}
	u, err := Measure(dir)
	if err != nil {
		t.Fatal(err)
	}
	for flag, got := range map[string]uint64{"--block-size=1": u.Bytes, "--inodes": u.Inodes} {
		out, err := exec.Command("du", "-s", flag, dir).Output()
		if err != nil {
			t.Fatal(err)
		}
		if want := strings.Fields(string(out))[0]; fmt.Sprint(got) != want {
			t.Errorf("measured %d, du %s says %s", got, flag, want)
		}
	}
}

// deepen makes a tree deeper than any path may be long.
func deepen(t *testing.T, dir string, depth int) {
	t.Helper()
	fd, err := unix.Open(dir, openDir, 0)
	for i := 0; i < depth && err == nil; i++ {
		var next int
		if err = unix.Mkdirat(fd, "d", 0o755); err == nil {
			next, err = unix.Openat(fd, "d", openDir, 0)
		}
		unix.Close(fd)
		fd = next
	}
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
}

// A container may nest directories as it likes; measuring them must not take
// the descriptors that others need.
func TestMeasureHoldsFewDescriptors(t *testing.T) {
	const depth = 300
	dir := filepath.Join(t.TempDir(), "deep")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	deepen(t, dir, depth)
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 64, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	u, err := Measure(dir)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err != nil && errors.Is(err, unix.EMFILE) {
		t.Fatal("ran out of descriptors")
	}
	if err != nil || u.Inodes != depth+1 {
		t.Errorf("%d inodes, %v; want %d", u.Inodes, err, depth+1)
	}
}

// A directory that is moved while it is measured ends neither the walk nor
// leads it out of the tree.
func TestMeasureOfAMovingTree(t *testing.T) {
	base := t.TempDir()
	for _, name := range []string{"tree/a/b/c", "tree/a/x", "tree/y", "other/z"} {
		if err := os.MkdirAll(filepath.Join(base, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	root, err := openRoot(filepath.Join(base, "tree"))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(root)
	m := measurement{seen: map[inode]bool{}}
	for _, name := range []string{"", "a", "a/b"} {
		fd, err := unix.Openat(root, "./"+name, openDir, 0)
		if err == nil {
			err = m.enter(fd, filepath.Base(name))
		}
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
	}
	here, err := unix.Openat(root, "a/b", openDir, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(here)

	if err := os.Rename(filepath.Join(base, "tree/a/b"), filepath.Join(base, "other/b")); err != nil {
		t.Fatal(err)
	}
	m.path = m.path[:2]
	fd, err := m.up(root, here)
	if err != nil || len(m.path) != 2 || !m.isAt(fd, 1) {
		t.Fatalf("after b moved: %v, path %v", err, m.path)
	}
	unix.Close(fd)

	if err := os.Rename(filepath.Join(base, "tree/a"), filepath.Join(base, "other/a")); err != nil {
		t.Fatal(err)
	}
	if fd, err = m.up(root, here); err != nil || len(m.path) != 1 || !m.isAt(fd, 0) {
		t.Fatalf("after a moved: %v, path %v", err, m.path)
	}
	unix.Close(fd)
}
