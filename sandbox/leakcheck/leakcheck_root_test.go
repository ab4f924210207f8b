package leakcheck

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// recorder stands in for a test whose failure is the expected outcome.
type recorder struct {
	testing.TB
	dir      string
	cleanups []func()
	errors   []string
}

func (r *recorder) Helper()          {}
func (r *recorder) TempDir() string  { return r.dir }
func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Errorf(f string, a ...any) {
	r.errors = append(r.errors, fmt.Sprintf(f, a...))
}

func (r *recorder) finish() {
	for _, f := range slices.Backward(r.cleanups) {
		f()
	}
}

func newRecorder(t *testing.T) *recorder {
	if os.Geteuid() != 0 {
		t.Skipf("skipped: needs root, runs as uid %d", os.Geteuid())
	}
	dir := filepath.Join(t.TempDir(), "001")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return &recorder{TB: t, dir: dir}
}

func TestStartPassesWhenNothingIsLeft(t *testing.T) {
	r := newRecorder(t)
	Start(r)
	if err := exec.Command("true").Run(); err != nil {
		t.Fatal(err)
	}
	r.finish()
	if len(r.errors) != 0 {
		t.Errorf("errors of a clean test: %q", r.errors)
	}
}

func TestStartWaitsForWhatGoesAwayByItself(t *testing.T) {
	r := newRecorder(t)
	Start(r)
	cmd := exec.Command("sleep", "0.3")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go cmd.Wait()
	r.finish()
	if len(r.errors) != 0 {
		t.Errorf("errors of a test whose process ended soon: %q", r.errors)
	}
}

func TestStartReportsAndDetachesMount(t *testing.T) {
	settle = 300 * time.Millisecond
	t.Cleanup(func() { settle = 8 * time.Second })
	r := newRecorder(t)
	Start(r)
	target := filepath.Join(r.dir, "m")
	if err := os.Mkdir(target, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", target, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	r.finish()
	if len(r.errors) != 1 || !strings.Contains(r.errors[0], "mount "+target+" (tmpfs") {
		t.Errorf("errors = %q, want the mount %s", r.errors, target)
	}
	if err := os.Remove(target); err != nil {
		t.Errorf("the leaked mount was not detached: %v", err)
	}
}

// thing is something that can be left behind: how to make it, how to remove it,
// and what a snapshot says of it.
type thing struct {
	scope      Scope
	make, undo func() error
	want       string
}

func linkAndCgroup(t *testing.T, name string) map[string]thing {
	mounts, err := readMounts("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	cgroup := ""
	for _, m := range mounts {
		if m.fstype == "cgroup" || m.fstype == "cgroup2" {
			cgroup = filepath.Join(m.point, name+"-x")
		}
	}
	return map[string]thing{
		"link": {Scope{Links: []string{name}},
			exec.Command("ip", "link", "add", name, "type", "bridge").Run,
			exec.Command("ip", "link", "del", name).Run, "network link " + name},
		"cgroup": {Scope{Cgroups: []string{name}},
			func() error { return os.Mkdir(cgroup, 0o755) },
			func() error { return os.Remove(cgroup) }, "cgroup " + cgroup},
		"table": {Scope{Tables: true, Paths: []string{"/" + name}},
			exec.Command("nft", "add", "table", "inet", "berth/"+name+"/state").Run,
			exec.Command("nft", "delete", "table", "inet", "berth/"+name+"/state").Run, "nftables table inet berth/" + name + "/state"},
	}
}

func files(dir string) map[string]thing {
	var held *os.File
	return map[string]thing{
		"lease": {Scope{Leases: []string{dir}},
			func() error { return os.WriteFile(dir+"/10.88.0.2", nil, 0o600) },
			func() error { return os.Rename(dir+"/10.88.0.2", dir+"/last_reserved_ip.0") }, "lease " + dir + "/10.88.0.2"},
		"file": {Scope{Files: []string{dir}},
			func() error { return os.WriteFile(dir+"/f", nil, 0o600) },
			func() error { return os.Remove(dir + "/f") }, "file " + dir + "/f"},
		"descriptor": {Scope{FDs: true},
			func() (err error) { held, err = os.Open(dir); return err },
			func() error { return held.Close() }, "descriptor"},
	}
}

func processes(dir string) map[string]thing {
	var child *exec.Cmd
	kill := func() error { child.Process.Kill(); child.Wait(); return nil }
	return map[string]thing{
		"descendant": {Scope{Descendants: true},
			func() error { child = exec.Command("sleep", "60"); return child.Start() }, kill, "sleep 60"},
		"process by environment": {Scope{Paths: []string{dir}},
			func() error {
				child = exec.Command("sleep", "61")
				child.Env = []string{"STATE=" + dir + "/x"}
				return child.Start()
			}, kill, "sleep 61"},
		"zombie": {Scope{Descendants: true},
			func() error {
				child = exec.Command("true")
				err := child.Start()
				time.Sleep(Patience(100 * time.Millisecond))
				return err
			}, kill, "state Z): [true]"},
	}
}

// TestEveryKind makes one thing of each kind, sees it in the difference, removes
// it, and sees the difference empty again.
func TestEveryKind(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skipf("skipped: needs root, runs as uid %d", os.Geteuid())
	}
	dir := t.TempDir()
	for _, group := range []map[string]thing{linkAndCgroup(t, Name(t)), files(dir), processes(dir)} {
		for kind, c := range group {
			t.Run(kind, func(t *testing.T) {
				before := take(t, c.scope)
				if err := c.make(); err != nil {
					t.Fatal(err)
				}
				leaks := Diff(before, take(t, c.scope))
				if err := c.undo(); err != nil {
					t.Fatal(err)
				}
				if len(leaks) != 1 || !strings.Contains(leaks[0], c.want) {
					t.Errorf("difference = %q, want one with %q", leaks, c.want)
				}
				if left, err := Wait(before, c.scope, 2*time.Second); err != nil || len(left) != 0 {
					t.Errorf("after undoing: %q, %v", left, err)
				}
			})
		}
	}
}

// TestContainerIsFoundByItsRoot has a process that mentions the directory nowhere
// but in the overlay it has as its root, as a container does that outlives its
// runtime.
func TestContainerIsFoundByItsRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skipf("skipped: needs root, runs as uid %d", os.Geteuid())
	}
	dir := t.TempDir()
	scope := Scope{Paths: []string{dir}}
	before := take(t, scope)
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-c", `set -e
		mkdir "$0/upper" "$0/work" "$0/root"
		mount -t overlay overlay -o "lowerdir=/usr,upperdir=$0/upper,workdir=$0/work" "$0/root"
		cd "$0/root"
		mkdir -p old
		pivot_root . old
		exec env -i sh -c 'cd / && umount -l /old 2>/dev/null; exec sleep 62'`, dir)
	out := &strings.Builder{}
	cmd.Stderr = out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	var leaks []string
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		leaks = Diff(before, take(t, scope))
		if len(leaks) == 1 && strings.HasSuffix(leaks[0], ": sleep 62") {
			return
		}
	}
	t.Errorf("difference = %q, want the one process in the overlay; stderr %s", leaks, out)
}

// TestStrangersAreNotReported makes things outside of the scope.
func TestStrangersAreNotReported(t *testing.T) {
	r := newRecorder(t)
	other := t.TempDir() + "/other" // not below the recorder's directory
	if err := os.MkdirAll(other, 0o700); err != nil {
		t.Fatal(err)
	}
	scope := Scope{Paths: []string{r.dir}, Links: []string{Name(t)}, Cgroups: []string{Name(t)}}
	before := take(t, scope)
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	if err := syscall.Mount("tmpfs", other, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer syscall.Unmount(other, 0)
	if leaks := Diff(before, take(t, scope)); len(leaks) != 0 {
		t.Errorf("reported what belongs to others: %q", leaks)
	}
}

func TestNameDiffersByTest(t *testing.T) {
	own := Name(t)
	t.Run("sub", func(t *testing.T) {
		if n := Name(t); n == own || len(n) != 10 {
			t.Errorf("Name = %q, want 10 characters and not %q", n, own)
		}
	})
}

func TestDepsDir(t *testing.T) {
	t.Setenv("BERTH_DEPS", "/elsewhere")
	if dir := DepsDir(t); dir != "/elsewhere" {
		t.Errorf("DepsDir with BERTH_DEPS = %q", dir)
	}
	t.Setenv("BERTH_DEPS", "")
	top := t.TempDir()
	if err := os.MkdirAll(top+"/.deps", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(top+"/a/b", 0o700); err != nil {
		t.Fatal(err)
	}
	t.Chdir(top + "/a/b")
	if dir := DepsDir(t); dir != top+"/.deps" {
		t.Errorf("DepsDir = %q, want %q", dir, top+"/.deps")
	}
}

func take(t *testing.T, s Scope) State {
	t.Helper()
	st, err := Snapshot(s)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func TestPatienceFollowsTheMachine(t *testing.T) {
	for text, want := range map[string]time.Duration{"": time.Second, "5": 5 * time.Second, "0": time.Second, "much": time.Second} {
		t.Setenv("BERTH_TEST_SLOW", text)
		if got := Patience(time.Second); got != want {
			t.Errorf("BERTH_TEST_SLOW=%q makes %v of a second, want %v", text, got, want)
		}
	}
}
