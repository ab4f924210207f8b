package main

import (
	"os"
	"path/filepath"
	"sync"

	"berth/oci/monitor"
)

// kills accounts for processes that the kernel killed for want of memory, where
// a container's own counter may be gone when its end is looked at: systemd removes
// a scope's cgroup as soon as it is empty. On cgroup v2 the counter of the cgroup
// above has the sum of all below it, also of those that are gone. What of it no
// container accounts for is the vanished one's.
type kills struct {
	mu      sync.Mutex
	parents map[string]*parentKills // by directory; guarded by mu
}

// parentKills is one cgroup with containers in it.
type parentKills struct {
	strange uint64              // of no container of ours, or of one that has ended
	within  map[*container]bool // that have not ended
}

// join notes a container that has begun or was adopted.
func (k *kills) join(c *container) {
	dir := above(c)
	if dir == "" {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.parents == nil {
		k.parents = map[string]*parentKills{}
	}
	p := k.parents[dir]
	if p == nil {
		p = &parentKills{within: map[*container]bool{}}
		k.parents[dir] = p
	}
	p.within[c] = true
	p.strange = less(countKills(dir), p.own())
}

// leave notes a container's end and tells whether the kernel killed a process of
// it in this life. To be called once, while its end is being recorded.
func (k *kills) leave(c *container) bool {
	dir := above(c)
	if dir == "" {
		return c.info.Cgroups.OOMKills() > c.info.OOMKills
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.parents[dir]
	if p == nil {
		return c.info.Cgroups.OOMKills() > c.info.OOMKills
	}
	killed := c.info.Cgroups.OOMKills() > c.info.OOMKills
	if _, err := os.Stat(c.info.Cgroups.Memory); err != nil {
		killed = countKills(dir) > p.strange+p.own()
	}
	delete(p.within, c)
	p.strange = less(countKills(dir), p.own())
	if len(p.within) == 0 {
		delete(k.parents, dir)
	}
	return killed
}

// save is what is known of kills in cgroups that are gone.
func (k *kills) save() map[string]uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	strange := map[string]uint64{}
	for dir, p := range k.parents {
		strange[dir] = p.strange
	}
	return strange
}

// restore goes on from what was saved, when the containers have joined.
func (k *kills) restore(strange map[string]uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for dir, n := range strange {
		if p := k.parents[dir]; p != nil {
			p.strange = n
		}
	}
}

// own is the sum of the counters of the containers that have not ended.
func (p *parentKills) own() uint64 {
	sum := uint64(0)
	for c := range p.within {
		sum += c.info.Cgroups.OOMKills()
	}
	return sum
}

// above is the cgroup over a container's, on cgroup v2 only.
func above(c *container) string {
	if c.info.Cgroups.Unified == "" || c.info.Cgroups.Memory == "" {
		return ""
	}
	return filepath.Dir(c.info.Cgroups.Memory)
}

func countKills(dir string) uint64 {
	return monitor.Cgroups{Unified: dir, Memory: dir}.OOMKills()
}

func less(a, b uint64) uint64 {
	if a < b {
		return 0
	}
	return a - b
}
