package monitor

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// reaper collects what falls to the daemon as subreaper: inits of a dead
// monitor, whose statuses it keeps, orphans of execs in the host's PID
// namespace, and what a killed command leaves. It must not wait for a child
// that os/exec waits for. Those are in this process's session, while what comes
// out of a container is in another; in its own it takes only what nobody has
// waited for in a long time.
type reaper struct {
	self     int
	session  int
	finished chan struct{}

	mu       sync.Mutex
	tracked  map[int]bool // pids that someone else waits for; guarded by mu
	statuses map[process]unix.WaitStatus
}

type process struct {
	pid       int
	startTime uint64
}

// unclaimed is how long a zombie of this process's session stays its parent's.
const unclaimed = time.Minute

// keepStatuses bounds the statuses that nobody asked for.
const keepStatuses = 1024

func startReaper(ctx context.Context) (*reaper, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become subreaper: %w", err)
	}
	session, err := unix.Getsid(0)
	if err != nil {
		return nil, fmt.Errorf("read own session: %w", err)
	}
	r := &reaper{self: os.Getpid(), session: session, finished: make(chan struct{}),
		tracked: map[int]bool{}, statuses: map[process]unix.WaitStatus{}}
	go r.run(ctx)
	return r, nil
}

func (r *reaper) wait() { <-r.finished }

// run looks a second after a child has ended, and again while one is left.
func (r *reaper) run(ctx context.Context) {
	defer close(r.finished)
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGCHLD)
	defer signal.Stop(ended)
	seen := map[process]time.Time{}
	for {
		var again <-chan time.Time
		if len(seen) > 0 {
			again = time.After(time.Second)
		}
		select {
		case <-ctx.Done():
		case <-again:
		case <-ended:
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
		}
		seen = r.sweep(seen)
		if ctx.Err() != nil {
			r.sweep(seen) // nobody is about to track one now
			return
		}
	}
}

// sweep reaps the orphans that were zombies at the last look too, and returns
// those that are left, with the time they were first seen: whoever tracks a
// process has had its time by the second look.
func (r *reaper) sweep(seen map[process]time.Time) map[process]time.Time {
	left := map[process]time.Time{}
	for _, pid := range r.children() {
		s, err := readStat(pid)
		if err != nil || s.state != 'Z' || s.ppid != r.self || s.session == pid && r.own(pid) {
			continue
		}
		r.mu.Lock()
		tracked := r.tracked[pid]
		r.mu.Unlock()
		if tracked {
			continue
		}
		p := process{pid, s.startTime}
		since, again := seen[p]
		if !again {
			since = time.Now()
		}
		if again && (s.session != r.session || time.Since(since) > unclaimed) {
			r.collect(p)
			continue
		}
		left[p] = since
	}
	return left
}

// own: a monitor that this process started has a session of its own, too, but
// os/exec waits for it.
func (r *reaper) own(pid int) bool {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return err == nil && string(bytes.TrimSpace(name)) == "berth-monitor"
}

func (r *reaper) children() []int {
	data, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", r.self))
	if err != nil {
		return nil
	}
	var pids []int
	for f := range bytes.FieldsSeq(data) {
		if pid, err := strconv.Atoi(string(f)); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// collect reaps a zombie and keeps its status.
func (r *reaper) collect(p process) {
	var status unix.WaitStatus
	pid, err := unix.Wait4(p.pid, &status, unix.WNOHANG, nil)
	if err != nil || pid != p.pid {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.statuses) >= keepStatuses {
		clear(r.statuses)
	}
	r.statuses[p] = status
}

func (r *reaper) status(pid int, startTime uint64) (unix.WaitStatus, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.statuses[process{pid, startTime}]
	return s, ok
}

// Track keeps the reaper away from a child that the caller waits for itself.
func (c *Client) Track(pid int) {
	c.reap.mu.Lock()
	defer c.reap.mu.Unlock()
	c.reap.tracked[pid] = true
}

// Untrack ends Track, after the caller has waited.
func (c *Client) Untrack(pid int) {
	c.reap.mu.Lock()
	defer c.reap.mu.Unlock()
	delete(c.reap.tracked, pid)
}

// watchOrphans lets this process wait for the inits of a monitor that has died,
// so that a kernel without PIDFD_GET_INFO does not lose their codes. Whether
// they have fallen to this process yet does not matter before they end. The
// caller holds c.mu.
func (c *Client) watchOrphans() {
	for _, e := range c.table {
		fd, ok := e.fds[FDPid]
		if e.exit != nil || e.orphan || !ok {
			continue
		}
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			continue
		}
		e.orphan = true
		p := process{e.container.PID, e.container.StartTime}
		c.tasks.Add(1)
		go func() {
			defer c.tasks.Done()
			c.awaitOrphan(p, dup)
		}()
	}
}

// awaitOrphan reaps one init when it ends, if it is a child of this process.
func (c *Client) awaitOrphan(p process, fd int) {
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	stop := context.AfterFunc(c.ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if raw.Read(func(fd uintptr) bool { return readable(int(fd)) }) == nil {
		c.reap.collect(p)
	}
}
