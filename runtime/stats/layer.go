package stats

import (
	"sync"
	"time"
)

const (
	// layerAge is how old a size may be before it is measured again.
	layerAge = 5 * time.Second
	// layerShare bounds what measuring costs: a layer that took t to measure
	// is left alone for layerShare times t.
	layerShare = 20
	// quick is what a layer may take to be waited for, and to be measured
	// beside others; one that took longer stands in a queue of its own.
	quick = 2 * time.Millisecond
	// patience is how long one reply waits for sizes in all.
	patience = 10 * time.Millisecond
	// measurers is how many layers are measured at once.
	measurers = 2
)

// Layer is the size of a writable layer, as du counts it.
type Layer struct {
	At            time.Time
	Bytes, Inodes uint64
}

// layers measures writable layers in the background and remembers the sizes.
type layers struct {
	measure    func(dir string) (bytes, inodes uint64, err error)
	fast, slow chan struct{} // semaphores

	mu   sync.Mutex
	byID map[string]*layer // guarded by mu
}

type layer struct {
	value *Layer // last size; guarded by layers.mu, as all here
	tried time.Time
	took  time.Duration
	busy  chan struct{} // closed when the running measurement ends; nil when none runs
}

func newLayers(measure func(dir string) (bytes, inodes uint64, err error)) *layers {
	return &layers{measure: measure, fast: make(chan struct{}, measurers), slow: make(chan struct{}, 1), byID: map[string]*layer{}}
}

// refresh sees to it that a stale size gets measured, and returns what to wait
// for; nil when the size is fresh, or known to take long.
func (l *layers) refresh(id, dir string, now time.Time) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.byID[id]
	if e == nil {
		e = &layer{}
		l.byID[id] = e
	}
	if e.busy == nil {
		if now.Sub(e.tried) < max(layerAge, layerShare*e.took) {
			return nil
		}
		e.busy = make(chan struct{})
		queue := l.fast
		if e.took > quick {
			queue = l.slow
		}
		go l.run(e, dir, queue)
	}
	if e.took > quick {
		return nil
	}
	return e.busy
}

// run measures one layer. A size that cannot be had (the container is being
// removed) leaves the old one.
func (l *layers) run(e *layer, dir string, queue chan struct{}) {
	queue <- struct{}{}
	began := time.Now()
	bytes, inodes, err := l.measure(dir)
	ended := time.Now()
	<-queue

	l.mu.Lock()
	defer l.mu.Unlock()
	e.tried, e.took = ended, ended.Sub(began)
	if err == nil {
		e.value = &Layer{At: ended, Bytes: bytes, Inodes: inodes}
	}
	close(e.busy)
	e.busy = nil
}

// last is the last known size, nil when there is none.
func (l *layers) last(id string) *Layer {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.byID[id]; e != nil {
		return e.value
	}
	return nil
}

// keep forgets the containers that are not alive.
func (l *layers) keep(alive func(id string) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range l.byID {
		if !alive(id) {
			delete(l.byID, id)
		}
	}
}
