package image

import (
	"context"
	"sync/atomic"
)

// slots bound what all pulls and imports together take at one time, however
// many there are. Nobody who has a slot waits for a claim, so all come to
// their turn.
type slots struct {
	layers atomic.Pointer[chan struct{}] // one for each layer that is being fetched and unpacked
	large  chan struct{}                 // and one more for each that needs a lot of memory
}

const (
	largeSlots  = 2
	rangeMemory = 128 << 20 // bytes of layers that come in ranges, see package fetch
)

func newSlots(layers int) *slots {
	s := &slots{large: make(chan struct{}, largeSlots)}
	s.resize(layers)
	return s
}

// resize sets how many layers there can be; those that are there stay and count
// no more.
func (s *slots) resize(layers int) {
	if old := s.layers.Load(); old == nil || cap(*old) != layers {
		fresh := make(chan struct{}, layers)
		s.layers.Store(&fresh)
	}
}

// enter waits for a layer's turn, until ctx is done. leave is to be called once.
func (s *slots) enter(ctx context.Context) (leave func(), err error) {
	return take(ctx, *s.layers.Load())
}

// enterLarge is for a layer that has a slot already.
func (s *slots) enterLarge(ctx context.Context) (leave func(), err error) { return take(ctx, s.large) }

func take(ctx context.Context, slots chan struct{}) (func(), error) {
	select {
	case slots <- struct{}{}:
		return func() { <-slots }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// atOnce is for what is bounded otherwise: an archive that the operator gave.
func atOnce() (leave func(), err error) { return func() {}, nil }
