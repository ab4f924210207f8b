package stats

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The files that only a Detail reads, beside version1 and version2.
var (
	more1 = tree{
		"cpu/cpu.shares": "1\n", "pids/cgroup.procs": "1\n", "blkio/cgroup.procs": "1\n", "hugetlb/cgroup.procs": "1\n",
		"cpuacct/pod/c/cpuacct.usage_user":                      "100\n",
		"cpuacct/pod/c/cpuacct.usage_sys":                       "23\n",
		"cpu/pod/c/cpu.stat":                                    "nr_periods 10\nnr_throttled 3\nthrottled_time 7000000000\nnr_bursts 0\n",
		"cpu/pod/c/cpu.shares":                                  "512\n",
		"cpu/pod/c/cpu.cfs_period_us":                           "100000\n",
		"cpu/pod/c/cpu.cfs_quota_us":                            "20000\n",
		"memory/pod/c/memory.stat":                              version1["memory/pod/c/memory.stat"] + "pgfault 5\npgmajfault 6\ntotal_mapped_file 8192\ntotal_active_file 21\ntotal_active_anon 22\ntotal_inactive_anon 23\n",
		"memory/pod/c/memory.kmem.usage_in_bytes":               "31\n",
		"memory/pod/c/memory.max_usage_in_bytes":                "32\n",
		"memory/pod/c/memory.failcnt":                           "33\n",
		"memory/pod/c/memory.soft_limit_in_bytes":               none,
		"memory/pod/c/memory.oom_control":                       "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
		"pids/pod/c/pids.current":                               "9\n",
		"pids/pod/c/pids.max":                                   "max\n",
		"pids/pod/c/cgroup.procs":                               "100\n200\n",
		"pids/pod/c/inner/cgroup.procs":                         "300\n",
		"blkio/pod/c/blkio.throttle.io_service_bytes_recursive": "254:0 Read 4096\n254:0 Write 512\n254:0 Total 4608\nTotal 4608\n",
		"blkio/pod/c/blkio.throttle.io_serviced_recursive":      "254:0 Read 2\n254:0 Write 1\nTotal 3\n",
		"hugetlb/pod/c/hugetlb.2MB.usage_in_bytes":              "2097152\n",
		"hugetlb/pod/c/hugetlb.2MB.max_usage_in_bytes":          "4194304\n",
	}
	more2 = tree{
		"pod/c/cpu.stat":            "usage_usec 123456\nuser_usec 100\nsystem_usec 23\nnr_periods 10\nnr_throttled 3\nthrottled_usec 7000000\n",
		"pod/c/cpu.max":             "20000 100000\n",
		"pod/c/memory.stat":         version2["pod/c/memory.stat"] + "file_mapped 8192\nkernel 31\nactive_anon 22\ninactive_anon 23\nanon_thp 24\nshmem_thp 25\nfile_thp 26\n",
		"pod/c/memory.peak":         "32\n",
		"pod/c/memory.events":       "low 0\nhigh 0\nmax 33\noom 2\noom_kill 2\noom_group_kill 0\n",
		"pod/c/memory.min":          "0\n",
		"pod/c/pids.current":        "9\n",
		"pod/c/pids.max":            "100\n",
		"pod/c/cgroup.procs":        "100\n200\n",
		"pod/c/inner/cgroup.procs":  "300\n",
		"pod/c/io.stat":             "254:0 rbytes=4096 wbytes=512 rios=2 wios=1 dbytes=7 dios=1\n7:1\nodd rbytes=1\n",
		"pod/c/hugetlb.2MB.current": "2097152\n",
	}
)

func detailOf(t *testing.T, files tree) Detail {
	t.Helper()
	c := OpenCgroups(files.make(t))
	c.hugeSizes = []string{"2MB", "1GB"}
	d, err := c.detail(Target{Cgroup: "/pod/c", PID: 200})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// expect compares figures; those that are not named must be unknown.
func (d *Detail) expect(t *testing.T, want map[Figure]uint64) {
	t.Helper()
	for k := range figures {
		got, known := d.Get(k)
		n, expected := want[k]
		if known != expected || got != n {
			t.Errorf("figure %d: %d, known: %v; want %d, known: %v", k, got, known, n, expected)
		}
	}
}

func TestDetail1(t *testing.T) {
	d := detailOf(t, version1.with(more1))
	want := map[Figure]uint64{
		CPUUser: 100, CPUSystem: 23, CPUPeriods: 10, CPUThrottled: 3, CPUThrottledTime: 7e9, CPUPeriod: 1e8, CPUQuota: 2e7, CPUShares: 512,
		MemoryCache: 4096, MemoryMapped: 8192, MemoryKernel: 31, MemoryPeak: 32, MemoryLimitHits: 33, MemoryActiveFile: 21, MemoryInactiveFile: 300,
		MemoryActiveAnon: 22, MemoryInactiveAnon: 23, MemoryAnonHuge: 9, MemorySharedHuge: 0, MemoryFileHuge: 0, MemoryOwnFaults: 5, MemoryOwnMajor: 6,
		MemoryLimit: 5000, MemoryReservation: 0, MemorySwapLimit: 6000, MemoryKilled: 2, Threads: 9, ThreadsMax: 0,
	}
	d.expect(t, want)
	if d.CPU.Usage != 123456789 || d.Memory.Usage != 1000 {
		t.Errorf("the sample is missing: %s", show(d.Sample))
	}
	wantDevice := `[{"Major":254,"Minor":0,"Bytes":{"Read":4096,"Total":4608,"Write":512},"Count":{"Read":2,"Write":1}}]`
	if got := show(d.Devices); got != wantDevice {
		t.Errorf("devices %s", got)
	}
	if got := show(d.Huge); got != `[{"Size":"2MB","Usage":2097152,"Peak":4194304}]` {
		t.Errorf("huge pages %s", got)
	}
	if d.Processes == nil || d.Processes.Count != 3 {
		t.Errorf("processes %s", show(d.Processes))
	}
}

func TestDetail2(t *testing.T) {
	d := detailOf(t, version2.with(more2))
	d.expect(t, map[Figure]uint64{
		CPUUser: 100e3, CPUSystem: 23e3, CPUPeriods: 10, CPUThrottled: 3, CPUThrottledTime: 7e9, CPUPeriod: 1e8, CPUQuota: 2e7,
		MemoryCache: 1, MemoryMapped: 8192, MemoryKernel: 31, MemoryPeak: 32, MemoryLimitHits: 33, MemoryActiveFile: 2, MemoryInactiveFile: 300,
		MemoryActiveAnon: 22, MemoryInactiveAnon: 23, MemoryAnonHuge: 24, MemorySharedHuge: 25, MemoryFileHuge: 26, MemoryOwnFaults: 11, MemoryOwnMajor: 12,
		MemoryLimit: 5000, MemoryReservation: 0, MemorySwapLimit: 1000, MemoryKilled: 2, Threads: 9, ThreadsMax: 100,
	})
	wantDevice := `[{"Major":254,"Minor":0,"Bytes":{"Discard":7,"Read":4096,"Write":512},"Count":{"Discard":1,"Read":2,"Write":1}}]`
	if got := show(d.Devices); got != wantDevice {
		t.Errorf("devices %s", got)
	}
	if got := show(d.Huge); got != `[{"Size":"2MB","Usage":2097152,"Peak":null}]` {
		t.Errorf("huge pages %s", got)
	}
	if d.Processes == nil || d.Processes.Count != 3 {
		t.Errorf("processes %s", show(d.Processes))
	}
}

// What the kernel does not tell is unknown, and hides nothing else.
func TestDetailWithLessFiles(t *testing.T) {
	d := detailOf(t, version1.with(tree{"cpuacct/pod/c/cgroup.procs": "1\n"}))
	d.expect(t, map[Figure]uint64{
		MemoryCache: 4096, MemoryAnonHuge: 9, MemoryInactiveFile: 300, MemorySharedHuge: 0, MemoryFileHuge: 0,
		MemoryLimit: 5000, MemorySwapLimit: 6000,
	})
	if d.Devices != nil || d.Huge != nil || d.Processes.Count != 1 {
		t.Errorf("made up: %s %s %s", show(d.Devices), show(d.Huge), show(d.Processes))
	}
	d = detailOf(t, tree{"cgroup.controllers": "\n", "pod/c/cpu.stat": "usage_usec 1\nuser_usec 2\n", "pod/c/cgroup.procs": "", "pod/c/cpu.max": "max 50000\n"})
	d.expect(t, map[Figure]uint64{CPUUser: 2000, CPUPeriod: 5e7})
	if d.Memory != nil || d.Processes.Count != 0 || d.Devices != nil {
		t.Errorf("made up: %s", show(d))
	}
}

func TestDetailOfTheVanished(t *testing.T) {
	for name, files := range map[string]tree{
		"1": version1.with(more1), "2": version2.with(more2),
		"1, half gone": version1.with(more1).with(tree{"pids/pod/c/cgroup.procs": "-"}),
		"2, half gone": version2.with(more2).with(tree{"pod/c/cgroup.procs": "-"}),
	} {
		path := "/pod/c"
		if !strings.HasSuffix(name, "half gone") {
			path = "/pod/gone"
		}
		d, err := OpenCgroups(files.make(t)).detail(Target{Cgroup: path})
		if !errors.Is(err, ErrGone) || d.CPU != nil || d.known != 0 {
			t.Errorf("%s: %v, %s", name, err, show(d))
		}
	}
}

// A line that nobody asked for may be anything, and an odd one hides no other file.
func TestOddLines(t *testing.T) {
	d := detailOf(t, version2.with(more2).with(tree{
		"pod/c/memory.stat":   "new -1\nwords a b c\nlonely\n" + more2["pod/c/memory.stat"],
		"pod/c/memory.events": "max nonsense\noom_kill 2\n", "pod/c/memory.peak": "", "pod/c/io.stat": "254:0 rbytes=x wbytes=512\n"}))
	if d.Memory.Usage != 1000 || d.Memory.RSS != 500 {
		t.Errorf("memory %s", show(d.Memory))
	}
	for _, k := range []Figure{MemoryPeak, MemoryLimitHits} {
		if n, ok := d.Get(k); ok {
			t.Errorf("figure %d of nonsense: %d", k, n)
		}
	}
	if n, ok := d.Get(Threads); !ok || n != 9 || d.Devices[0].Bytes["Write"] != 512 {
		t.Errorf("what is behind the odd lines: %s", show(d))
	}
}

// Pressure of version 1's containers comes from a unified hierarchy beside it.
func TestPressureBesideVersion1(t *testing.T) {
	line := "some avg10=0.00 avg60=0.00 avg300=0.00 total=%d\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"
	files := version1.with(tree{"unified/cgroup.controllers": "\n", "unified/pod/c/cpu.pressure": fmt.Sprintf(line, 5),
		"unified/pod/c/memory.pressure": fmt.Sprintf(line, 6), "unified/pod/c/io.pressure": fmt.Sprintf(line, 7)})
	s, err := OpenCgroups(files.make(t)).Read("/pod/c")
	if err != nil {
		t.Fatal(err)
	}
	if s.CPU.Pressure.Some.Total != 5000 || s.Memory.Pressure.Some.Total != 6000 || s.IO.Some.Total != 7000 || s.CPU.Usage != 123456789 {
		t.Errorf("%s", show(s))
	}
	s, err = OpenCgroups(files.with(tree{"unified/pod/c/io.pressure": "-"}).make(t)).Read("/pod/c")
	if err != nil || s.IO != nil || s.CPU.Pressure != nil || s.Memory.Usage != 1000 {
		t.Errorf("without: %s, %v", show(s), err)
	}
}

func TestHugeSizes(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"hugepages-64kB", "hugepages-2048kB", "hugepages-1048576kB", "odd", "hugepages-xkB"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if got := show(hugeSizes(dir)); got != `["1GB","2MB","64KB"]` {
		t.Errorf("sizes %s", got)
	}
	if got := hugeSizes(filepath.Join(dir, "none")); got != nil {
		t.Errorf("without huge pages: %v", got)
	}
}

// A list of processes may be longer than any buffer, and numbers may lie across
// two of its blocks.
func TestLongListOfProcesses(t *testing.T) {
	var text strings.Builder
	const many = 30000
	for i := range many {
		fmt.Fprintf(&text, "%d\n", i+100000)
	}
	c := OpenCgroups(version2.with(tree{"pod/c/cgroup.procs": text.String()}).make(t))
	next := 100000
	err := c.eachProcess("/pod/c", func(pid int) {
		if pid != next {
			t.Fatalf("process %d, want %d", pid, next)
		}
		next++
	})
	if err != nil || next != 100000+many {
		t.Errorf("%d processes, %v", next-100000, err)
	}
	if err := c.eachProcess("", func(int) {}); !errors.Is(err, ErrGone) {
		t.Errorf("of the root cgroup: %v", err)
	}
	if err := OpenCgroups(t.TempDir()).eachProcess("/c", func(int) {}); !errors.Is(err, ErrNoCgroups) {
		t.Errorf("without hierarchies: %v", err)
	}
}

// The test's own process: what it holds is known.
func TestFilesOfAProcess(t *testing.T) {
	c := OpenCgroups(version2.with(tree{"pod/c/cgroup.procs": fmt.Sprintf("%d\n4194304\n", os.Getpid())}).make(t)) // the second is above any pid
	before, err := c.files("/pod/c")
	if err != nil || before.Descriptors == 0 || before.At.IsZero() {
		t.Fatalf("%s, %v", show(before), err)
	}
	var files []*os.File
	for range 1500 { // more than one block of names
		f, err := os.Open("/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	after, err := c.files("/pod/c")
	for _, f := range files {
		f.Close()
	}
	if err != nil || after.Descriptors < before.Descriptors+1490 || after.Sockets > before.Sockets+5 {
		t.Errorf("before %s, with 1500 files more %s, %v", show(before), show(after), err)
	}
	p, err := c.processes("/pod/c", os.Getpid())
	if err != nil || p.Count != 2 || p.OpenFiles == nil || p.OpenFiles.Soft == 0 {
		t.Errorf("processes %s, %v", show(p), err)
	}
	if p, err = c.processes("/pod/c", 1); err != nil || p.OpenFiles != nil {
		t.Errorf("limits of a process that is not in the cgroup: %s, %v", show(p), err)
	}
}

func TestSum(t *testing.T) {
	one := Sample{CPU: &CPU{Usage: 5, Rate: n(1), Pressure: &Pressure{}}, Memory: &Memory{Usage: 10, WorkingSet: 9, RSS: 8, Faults: 7, Major: 6, Available: n(1)}}
	want := Sample{CPU: &CPU{Usage: 10, Rate: n(2)}, Memory: &Memory{Usage: 20, WorkingSet: 18, RSS: 16, Faults: 14, Major: 12}}
	for what, c := range map[string]struct {
		parts []Sample
		want  Sample
	}{
		"two":          {[]Sample{one, one}, want},
		"nothing":      {nil, Sample{CPU: &CPU{Rate: n(0)}, Memory: &Memory{}}},
		"unknown rate": {[]Sample{{CPU: &CPU{Usage: 5}}, one}, Sample{CPU: &CPU{Usage: 10}, Memory: &Memory{Usage: 10, WorkingSet: 9, RSS: 8, Faults: 7, Major: 6}}},
	} {
		if got := Sum(c.want.At, c.parts); show(got) != show(c.want) {
			t.Errorf("%s: %s, want %s", what, show(got), show(c.want))
		}
	}
}

func TestDeviceName(t *testing.T) {
	fs, err := ReadFilesystem("/")
	if err != nil || fs.Bytes == 0 {
		t.Fatalf("%s, %v", show(fs), err)
	}
	if fs.Device != "" && !strings.HasPrefix(fs.Device, "/dev/") {
		t.Errorf("the root filesystem's device %q", fs.Device)
	}
	if got := DeviceName(4095, 1); got != "" {
		t.Errorf("a device that is not there: %q", got)
	}
	if _, err := ReadFilesystem(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of nothing: %v", err)
	}
}
