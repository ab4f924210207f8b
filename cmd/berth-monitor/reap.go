package main

import (
	"os"
	"os/signal"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ended is how a child of the monitor ended.
type ended struct {
	status unix.WaitStatus
	at     time.Time
}

// reaper waits for every child: commands the monitor spawned, inits, and
// orphans. Nothing else in the program may wait.
type reaper struct {
	// mu is also held from the wait for a child until its end is noted, so that
	// whoever has it misses none.
	mu      sync.Mutex
	watched map[int]func(ended) // by pid, called once, with mu held: it must not block; guarded by mu
	// early are the ends of pids nobody watched, kept while commands run: an
	// init may end before its create has told its pid. guarded by mu
	early    map[int]ended
	commands int // guarded by mu
}

func newReaper() *reaper {
	return &reaper{watched: map[int]func(ended){}, early: map[int]ended{}}
}

// run never returns.
func (r *reaper) run() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGCHLD)
	for {
		r.collect()
		<-signals
	}
}

func (r *reaper) collect() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if !status.Exited() && !status.Signaled() {
			continue
		}
		e := ended{status, time.Now()}
		f := r.watched[pid]
		delete(r.watched, pid)
		switch {
		case f != nil:
			f(e)
		case r.commands > 0:
			r.early[pid] = e
		}
	}
}

// spawn starts a command and tells of its end on the channel. release must be
// called when the pids it may have left are watched.
func (r *reaper) spawn(argv []string, attr *os.ProcAttr) (pid int, end <-chan ended, err error) {
	c := make(chan ended, 1)
	r.mu.Lock() // the child cannot be collected before it is in the table
	defer r.mu.Unlock()
	p, err := os.StartProcess(argv[0], argv, attr)
	if err != nil {
		return 0, nil, err
	}
	pid = p.Pid
	_ = p.Release()
	r.commands++
	r.watched[pid] = func(e ended) { c <- e }
	return pid, c, nil
}

func (r *reaper) release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.commands--; r.commands == 0 {
		clear(r.early)
	}
}

// watch calls f once when pid, a child now or soon, has ended, from the
// reaper's goroutine or at once, with mu held.
func (r *reaper) watch(pid int, f func(ended)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, already := r.early[pid]
	delete(r.early, pid)
	if already {
		f(e)
		return
	}
	r.watched[pid] = f
}
