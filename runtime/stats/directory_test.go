package stats

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// The first question waits for a measurement, the next ones are answered at
// once; a measurement that fails leaves the last size.
func TestDirectory(t *testing.T) {
	measured, release := make(chan error, 1), make(chan struct{})
	calls := 0
	d := NewDirectory("/some/where", func(dir string) (uint64, uint64, error) {
		calls++
		if dir != "/some/where" {
			t.Errorf("measures %q", dir)
		}
		<-release
		return uint64(calls), 2, <-measured
	})
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := d.Size(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while it is measured: %v", err)
	}
	measured <- nil
	close(release)
	first, err := d.Size(t.Context())
	if err != nil || first.Bytes != 1 || first.Inodes != 2 || first.At.IsZero() {
		t.Fatalf("first size %+v, %v", first, err)
	}
	if again, err := d.Size(t.Context()); err != nil || again != first {
		t.Errorf("a second question at once: %+v, %v", again, err)
	}
	bad := NewDirectory("/bad", func(string) (uint64, uint64, error) { return 0, 0, os.ErrPermission })
	if _, err := bad.Size(t.Context()); !errors.Is(err, ErrUnmeasured) {
		t.Errorf("never measured: %v", err)
	}
}

func TestSameFilesystem(t *testing.T) {
	dir := t.TempDir()
	sub := filepath.Join(dir, "sub")
	if err := os.Mkdir(sub, 0o700); err != nil {
		t.Fatal(err)
	}
	if same, err := SameFilesystem(dir, sub); err != nil || !same {
		t.Errorf("a directory and one in it: %v, %v", same, err)
	}
	if same, err := SameFilesystem(dir, "/proc"); err != nil || same {
		t.Errorf("a directory and /proc: %v, %v", same, err)
	}
	if _, err := SameFilesystem(dir, filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing one: %v", err)
	}
}
