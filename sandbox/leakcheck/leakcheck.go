// Package leakcheck finds what a test left behind on the machine: processes,
// mounts, network links, nftables tables, cgroups, CNI address leases, files and
// open file descriptors.
//
// It owns the snapshot of those things, the comparison of two snapshots and the
// check every root test starts with. It does not own any cleaning, but for one
// safety measure: a mount leaked below the test's temporary directory is
// detached after it was reported, so that removing the directory cannot reach
// through it.
//
// The machine may be shared with other runs of the same tests, so nothing counts
// merely because it is new. A Scope says what belongs to the caller: its
// directories, the names it gives to links and cgroups, its lease directories,
// and the descendants of its own process.
//
// It imports nothing but the standard library, for modules outside of berth's
// own use it too. It reads /proc, /sys/class/net and the cgroup mounts, runs nft
// for tables, and writes no file.
package leakcheck

import (
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

// settle is how long a leak may take to go away by itself: the kernel tears
// network namespaces down behind the caller's back, and an ended process stays
// visible until its parent has read its status.
var settle = 8 * time.Second

// Option widens what Start looks at.
type Option func(*Scope)

// Paths adds directories: mounts below them and processes that mention them are
// the test's own. The test's temporary directory is always among them.
func Paths(dirs ...string) Option {
	return func(s *Scope) { s.Paths = append(s.Paths, dirs...) }
}

// Links adds prefixes of names of network links. Ports of a bridge of such a
// name count as well. Name(t) is always among them.
func Links(prefixes ...string) Option {
	return func(s *Scope) { s.Links = append(s.Links, prefixes...) }
}

// Cgroups adds prefixes of names of cgroup directories, looked for in every
// mounted hierarchy. Name(t) is always among them.
func Cgroups(prefixes ...string) Option {
	return func(s *Scope) { s.Cgroups = append(s.Cgroups, prefixes...) }
}

// Leases adds data directories of CNI's host-local plugin: a file named after
// an address below them is a lease.
func Leases(dirs ...string) Option {
	return func(s *Scope) { s.Leases = append(s.Leases, dirs...) }
}

// Files adds directories that must hold no new entries, at any depth.
func Files(dirs ...string) Option {
	return func(s *Scope) { s.Files = append(s.Files, dirs...) }
}

// Tables adds the nftables tables of berth daemons whose state directory is among
// the test's own.
func Tables() Option {
	return func(s *Scope) { s.Tables = true }
}

// WithoutFDs leaves the test process's own descriptors out, for tests that keep
// connections open on purpose.
func WithoutFDs() Option {
	return func(s *Scope) { s.FDs = false }
}

// Start opens a root test. It skips the test, saying why, unless it runs as
// root, and arranges that the test fails when it ends with something left
// behind. Call it first: what later registers with t.Cleanup runs before the
// check. Tests that run in parallel in one process cannot be told apart by
// descent, so they must not use it.
func Start(t testing.TB, options ...Option) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skipf("skipped: needs root, runs as uid %d", os.Geteuid())
	}
	// The directory is made before the check is registered, so it is removed
	// after it.
	root := filepath.Dir(t.TempDir())
	scope := Scope{
		Paths:       []string{root},
		Links:       []string{Name(t)},
		Cgroups:     []string{Name(t)},
		Descendants: true,
		FDs:         true,
	}
	for _, o := range options {
		o(&scope)
	}
	before, err := Snapshot(scope)
	if err != nil {
		t.Fatalf("take the snapshot before the test: %v", err)
	}
	t.Cleanup(func() {
		leaks, err := Wait(before, scope, Patience(settle))
		if err != nil {
			t.Errorf("take the snapshot after the test: %v", err)
		}
		for _, leak := range leaks {
			t.Errorf("left behind: %s", leak)
		}
		detachBelow(root)
	})
}

// Name returns a short name that belongs to this test alone among the tests of
// all processes: 10 characters, fit for a network link, a bridge or a cgroup.
func Name(t testing.TB) string {
	h := fnv.New32a()
	fmt.Fprintf(h, "%d %s", os.Getpid(), t.Name())
	return fmt.Sprintf("bt%08x", h.Sum32())
}

// Patience stretches a limit of time for machines that are slower than usual by
// the factor in BERTH_TEST_SLOW, such as an emulated one.
func Patience(d time.Duration) time.Duration {
	factor, err := strconv.Atoi(os.Getenv("BERTH_TEST_SLOW"))
	if err != nil || factor < 1 {
		return d
	}
	return d * time.Duration(factor)
}

// DepsDir returns the directory of the tools that `make deps` built: bin/ (runc,
// crictl) and cni/ (plugins) are below it. It is BERTH_DEPS, or else the nearest
// .deps in the working directory or above. The test fails when there is none.
func DepsDir(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("BERTH_DEPS"); dir != "" {
		return dir
	}
	wd, err := os.Getwd()
	if err != nil {
		t.Fatalf("find the tools: %v", err)
	}
	for dir := wd; ; dir = filepath.Dir(dir) {
		candidate := filepath.Join(dir, ".deps")
		if info, err := os.Stat(candidate); err == nil && info.IsDir() {
			return candidate
		}
		if dir == filepath.Dir(dir) {
			t.Fatalf("find the tools: no .deps in %s or above; run `make deps` or set BERTH_DEPS", wd)
		}
	}
}
