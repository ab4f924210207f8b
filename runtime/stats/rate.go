package stats

import (
	"sync"
	"time"
)

// Bounds of a rate's window. A shorter one is mostly noise, and two callers
// would spoil each other's; a longer one says nothing about now.
const (
	minWindow = time.Second
	maxWindow = 5 * time.Minute
)

// rates turns CPU time into a rate, by a previous sample of each container.
type rates struct {
	mu   sync.Mutex
	byID map[string]*rate // guarded by mu
}

type rate struct {
	at    time.Time // of the sample that the next window begins with
	usage uint64
	last  *uint64 // of the window before
}

// next is the rate of a container at a new sample, nil while there is none.
// A container's start counts as a sample of 0.
func (r *rates) next(id string, started, now time.Time, usage uint64) *uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.byID[id]
	if p == nil {
		p = &rate{at: started}
		r.byID[id] = p
	}
	window := now.Sub(p.at)
	switch {
	case window > maxWindow || window < 0 || usage < p.usage: // too old, or a clock or counter was set back
		p.last = nil
	case window < minWindow:
		return p.last
	default:
		n := uint64(float64(usage-p.usage) / window.Seconds())
		p.last = &n
	}
	p.at, p.usage = now, usage
	return p.last
}

// keep forgets the containers that are not alive.
func (r *rates) keep(alive func(id string) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := range r.byID {
		if !alive(id) {
			delete(r.byID, id)
		}
	}
}
