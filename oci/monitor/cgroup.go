package monitor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// ErrSharedCgroup: a process has no cgroup of its own, so killing by it would
// reach others.
var ErrSharedCgroup = errors.New("no cgroup of its own")

// Cgroups are the directories of a container's cgroup; empty where the
// hierarchy is not mounted or the container has no cgroup of its own there.
type Cgroups struct {
	Unified string `json:"unified,omitempty"` // v2, only when it is the node's only hierarchy
	Freezer string `json:"freezer,omitempty"` // v1
	Pids    string `json:"pids,omitempty"`    // v1
	Memory  string `json:"memory,omitempty"`  // v1, or Unified
}

// Kill returns the directory whose processes are the container's.
func (c Cgroups) Kill() string {
	for _, dir := range []string{c.Unified, c.Freezer, c.Pids, c.Memory} {
		if dir != "" {
			return dir
		}
	}
	return ""
}

// cgroupMounts maps a v1 controller, or "" for v2, to its mount point and the
// cgroup that is visible there.
var cgroupMounts = sync.OnceValues(func() (map[string][2]string, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read cgroup mounts: %w", err)
	}
	mounts := map[string][2]string{}
	for line := range strings.Lines(string(data)) {
		left, right, ok := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 5 || len(r) < 3 {
			continue
		}
		switch r[0] {
		case "cgroup2":
			if _, twice := mounts[""]; !twice {
				mounts[""] = [2]string{l[4], l[3]}
			}
		case "cgroup":
			for _, controller := range strings.Split(r[2], ",") {
				if _, twice := mounts[controller]; !twice {
					mounts[controller] = [2]string{l[4], l[3]}
				}
			}
		}
	}
	return mounts, nil
})

// CgroupRoots are where the hierarchies are mounted, sorted: one on v2, many on v1.
func CgroupRoots() ([]string, error) {
	mounts, err := cgroupMounts()
	if err != nil {
		return nil, err
	}
	var roots []string
	for _, m := range mounts {
		roots = append(roots, m[0])
	}
	slices.Sort(roots)
	return slices.Compact(roots), nil
}

// CgroupsOf reads where a living process is accounted. ErrSharedCgroup when
// that is the root, or a cgroup that holds the caller.
func CgroupsOf(pid int) (Cgroups, error) {
	mounts, err := cgroupMounts()
	if err != nil {
		return Cgroups{}, err
	}
	of, err := readCgroupFile(strconv.Itoa(pid))
	if err != nil {
		return Cgroups{}, err
	}
	self, err := readCgroupFile("self")
	if err != nil {
		return Cgroups{}, err
	}
	dir := func(controller string) string {
		path, m := of[controller], mounts[controller]
		if m[0] == "" || path == "" || path == "/" || within(self[controller], path) {
			return ""
		}
		rel := path
		if m[1] != "/" {
			if !within(path, m[1]) {
				return ""
			}
			rel = strings.TrimPrefix(path, m[1])
		}
		return filepath.Join(m[0], rel)
	}
	c := Cgroups{Freezer: dir("freezer"), Pids: dir("pids"), Memory: dir("memory")}
	if c == (Cgroups{}) {
		c.Unified = dir("")
		c.Memory = c.Unified
	}
	if c.Kill() == "" {
		return c, fmt.Errorf("cgroup of %d: %w", pid, ErrSharedCgroup)
	}
	return c, nil
}

// within reports whether path is dir or below it.
func within(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

func readCgroupFile(pid string) (map[string]string, error) {
	data, err := os.ReadFile("/proc/" + pid + "/cgroup")
	if err != nil {
		return nil, fmt.Errorf("read cgroups: %w", err)
	}
	paths := map[string]string{}
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 {
			continue
		}
		for _, controller := range strings.Split(f[1], ",") {
			paths[controller] = f[2]
		}
	}
	return paths, nil
}

// OOMKills reads how many processes of the memory cgroup the kernel killed for
// want of memory; 0 when it does not say.
func (c Cgroups) OOMKills() uint64 {
	if c.Memory == "" {
		return 0
	}
	name := "memory.oom_control"
	if c.Unified != "" {
		name = "memory.events"
	}
	data, _ := os.ReadFile(filepath.Join(c.Memory, name))
	for line := range strings.Lines(string(data)) {
		if key, value, _ := strings.Cut(strings.TrimSpace(line), " "); key == "oom_kill" {
			n, _ := strconv.ParseUint(value, 10, 64)
			return n
		}
	}
	return 0
}

// Processes lists the pids of a cgroup directory and of those below it. A
// directory that is gone has none.
func Processes(dir string) ([]int, error) {
	var pids []int
	data, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil && !gone(err) {
		return nil, fmt.Errorf("read processes: %w", err)
	}
	for line := range strings.Lines(string(data)) {
		if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			below, err := Processes(filepath.Join(dir, e.Name()))
			if err != nil {
				return nil, err
			}
			pids = append(pids, below...)
		}
	}
	return pids, nil
}

// OwnCgroup is the directory of this process's cgroup of version 2, whichever
// hierarchies the node uses beside. An error where that version is not mounted.
func OwnCgroup() (string, error) {
	mounts, err := cgroupMounts()
	if err != nil {
		return "", err
	}
	self, err := readCgroupFile("self")
	if err != nil {
		return "", err
	}
	m, path := mounts[""], self[""]
	if m[0] == "" || !within(path, m[1]) {
		return "", fmt.Errorf("find own cgroup: cgroup version 2 is not mounted, or without %q", path)
	}
	return filepath.Join(m[0], strings.TrimPrefix(path, strings.TrimSuffix(m[1], "/"))), nil
}
