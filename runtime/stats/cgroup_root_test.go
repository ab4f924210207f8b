package stats

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
)

// hierarchies are the directories in which a container's cgroup would be.
func (c *Cgroups) hierarchies() []string {
	if c.unified != "" {
		return []string{c.unified}
	}
	var out []string
	for _, dir := range []string{c.cpu, c.cpuacct, c.memory, c.pids, c.blkio, c.hybrid} {
		if dir != "" && !slices.Contains(out, dir) {
			out = append(out, dir)
		}
	}
	return out
}

// realCgroup makes a cgroup in this machine's hierarchies, removed with the
// test, and returns its path.
func realCgroup(t testing.TB, c *Cgroups, name string) string {
	t.Helper()
	parent := "/" + leakcheck.Name(t)
	path := parent + "/" + name
	for _, root := range c.hierarchies() {
		if err := os.MkdirAll(filepath.Join(root, parent), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Rmdir(filepath.Join(root, parent)) })
		if c.unified != "" {
			for _, dir := range []string{root, filepath.Join(root, parent)} {
				_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+memory +pids +cpu +io"), 0)
			}
		}
		if err := os.Mkdir(filepath.Join(root, path), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Rmdir(filepath.Join(root, path)) })
	}
	return path
}

// A process that takes 20 MB and some CPU time in a cgroup limited to 200 MB.
func TestRealCgroup(t *testing.T) {
	leakcheck.Start(t)
	const mb, limit = 1 << 20, 200 << 20
	c := OpenCgroups(DefaultRoot)
	path := realCgroup(t, c, "c")
	limits := filepath.Join(c.memory, path, "memory.limit_in_bytes")
	if c.unified != "" {
		limits = filepath.Join(c.unified, path, "memory.max")
	}
	if err := os.WriteFile(limits, []byte(strconv.Itoa(limit)), 0); err != nil {
		t.Fatal(err)
	}
	before, err := c.Read(path)
	if err != nil {
		t.Fatal(err)
	}
	if before.CPU.Usage != 0 || before.Memory.RSS > mb {
		t.Errorf("an empty cgroup: %s", show(before))
	}

	cmd := exec.Command("sh", "-c", `read go; x=$(head -c 20000000 /dev/zero | tr '\0' a); i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo ready; read end`)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		in.Close()
		_ = cmd.Wait()
	}()
	for _, root := range c.hierarchies() {
		if err := os.WriteFile(filepath.Join(root, path, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	fmt.Fprintln(in, "go")
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	took := time.Since(began)
	got, err := c.Read(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("in %v: %s", took, show(got))
	if used := time.Duration(got.CPU.Usage); used < 10*time.Millisecond || used > 4*took {
		t.Errorf("CPU time of %v in %v", used, took)
	}
	m := got.Memory
	if m.RSS < 19*mb || m.RSS > 120*mb || m.WorkingSet < m.RSS || m.Usage < m.WorkingSet || m.Faults < 100 {
		t.Errorf("memory: %s", show(m))
	}
	if m.Available == nil || *m.Available != limit-m.WorkingSet {
		t.Errorf("available: %s", show(m))
	}
	detailOfReal(t, c, Target{Cgroup: path, PID: cmd.Process.Pid}, limit)
}

// detailOfReal checks everything else that is known of the same cgroup.
func detailOfReal(t *testing.T, c *Cgroups, target Target, limit uint64) {
	t.Helper()
	d, err := c.detail(target)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("detail: %s, figures known: %b", show(d), d.known)
	for k, least := range map[Figure]uint64{MemoryPeak: 19 << 20, MemoryLimit: limit, Threads: 1, MemoryOwnFaults: 100, CPUPeriod: 1000, MemoryKilled: 0, MemoryLimitHits: 0, CPUPeriods: 0} {
		if n, ok := d.Get(k); !ok || n < least {
			t.Errorf("figure %d is %d, known: %v; want at least %d", k, n, ok, least)
		}
	}
	user, _ := d.Get(CPUUser)
	system, _ := d.Get(CPUSystem)
	if sum := user + system; sum < 5e6 || sum > d.CPU.Usage*2 {
		t.Errorf("CPU time %d and %d of %d", user, system, d.CPU.Usage)
	}
	if d.Processes.Count != 1 || d.Processes.OpenFiles == nil {
		t.Errorf("processes: %s", show(d.Processes))
	}
	f, err := c.files(target.Cgroup)
	if err != nil || f.Descriptors < 3 || f.Sockets != 0 {
		t.Errorf("files: %s, %v", show(f), err)
	}
	if _, err := os.Stat("/proc/pressure/cpu"); err == nil && (c.unified != "" || c.hybrid != "") && d.CPU.Pressure == nil {
		t.Error("the kernel has pressure, it is not told")
	}
}

// Cgroups that go while they are read are ErrGone, and nothing else.
func TestRealCgroupGoesWhileRead(t *testing.T) {
	leakcheck.Start(t)
	c := OpenCgroups(DefaultRoot)
	for i := range 30 {
		path := realCgroup(t, c, fmt.Sprint("c", i))
		if _, err := c.Read(path); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			for {
				if _, err := c.Read(path); err != nil {
					done <- err
					return
				}
			}
		}()
		for _, root := range c.hierarchies() {
			if err := unix.Rmdir(filepath.Join(root, path)); err != nil {
				t.Fatal(err)
			}
		}
		if err := <-done; !errors.Is(err, ErrGone) {
			t.Fatalf("round %d: %v", i, err)
		}
	}
}

// BenchmarkFiftyDetails measures what a scrape needs from the kernel.
func BenchmarkFiftyDetails(b *testing.B) {
	leakcheck.Start(b)
	c := OpenCgroups(DefaultRoot)
	var targets []Target
	for i := range 50 {
		id := fmt.Sprint("c", i)
		targets = append(targets, Target{ID: id, Cgroup: realCgroup(b, c, id), Layer: id, Started: time.Now()})
	}
	collector := NewCollector(c, sizeOne)
	for b.Loop() {
		details, err := collector.Details(b.Context(), targets)
		if err != nil || details[49].Err != nil {
			b.Fatal(err, details[49].Err)
		}
	}
}

// BenchmarkFiftyContainers measures what a reply needs from the kernel.
func BenchmarkFiftyContainers(b *testing.B) {
	leakcheck.Start(b)
	c := OpenCgroups(DefaultRoot)
	var targets []Target
	for i := range 50 {
		id := fmt.Sprint("c", i)
		targets = append(targets, Target{ID: id, Cgroup: realCgroup(b, c, id), Layer: id, Started: time.Now()})
	}
	collector := NewCollector(c, sizeOne)
	for b.Loop() {
		results, err := collector.Collect(b.Context(), targets)
		if err != nil || results[49].Err != nil {
			b.Fatal(err, results[49].Err)
		}
	}
}
