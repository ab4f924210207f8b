package operation

import (
	"context"
	"sync"
)

// Crew counts running goroutines. Unlike with a sync.WaitGroup one may begin while
// somebody waits for the last: what ends as the daemon closes may begin what undoes
// it. The zero value is a crew of none.
type Crew struct {
	mu      sync.Mutex
	running int
	idle    chan struct{} // closed when running comes to 0; nil while nobody waits
}

// Go runs f beside the caller. It may be called at any time, also by a member.
func (c *Crew) Go(f func()) {
	c.mu.Lock()
	c.running++
	c.mu.Unlock()
	go func() {
		defer c.leave()
		f()
	}()
}

func (c *Crew) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running--; c.running == 0 && c.idle != nil {
		close(c.idle)
		c.idle = nil
	}
}

// Wait blocks until there is a moment at which none runs, or ctx is over.
func (c *Crew) Wait(ctx context.Context) {
	c.mu.Lock()
	if c.running == 0 {
		c.mu.Unlock()
		return
	}
	if c.idle == nil {
		c.idle = make(chan struct{})
	}
	idle := c.idle
	c.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}
