package leakcheck

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// process is one line of the process table.
type process struct {
	pid, ppid int
	started   string // clock ticks after boot; with the pid it identifies the process
	state     string // R, S, D, Z, …
	name      string
}

// addProcesses records the processes within the scope: descendants of the
// caller, and whatever mentions one of the paths or sits in one of the cgroups,
// whoever its parent is by now.
func (st State) addProcesses(s Scope) error {
	table, err := readProcesses()
	if err != nil {
		return fmt.Errorf("read the process table: %w", err)
	}
	self := os.Getpid()
	for pid, p := range table {
		if pid == self {
			continue
		}
		ours := s.Descendants && descends(table, pid, self)
		if !ours && (mentions(pid, s.Paths) || inCgroup(pid, s.Cgroups)) {
			ours = true
		}
		if ours {
			key := fmt.Sprintf("process %d %s", pid, p.started)
			st[key] = fmt.Sprintf("process %d (parent %d, state %s): %s", pid, p.ppid, p.state, commandLine(p))
		}
	}
	return nil
}

func readProcesses() (map[int]process, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	table := make(map[int]process, len(names))
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if p, ok := readProcess(pid); ok {
			table[pid] = p
		}
	}
	return table, nil
}

// readProcess parses /proc/<pid>/stat. The name stands in parentheses and may
// hold anything, so the fields count from the last closing one.
func readProcess(pid int) (process, bool) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return process{}, false
	}
	text := string(data)
	open, end := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if open < 0 || end < open {
		return process{}, false
	}
	fields := strings.Fields(text[end+1:])
	if len(fields) < 20 {
		return process{}, false
	}
	ppid, err := strconv.Atoi(fields[1])
	if err != nil {
		return process{}, false
	}
	return process{pid: pid, ppid: ppid, started: fields[19], state: fields[0], name: text[open+1 : end]}, true
}

// descends reports whether ancestor is among the parents of pid.
func descends(table map[int]process, pid, ancestor int) bool {
	for range table { // bounds the walk: the table is not read at one instant
		p, ok := table[pid]
		if !ok || p.ppid == 0 {
			return false
		}
		if p.ppid == ancestor {
			return true
		}
		pid = p.ppid
	}
	return false
}

// mentions reports whether the process has one of the directories in its
// command line, environment, executable, working directory or root file system.
func mentions(pid int, dirs []string) bool {
	if len(dirs) == 0 {
		return false
	}
	base := fmt.Sprintf("/proc/%d/", pid)
	for _, link := range []string{"exe", "cwd", "root"} {
		if target, err := os.Readlink(base + link); err == nil && containsAny(target, dirs) {
			return true
		}
	}
	for _, file := range []string{"cmdline", "environ"} {
		if data, err := os.ReadFile(base + file); err == nil && containsAny(string(data), dirs) {
			return true
		}
	}
	return rootMountedFrom(pid, dirs)
}

// rootMountedFrom reports whether the process's root mount names one of the
// directories, as a container's overlay does long after its runtime is gone.
func rootMountedFrom(pid int, dirs []string) bool {
	ns := func(p string) string { l, _ := os.Readlink(filepath.Join("/proc", p, "ns/mnt")); return l }
	if own := ns(strconv.Itoa(pid)); own == "" || own == ns("self") {
		return false
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == "/" && containsAny(line, dirs) {
			return true
		}
	}
	return false
}

func inCgroup(pid int, prefixes []string) bool {
	if len(prefixes) == 0 {
		return false
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(data)) {
		for _, part := range strings.Split(strings.TrimSpace(line), "/")[1:] {
			if hasAnyPrefix(part, prefixes) {
				return true
			}
		}
	}
	return false
}

// commandLine returns the arguments, or the name in brackets for a process that
// has none, such as a zombie.
func commandLine(p process) string {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
	text := strings.TrimSpace(strings.ReplaceAll(string(data), "\x00", " "))
	if text == "" {
		return "[" + p.name + "]"
	}
	if len(text) > 300 {
		text = text[:300] + "…"
	}
	return text
}

func containsAny(text string, parts []string) bool {
	for _, part := range parts {
		if part != "" && strings.Contains(text, part) {
			return true
		}
	}
	return false
}

func hasAnyPrefix(text string, prefixes []string) bool {
	for _, p := range prefixes {
		if p != "" && strings.HasPrefix(text, p) {
			return true
		}
	}
	return false
}
