package stats

import (
	"sync"
	"time"
)

const (
	// behindAge is how old a value may be before it is measured again.
	behindAge = 5 * time.Second
	// behindShare bounds what measuring costs: what took t to measure is left
	// alone for behindShare times t.
	behindShare = 20
	// quick is what a measurement may take to be waited for, and to be done
	// beside others; what took longer stands in a queue of its own.
	quick = 2 * time.Millisecond
	// measurers is how many are measured at once.
	measurers = 2
)

// Layer is the size of a writable layer, as du counts it.
type Layer struct {
	At            time.Time
	Bytes, Inodes uint64
}

// behind measures what may take long (a tree of files, a thousand
// descriptors) behind the replies, and remembers the values by container.
type behind[T any] struct {
	measure    func(what string) (T, error)
	fast, slow chan struct{} // semaphores

	mu   sync.Mutex
	byID map[string]*entry[T] // guarded by mu
}

type entry[T any] struct {
	value *T // last one; guarded by behind.mu, as all here
	tried time.Time
	took  time.Duration
	busy  chan struct{} // closed when the running measurement ends; nil when none runs
}

func newBehind[T any](measure func(what string) (T, error)) *behind[T] {
	return &behind[T]{measure: measure, fast: make(chan struct{}, measurers), slow: make(chan struct{}, 1), byID: map[string]*entry[T]{}}
}

// refresh sees to it that a stale value gets measured, and returns what to wait
// for; nil when the value is fresh, or known to take long.
func (b *behind[T]) refresh(id, what string, now time.Time) <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.byID[id]
	if e == nil {
		e = &entry[T]{}
		b.byID[id] = e
	}
	if e.busy == nil {
		if now.Sub(e.tried) < max(behindAge, behindShare*e.took) {
			return nil
		}
		e.busy = make(chan struct{})
		queue := b.fast
		if e.took > quick {
			queue = b.slow
		}
		go b.run(e, what, queue)
	}
	if e.took > quick {
		return nil
	}
	return e.busy
}

// run measures once. A value that cannot be had (the container is being
// removed) leaves the old one.
func (b *behind[T]) run(e *entry[T], what string, queue chan struct{}) {
	queue <- struct{}{}
	began := time.Now()
	value, err := b.measure(what)
	ended := time.Now()
	<-queue

	b.mu.Lock()
	defer b.mu.Unlock()
	e.tried, e.took = ended, ended.Sub(began)
	if err == nil {
		e.value = &value
	}
	close(e.busy)
	e.busy = nil
}

// last is the last known value, nil when there is none.
func (b *behind[T]) last(id string) *T {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e := b.byID[id]; e != nil {
		return e.value
	}
	return nil
}

// keep forgets the containers that are not alive.
func (b *behind[T]) keep(alive func(id string) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id := range b.byID {
		if !alive(id) {
			delete(b.byID, id)
		}
	}
}
