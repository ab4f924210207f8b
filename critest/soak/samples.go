package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// metricsAddress is free: the node has a network namespace of its own.
const metricsAddress = "127.0.0.1:19190"

const (
	sampleEvery = 2 * time.Second
	// warm is how long a daemon may grow before it must be flat.
	warm = 5 * time.Minute
	// window is what a median is taken over, at most.
	window = 5 * time.Minute
)

// sizes are what a leak shows in, at one moment.
type sizes struct {
	at                        time.Time
	goroutines, memory, fds   float64 // the daemon's; KiB
	heap                      float64 // KiB at which its garbage is collected next: twice what lived the last time
	monitor                   int     // pid
	monitorMemory, monitorFDs float64
	daemon                    int64 // pid
}

// measures are the numbers of sizes by name, with what they may grow by under
// load, as a share and an amount, and at rest, as an amount. A daemon at rest gives
// the memory of its last load back slowly: there only much more is told apart.
var measures = []struct {
	name                string
	of                  func(sizes) float64
	share, amount, rest float64
}{
	{"daemon KiB", func(s sizes) float64 { return s.memory }, 0.1, 2048, 20480},
	{"daemon heap KiB", func(s sizes) float64 { return s.heap }, 0.2, 2048, 20480},
	{"daemon goroutines", func(s sizes) float64 { return s.goroutines }, 0.2, 5, 2},
	{"daemon descriptors", func(s sizes) float64 { return s.fds }, 0.2, 5, 2},
	{"monitor KiB", func(s sizes) float64 { return s.monitorMemory }, 0.1, 1024, 1024},
	{"monitor descriptors", func(s sizes) float64 { return s.monitorFDs }, 0.2, 5, 2},
}

type samples struct {
	mu    sync.Mutex
	load  []sizes // guarded by mu, as rests
	rests []sizes
}

// now measures once.
func (w *world) now(ctx context.Context) (s sizes, err error) {
	res, err := w.rt.Status(ctx, &cri.StatusRequest{Verbose: true})
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal([]byte(res.GetInfo()["goroutines"]), &s.goroutines); err != nil {
		return s, err
	}
	s.at, s.daemon, s.monitor = time.Now(), w.daemon.Load(), w.monitor()
	var errs [5]error
	s.memory, errs[0] = resident(int(s.daemon))
	s.fds, errs[1] = descriptors(int(s.daemon))
	if s.monitor != 0 {
		s.monitorMemory, errs[2] = resident(s.monitor)
		s.monitorFDs, errs[3] = descriptors(s.monitor)
	}
	s.heap, errs[4] = heap()
	return s, errors.Join(errs[:]...)
}

// heap asks the daemon's metrics when its garbage is collected next.
func heap() (kib float64, err error) {
	reply, err := http.Get("http://" + metricsAddress + "/metrics")
	if err != nil {
		return 0, err
	}
	defer reply.Body.Close()
	for lines := bufio.NewScanner(reply.Body); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "go_memstats_next_gc_bytes "); ok {
			_, err = fmt.Sscan(rest, &kib)
			return kib / 1024, err
		}
	}
	return 0, errors.New("the metrics do not tell of the heap")
}

// resident is a process's memory in KiB.
func resident(pid int) (kib float64, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			_, err = fmt.Sscan(rest, &kib)
		}
	}
	return kib, err
}

func descriptors(pid int) (float64, error) {
	dir, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return float64(len(dir)), err
}

// sample measures all the time but while a process is away, and prints a line a
// minute.
func (w *world) sample(ctx context.Context, s *samples) {
	told := time.Now()
	for ; ctx.Err() == nil; sleep(ctx, sampleEvery) {
		before := w.disturbances.Load()
		now, err := w.now(ctx)
		if err != nil || before%2 == 1 || w.disturbances.Load() != before {
			continue
		}
		s.mu.Lock()
		s.load = append(s.load, now)
		s.mu.Unlock()
		if time.Since(told) > time.Minute {
			told = time.Now()
			fmt.Printf("%s %s\n", w.clock(), now)
		}
	}
}

func (s sizes) String() string {
	var parts []string
	for _, m := range measures {
		parts = append(parts, fmt.Sprintf("%s %.0f", m.name, m.of(s)))
	}
	return strings.Join(parts, ", ")
}

// quiet is more than the time after which daemon and monitor give memory back.
const quiet = 8 * time.Second

// rest measures an idle node once it has come to rest.
func (s *samples) rest(ctx context.Context, w *world) {
	var last sizes
	time.Sleep(quiet)
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(time.Second) {
		now, err := w.now(ctx)
		if err != nil {
			w.bad("at rest: measure: %v", err)
			return
		}
		if now.goroutines == last.goroutines && now.fds == last.fds && now.monitorFDs == last.monitorFDs {
			break
		}
		last = now
	}
	fmt.Printf("%s at rest: %s\n", w.clock(), last)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rests = append(s.rests, last)
}

// judge compares the calm's end with its minute 5, under load and at rest.
func (s *samples) judge(w *world, calm time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	begin := calm.Add(warm)
	load := slices.DeleteFunc(slices.Clone(s.load), func(x sizes) bool { return x.at.Before(begin) })
	rests := slices.DeleteFunc(slices.Clone(s.rests), func(x sizes) bool { return x.at.Before(begin) })
	if len(load) == 0 || len(rests) < 2 || load[len(load)-1].at.Sub(begin) < 2*window {
		fmt.Printf("a calm of %v is too short to tell whether anything grows\n", time.Since(calm).Round(time.Second))
		return
	}
	end := load[len(load)-1].at
	span := min(window, end.Sub(begin)/3)
	first := slices.DeleteFunc(slices.Clone(load), func(x sizes) bool { return x.at.After(begin.Add(span)) })
	last := slices.DeleteFunc(slices.Clone(load), func(x sizes) bool { return x.at.Before(end.Add(-span)) })
	fmt.Printf("medians of %v from minute 5 of the calm on and at its end; at rest then and at the end\n", span.Round(time.Second))
	for _, m := range measures {
		a, b := median(first, m.of), median(last, m.of)
		c, d := m.of(rests[0]), m.of(rests[len(rests)-1])
		fmt.Printf("  %-20s under load %8.0f %8.0f   at rest %8.0f %8.0f\n", m.name, a, b, c, d)
		if b > a*(1+m.share)+m.amount || d > c+m.rest {
			w.bad("%s grew", m.name)
		}
	}
}

func median(of []sizes, what func(sizes) float64) float64 {
	var all []float64
	for _, s := range of {
		all = append(all, what(s))
	}
	slices.Sort(all)
	return all[len(all)/2]
}
