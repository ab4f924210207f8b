package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

// Inotify alone is not enough: a watch dies with the directory it was set on,
// and events are lost when the queue overflows. So the directory is also looked
// at every pollInterval, which costs a few stats. Events are let come to rest
// first, because a file that is being written is not valid yet.
const (
	pollInterval = 2 * time.Second
	restInterval = 50 * time.Millisecond
)

// Tests replace these, to poll faster or to find no inotify instance.
var (
	pollEvery  = pollInterval
	newWatcher = fsnotify.NewWatcher
)

// watch follows the directory until ctx ends.
func (m *Manager) watch(ctx context.Context) {
	var events chan fsnotify.Event
	var lost chan error
	watcher, err := newWatcher()
	if err != nil {
		m.mu.Lock()
		m.watched = fmt.Sprintf("watch %s: %v", m.o.ConfDir, err)
		m.mu.Unlock()
	} else {
		defer watcher.Close()
		events, lost = watcher.Events, watcher.Errors
	}
	watches := map[string]string{} // directory → identity when it was added
	if m.answers() {
		follow(watcher, watches, m.o.ConfDir)
		m.check() // what changed before the first watch was set
	}

	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	var rest <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-events:
			if rest == nil && concerns(event.Name, watches, m.o.ConfDir) {
				rest = time.After(restInterval)
			}
			continue
		case <-lost:
			// An overflow of the queue: look at once.
		case <-rest:
			rest = nil
		case <-poll.C:
		}
		if m.answers() { // else following it would hang as well
			follow(watcher, watches, m.o.ConfDir)
			m.check()
		}
	}
}

// answers looks at the directory and tells whether it has answered.
func (m *Manager) answers() bool {
	m.check()
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.silent.IsZero()
}

// follow puts watches on what can change the content of dir: itself, the
// directory in which it or a link to it stands, and, as long as these are
// missing, the nearest one above. It renews what was replaced.
func follow(w *fsnotify.Watcher, watches map[string]string, dir string) {
	if w == nil {
		return
	}
	want := places(dir)
	for path := range watches {
		if !slices.Contains(want, path) {
			_ = w.Remove(path) // the kernel may have dropped it already
			delete(watches, path)
		}
	}
	alive := w.WatchList()
	for _, path := range want {
		info, err := os.Stat(path)
		if err != nil {
			continue
		}
		id := identity(info)
		if watches[path] == id && slices.Contains(alive, path) {
			continue
		}
		_ = w.Remove(path)
		if w.Add(path) == nil {
			watches[path] = id
		}
	}
}

// places lists the directories to watch for dir.
func places(dir string) []string {
	list := []string{nearest(dir)}
	add := func(path string) {
		if path = nearest(path); !slices.Contains(list, path) {
			list = append(list, path)
		}
	}
	add(filepath.Dir(dir))
	// Each link on the way may be turned elsewhere, and its target replaced.
	for range 8 {
		target, err := os.Readlink(dir)
		if err != nil {
			break
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(dir), target)
		}
		dir = target
		add(dir)
		add(filepath.Dir(dir))
	}
	return list
}

// nearest returns path, or the nearest directory above that exists.
func nearest(path string) string {
	for path != filepath.Dir(path) {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			return path
		}
		path = filepath.Dir(path)
	}
	return path
}

// concerns leaves out what happens in a directory that is watched only because
// dir, or a link's target, is to appear below it: that directory may be busy.
func concerns(name string, watches map[string]string, dir string) bool {
	resolved, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return true
	}
	parent := filepath.Dir(name)
	if parent == dir || parent == resolved {
		return true
	}
	for _, path := range []string{dir, resolved} {
		if name == path || strings.HasPrefix(path, name+"/") {
			return true
		}
	}
	_, watched := watches[name]
	return watched
}

// identity tells one file from another that has taken its name.
func identity(info fs.FileInfo) string {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	return fmt.Sprintf("%d:%d", st.Dev, st.Ino)
}
