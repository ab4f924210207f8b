package runc

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go/features"

	"berth/oci"
)

// A criu on a filesystem that does not answer is not run; without one it is said so.
func TestCriuIsAskedAboutFirst(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	mark := filepath.Join(dir, "ran")
	if err := os.WriteFile(filepath.Join(dir, "criu"), []byte("#!/bin/sh\necho >"+mark+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	var answer error = context.DeadlineExceeded
	r := &Runtime{binary: "/runc", answer: func(_ context.Context, paths ...string) error {
		if len(paths) != 1 || paths[0] != filepath.Join(dir, "criu") {
			t.Errorf("asked about %v", paths)
		}
		return answer
	}}
	r.features = func() (*features.Features, error) { return nil, errors.New("none") }
	if err := r.CanCheckpoint(t.Context()); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, oci.ErrNoCheckpoint) {
		t.Errorf("where it does not answer: %v", err)
	}
	if _, err := os.Stat(mark); err == nil {
		t.Error("criu has run")
	}
	answer = nil
	if err := r.CanCheckpoint(t.Context()); err != nil {
		t.Errorf("where it answers: %v", err)
	}
	if _, err := os.Stat(mark); err != nil {
		t.Errorf("criu has not run: %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	r.answer = func(context.Context, ...string) error { return nil }
	if err := r.CanCheckpoint(t.Context()); !errors.Is(err, oci.ErrNoCheckpoint) {
		t.Errorf("without criu: %v", err)
	}
}
