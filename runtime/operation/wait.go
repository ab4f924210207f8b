package operation

import (
	"context"
	"slices"
	"time"
)

// Wait is something that an operation waits for.
type Wait struct {
	PID   int // of the process that does what is waited for; 0: none
	Since time.Time

	what   string
	holder func() string // nil: what says it
}

// Text says what is waited for.
func (w *Wait) Text() string {
	if w.holder != nil {
		return w.holder()
	}
	return w.what
}

type key struct{}

func within(ctx context.Context, o *Operation) context.Context {
	return context.WithValue(ctx, key{}, o)
}

// From is the operation that runs with ctx, or one that nobody lists.
func From(ctx context.Context) *Operation {
	if o, ok := ctx.Value(key{}).(*Operation); ok {
		return o
	}
	return new(Operation)
}

// Await notes that ctx's operation waits for something outside of it, until done is
// called: what in words, and the pid of the process that does it, or 0.
func Await(ctx context.Context, what string, pid int) (done func()) {
	return await(ctx, &Wait{what: what, PID: pid})
}

func await(ctx context.Context, w *Wait) (done func()) {
	o := From(ctx)
	w.Since = time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waits = append(o.waits, w)
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.waits = slices.DeleteFunc(o.waits, func(other *Wait) bool { return other == w })
	}
}

// Waits are what the operation waits for now, the longest first.
func (o *Operation) Waits() []*Wait {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.waits)
}
