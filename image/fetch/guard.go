package fetch

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Why a registry is given up. Both are for errors.Is.
var (
	// ErrIdle: not a byte for Patience.Idle.
	ErrIdle = errors.New("the registry sends no data")
	// ErrSlow: fewer bytes a second than Patience.MinRate.
	ErrSlow = errors.New("the registry sends too slowly")
)

// Patience is how long a registry is waited for. Only time that somebody spends
// waiting for bytes counts.
type Patience struct {
	Idle    time.Duration // without a byte; required
	MinRate int64         // bytes a second over Window; 0: no such rule
	Window  time.Duration // required with MinRate
}

// Guard bounds a wait for a registry: its context ends when patience does.
type Guard struct {
	Ctx    context.Context // ends with the parent, by Stop, or when patience ends
	cancel context.CancelCauseFunc
	timer  *time.Timer
	limit  Patience

	since  time.Time     // when the current wait began; zero: nobody waits
	waited time.Duration // in this window
	got    int64         // bytes in this window
}

// NewGuard starts the clock. Stop must be called. A Guard is for one goroutine.
func NewGuard(parent context.Context, p Patience) *Guard {
	ctx, cancel := context.WithCancelCause(parent)
	return &Guard{Ctx: ctx, cancel: cancel, limit: p, timer: time.AfterFunc(p.Idle, func() {
		cancel(fmt.Errorf("%w for %v", ErrIdle, p.Idle))
	})}
}

// Pause stops the clock: what follows is not the registry's doing.
func (g *Guard) Pause() { g.timer.Stop() }

// Resume starts the clock of idleness anew.
func (g *Guard) Resume() { g.timer.Reset(g.limit.Idle) }

// Stop ends the guard and its context. Idempotent.
func (g *Guard) Stop() {
	g.timer.Stop()
	g.cancel(nil)
}

// Explain replaces the "context canceled" of a guarded call by its reason.
func (g *Guard) Explain(err error) error {
	cause := context.Cause(g.Ctx)
	if err != nil && (errors.Is(cause, ErrIdle) || errors.Is(cause, ErrSlow)) {
		return cause
	}
	return err
}

// begin is called before a read.
func (g *Guard) begin() {
	g.Resume()
	g.since = time.Now()
}

// end is called after a read of n bytes; ErrSlow ends the guard's context too.
//
// One wait counts for a quarter of the window at most: a link that pauses and
// then delivers is slow only when it stays so.
func (g *Guard) end(n int) error {
	g.Pause()
	g.got += int64(n)
	g.waited += min(time.Since(g.since), g.limit.Window/4)
	if g.limit.MinRate <= 0 || g.waited < g.limit.Window {
		return nil
	}
	rate := float64(g.got) / g.waited.Seconds()
	waited := g.waited
	g.waited, g.got = 0, 0
	if rate >= float64(g.limit.MinRate) {
		return nil
	}
	err := fmt.Errorf("%w: %.0f bytes a second over %v, at least %d are wanted",
		ErrSlow, rate, waited.Round(time.Second), g.limit.MinRate)
	g.cancel(err)
	return err
}
