package stats

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
	for _, dir := range []string{c.cpuacct, c.memory} {
		if dir != "" {
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
				_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+memory"), 0)
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
