package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/node"
	"berth/sandbox/leakcheck"
)

// workers is how many lives are lived at once.
const workers = 8

// maxWrong ends a run early: more of the same tells nothing.
const maxWrong = 25

// world is the node, what is known to be on it, and what went wrong.
type world struct {
	*node.Node
	rt    cri.RuntimeServiceClient
	im    cri.ImageServiceClient
	seed  uint64
	began time.Time
	model *model

	// The ends of disturbances: odd while one goes on.
	disturbances atomic.Int64
	wrong        atomic.Int64
	give         context.CancelFunc // ends the run

	gate sync.RWMutex // read-held by a worker for the length of a life

	daemon atomic.Int64 // its pid

	mu   sync.Mutex
	done map[string]tally // by kind of step, guarded by mu
	life int              // lives to their end, guarded by mu
}

// tally is how often something was done, and how long it took at most.
type tally struct {
	times   int
	slowest time.Duration
}

func newWorld(n *node.Node, stock *node.Stock, seed uint64) (*world, error) {
	w := &world{Node: n, rt: n.Runtime(), im: n.Images(), seed: seed, model: newModel(), done: map[string]tally{}, began: time.Now()}
	return w, publish(stock)
}

// bad notes that something is wrong, and keeps the daemon's log of the first time.
func (w *world) bad(format string, args ...any) {
	fmt.Printf("%s WRONG: %s\n", w.clock(), fmt.Sprintf(format, args...))
	switch n := w.wrong.Add(1); {
	case n == 1:
		path := filepath.Join(os.TempDir(), fmt.Sprintf("berth-soak-%d.log", os.Getpid()))
		if err := w.CopyLog(path); err == nil {
			fmt.Printf("the daemon's log so far: %s\n", path)
		}
	case n >= maxWrong:
		w.give()
	}
}

// clock is how long the run has lasted.
func (w *world) clock() string {
	d := time.Since(w.began).Round(time.Second)
	return fmt.Sprintf("%02d:%02d", int(d.Minutes()), int(d.Seconds())%60)
}

// count notes a step that was done.
func (w *world) count(step string, took time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.done[step]
	w.done[step] = tally{t.times + 1, max(t.slowest, took)}
}

// steps is what was done, most frequent first, with the longest time each took.
func (w *world) steps() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	names := slices.SortedFunc(maps.Keys(w.done), func(a, b string) int { return w.done[b].times - w.done[a].times })
	var parts []string
	for _, n := range names {
		parts = append(parts, fmt.Sprintf("%d %s (%.1f s)", w.done[n].times, n, w.done[n].slowest.Seconds()))
	}
	return strings.Join(parts, ", ")
}

// disturb runs what takes berth's processes away for a while. Requests that
// overlap with it may fail.
func (w *world) disturb(do func() error) error {
	w.disturbances.Add(1)
	defer w.disturbances.Add(1)
	return do()
}

// excused are the codes that a request may fail with when the daemon or its
// monitor went away under it.
var excused = []codes.Code{codes.Unavailable}

// request sends a request until it succeeds, as the kubelet does: it may fail
// only while something is disturbed.
func (w *world) request(ctx context.Context, what string, send func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, leakcheck.Patience(2*time.Minute))
	defer cancel()
	began := time.Now()
	for {
		before := w.disturbances.Load()
		err := send(ctx)
		if err == nil {
			w.count(what, time.Since(began))
			return nil
		}
		if strings.Contains(err.Error(), "reserved") {
			return fmt.Errorf("%s: %w", what, err)
		}
		disturbed := before%2 == 1 || w.disturbances.Load() != before
		if !disturbed || ctx.Err() != nil || !slices.Contains(excused, status.Code(err)) && !errors.Is(err, errBroken) {
			return fmt.Errorf("%s: %w", what, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// relaunched notes the daemon's start.
func (w *world) relaunched() { w.daemon.Store(int64(w.PID())) }
