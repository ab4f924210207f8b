package sandbox

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"berth/sandbox/leakcheck"
)

// Files that cannot be deleted now do not bring the record back, and are deleted
// with the next removal.
func TestFilesThatCannotBeDeletedAreTriedAgain(t *testing.T) {
	leakcheck.Start(t)
	root := t.TempDir()
	s := mustOpen(t, root)
	for _, id := range []string{"stuck", "other"} {
		if err := s.Sandboxes.Create(testSandbox(id)); err != nil {
			t.Fatal(err)
		}
	}
	held := filepath.Join(s.Sandboxes.Dir("stuck"), "held")
	if err := os.Mkdir(held, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", held, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	gone := filepath.Join(root, "trash", "stuck")
	if err := s.Sandboxes.Remove("stuck"); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("the removal of what is a mount: %v", err)
	}
	if _, err := s.Sandboxes.Get("stuck"); !errors.Is(err, ErrNotFound) {
		t.Errorf("the record is still there: %v", err)
	}
	if err := syscall.Unmount(filepath.Join(gone, "held"), 0); err != nil {
		t.Fatal(err)
	}
	if err := s.Sandboxes.Remove("other"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(gone); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its files after another removal: %v", err)
	}
}
