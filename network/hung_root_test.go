package network

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"berth/sandbox/leakcheck"
	"berth/sandbox/outside/hung"
)

// A configuration directory that answers no more makes the network not ready, says
// so, and holds up neither Plan nor Close.
func TestHungDirectoryRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skipf("skipped: mounting needs root, runs as uid %d", os.Geteuid())
	}
	before := lookPatience
	lookPatience = 500 * time.Millisecond
	t.Cleanup(func() { lookPatience = before })
	dir := t.TempDir()
	fs, err := hung.Mount(dir)
	if errors.Is(err, hung.ErrNoFUSE) {
		t.Skipf("skipped: %v", err)
	}
	must(t, err)
	t.Cleanup(func() { must(t, fs.Release()) })
	says := func(m *Manager, words string) {
		t.Helper()
		for end := time.Now().Add(leakcheck.Patience(10 * time.Second)); ; time.Sleep(10 * time.Millisecond) {
			err := m.Ready()
			if errors.Is(err, ErrNotReady) && strings.Contains(err.Error(), words) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("it says %v, want %q", err, words)
			}
		}
	}
	m := manager(t, dir)
	says(m, "no CNI configuration in "+dir)
	fs.Hang()
	silent := "directory " + dir + " does not answer, since "
	says(m, silent)
	began := time.Now()
	if _, err := m.Plan(PodNetwork{ID: "x", Name: "n", Namespace: "ns", UID: "u"}); !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), silent) {
		t.Errorf("a plan: %v", err)
	}
	other := manager(t, dir) // as a daemon that starts
	says(other, silent)
	must(t, m.Close())
	if took := time.Since(began); took > leakcheck.Patience(5*time.Second) {
		t.Errorf("it took %v", took)
	}
	fs.Go()
	says(other, "no CNI configuration in "+dir)
}
