package operation

import (
	"context"
	"fmt"
	"sync"
)

// Locks is a lock per object id.
type Locks struct {
	mu   sync.Mutex
	held map[string]*lock // guarded by mu
}

type lock struct {
	ch     chan struct{} // holds one token while the lock is taken
	uses   int           // holders and waiters, guarded by Locks.mu
	holder *Operation    // guarded by Locks.mu; of the holder's context
}

// NewLocks returns a set of open locks.
func NewLocks() *Locks { return &Locks{held: map[string]*lock{}} }

// Lock waits for the lock of id or for ctx. The returned func opens it. The error
// says which operation has it.
func (l *Locks) Lock(ctx context.Context, id string) (func(), error) {
	l.mu.Lock()
	k, ok := l.held[id]
	if !ok {
		k = &lock{ch: make(chan struct{}, 1)}
		l.held[id] = k
	}
	k.uses++
	l.mu.Unlock()
	select {
	case k.ch <- struct{}{}:
		return l.taken(ctx, id, k), nil
	default:
	}
	w := Wait{holder: func() string { return l.holder(id, k) }}
	defer await(ctx, &w)()
	select {
	case k.ch <- struct{}{}:
		return l.taken(ctx, id, k), nil
	case <-ctx.Done():
		text := w.Text()
		l.release(id, k)
		return nil, fmt.Errorf("wait for %s: %w", text, ctx.Err())
	}
}

func (l *Locks) taken(ctx context.Context, id string, k *lock) func() {
	l.mu.Lock()
	k.holder = From(ctx)
	l.mu.Unlock()
	return func() {
		l.mu.Lock()
		k.holder = nil
		l.mu.Unlock()
		<-k.ch
		l.release(id, k)
	}
}

// holder tells of the lock of id who has it.
func (l *Locks) holder(id string, k *lock) string {
	l.mu.Lock()
	o := k.holder
	l.mu.Unlock()
	if o == nil || o.Verb == "" {
		return "another operation on " + id
	}
	return fmt.Sprintf("another operation on %s: %s %s, at step %s", id, o.Verb, o.Object, o.Where())
}

func (l *Locks) release(id string, k *lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.uses--; k.uses == 0 {
		delete(l.held, id)
	}
}
