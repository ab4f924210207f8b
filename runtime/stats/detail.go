package stats

import (
	"bytes"
	"path/filepath"
	"time"
)

// Detail is everything that is known of a container, for whoever wants more
// than its Sample. It costs three times as much.
type Detail struct {
	Sample
	Figures
	Layer     *Layer      // nil while it is unknown
	Devices   []Device    // disks it used
	Huge      []HugePages // by page size; nil without the controller
	Processes *Processes
	Files     *Files // nil while they are unknown
	Err       error  // ErrGone, or what the kernel said; then the rest is empty
}

// What is read into figures from files that a Sample needs too.
var (
	memoryLines1 = map[string]Figure{
		"total_cache": MemoryCache, "total_mapped_file": MemoryMapped, "total_rss_huge": MemoryAnonHuge,
		"total_active_file": MemoryActiveFile, "total_inactive_file": MemoryInactiveFile,
		"total_active_anon": MemoryActiveAnon, "total_inactive_anon": MemoryInactiveAnon,
		"pgfault": MemoryOwnFaults, "pgmajfault": MemoryOwnMajor,
	}
	memoryLines2 = map[string]Figure{
		"file": MemoryCache, "file_mapped": MemoryMapped, "kernel": MemoryKernel,
		"active_file": MemoryActiveFile, "inactive_file": MemoryInactiveFile, "active_anon": MemoryActiveAnon, "inactive_anon": MemoryInactiveAnon,
		"anon_thp": MemoryAnonHuge, "shmem_thp": MemorySharedHuge, "file_thp": MemoryFileHuge,
		"pgfault": MemoryOwnFaults, "pgmajfault": MemoryOwnMajor, // version 2 counts no cgroup's own alone
	}
	cpuLines2 = map[string]Figure{
		"user_usec": CPUUser, "system_usec": CPUSystem, "throttled_usec": CPUThrottledTime, "nr_periods": CPUPeriods, "nr_throttled": CPUThrottled,
	}
)

// rules1 are version 1's other files, by controller.
var rules1 = map[string][]rule{
	"cpuacct": {
		{file: "cpuacct.usage_user", only: CPUUser},
		{file: "cpuacct.usage_sys", only: CPUSystem},
	},
	"cpu": {
		{file: "cpu.stat", lines: map[string]Figure{"nr_periods": CPUPeriods, "nr_throttled": CPUThrottled, "throttled_time": CPUThrottledTime}},
		{file: "cpu.shares", only: CPUShares},
		{file: "cpu.cfs_period_us", only: CPUPeriod, scale: 1000},
		{file: "cpu.cfs_quota_us", only: CPUQuota, scale: 1000}, // -1 without one is no number: unknown
	},
	"memory": {
		{file: "memory.kmem.usage_in_bytes", only: MemoryKernel},
		{file: "memory.max_usage_in_bytes", only: MemoryPeak},
		{file: "memory.failcnt", only: MemoryLimitHits},
		{file: "memory.limit_in_bytes", only: MemoryLimit},
		{file: "memory.soft_limit_in_bytes", only: MemoryReservation},
		{file: "memory.memsw.limit_in_bytes", only: MemorySwapLimit},
		{file: "memory.oom_control", lines: map[string]Figure{"oom_kill": MemoryKilled}},
	},
	"pids": {{file: "pids.current", only: Threads}, {file: "pids.max", only: ThreadsMax}},
}

// rules2 are version 2's.
var rules2 = []rule{
	{file: "memory.peak", only: MemoryPeak},
	{file: "memory.events", lines: map[string]Figure{"max": MemoryLimitHits, "oom_kill": MemoryKilled}},
	{file: "memory.max", only: MemoryLimit},
	{file: "memory.min", only: MemoryReservation},
	{file: "memory.swap.max", only: MemorySwapLimit},
	{file: "pids.current", only: Threads},
	{file: "pids.max", only: ThreadsMax},
}

// detail measures a container thoroughly. Errors are Read's.
func (c *Cgroups) detail(t Target) (Detail, error) {
	var d Detail
	var err error
	if d.Sample, err = c.read(t.Cgroup, &d.Figures); err != nil {
		return Detail{}, err
	}
	if c.unified != "" {
		dir := filepath.Join(c.unified, t.Cgroup)
		d.read(rules2, func(file string) string { return filepath.Join(dir, file) })
		d.readBandwidth(filepath.Join(dir, "cpu.max"))
		d.Devices = devices2(filepath.Join(dir, "io.stat"))
		d.Huge = c.huge(dir, "current", "")
	} else {
		c.detail1(t.Cgroup, &d)
	}
	d.Processes, err = c.processes(t.Cgroup, t.PID)
	if err != nil {
		return Detail{}, err // it has just gone
	}
	return d, nil
}

func (c *Cgroups) detail1(path string, d *Detail) {
	for controller, root := range map[string]string{"cpu": c.cpu, "cpuacct": c.cpuacct, "memory": c.memory, "pids": c.pids} {
		if root != "" {
			d.read(rules1[controller], func(file string) string { return filepath.Join(root, path, file) })
		}
	}
	d.Set(MemorySharedHuge, 0)
	d.Set(MemoryFileHuge, 0)
	if c.blkio != "" {
		d.Devices = devices1(filepath.Join(c.blkio, path))
	}
	if c.hugetlb != "" {
		d.Huge = c.huge(filepath.Join(c.hugetlb, path), "usage_in_bytes", "max_usage_in_bytes")
	}
}

// readBandwidth reads version 2's "quota period" in microseconds; the quota is
// "max" without a limit.
func (f *Figures) readBandwidth(path string) {
	_ = read(path, func(b []byte) error {
		quota, period, _ := bytes.Cut(bytes.TrimSpace(b), []byte(" "))
		if n, err := parseUint(period); err == nil {
			f.Set(CPUPeriod, n*uint64(time.Microsecond))
		}
		if n, err := parseUint(quota); err == nil {
			f.Set(CPUQuota, n*uint64(time.Microsecond))
		}
		return nil
	})
}
