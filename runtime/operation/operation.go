// Package operation runs the runtime's long operations apart from the callers
// that asked for them, and knows which step each is in and since when.
//
// An operation has a key (what it makes, e.g. a sandbox's name). A second call
// with the same key joins the first instead of colliding with it. A caller that
// gives up gets an error telling the step; the operation goes on with a deadline
// of its own, and a retry finds it or its result. What a caller runs itself is only
// listed (Track). Locks order operations on one object; waiting for one ends with
// the caller. An operation knows what it waits for outside of it: a lock and who
// holds it, a path, a process (Await).
//
// It owns no record and no policy, and nothing on disk.
package operation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
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
	Quiet        time.Duration // see Request

	mu    sync.Mutex
	step  string    // guarded by mu
	since time.Time // guarded by mu
	steps []Step    // finished ones, guarded by mu
	broke string    // the step that failed, guarded by mu
	waits []*Wait   // guarded by mu

	shared any                // of the request that began it
	cancel context.CancelFunc // nil: it ends with its caller
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
	Reached(o.Verb, name)
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

// Broken is Where, of a step that has failed and is about to be undone, in steps of
// its own.
func (o *Operation) Broken() string {
	where := o.Where()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.broke = o.step
	return where
}

// Failed is the step that failed: what Broken was told of, else the last one.
func (o *Operation) Failed() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return cmp.Or(o.broke, o.step)
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

// Tracked tells whether the operation ends with its caller, see Track.
func (o *Operation) Tracked() bool { return o.cancel == nil }

// Err is how the operation ended; to be asked by what Watch calls.
func (o *Operation) Err() error { return o.err }

// Group holds the running operations by key.
type Group struct {
	mu      sync.Mutex
	running map[string]*Operation // guarded by mu
	tracked map[*Operation]bool   // guarded by mu
	closed  bool                  // guarded by mu
	crew    Crew
	ended   func(*Operation) // nil: nobody watches
	explain func(*Operation) string
}

// NewGroup returns an empty group.
func NewGroup() *Group {
	return &Group{running: map[string]*Operation{}, tracked: map[*Operation]bool{}}
}

// Watch has f called with each operation that has ended, before its callers hear
// of it. f must not block. To be called once, before the first operation.
func (g *Group) Watch(f func(*Operation)) { g.ended = f }

// Explain has f say what an operation waits for, for callers that give up. To be
// called once, before the first operation.
func (g *Group) Explain(f func(*Operation) string) { g.explain = f }

// Endless is the Quiet of what may take as long as it likes.
const Endless = time.Duration(1) << 62

// Request describes an operation to Do.
type Request struct {
	Key          string        // what it makes or changes; equal keys join
	Verb, Object string        // for messages: "RunPodSandbox", "name_ns_uid_0"
	Limit        time.Duration // the operation's own deadline
	Quiet        time.Duration // it is expected to take so long, and no wonder

	// Join hears Shared of the request that began the operation, for each that joins
	// it, before it can end. It must not block. Both may be nil.
	Shared any
	Join   func(shared any)
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
	delete(g.tracked, From(ctx)) // what is asked for is listed itself now
	o, ok := g.running[r.Key]
	if !ok && g.closed && From(ctx).Tracked() {
		g.mu.Unlock()
		return "", fmt.Errorf("%s %s: %w", r.Verb, r.Object, ErrClosing)
	}
	if ok && r.Join != nil {
		r.Join(o.shared)
	}
	if !ok {
		o = r.operation()
		g.running[r.Key] = o
		var own context.Context
		own, o.cancel = context.WithTimeout(within(context.WithoutCancel(ctx), o), r.Limit)
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

func (r Request) operation() *Operation {
	return &Operation{Verb: r.Verb, Object: r.Object, Began: time.Now(), Quiet: r.Quiet, shared: r.Shared, done: make(chan struct{})}
}

// Track lists fn among the running operations while the caller runs it. It ends
// with its caller, so nobody can join it and neither Cancel nor Wait minds it.
func (g *Group) Track(ctx context.Context, r Request, fn func(context.Context, *Operation) error) error {
	o := r.operation()
	g.mu.Lock()
	g.tracked[o] = true
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		delete(g.tracked, o)
		g.mu.Unlock()
	}()
	return fn(within(ctx, o), o)
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
	out := make([]*Operation, 0, len(g.running)+len(g.tracked))
	for _, o := range g.running {
		out = append(out, o)
	}
	for o := range g.tracked {
		out = append(out, o)
	}
	g.mu.Unlock()
	sort.Slice(out, func(i, j int) bool { return out[i].Began.Before(out[j].Began) })
	return out
}

// Close lets no operation begin any more but as a part of one that runs, which may
// have to undo something. Those that run may still be joined.
func (g *Group) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

// Cancel ends the contexts of the running operations of a closed group that would
// outlive their callers, which it returns, oldest first. Their callers get
// ErrClosing.
func (g *Group) Cancel() []*Operation {
	broken := slices.DeleteFunc(g.Running(), func(o *Operation) bool { return o.cancel == nil })
	for _, o := range broken {
		o.cancel()
	}
	return broken
}

// Wait blocks until every operation has ended or ctx is over.
func (g *Group) Wait(ctx context.Context) { g.crew.Wait(ctx) }
