// Package operation runs the runtime's long operations apart from the callers
// that asked for them, and knows which step each is in and since when.
//
// An operation has a key (what it makes, e.g. a sandbox's name). A second call
// with the same key joins the first instead of colliding with it. A caller that
// gives up gets an error telling the step; the operation goes on with a deadline
// of its own, and a retry finds it or its result. Locks order operations on one
// object; waiting for one ends with the caller.
//
// It owns no record and no policy, and nothing on disk.
package operation

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sort"
	"sync"
	"time"
)

// ErrPanic: a fault of berth's own. What the operation had done by then stays for
// whoever removes or repeats it.
var ErrPanic = errors.New("internal error")

// ErrClosing: the daemon ends. What it has begun is over soon, or broken off; the
// next daemon may be asked again.
var ErrClosing = errors.New("berth is stopping")

// PanicError is an ErrPanic that knows where it came from.
type PanicError struct {
	Value any
	Stack []byte // as the runtime prints it
}

// Recovered makes an error of what recover gave, by whoever has called it.
func Recovered(value any) error { return &PanicError{Value: value, Stack: debug.Stack()} }

// Guarded is f's error, also when f panics.
func Guarded(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = Recovered(p)
		}
	}()
	return f()
}

func (e *PanicError) Error() string { return fmt.Sprintf("%v: %v", ErrPanic, e.Value) }

// Unwrap gives ErrPanic.
func (e *PanicError) Unwrap() error { return ErrPanic }

// Operation is one running operation.
type Operation struct {
	Verb, Object string
	Began        time.Time

	mu    sync.Mutex
	step  string    // guarded by mu
	since time.Time // guarded by mu
	steps []Step    // finished ones, guarded by mu

	cancel context.CancelFunc
	done   chan struct{}
	result string
	err    error
}

// Step is a finished step.
type Step struct {
	Name string
	Took time.Duration
}

// Step ends the step before and begins the named one.
func (o *Operation) Step(name string) {
	now := time.Now()
	o.mu.Lock()
	o.finish(now)
	o.step, o.since = name, now
	o.mu.Unlock()
	reached(o.Verb, name)
}

func (o *Operation) finish(now time.Time) {
	if o.step != "" {
		o.steps = append(o.steps, Step{Name: o.step, Took: now.Sub(o.since)})
	}
}

// Steps ends the running step and returns all finished ones in order.
func (o *Operation) Steps() []Step {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	o.finish(now)
	o.step, o.since = "", now
	return append([]Step(nil), o.steps...)
}

// Where tells the step an operation is in, e.g. `network setup, for 12.1s`.
func (o *Operation) Where() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.step == "" {
		return fmt.Sprintf("waiting, for %s", time.Since(o.Began).Round(time.Millisecond))
	}
	return fmt.Sprintf("%s, for %s", o.step, time.Since(o.since).Round(time.Millisecond))
}

// Current is the running step and since when; before the first one it is empty,
// since the operation began.
func (o *Operation) Current() (step string, since time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.step == "" {
		return "", o.Began
	}
	return o.step, o.since
}

// Err is how the operation ended; to be asked by what Watch calls.
func (o *Operation) Err() error { return o.err }

// Group holds the running operations by key.
type Group struct {
	mu      sync.Mutex
	running map[string]*Operation // guarded by mu
	closed  bool                  // guarded by mu
	crew    Crew
	ended   func(*Operation) // nil: nobody watches
	explain func(*Operation) string
}

// NewGroup returns an empty group.
func NewGroup() *Group { return &Group{running: map[string]*Operation{}} }

// Watch has f called with each operation that has ended, before its callers hear
// of it. f must not block. To be called once, before the first operation.
func (g *Group) Watch(f func(*Operation)) { g.ended = f }

// Explain has f say what an operation waits for, for callers that give up. To be
// called once, before the first operation.
func (g *Group) Explain(f func(*Operation) string) { g.explain = f }

// Request describes an operation to Do.
type Request struct {
	Key          string        // what it makes or changes; equal keys join
	Verb, Object string        // for messages: "RunPodSandbox", "name_ns_uid_0"
	Limit        time.Duration // the operation's own deadline
}

// StillRunning is the error of a caller that gave up before its operation ended.
type StillRunning struct {
	Operation *Operation
	Waits     string // what the operation waits for, as the group's Explain says
	Err       error  // the caller's context error
}

func (e *StillRunning) Error() string {
	where := e.Operation.Where()
	if e.Waits != "" {
		where += ", waiting for " + e.Waits
	}
	return fmt.Sprintf("%s %s: still at step %s; a retry joins it: %v", e.Operation.Verb, e.Operation.Object, where, e.Err)
}

func (e *StillRunning) Unwrap() error { return e.Err }

// Early is a context that ends shortly before ctx's own deadline. A gRPC client
// whose deadline has passed reads no reply any more, so an answer that shall tell
// it what its request waits for must be there before.
func Early(ctx context.Context) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return ctx, func() {}
	}
	const most = 200 * time.Millisecond
	return context.WithDeadline(ctx, end.Add(-min(most, time.Until(end)/5)))
}

// Do joins the running operation of r.Key or starts fn as a new one, and waits
// for its result or until shortly before ctx's deadline (Early). fn runs on although ctx ends; its own context
// carries ctx's values and the deadline r.Limit. A closed group starts nothing: ErrClosing.
func (g *Group) Do(ctx context.Context, r Request, fn func(context.Context, *Operation) (string, error)) (string, error) {
	g.mu.Lock()
	o, ok := g.running[r.Key]
	if !ok && g.closed {
		g.mu.Unlock()
		return "", fmt.Errorf("%s %s: %w", r.Verb, r.Object, ErrClosing)
	}
	if !ok {
		o = &Operation{Verb: r.Verb, Object: r.Object, Began: time.Now(), done: make(chan struct{})}
		g.running[r.Key] = o
		var own context.Context
		own, o.cancel = context.WithTimeout(context.WithoutCancel(ctx), r.Limit)
		g.crew.Go(func() {
			defer o.cancel()
			g.run(own, r.Key, o, fn)
		})
	}
	g.mu.Unlock()
	ctx, cancel := Early(ctx)
	defer cancel()
	select {
	case <-o.done:
		return o.result, o.err
	case <-ctx.Done():
		gaveUp := &StillRunning{Operation: o, Err: ctx.Err()}
		if g.explain != nil {
			gaveUp.Waits = g.explain(o)
		}
		return "", gaveUp
	}
}

func (g *Group) run(ctx context.Context, key string, o *Operation, fn func(context.Context, *Operation) (string, error)) {
	o.err = Guarded(func() (err error) {
		o.result, err = fn(ctx, o)
		return err
	})
	if p := (*PanicError)(nil); errors.As(o.err, &p) {
		o.err = fmt.Errorf("%s %s: %w", o.Verb, o.Object, o.err)
	} else if o.err != nil && errors.Is(ctx.Err(), context.Canceled) { // by Cancel: callers cannot
		o.err = fmt.Errorf("%w: %w", ErrClosing, o.err)
	}
	g.mu.Lock()
	delete(g.running, key)
	g.mu.Unlock()
	if g.ended != nil {
		g.ended(o)
	}
	close(o.done)
}

// Running lists the running operations, oldest first.
func (g *Group) Running() []*Operation {
	g.mu.Lock()
	out := make([]*Operation, 0, len(g.running))
	for _, o := range g.running {
		out = append(out, o)
	}
	g.mu.Unlock()
	sort.Slice(out, func(i, j int) bool { return out[i].Began.Before(out[j].Began) })
	return out
}

// Close lets no operation begin any more. Those that run may still be joined.
func (g *Group) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

// Cancel ends the contexts of the running operations of a closed group, which it
// returns, oldest first. Their callers get ErrClosing.
func (g *Group) Cancel() []*Operation {
	running := g.Running()
	for _, o := range running {
		o.cancel()
	}
	return running
}

// Wait blocks until every operation has ended or ctx is over.
func (g *Group) Wait(ctx context.Context) { g.crew.Wait(ctx) }

// Locks is a lock per object id.
type Locks struct {
	mu   sync.Mutex
	held map[string]*lock // guarded by mu
}

type lock struct {
	ch   chan struct{} // holds one token while the lock is taken
	uses int           // holders and waiters, guarded by Locks.mu
}

// NewLocks returns a set of open locks.
func NewLocks() *Locks { return &Locks{held: map[string]*lock{}} }

// Lock waits for the lock of id or for ctx. The returned func opens it.
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
		return func() { <-k.ch; l.release(id, k) }, nil
	case <-ctx.Done():
		l.release(id, k)
		return nil, fmt.Errorf("wait for another operation on %s: %w", id, ctx.Err())
	}
}

func (l *Locks) release(id string, k *lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.uses--; k.uses == 0 {
		delete(l.held, id)
	}
}
