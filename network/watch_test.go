package network

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
)

const follows = 5 * time.Second // the promise of NetworkReady

func conflist(name string) string {
	return fmt.Sprintf(`{"cniVersion":"1.0.0","name":%q,"plugins":[{"type":"fake"}]}`, name)
}

// manager starts one on dir, with a plugin "fake" that is there but does nothing.
func manager(t *testing.T, dir string) *Manager {
	t.Helper()
	bin := t.TempDir()
	must(t, writeScript(bin+"/fake", "exit 0"))
	m, err := New(Options{ConfDir: dir, BinDirs: []string{bin}, CacheDir: t.TempDir()})
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

// becomes waits until the network of that name, or none for "", is loaded.
func becomes(t *testing.T, m *Manager, name string) {
	t.Helper()
	begin := time.Now()
	for {
		ready := m.Ready() == nil
		if ready == (name != "") && (name == "" || m.Describe().Network == name) {
			return
		}
		if time.Since(begin) > follows {
			t.Fatalf("after %v: Ready() = %v, network %q; want %q", follows, m.Ready(), m.Describe().Network, name)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func put(t *testing.T, dir, name string) {
	t.Helper()
	must(t, os.MkdirAll(dir, 0o755))
	must(t, os.WriteFile(dir+"/10-x.conflist", []byte(conflist(name)), 0o600))
}

// changes are what may happen to the directory, from the moment when it is missing.
var changes = map[string]func(t *testing.T, m *Manager, top string){
	"removed and made again": func(t *testing.T, m *Manager, top string) {
		for i := range 3 {
			put(t, top+"/cni/net.d", fmt.Sprint("n", i))
			becomes(t, m, fmt.Sprint("n", i))
			must(t, os.RemoveAll(top+"/cni/net.d"))
			becomes(t, m, "")
		}
	},
	"parent removed": func(t *testing.T, m *Manager, top string) {
		put(t, top+"/cni/net.d", "a")
		becomes(t, m, "a")
		must(t, os.RemoveAll(top+"/cni"))
		becomes(t, m, "")
		put(t, top+"/cni/net.d", "b")
		becomes(t, m, "b")
	},
	"replaced by rename": func(t *testing.T, m *Manager, top string) {
		put(t, top+"/cni/net.d", "a")
		becomes(t, m, "a")
		put(t, top+"/cni/next", "b")
		must(t, os.Rename(top+"/cni/net.d", top+"/cni/old"))
		must(t, os.Rename(top+"/cni/next", top+"/cni/net.d"))
		becomes(t, m, "b")
		put(t, top+"/cni/old", "stray") // the watch on it must be gone
		put(t, top+"/cni/net.d", "c")
		becomes(t, m, "c")
	},
	"symbolic link": func(t *testing.T, m *Manager, top string) {
		must(t, os.MkdirAll(top+"/cni", 0o755))
		must(t, os.Symlink("../real/one", top+"/cni/net.d"))
		becomes(t, m, "")
		put(t, top+"/real/one", "a")
		becomes(t, m, "a")
		must(t, os.RemoveAll(top+"/real/one"))
		becomes(t, m, "")
		put(t, top+"/real/one", "b")
		becomes(t, m, "b")
		put(t, top+"/real/two", "c")
		must(t, os.Symlink(top+"/real/two", top+"/cni/new"))
		must(t, os.Rename(top+"/cni/new", top+"/cni/net.d"))
		becomes(t, m, "c")
		put(t, top+"/real/two", "d")
		becomes(t, m, "d")
	},
	"file broken and mended": func(t *testing.T, m *Manager, top string) {
		put(t, top+"/cni/net.d", "a")
		becomes(t, m, "a")
		must(t, os.WriteFile(top+"/cni/net.d/10-x.conflist", []byte("{"), 0o600))
		becomes(t, m, "")
		if err := m.Ready(); !strings.Contains(err.Error(), "10-x.conflist: not a JSON object") {
			t.Errorf("reason: %v", err)
		}
		put(t, top+"/cni/net.d", "b")
		becomes(t, m, "b")
	},
}

// TestB53 makes, removes, makes again, replaces and relinks the directory, with
// inotify and without.
func TestB53(t *testing.T) {
	for name, change := range changes {
		t.Run(name, func(t *testing.T) { followChange(t, change, true) })
	}
	newWatcher = func() (*fsnotify.Watcher, error) { return nil, syscall.EMFILE }
	pollEvery = pollInterval / 10 // for the test's sake
	t.Cleanup(func() { newWatcher, pollEvery = fsnotify.NewWatcher, pollInterval })
	for name, change := range changes {
		t.Run(name+", polling", func(t *testing.T) { followChange(t, change, false) })
	}
	if pollInterval > follows/2 {
		t.Errorf("polling every %v is too seldom to follow within %v", pollInterval, follows)
	}
}

func followChange(t *testing.T, change func(t *testing.T, m *Manager, top string), inotify bool) {
	t.Helper()
	top := t.TempDir()
	m := manager(t, top+"/cni/net.d")
	if err := m.Ready(); !errors.Is(err, ErrNotReady) {
		t.Errorf("Ready without a directory: %v", err)
	}
	if _, err := m.Plan(PodNetwork{ID: "x"}); !errors.Is(err, ErrNotReady) {
		t.Errorf("Plan without a directory: %v", err)
	}
	change(t, m, top)
	if watch := m.Describe().Watch; (watch == "") != inotify {
		t.Errorf("Describe().Watch = %q", watch)
	}
}

// TestPlanLooksAgain plans at once after a change, before any event.
func TestPlanLooksAgain(t *testing.T) {
	dir := t.TempDir()
	m := manager(t, dir)
	for i := range 20 {
		put(t, dir, fmt.Sprint("n", i))
		plan, err := m.Plan(PodNetwork{ID: "x"})
		must(t, err)
		if plan.Network != fmt.Sprint("n", i) {
			t.Fatalf("Plan chose %q after n%d was written", plan.Network, i)
		}
	}
}

// TestSameTimesDoNotHideAChange rewrites a file with its size and times kept, as
// happens within one step of an older kernel's clock.
func TestSameTimesDoNotHideAChange(t *testing.T) {
	dir := t.TempDir()
	stamp := func() {
		file := dir + "/10-x.conflist"
		at := time.Now().Truncate(time.Hour)
		if time.Since(at) < time.Minute {
			at = at.Add(-time.Minute)
		}
		must(t, os.Chtimes(file, at, at))
		must(t, os.Chtimes(dir, at, at))
	}
	put(t, dir, "a")
	stamp()
	old := signature(dir)
	if again := signature(dir); again != old {
		t.Errorf("an old directory looks different each time: %q, %q", old, again)
	}
	put(t, dir, "b")
	if first, second := signature(dir), signature(dir); first == second {
		t.Errorf("a directory written just now looks the same twice: %q", first)
	}
}

// TestMissingPluginAppears has the configuration come before its plugins, as
// some installers do it.
func TestMissingPluginAppears(t *testing.T) {
	dir, bin := t.TempDir(), t.TempDir()
	put(t, dir, "a")
	m, err := New(Options{ConfDir: dir, BinDirs: []string{bin}, CacheDir: t.TempDir()})
	must(t, err)
	t.Cleanup(func() { m.Close() })
	if err := m.Ready(); !errors.Is(err, ErrNotReady) || !errors.Is(err, ErrPluginNotFound) || !strings.Contains(err.Error(), `"fake" in `+bin) {
		t.Errorf("Ready without the plugin: %v", err)
	}
	must(t, writeScript(bin+"/fake", "exit 0"))
	becomes(t, m, "a")
}

// TestConcerns tells events that may change the answer from noise next door.
func TestConcerns(t *testing.T) {
	top := t.TempDir()
	dir := top + "/cni/net.d"
	put(t, dir, "a")
	watches := map[string]string{dir: "", filepath.Dir(dir): ""}
	for name, want := range map[string]bool{
		dir + "/10-x.conflist": true,
		dir:                    true,
		top + "/cni":           true,
		top + "/cni/other":     false,
		top + "/noise":         false,
		top + "/cni/net":       false,
	} {
		if got := concerns(name, watches, dir); got != want {
			t.Errorf("concerns(%s) = %v", name, got)
		}
	}
}

// TestCloseLeavesNothing opens and closes many and counts descriptors.
func TestCloseLeavesNothing(t *testing.T) {
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(entries)
	}
	dir := t.TempDir()
	before := count()
	for range 20 {
		m, err := New(Options{ConfDir: dir, BinDirs: []string{dir}, CacheDir: dir})
		must(t, err)
		must(t, m.Close())
	}
	for end := time.Now().Add(5 * time.Second); count() > before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d descriptors before, %d after", before, count())
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for _, o := range []Options{{}, {ConfDir: "/x", CacheDir: "/x"}, {ConfDir: "/x", BinDirs: []string{"/x"}}} {
		if _, err := New(o); !errors.Is(err, ErrInvalid) {
			t.Errorf("New(%+v) = %v", o, err)
		}
	}
}
