package operation

import (
	"context"
	"sync"
	"testing"
	"time"
)

// Members begin and end while others wait, all the time.
func TestCrewBeginsWhileOthersWait(t *testing.T) {
	var c Crew
	c.Wait(t.Context()) // of none
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 2000 {
				c.Go(func() {})
			}
		})
		all.Go(func() {
			for range 2000 {
				c.Wait(t.Context())
			}
		})
	}
	all.Wait()
	c.Wait(t.Context())
	if c.running != 0 || c.idle != nil {
		t.Errorf("%d run after all have ended, somebody waits: %v", c.running, c.idle != nil)
	}
}

func TestCrewIsWaitedForUntilTheContextEnds(t *testing.T) {
	var c Crew
	open, ended := make(chan struct{}), make(chan struct{})
	c.Go(func() { <-open })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	c.Wait(ctx)
	if ctx.Err() == nil {
		t.Error("nobody was waited for")
	}
	go func() { c.Wait(context.Background()); close(ended) }()
	close(open)
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("the last member's end is not told")
	}
}
