package stats

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// DefaultRoot is where every distribution mounts the hierarchies.
const DefaultRoot = "/sys/fs/cgroup"

// Cgroups reads cgroups below one root: version 2 where the root is the
// unified hierarchy, else version 1 with a directory for each controller, and
// pressure from a unified hierarchy beside it ("hybrid") where one is mounted.
type Cgroups struct {
	unified string // root of version 2, or empty

	// Version 1: roots of the controllers, empty when not mounted.
	cpu, cpuacct, memory, pids, blkio, hugetlb string
	hybrid                                     string // unified hierarchy beside them
	hugeSizes                                  []string
}

// OpenCgroups looks once which hierarchies root has. A host without any is
// not an error here: Read says so.
func OpenCgroups(root string) *Cgroups {
	if exists(filepath.Join(root, "cgroup.controllers")) {
		return &Cgroups{unified: root, hugeSizes: hugeSizes(hugePages)}
	}
	c := &Cgroups{hugeSizes: hugeSizes(hugePages)}
	joined := []string{"cpu,cpuacct", "cpuacct,cpu"}
	for _, h := range []struct {
		into  *string
		dirs  []string
		probe string
	}{
		{&c.cpu, append([]string{"cpu"}, joined...), "cpu.shares"},
		{&c.cpuacct, append([]string{"cpuacct"}, joined...), "cpuacct.usage"},
		{&c.memory, []string{"memory"}, "memory.stat"},
		{&c.pids, []string{"pids"}, "cgroup.procs"},
		{&c.blkio, []string{"blkio"}, "cgroup.procs"},
		{&c.hugetlb, []string{"hugetlb"}, "cgroup.procs"},
		{&c.hybrid, []string{"unified"}, "cgroup.controllers"},
	} {
		for _, dir := range h.dirs {
			if exists(filepath.Join(root, dir, h.probe)) {
				*h.into = filepath.Join(root, dir)
				break
			}
		}
	}
	return c
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Read measures one cgroup with all below it. ErrGone when it is not there or
// path is empty, also when it goes while it is read; ErrNoCgroups. It does not block but for
// the kernel's own summing up.
func (c *Cgroups) Read(path string) (Sample, error) { return c.read(path, nil) }

// read is Read, and sets those figures that are in the same files; f may be nil.
func (c *Cgroups) read(path string, f *Figures) (Sample, error) {
	s := Sample{At: time.Now()}
	var err error
	switch {
	case path == "": // the root cgroup is no container's
		err = ErrGone
	case c.unified != "":
		err = readUnified(filepath.Join(c.unified, path), &s, f)
	case c.cpuacct == "" && c.memory == "":
		err = ErrNoCgroups
	default:
		err = c.readSplit(path, &s, f)
	}
	if err != nil {
		return Sample{}, fmt.Errorf("measure cgroup %s: %w", path, err)
	}
	return s, nil
}

// readSplit reads version 1: a mounted controller has every container.
func (c *Cgroups) readSplit(path string, s *Sample, f *Figures) error {
	if c.cpuacct != "" {
		usage, err := count(filepath.Join(c.cpuacct, path, "cpuacct.usage"))
		if err != nil {
			return err
		}
		s.CPU = &CPU{Usage: usage}
	}
	if c.memory != "" {
		if err := readMemory1(filepath.Join(c.memory, path), s, f); err != nil {
			return err
		}
	}
	if c.hybrid != "" {
		readPressure(filepath.Join(c.hybrid, path), s)
	}
	return nil
}

// readPressure adds what the kernel tells of pressure to what is there.
func readPressure(dir string, s *Sample) {
	if s.IO = pressure(filepath.Join(dir, "io.pressure")); s.IO == nil {
		return // a kernel without, or the cgroup is not in this hierarchy
	}
	if s.CPU != nil {
		s.CPU.Pressure = pressure(filepath.Join(dir, "cpu.pressure"))
	}
	if s.Memory != nil {
		s.Memory.Pressure = pressure(filepath.Join(dir, "memory.pressure"))
	}
}

func readMemory1(dir string, s *Sample, f *Figures) error {
	const noSwap = 1<<64 - 1 // the line is missing where swap is not accounted
	var m Memory
	inactive, swap, tightest := uint64(0), uint64(noSwap), uint64(0)
	err := fields(filepath.Join(dir, "memory.stat"), map[string]*uint64{
		"total_inactive_file": &inactive, "total_rss": &m.RSS, "total_pgfault": &m.Faults, "total_pgmajfault": &m.Major, "total_swap": &swap,
		"hierarchical_memory_limit": &tightest,
	}, f, memoryLines1)
	if err != nil {
		return err
	}
	if m.Usage, err = count(filepath.Join(dir, "memory.usage_in_bytes")); err != nil {
		return err
	}
	m.WorkingSet = less(m.Usage, inactive)
	s.Memory = &m
	if swap != noSwap {
		s.Swap = &Swap{Usage: swap}
	}
	if tightest >= unlimited { // neither the container nor its pod: two files less to open
		return nil
	}
	return limits1(dir, s)
}

// limits1 adds what version 1's limits leave.
func limits1(dir string, s *Sample) error {
	limit, err := number(filepath.Join(dir, "memory.limit_in_bytes"))
	if err != nil || limit == nil {
		return err
	}
	s.Memory.Available = left(limit, s.Memory.WorkingSet)
	if s.Swap == nil {
		return nil
	}
	both, err := optional(filepath.Join(dir, "memory.memsw.limit_in_bytes")) // of memory and swap together
	if err != nil || both == nil {
		return err
	}
	room := less(*both, *limit)
	s.Swap.Available = left(&room, s.Swap.Usage)
	return nil
}

// readUnified reads version 2. cpu.stat is in every cgroup, memory's files
// only where the controller was handed down.
func readUnified(dir string, s *Sample, f *Figures) error {
	var micros uint64
	if err := fields(filepath.Join(dir, "cpu.stat"), map[string]*uint64{"usage_usec": &micros}, f, cpuLines2); err != nil {
		return err
	}
	s.CPU = &CPU{Usage: micros * 1000, Pressure: pressure(filepath.Join(dir, "cpu.pressure"))}
	s.IO = pressure(filepath.Join(dir, "io.pressure"))
	usage, err := count(filepath.Join(dir, "memory.current"))
	if errors.Is(err, ErrGone) && exists(dir) {
		return nil
	}
	if err != nil {
		return err
	}
	return readMemory2(dir, usage, s, f)
}

func readMemory2(dir string, usage uint64, s *Sample, f *Figures) error {
	m := Memory{Usage: usage}
	inactive := uint64(0)
	err := fields(filepath.Join(dir, "memory.stat"), map[string]*uint64{
		"inactive_file": &inactive, "anon": &m.RSS, "pgfault": &m.Faults, "pgmajfault": &m.Major,
	}, f, memoryLines2)
	if err != nil {
		return err
	}
	limit, err := number(filepath.Join(dir, "memory.max"))
	if err != nil {
		return err
	}
	m.WorkingSet = less(usage, inactive)
	m.Available = left(limit, m.WorkingSet)
	m.Pressure = pressure(filepath.Join(dir, "memory.pressure"))
	s.Memory = &m

	swap, err := optional(filepath.Join(dir, "memory.swap.current"))
	if err != nil || swap == nil {
		return err
	}
	most, err := optional(filepath.Join(dir, "memory.swap.max"))
	if err != nil {
		return err
	}
	s.Swap = &Swap{Usage: *swap, Available: left(most, *swap)}
	return nil
}

// optional is number for a file that not every kernel has: nil without it.
func optional(path string) (*uint64, error) {
	n, err := number(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return n, err
}
