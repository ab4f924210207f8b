package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"berth/oci/monitor"
)

// A log's filesystem that does not answer holds one thread of the monitor for each of
// its containers, where no signal reaches it. It holds up nothing but that container's
// output: the tape and the pipe fill, and then the container waits. But execve would
// wait for the thread, so there is no renewal meanwhile.

// stallTold is how long a log may take until the daemon is told.
const stallTold = 10 * time.Second

// hangPatience is how long a thread may be in a call that execve would wait for, and
// a log until requests about it are refused.
const hangPatience = time.Second

// stall watches over the calls about a log's file. begin and done are called in turn,
// with logFile.mu held.
type stall struct {
	since atomic.Int64 // of the call under way, in nanoseconds since 1970; 0: none
	told  atomic.Bool
	timer *time.Timer
}

func (l *logFile) begin() {
	l.stall.since.Store(time.Now().UnixNano())
	if l.stall.timer == nil {
		l.stall.timer = time.AfterFunc(stallTold, func() {
			if l.stalled() >= stallTold {
				l.stall.told.Store(true)
				l.tell(monitor.Stalled, l.stalledText())
			}
		})
		return
	}
	l.stall.timer.Reset(stallTold)
}

func (l *logFile) done() {
	l.stall.timer.Stop()
	since := time.Unix(0, l.stall.since.Swap(0))
	if l.stall.told.Swap(false) {
		l.tell(monitor.Answers, fmt.Sprintf("the log %s answers again, after %s", l.path, time.Since(since).Round(time.Second)))
	}
}

// stalled is for how long the file has not answered.
func (l *logFile) stalled() time.Duration {
	since := l.stall.since.Load()
	if since == 0 {
		return 0
	}
	return time.Since(time.Unix(0, since))
}

func (l *logFile) stalledText() string {
	return fmt.Sprintf("the log %s has not answered for %s: output waits", l.path, l.stalled().Round(time.Second))
}

// tell passes something on to the daemon, without waiting.
func (l *logFile) tell(kind, text string) {
	if l.complain != nil {
		l.complain(kind, text)
	}
}

// stalls are the logs that do not answer, each with its container. The caller does not
// hold s.mu.
func (s *server) stalls() (list []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for l, id := range s.logs {
		if l.stalled() >= hangPatience {
			list = append(list, "container "+id+": "+l.stalledText())
		}
	}
	slices.Sort(list)
	return list
}

// hanging tells of a thread in uninterruptible sleep, as a write to a log on a hung
// filesystem is: execve ends the other threads and would wait for that one.
func (s *server) hanging() error {
	for end := time.Now().Add(hangPatience); ; time.Sleep(10 * time.Millisecond) {
		where, hangs := sleeper()
		if !hangs {
			return nil
		}
		if !time.Now().After(end) {
			continue
		}
		text := fmt.Sprintf("a thread hangs in the kernel at %s", where)
		const most = 8
		logs := s.stalls()
		if len(logs) > most {
			logs = append(logs[:most], fmt.Sprintf("and %d more", len(logs)-most))
		}
		if len(logs) > 0 {
			text += ": " + strings.Join(logs, "; ")
		}
		return errors.New(text)
	}
}

// sleeper is where a thread of this process is that signals do not wake.
func sleeper() (where string, hangs bool) {
	for _, tid := range monitor.Threads(os.Getpid()) {
		if state, _, _ := monitor.State(tid); state == "D" {
			at, _ := monitor.Look(tid)
			return at.Channel, true
		}
	}
	return "", false
}
