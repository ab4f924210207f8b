package image

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Records in whose place a FIFO is are an error with the name; none is overwritten.
func TestRecordsAreRegularFiles(t *testing.T) {
	for _, name := range []string{refsFile, durableFile} {
		root := t.TempDir()
		file := filepath.Join(root, name)
		if err := syscall.Mkfifo(file, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := loadImages(root); err == nil || !strings.Contains(err.Error(), file+" is no regular file") {
			t.Errorf("%s: %v", name, err)
		}
		if info, err := os.Lstat(file); err != nil || info.Mode().IsRegular() {
			t.Errorf("%s has become %v, %v", name, info, err)
		}
	}
}

// What reads files is waited for no longer than anybody wants the answer.
func TestReadingEndsWithItsContext(t *testing.T) {
	left := errors.New("left")
	ctx, cancel := context.WithCancelCause(t.Context())
	never := make(chan struct{})
	defer close(never)
	cancel(left)
	if _, err := within(ctx, func() (int, error) { <-never; return 1, nil }); !errors.Is(err, left) {
		t.Errorf("a read that waits: %v", err)
	}
	if n, err := within(t.Context(), func() (int, error) { return 7, left }); n != 7 || !errors.Is(err, left) {
		t.Errorf("a read: %d, %v", n, err)
	}
}
