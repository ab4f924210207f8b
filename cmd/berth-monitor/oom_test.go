package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"berth/oci/monitor"
)

// pod is a cgroup v2 directory in which the test plays the kernel.
type pod struct {
	t   *testing.T
	dir string
}

func (p pod) count(dir string, n int) {
	p.t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "memory.events"), fmt.Appendf(nil, "oom 9\noom_kill %d\n", n), 0o600); err != nil {
		p.t.Fatal(err)
	}
}

func (p pod) container(name string, kills int) *container {
	p.t.Helper()
	dir := filepath.Join(p.dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		p.t.Fatal(err)
	}
	p.count(dir, kills)
	return &container{info: monitor.Container{ID: name, Cgroups: monitor.Cgroups{Unified: dir, Memory: dir}, OOMKills: 0}}
}

func (p pod) vanish(c *container) {
	p.t.Helper()
	if err := os.RemoveAll(c.info.Cgroups.Memory); err != nil {
		p.t.Fatal(err)
	}
}

// A container's cgroup may be gone when its end is looked at; then the cgroup
// above tells, as far as nobody else accounts for it.
func TestKillsOfVanishedCgroups(t *testing.T) {
	p := pod{t, t.TempDir()}
	p.count(p.dir, 5) // of before, and of others
	var k kills
	first, second, third := p.container("first", 0), p.container("second", 0), p.container("third", 0)
	for _, c := range []*container{first, second, third} {
		k.join(c)
	}
	p.count(first.info.Cgroups.Memory, 1) // killed, and its cgroup stays
	p.count(p.dir, 6)
	p.vanish(second) // ended by a signal of somebody's
	if k.leave(second) {
		t.Error("the kill of a neighbour that still has its cgroup is taken for the vanished one's")
	}
	if !k.leave(first) {
		t.Error("a counter of its own is not believed")
	}
	p.count(p.dir, 7)
	p.vanish(third)
	if !k.leave(third) {
		t.Error("a kill that nobody else accounts for is lost with its cgroup")
	}
	if len(k.parents) != 0 {
		t.Errorf("%d pods are remembered after their containers' ends", len(k.parents))
	}
	again := p.container("again", 0)
	k.join(again)
	p.vanish(again)
	if k.leave(again) {
		t.Error("kills of an earlier life are taken for this one's")
	}
}

// A new monitor adopts containers that have counted already.
func TestKillsOfAdoptedContainers(t *testing.T) {
	p := pod{t, t.TempDir()}
	p.count(p.dir, 3)
	var k kills
	one, two := p.container("one", 1), p.container("two", 2)
	k.join(one)
	k.join(two)
	p.count(p.dir, 4)
	p.vanish(two)
	if !k.leave(two) {
		t.Error("a kill after the adoption is lost")
	}
}

// On cgroup v1 nobody removes a container's cgroup but berth.
func TestKillsOnVersion1(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "memory.oom_control"), []byte("oom_kill 2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var k kills
	for base, want := range map[uint64]bool{2: false, 1: true} {
		c := &container{info: monitor.Container{Cgroups: monitor.Cgroups{Memory: dir}, OOMKills: base}}
		k.join(c)
		if got := k.leave(c); got != want {
			t.Errorf("with %d kills before: %v, want %v", base, got, want)
		}
	}
}
