package leakcheck

import (
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sort"
	"time"
)

// Scope says what belongs to the caller. Its zero value covers nothing.
type Scope struct {
	Paths       []string // absolute; mounts below them, processes that mention them
	Links       []string // prefixes of link names in the caller's network namespace
	Cgroups     []string // prefixes of cgroup directory names
	Leases      []string // host-local data directories; need not exist
	Files       []string // directories whose content counts; need not exist
	Tables      bool     // nftables tables of daemons whose directories are below Paths
	Descendants bool     // descendants of the calling process
	FDs         bool     // open descriptors of the calling process
}

// State is what a snapshot saw: a key that identifies the thing over time, and
// its description.
type State map[string]string

// Snapshot records what exists within the scope. It fails only when /proc cannot
// be read, or nft not be run when tables are asked for; what vanishes while it looks is left out.
func Snapshot(s Scope) (State, error) {
	st := State{}
	if err := st.addProcesses(s); err != nil {
		return nil, err
	}
	mounts, err := readMounts("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	st.addMounts(mounts, s.Paths)
	st.addCgroups(mounts, s.Cgroups)
	st.addLinks(s.Links)
	if s.Tables {
		if err := st.addTables(s.Paths); err != nil {
			return nil, err
		}
	}
	for _, dir := range s.Leases {
		st.addFiles("lease ", dir, func(name string) bool { return net.ParseIP(name) != nil })
	}
	for _, dir := range s.Files {
		st.addFiles("file ", dir, func(string) bool { return true })
	}
	if s.FDs {
		st.addFDs()
	}
	return st, nil
}

// Diff describes what is in after and was not in before, sorted.
func Diff(before, after State) []string {
	var leaks []string
	for key, text := range after {
		if _, ok := before[key]; !ok {
			leaks = append(leaks, text)
		}
	}
	sort.Strings(leaks)
	return leaks
}

// Wait compares with before until nothing is left or the time is over, and
// returns what is left then. It blocks for at most about that time.
func Wait(before State, s Scope, limit time.Duration) ([]string, error) {
	end := time.Now().Add(limit)
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 250*time.Millisecond) {
		after, err := Snapshot(s)
		if err != nil {
			return nil, err
		}
		leaks := Diff(before, after)
		if len(leaks) == 0 || time.Now().After(end) {
			return leaks, nil
		}
		time.Sleep(pause)
	}
}

// addFiles records the entries below dir whose base name is wanted.
func (st State) addFiles(kind, dir string, want func(name string) bool) {
	_ = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err == nil && path != dir && want(filepath.Base(path)) {
			st[kind+path] = kind + path
		}
		return nil // an unreadable or vanished entry is not a leak
	})
}

// addFDs records this process's descriptors by number and target. The poller's
// own are left out: the Go runtime opens them once, whenever it first needs them.
func (st State) addFDs() {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil || target == "anon_inode:[eventpoll]" || target == "anon_inode:[eventfd]" {
			continue // the descriptor that read the directory is gone by now
		}
		st["fd "+e.Name()+" "+target] = "descriptor " + e.Name() + " of the test process: " + target
	}
}
