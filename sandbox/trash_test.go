package sandbox

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A container can nest directories deeper than the daemon may hold descriptors.
func TestRemoveTreeDeeperThanDescriptors(t *testing.T) {
	trash := t.TempDir()
	top := filepath.Join(trash, "c1")
	name := strings.Repeat("d", 255)
	dir, err := os.MkdirTemp(trash, "build")
	if err != nil {
		t.Fatal(err)
	}
	// From the innermost outwards: the whole path is far longer than the kernel's bound.
	for range 300 {
		outer, err := os.MkdirTemp(trash, "build")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(dir, filepath.Join(outer, name)); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(outer, "file"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		dir = outer
	}
	if err := os.Rename(dir, top); err != nil {
		t.Fatal(err)
	}
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	low := was
	low.Cur = 100
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	plain := os.RemoveAll(top)
	err = removeTree(top)
	if rerr := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was); rerr != nil {
		t.Fatal(rerr)
	}
	if !errors.Is(plain, syscall.EMFILE) {
		t.Errorf("the tree is not deep enough to test anything: %v", plain)
	}
	if err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(trash)
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
