package main

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

// point is one fault in one request of a life.
type point struct {
	suite   string
	life    string
	request int // index in the life
	name    string
	fault   fault
}

func (p point) String() string {
	return fmt.Sprintf("%s: %s, %s: %v", p.suite, p.life, p.name, p.fault)
}

// The suites. A point whose daemon must be supervised is in one of the second
// kind of world.
const (
	killDaemon      = "daemon"
	killMonitor     = "monitor"
	failStep        = "fail"
	killDaemonCall  = "daemon-call"
	killMonitorCall = "monitor-call"
	failCall        = "fail-call"
)

// supervised tells whether a suite needs the daemon's system calls.
func supervised(suite string) bool { return strings.HasSuffix(suite, "-call") }

// points lives a life of each kind without a fault and makes points of all that
// happens in it.
func (w *world) points(ctx context.Context) ([]point, map[string]bool, error) {
	var found []point
	reached, tried := map[string]bool{}, map[string]bool{}
	for _, kind := range lives {
		if kind.name == checkpoints && w.noCheckpoints != "" {
			continue
		}
		l, from := w.life(kind.name), 0
		if kind.from != "" {
			from = len(l.requests)
		}
		for i, r := range l.requests {
			w.steps.begin()
			w.parts.begin()
			if w.calls != nil {
				w.calls.begin()
			}
			if err := r.send(ctx); err != nil {
				return nil, nil, fmt.Errorf("a life (%s) without a fault: %s: %w", kind.name, r.name, err)
			}
			for _, step := range w.steps.reached() {
				reached[step] = true
			}
			if r.name == kind.from {
				from = i
			}
			if i < from {
				continue // other lives have these points
			}
			add := func(suite string, f fault) {
				found = append(found, point{suite: suite, life: kind.name, request: i, name: r.name, fault: f})
			}
			if w.calls != nil {
				w.callPoints(r, tried, add)
			} else {
				w.stepPoints(kind.name, r, tried, add)
			}
		}
		if err := l.whole(); err != nil {
			return nil, nil, err
		}
	}
	return found, reached, nil
}

// stepPoints are those of the steps that were reached, each for the first time in
// the life, and of the programs that the request needs.
func (w *world) stepPoints(life string, r request, tried map[string]bool, add func(string, fault)) {
	for _, step := range w.steps.reached() {
		if tried[life+step] || strings.HasPrefix(r.name, restarts) != ofStart(step) {
			continue
		}
		tried[life+step] = true
		add(killDaemon, &killAt{victim: "daemon", step: step})
		add(killMonitor, &killAt{victim: "monitor", step: step})
		if strings.HasSuffix(step, "/reply") {
			continue // nothing comes behind it
		}
		for _, dir := range directories {
			add(failStep, &fillDisk{step: step, dir: dir})
		}
	}
	for _, b := range misbehaviour {
		if !strings.HasPrefix(r.name, b.request) || !w.parts.called(b.who, b.verb) || b.but == life {
			continue
		}
		for _, mode := range b.modes {
			for _, times := range b.times {
				add(failStep, &breakPart{who: b.who, verb: b.verb, mode: mode, times: times})
			}
		}
	}
}

// directories are the daemon's own.
var directories = []string{"root", "state"}

// misbehaviour is how runc and plugins can go wrong, by the beginning of the
// request's name. A DEL is tried twice and then once for each plugin.
var misbehaviour = []struct {
	request, who, verb string
	modes              []string
	times              []int
	but                string // the life that has no such point
}{
	{"CreateContainer main", "runc", "create", []string{"refuses", "loses", "killed", "babbles", "hangs"}, []int{1}, ""},
	{"StartContainer main", "runc", "start", []string{"refuses", "loses", "killed", "hangs"}, []int{1}, ""},
	{"CheckpointContainer", "runc", "checkpoint", []string{"refuses", "loses", "killed", "hangs"}, []int{1}, ""},
	{"CheckpointPod", "runc", "checkpoint", []string{"refuses", "loses", "killed", "hangs"}, []int{1}, ""},
	{"RestorePod", "runc", "restore", []string{"refuses", "loses", "killed", "hangs"}, []int{1}, ""},
	// A command without end neither loses its end nor is waited for.
	{"ExecSync main", "runc", "exec", []string{"refuses", "loses", "killed", "hangs"}, []int{1}, "sessions"},
	{"UpdateContainerResources", "runc", "update", []string{"refuses", "loses", "killed", "hangs"}, []int{1}, ""},
	{"RemoveContainer", "runc", "delete", []string{"refuses", "loses", "killed", "hangs"}, []int{1}, ""},
	{"RunPodSandbox", "bridge", "ADD", []string{"refuses", "loses", "killed", "babbles", "hangs"}, []int{1}, ""},
	{"RunPodSandbox", "host-local", "ADD", []string{"refuses", "loses", "killed"}, []int{1}, ""},
	{"RunPodSandbox", "portmap", "ADD", []string{"refuses", "loses", "killed"}, []int{1}, ""},
	{"RunPodSandbox", "runc", "create", []string{"refuses", "loses", "killed"}, []int{1}, ""},
	{"RunPodSandbox", "runc", "start", []string{"refuses", "loses", "killed"}, []int{1}, ""},
	{"StopPodSandbox", "bridge", "DEL", []string{"refuses", "loses", "killed"}, []int{1, 3}, ""},
	{"StopPodSandbox", "bridge", "DEL", []string{"hangs"}, []int{1}, ""},
	// Bridge 1.10 gives the address back between the link and the iptables rules, and
	// forgets these for ever when that fails.
	{"StopPodSandbox", "host-local", "DEL", []string{"refuses", "loses", "killed"}, []int{1, 3}, "iptables"},
	{"StopPodSandbox", "portmap", "DEL", []string{"refuses", "loses", "killed"}, []int{1, 3}, ""},
}

// callPoints are those of the system calls that were made: each for the first time
// in a request of that kind, in whatever life.
func (w *world) callPoints(r request, tried map[string]bool, add func(string, fault)) {
	kind, _, _ := strings.Cut(r.name, " ")
	for i, step := range w.steps.reached() {
		if !tried[step] && !strings.HasSuffix(step, "/reply") && strings.HasPrefix(r.name, restarts) == ofStart(step) {
			tried[step] = true
			add(failCall, &denyAll{step: step, dir: directories[i%2], errno: []syscall.Errno{syscall.EROFS, syscall.EIO}[i/2%2]})
		}
	}
	for i, call := range w.calls.made() {
		if tried[kind+call] || strings.Contains(call, "#") || strings.Contains(call, "/trash/X/") {
			continue // what is deleted behind is deleted file by file
		}
		tried[kind+call] = true
		victim, _, _ := strings.Cut(call, " ")
		if victim == "daemon" {
			add(killDaemonCall, &killIn{victim: victim, call: call})
		} else {
			add(killMonitorCall, &killIn{victim: victim, call: call})
		}
		errno := []syscall.Errno{syscall.EIO, syscall.ENOMEM, syscall.ENOSPC}[i%3]
		if strings.Contains(call, message) {
			errno = syscall.EPIPE
		}
		add(failCall, &failIn{call: call, errno: errno})
	}
}

// choose takes the points that match, and of these a sample: the same share of
// each suite, spread evenly over it.
func choose(points []point, sample int, only string) []point {
	if only != "" {
		pattern := regexp.MustCompile(only)
		points = slices.DeleteFunc(slices.Clone(points), func(p point) bool { return !pattern.MatchString(p.String()) })
	}
	if sample <= 0 || sample >= len(points) {
		return points
	}
	suites := map[string][]point{}
	var names []string
	for _, p := range points {
		if len(suites[p.suite]) == 0 {
			names = append(names, p.suite)
		}
		suites[p.suite] = append(suites[p.suite], p)
	}
	var chosen []point
	for i, name := range names {
		all := suites[name]
		share := min(len(all), sample/len(names)+map[bool]int{true: 1}[i < sample%len(names)])
		for k := range share {
			chosen = append(chosen, all[k*len(all)/share])
		}
	}
	return chosen
}
