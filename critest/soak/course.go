package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/sandbox/leakcheck"
)

// restEvery is the time between two rests.
const restEvery = 5 * time.Minute

// soak runs workers, watchers and the course of disturbances and rests.
func (w *world) soak(ctx context.Context, length time.Duration) error {
	living, give := context.WithCancel(ctx)
	defer give()
	w.give = give
	w.relaunched()
	var all sync.WaitGroup
	for worker := range workers {
		all.Go(func() { w.work(living, worker) })
	}
	samples := &samples{}
	all.Go(func() { w.watchLists(living) })
	all.Go(func() { w.sample(living, samples) })
	storm := length / 3
	w.storm(living, storm, samples)
	fmt.Printf("%s the storm is over; no restart from now on\n", w.clock())
	calm := time.Now()
	for living.Err() == nil && time.Since(calm) < length-storm {
		sleep(living, min(restEvery, time.Until(calm.Add(length-storm))))
		w.rest(living, samples)
	}
	give()
	all.Wait()
	if ctx.Err() != nil {
		return errors.Join(ctx.Err(), w.quiet(context.WithoutCancel(ctx)))
	}
	samples.judge(w, calm)
	fmt.Printf("%s %d lives: %s\n", w.clock(), w.life, w.steps())
	if n := w.wrong.Load(); n > 0 {
		return fmt.Errorf("%w, %d times", errWrong, n)
	}
	return nil
}

// quiet waits until nothing goes on in the daemon any more: what a client that is
// interrupted asked for is done all the same, and the teardown shall find it.
func (w *world) quiet(ctx context.Context) error {
	for end := time.Now().Add(leakcheck.Patience(time.Minute)); ; time.Sleep(50 * time.Millisecond) {
		res, err := w.rt.Status(ctx, &cri.StatusRequest{Verbose: true})
		if err != nil {
			return err
		}
		var running []any
		if err := json.Unmarshal([]byte(res.GetInfo()["operations"]), &running); err != nil || len(running) == 0 {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("%w: operations go on: %v", errWrong, running)
		}
	}
}

// work lives one life after the other.
func (w *world) work(ctx context.Context, worker int) {
	for number := 0; ctx.Err() == nil; number++ {
		l := newLife(w, worker, number)
		w.gate.RLock()
		l.live(ctx)
		w.gate.RUnlock()
	}
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// storm takes processes of berth away until the time is over.
func (w *world) storm(ctx context.Context, length time.Duration, s *samples) {
	draw := rand.New(rand.NewPCG(w.seed, 1<<63))
	kinds := []struct {
		name string
		do   func(pause time.Duration) error
	}{
		{"SIGTERM", func(time.Duration) error { return w.again(ctx, w.Terminate, 0) }},
		{"SIGKILL", func(time.Duration) error { return w.again(ctx, w.Kill, 0) }},
		{"SIGKILL, down for a while", func(d time.Duration) error { return w.again(ctx, w.Kill, d) }},
		{"SIGKILL of the monitor", func(time.Duration) error { return w.killMonitor() }},
	}
	began, rested := time.Now(), time.Now()
	for {
		pause, down, kind := time.Duration(4+draw.IntN(16))*time.Second, time.Duration(1+draw.IntN(6))*time.Second, kinds[draw.IntN(len(kinds))]
		sleep(ctx, min(pause, length/3))
		if ctx.Err() != nil || time.Since(began) > length {
			return
		}
		begin := time.Now()
		if err := w.disturb(func() error { return kind.do(down) }); err != nil && ctx.Err() == nil {
			w.bad("%s: %v", kind.name, err)
			w.give()
		}
		w.count(kind.name, time.Since(begin))
		if time.Since(rested) > restEvery {
			w.rest(ctx, s)
			rested = time.Now()
		}
	}
}

// again ends the daemon and starts it after a pause.
func (w *world) again(ctx context.Context, end func() error, pause time.Duration) error {
	if err := end(); err != nil {
		return err
	}
	time.Sleep(pause)
	err := w.Launch(context.WithoutCancel(ctx)) // also at the run's end: the node's Close needs it
	w.relaunched()
	return err
}

// killMonitor ends the monitor and waits for the next.
func (w *world) killMonitor() error {
	first := w.monitor()
	if first == 0 {
		return nil // it ended with the last container
	}
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill the monitor: %w", err)
	}
	for end := time.Now().Add(leakcheck.Patience(20 * time.Second)); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if now := w.monitor(); now != 0 && now != first {
			time.Sleep(500 * time.Millisecond) // it takes over
			return nil
		}
	}
	return fmt.Errorf("no monitor came after %d", first)
}

// monitor is the pid of the node's monitor, 0 when there is none.
func (w *world) monitor() int {
	for _, pid := range w.Monitors() {
		return pid
	}
	return 0
}

// rest waits until no worker has a pod, and looks whether the node is as empty.
func (w *world) rest(ctx context.Context, s *samples) {
	w.gate.Lock()
	defer w.gate.Unlock()
	if ctx.Err() != nil {
		return
	}
	if err := w.Tidied(ctx); err != nil {
		w.bad("at rest: %v", err)
	}
	for what, list := range map[string]func(context.Context, bool) (map[string]string, error){"pods": w.listPods, "containers": w.listContainers} {
		if got, err := list(ctx, false); err != nil || len(got) > 0 {
			w.bad("at rest: %s %v, %v", what, got, err)
		}
	}
	leaks, err := w.Leaks()
	if err != nil || len(leaks) > 0 {
		w.bad("at rest: left behind: %q, %v", leaks, err)
	}
	w.imagesAtRest(ctx)
	s.rest(ctx, w)
}

// imagesAtRest compares the images with those that were pulled and not removed.
func (w *world) imagesAtRest(ctx context.Context) {
	res, err := w.im.ListImages(ctx, &cri.ListImagesRequest{})
	if err != nil {
		w.bad("at rest: list images: %v", err)
		return
	}
	var got []string
	for _, i := range res.GetImages() {
		got = append(got, i.GetRepoTags()...)
	}
	want := append(slices.Collect(maps.Keys(w.model.imagesNow())), images.Busybox)
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		w.bad("at rest: images\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}
