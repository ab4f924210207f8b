package runc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"berth/oci"
	"berth/sandbox/leakcheck"
	"berth/sandbox/outside/hung"
)

// A create whose binary hangs in the kernel, out of SIGKILL's reach, is given up
// after its time.
func TestCreateThatCannotBeKilled(t *testing.T) {
	n := newNode(t)
	dir := filepath.Join(n.dir, "hung")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	fs, err := hung.Mount(dir)
	if errors.Is(err, hung.ErrNoFUSE) {
		t.Skipf("skipped: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = fs.Release() })
	script := filepath.Join(n.dir, "stuck-runc")
	text := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in *\" create \"*) read x < %s/%s ;; esac\nexit 1\n", dir, hung.File)
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	rt, err := New(Options{Binary: script, Root: filepath.Join(n.dir, "stuck"), Monitor: n.client})
	if err != nil {
		t.Fatal(err)
	}
	bundle := filepath.Join(n.dir, "bundle")
	if err := os.Mkdir(bundle, 0o700); err != nil {
		t.Fatal(err)
	}
	fs.Hang()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	began := time.Now()
	_, err = rt.Create(ctx, oci.CreateRequest{ID: "stuck", Bundle: bundle})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if took := time.Since(began); took > leakcheck.Patience(20*time.Second) {
		t.Errorf("it took %v", took)
	}
	fs.Go()
	n.eventually("the id is free again", func() bool {
		_, err := rt.Create(t.Context(), oci.CreateRequest{ID: "stuck", Bundle: bundle})
		return !errors.Is(err, oci.ErrExists)
	})
	if err := fs.Release(); err != nil {
		t.Error(err)
	}
}
