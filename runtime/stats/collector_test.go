package stats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func show(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func TestRates(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(d time.Duration) time.Time { return start.Add(d) }
	ms := uint64(time.Millisecond)
	r := rates{byID: map[string]*rate{}}
	for _, step := range []struct {
		why   string
		at    time.Duration
		usage uint64
		want  *uint64
	}{
		{"too soon after the start", 500 * time.Millisecond, 400 * ms, nil},
		{"since the start", 2 * time.Second, 1000 * ms, n(500 * ms)},
		{"too soon for a new window: the last one's", 2500 * time.Millisecond, 1500 * ms, n(500 * ms)},
		{"since 2 s, whoever asked meanwhile", 4 * time.Second, 1400 * ms, n(200 * ms)},
		{"idle", 5 * time.Second, 1400 * ms, n(0)},
		{"several cores", 6 * time.Second, 5400 * ms, n(4000 * ms)},
		{"counter set back", 8 * time.Second, 400 * ms, nil},
		{"since then", 10 * time.Second, 2400 * ms, n(1000 * ms)},
		{"nobody asked for long", time.Hour, 9000 * ms, nil},
		{"again", time.Hour + 2*time.Second, 9001 * ms, n(ms / 2)},
		{"clock set back", time.Minute, 9002 * ms, nil},
		{"since then", time.Minute + time.Second, 9003 * ms, n(ms)},
	} {
		if got := r.next("c", start, at(step.at), step.usage); show(got) != show(step.want) {
			t.Errorf("%s: %s, want %s", step.why, show(got), show(step.want))
		}
	}
	if got := r.next("old", start, at(30*24*time.Hour), 1); got != nil {
		t.Errorf("a container first seen long after its start has a rate: %d", *got)
	}
	r.keep(func(id string) bool { return id == "old" })
	if len(r.byID) != 1 || r.byID["old"] == nil {
		t.Errorf("remembered: %v", r.byID)
	}
}

// many is a version 2 tree of containers c0, c1, … and their targets.
func many(t testing.TB, count int) (*Cgroups, []Target) {
	files := tree{"cgroup.controllers": "memory\n"}
	var targets []Target
	for i := range count {
		id := fmt.Sprintf("c%d", i)
		files["pod/"+id+"/cpu.stat"] = fmt.Sprintf("usage_usec %d\n", i)
		targets = append(targets, Target{ID: id, Cgroup: "/pod/" + id, Layer: id, Started: time.Now().Add(-time.Minute)})
	}
	return OpenCgroups(files.make(t)), targets
}

func sizeOne(string) (uint64, uint64, error) { return 4096, 1, nil }

func TestCollectKeepsOrderAndSkipsTheVanished(t *testing.T) {
	cgroups, targets := many(t, 40)
	c := NewCollector(cgroups, sizeOne)
	targets[7].Cgroup, targets[39].Cgroup = "/pod/vanished", ""
	results, err := c.Collect(t.Context(), targets)
	if err != nil || len(results) != len(targets) {
		t.Fatalf("%d results, %v", len(results), err)
	}
	for i, r := range results {
		if i == 7 || i == 39 {
			if !errors.Is(r.Err, ErrGone) || r.CPU != nil || r.Layer != nil {
				t.Errorf("vanished %d: %s %v", i, show(r), r.Err)
			}
			continue
		}
		if r.Err != nil || r.CPU.Usage != uint64(i)*1000 || r.CPU.Rate == nil || r.Layer == nil || r.Layer.Bytes != 4096 {
			t.Errorf("%d: %s %v", i, show(r), r.Err)
		}
	}
	if results, err := c.Collect(t.Context(), nil); err != nil || len(results) != 0 {
		t.Errorf("of nothing: %v, %v", results, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Collect(ended, targets); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that is gone: %v", err)
	}
}

// What is remembered is bounded by who lives.
func TestKeepForgetsTheDead(t *testing.T) {
	cgroups, targets := many(t, 10)
	c := NewCollector(cgroups, sizeOne)
	if _, err := c.Collect(t.Context(), targets); err != nil {
		t.Fatal(err)
	}
	c.Keep(func(id string) bool { return id == "c3" })
	if len(c.rates.byID) != 1 || len(c.layers.byID) != 1 || c.rates.byID["c3"] == nil || c.layers.byID["c3"] == nil {
		t.Errorf("remembered: rates %v, layers %v", c.rates.byID, c.layers.byID)
	}
}

func TestManyCallersAtOnce(t *testing.T) {
	cgroups, targets := many(t, 20)
	c := NewCollector(cgroups, sizeOne)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 20 {
				results, err := c.Collect(t.Context(), targets)
				if err != nil || slices.ContainsFunc(results, func(r Result) bool { return r.Err != nil }) {
					t.Errorf("collect: %v", err)
				}
				c.Keep(func(id string) bool { return id != "c0" })
			}
		})
	}
	all.Wait()
}

// A layer that takes for ever to measure delays no reply, hides no other
// container's size, and is measured by one call at a time.
func TestHugeLayerSlowsNoReply(t *testing.T) {
	cgroups, targets := many(t, 5)
	release := make(chan struct{})
	var calls atomic.Int32
	c := NewCollector(cgroups, func(dir string) (uint64, uint64, error) {
		if dir == "c2" {
			calls.Add(1)
			<-release
		}
		return 10, 1, nil
	})
	for range 20 {
		began := time.Now()
		results, err := c.Collect(t.Context(), targets)
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > time.Second {
			t.Fatalf("a reply took %v", took)
		}
		if results[2].Err != nil || results[2].Layer != nil {
			t.Errorf("the huge one: %s", show(results[2]))
		}
	}
	if got := calls.Load(); got != 1 {
		t.Errorf("measured %d times at once", got)
	}
	until(t, "the other sizes", func() bool {
		results, _ := c.Collect(t.Context(), targets)
		return results[0].Layer != nil && results[1].Layer != nil && results[3].Layer != nil && results[4].Layer != nil
	})
	close(release)
	until(t, "the huge one's size", func() bool {
		results, _ := c.Collect(t.Context(), targets)
		return results[2].Layer != nil && results[2].Layer.Bytes == 10
	})
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 2000 {
		if ok() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("still waiting for %s", what)
}

func TestLayersAreMeasuredAgain(t *testing.T) {
	var calls atomic.Int32
	var broken atomic.Bool
	l := newBehind(func(string) (Layer, error) {
		if broken.Load() {
			return Layer{}, errors.New("gone")
		}
		return Layer{Bytes: uint64(calls.Add(1))}, nil
	})
	now := time.Now()
	await := func(w <-chan struct{}) {
		t.Helper()
		if w == nil {
			t.Fatal("not measured")
		}
		<-w
	}
	await(l.refresh("c", "dir", now))
	if w := l.refresh("c", "dir", now.Add(behindAge/2)); w != nil || l.last("c").Bytes != 1 {
		t.Errorf("a fresh size is measured again: %s", show(l.last("c")))
	}
	later := time.Now().Add(2 * behindAge)
	l.byID["c"].took = 0 // whatever this machine's load made of it
	await(l.refresh("c", "dir", later))
	if got := l.last("c"); got.Bytes != 2 {
		t.Errorf("second size: %s", show(got))
	}
	broken.Store(true)
	l.byID["c"].took = 0
	await(l.refresh("c", "dir", later.Add(2*behindAge)))
	if got := l.last("c"); got.Bytes != 2 {
		t.Errorf("a failed measurement changes the size: %s", show(got))
	}
	if l.last("unknown") != nil {
		t.Error("an unknown container has a size")
	}
}

// A layer that took long is seldom measured, and never waited for.
func TestSlowLayerIsSeldomMeasured(t *testing.T) {
	var calls atomic.Int32
	l := newBehind(func(string) (Layer, error) { calls.Add(1); return Layer{Bytes: 1}, nil })
	now := time.Now()
	l.byID["c"] = &entry[Layer]{tried: now, took: time.Minute, value: &Layer{Bytes: 7}}
	if w := l.refresh("c", "dir", now.Add(behindShare*time.Minute-time.Second)); w != nil || calls.Load() != 0 || l.byID["c"].busy != nil {
		t.Error("measured again although it would cost much")
	}
	l.slow <- struct{}{} // another slow one is being measured
	if w := l.refresh("c", "dir", now.Add(behindShare*time.Minute+time.Second)); w != nil {
		t.Error("a reply would wait for it")
	}
	time.Sleep(20 * time.Millisecond)
	if calls.Load() != 0 {
		t.Error("two slow layers are measured at once")
	}
	<-l.slow
	until(t, "its turn", func() bool { return l.last("c").Bytes == 1 })
}

func TestDetailsKeepOrderAndSkipTheVanished(t *testing.T) {
	root := version2.with(more2).with(tree{"pod/c/cgroup.procs": fmt.Sprintf("%d\n", os.Getpid())}).make(t)
	c := NewCollector(OpenCgroups(root), sizeOne)
	targets := []Target{{ID: "gone", Cgroup: "/pod/gone", Layer: "x"}, {ID: "c", Cgroup: "/pod/c", Layer: "x", PID: os.Getpid(), Started: time.Now().Add(-time.Minute)}}
	var details []Detail
	until(t, "what is measured behind", func() bool {
		var err error
		if details, err = c.Details(t.Context(), targets); err != nil {
			t.Fatal(err)
		}
		return details[1].Files != nil && details[1].Layer != nil
	})
	if d := &details[0]; !errors.Is(d.Err, ErrGone) || d.CPU != nil || d.Layer != nil {
		t.Errorf("the vanished: %s", show(d))
	}
	d := &details[1]
	if n, _ := d.Get(Threads); d.Err != nil || n != 9 || d.CPU.Rate == nil || d.Files.Descriptors == 0 || d.Processes.OpenFiles == nil {
		t.Errorf("the other: %s, %v", show(d), d.Err)
	}
	c.Keep(func(string) bool { return false })
	if len(c.files.byID)+len(c.layers.byID)+len(c.rates.byID) != 0 {
		t.Errorf("remembered of the dead: %v %v %v", c.files.byID, c.layers.byID, c.rates.byID)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Details(ended, targets); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that is gone: %v", err)
	}
}

// A pod has no layer; its processes are counted when that is asked for.
func TestCollectCountsProcesses(t *testing.T) {
	c := NewCollector(OpenCgroups(version2.with(more2).make(t)), sizeOne)
	results, err := c.Collect(t.Context(), []Target{{ID: "p", Cgroup: "/pod/c", Count: true}, {ID: "q", Cgroup: "/pod/c"}})
	if err != nil || results[0].Err != nil || results[0].Processes == nil || *results[0].Processes != 3 || results[0].Layer != nil || results[0].CPU.Rate != nil {
		t.Errorf("counted: %s, %v", show(results), err)
	}
	if results[1].Processes != nil || len(c.layers.byID) != 0 {
		t.Errorf("not asked for: %s", show(results[1]))
	}
}
