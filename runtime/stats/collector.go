package stats

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Target is a container to measure.
type Target struct {
	ID      string
	Cgroup  string    // path below each hierarchy
	Layer   string    // its writable layer's directory
	Started time.Time // of its init
}

// Result is what could be measured of a target.
type Result struct {
	Sample
	Layer *Layer // nil while it is unknown
	Err   error  // ErrGone, or what the kernel said; then the rest is empty
}

// Collector measures containers and remembers what their next measurement
// needs. It may be used by many goroutines.
type Collector struct {
	cgroups *Cgroups
	rates   rates
	layers  *layers
}

// NewCollector makes a Collector. measure tells what a directory takes; it is
// called in the background, for at most three directories at once, and not
// again for a directory while a call for it runs.
func NewCollector(cgroups *Cgroups, measure func(dir string) (bytes, inodes uint64, err error)) *Collector {
	return &Collector{cgroups: cgroups, rates: rates{byID: map[string]*rate{}}, layers: newLayers(measure)}
}

// Collect measures targets; results are in their order, and the failure of one
// is its own. It waits for the cgroups and at most some milliseconds for
// layers; sizes may be some seconds old, as their time says. The error is the
// context's.
func (c *Collector) Collect(ctx context.Context, targets []Target) ([]Result, error) {
	now := time.Now()
	var waits []<-chan struct{}
	for _, t := range targets {
		if w := c.layers.refresh(t.ID, t.Layer, now); w != nil {
			waits = append(waits, w)
		}
	}
	results := make([]Result, len(targets))
	c.read(ctx, targets, results)
	awaitAll(ctx, waits)
	for i, t := range targets {
		if results[i].Err == nil {
			results[i].Layer = c.layers.last(t.ID)
		}
	}
	return results, ctx.Err()
}

// read fills in the samples, with a few goroutines: the kernel sums up each
// cgroup's counters on demand, which is most of the time.
func (c *Collector) read(ctx context.Context, targets []Target, results []Result) {
	var next atomic.Int64
	work := func() {
		for ctx.Err() == nil {
			i := int(next.Add(1)) - 1
			if i >= len(targets) {
				return
			}
			t, r := targets[i], &results[i]
			if r.Sample, r.Err = c.cgroups.Read(t.Cgroup); r.CPU != nil {
				r.CPU.Rate = c.rates.next(t.ID, t.Started, r.At, r.CPU.Usage)
			}
		}
	}
	var all sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), 4, len(targets)) - 1 {
		all.Go(work)
	}
	work()
	all.Wait()
}

// awaitAll waits until all channels are closed, patience is over, or ctx ends.
func awaitAll(ctx context.Context, waits []<-chan struct{}) {
	if len(waits) == 0 {
		return
	}
	over := time.NewTimer(patience)
	defer over.Stop()
	for _, w := range waits {
		select {
		case <-w:
		case <-over.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// Keep forgets what is remembered of containers that are not alive. Cheap;
// call it with every collection, and memory stays bounded by the living.
func (c *Collector) Keep(alive func(id string) bool) {
	c.rates.keep(alive)
	c.layers.keep(alive)
}
