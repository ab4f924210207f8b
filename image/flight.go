package image

import (
	"context"
	"errors"
	"sync"

	"github.com/opencontainers/go-digest"
)

// flights are the running pulls, one for each reference and credentials
// however many callers want it.
type flights struct {
	mu      sync.Mutex
	running map[string]*flight
	all     sync.WaitGroup
}

// flight is one running pull. It does not end with a caller but with the last
// of them.
type flight struct {
	cancel  context.CancelCauseFunc
	callers int // guarded by flights.mu
	done    chan struct{}
	id      string // valid when done is closed
	err     error
}

// errAbandoned is the cause when the last caller has gone.
var errAbandoned = errors.New("nobody waits for the pull any more")

// join takes part in the pull of that key and starts it when there is none.
func (f *flights) join(ctx, life context.Context, key string, pull func(context.Context) (string, error)) (string, error) {
	f.mu.Lock()
	if life.Err() != nil {
		f.mu.Unlock()
		return "", life.Err()
	}
	fl := f.running[key]
	if fl == nil {
		fl = f.start(life, key, pull)
	}
	fl.callers++
	f.mu.Unlock()
	select {
	case <-fl.done:
		return fl.id, fl.err
	case <-ctx.Done():
		f.quit(key, fl)
		return "", ctx.Err()
	}
}

// start is called with mu held.
func (f *flights) start(life context.Context, key string, pull func(context.Context) (string, error)) *flight {
	ctx, cancel := context.WithCancelCause(life)
	fl := &flight{cancel: cancel, done: make(chan struct{})}
	f.running[key] = fl
	f.all.Go(func() {
		id, err := pull(ctx)
		f.mu.Lock()
		if f.running[key] == fl {
			delete(f.running, key)
		}
		f.mu.Unlock()
		fl.id, fl.err = id, err
		close(fl.done)
		cancel(nil)
	})
	return fl
}

// quit takes a caller out. The last one ends the pull; a newcomer must not
// join what is ending, so its key is free at once.
func (f *flights) quit(key string, fl *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fl.callers--
	if fl.callers > 0 {
		return
	}
	if f.running[key] == fl {
		delete(f.running, key)
	}
	fl.cancel(errAbandoned)
}

// enter lets something else than a pull keep the store open until leave is
// called. It reports false when the store is closing.
func (f *flights) enter(life context.Context) (leave func(), ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if life.Err() != nil {
		return nil, false
	}
	f.all.Add(1)
	return f.all.Done, true
}

func (f *flights) wait() { f.all.Wait() }

// claims are the layers that are being fetched, by diffID, so that each is
// fetched by one pull only.
type claims struct {
	mu   sync.Mutex
	open map[digest.Digest]*claim
}

type claim struct {
	diffID digest.Digest
	done   chan struct{}
}

// get returns a claim of the caller's own (mine), or the one to wait for.
func (c *claims) get(d digest.Digest) (cl *claim, mine bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if cl := c.open[d]; cl != nil {
		return cl, false
	}
	cl = &claim{diffID: d, done: make(chan struct{})}
	c.open[d] = cl
	return cl, true
}

// settle ends a claim, whether the layer is there now or not: who waited looks.
func (c *claims) settle(cl *claim) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open[cl.diffID] == cl {
		delete(c.open, cl.diffID)
		close(cl.done)
	}
}
