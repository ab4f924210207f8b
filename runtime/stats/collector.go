package stats

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// How long one reply waits in all for what is measured behind it.
const (
	patience       = 10 * time.Millisecond
	detailPatience = time.Second // a first scrape is worth waiting for; later ones find what it began
)

// Target is a container, or a pod's own cgroup, to measure.
type Target struct {
	ID      string
	Cgroup  string    // path below each hierarchy
	Layer   string    // its writable layer's directory; empty for a pod
	Started time.Time // of its init, or of its cgroup; zero when that is not known
	PID     int       // its init; 0 for a pod
	Count   bool      // count its processes
}

// Result is what could be measured of a target.
type Result struct {
	Sample
	Layer     *Layer  // nil while it is unknown
	Processes *uint64 // when they were to be counted
	Err       error   // ErrGone, or what the kernel said; then the rest is empty
}

// Collector measures containers and remembers what their next measurement
// needs. It may be used by many goroutines.
type Collector struct {
	cgroups *Cgroups
	rates   rates
	layers  *behind[Layer]
	files   *behind[Files]
}

// NewCollector makes a Collector. measure tells what a directory takes; it is
// called in the background, for at most three directories at once, and not
// again for a directory while a call for it runs.
func NewCollector(cgroups *Cgroups, measure func(dir string) (bytes, inodes uint64, err error)) *Collector {
	return &Collector{cgroups: cgroups, rates: rates{byID: map[string]*rate{}}, files: newBehind(cgroups.files),
		layers: newSizes(measure)}
}

// Collect measures targets; results are in their order, and the failure of one
// is its own. It waits for the cgroups and at most some milliseconds for
// layers; sizes may be some seconds old, as their time says. The error is the
// context's.
func (c *Collector) Collect(ctx context.Context, targets []Target) ([]Result, error) {
	waits := c.refreshLayers(targets)
	results := make([]Result, len(targets))
	each(ctx, len(targets), func(i int) {
		t, r := targets[i], &results[i]
		if r.Sample, r.Err = c.cgroups.Read(t.Cgroup); r.Err == nil && t.Count {
			var p *Processes
			if p, r.Err = c.cgroups.processes(t.Cgroup, 0); r.Err == nil {
				r.Processes = &p.Count
			}
		}
		if r.Err != nil {
			r.Sample = Sample{}
			return
		}
		c.rate(t, &r.Sample)
	})
	awaitAll(ctx, waits, patience)
	for i, t := range targets {
		if results[i].Err == nil {
			results[i].Layer = c.layers.last(t.ID)
		}
	}
	return results, ctx.Err()
}

// Details is Collect for everything there is. It waits for at most a second for
// what was never measured before.
func (c *Collector) Details(ctx context.Context, targets []Target) ([]Detail, error) {
	waits := c.refreshLayers(targets)
	now := time.Now()
	for _, t := range targets {
		if w := c.files.refresh(t.ID, t.Cgroup, now); w != nil {
			waits = append(waits, w)
		}
	}
	details := make([]Detail, len(targets))
	each(ctx, len(targets), func(i int) {
		d, err := c.cgroups.detail(targets[i])
		if d.Err = err; err == nil {
			c.rate(targets[i], &d.Sample)
		}
		details[i] = d
	})
	awaitAll(ctx, waits, detailPatience)
	for i, t := range targets {
		if details[i].Err == nil {
			details[i].Layer, details[i].Files = c.layers.last(t.ID), c.files.last(t.ID)
		}
	}
	return details, ctx.Err()
}

func (c *Collector) refreshLayers(targets []Target) []<-chan struct{} {
	now := time.Now()
	var waits []<-chan struct{}
	for _, t := range targets {
		if t.Layer == "" {
			continue
		}
		if w := c.layers.refresh(t.ID, t.Layer, now); w != nil {
			waits = append(waits, w)
		}
	}
	return waits
}

func (c *Collector) rate(t Target, s *Sample) {
	if s.CPU != nil {
		s.CPU.Rate = c.rates.next(t.ID, t.Started, s.At, s.CPU.Usage)
	}
}

// each calls do for every number below n, with a few goroutines: the kernel
// sums up each cgroup's counters on demand, which is most of the time.
func each(ctx context.Context, n int, do func(i int)) {
	var next atomic.Int64
	work := func() {
		for ctx.Err() == nil {
			i := int(next.Add(1)) - 1
			if i >= n {
				return
			}
			do(i)
		}
	}
	var all sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), 4, n) - 1 {
		all.Go(work)
	}
	work()
	all.Wait()
}

// awaitAll waits until all channels are closed, it took too long, or ctx ends.
func awaitAll(ctx context.Context, waits []<-chan struct{}, long time.Duration) {
	if len(waits) == 0 {
		return
	}
	over := time.NewTimer(long)
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

// Keep forgets what is remembered of containers and pods that are not alive.
// Cheap; call it with every collection, and memory stays bounded by the living.
func (c *Collector) Keep(alive func(id string) bool) {
	c.rates.keep(alive)
	c.layers.keep(alive)
	c.files.keep(alive)
}
