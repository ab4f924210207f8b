package monitor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// entry is a container in the client's table.
type entry struct {
	container Container
	fds       map[string]int // parked; owned by the entry
	exit      *Exit
	deadSince time.Time // when the pidfd first told of an end that nobody reported
	orphan    bool      // watched by this process since its monitor died
	noStdin   bool      // stdin was closed for good; a duplicate that still comes is, too
	stalled   string    // its log does not answer, in words
	dropped   string    // its log could not take output, in words
}

func (e *entry) release() {
	for name, fd := range e.fds {
		_ = unix.Close(fd)
		delete(e.fds, name)
	}
}

func (c *Client) noteLog(id string, e *Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ct, ok := c.table[id]
	if !ok {
		return
	}
	switch e.Kind {
	case Stalled:
		ct.stalled = e.Text
	case Answers:
		ct.stalled = ""
	case Dropped:
		ct.dropped = e.Text + " (told at " + time.Now().Format(time.RFC3339) + ")"
	}
}

// LogTrouble says in words that a container's log does not answer, or that output of a
// container that runs is in no log; of one that has ended its Exit says that. Nothing
// where all is well, or that is not known. It does not block.
func (c *Client) LogTrouble(id string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.table[id]
	switch {
	case !ok:
		return ""
	case e.exit != nil || e.dropped == "":
		return e.stalled
	case e.stalled == "":
		return e.dropped
	}
	return e.stalled + "; " + e.dropped
}

// unreported is how long the monitor may take to report an end that the kernel
// tells of, before the client stops waiting for it.
const unreported = 15 * time.Second

// park takes a container and descriptors of it into the table. What comes again
// replaces what was there.
func (c *Client) park(ct Container, fds map[string]int) {
	c.mu.Lock()
	e, ok := c.table[ct.ID]
	if !ok || e.container.PID != ct.PID || e.container.StartTime != ct.StartTime {
		if ok {
			e.release()
		}
		e = &entry{fds: map[string]int{}}
		c.table[ct.ID] = e
	}
	exit := ct.Exit
	ct.Exit = nil
	e.container = ct
	for name, fd := range fds {
		if name == FDStdin && e.noStdin {
			_ = unix.Close(fd)
			continue
		}
		if old, ok := e.fds[name]; ok {
			_ = unix.Close(old)
		}
		e.fds[name] = fd
	}
	c.touch(ct.ID)
	c.mu.Unlock()
	if exit != nil {
		c.exited(*exit)
	}
}

// exited takes the report of an end, passes the first one on and returns what
// is recorded: a code that the monitor does not know may be known here.
func (c *Client) exited(x Exit) Exit {
	c.mu.Lock()
	e, ok := c.table[x.ID]
	if !ok || e.container.PID != x.PID {
		c.mu.Unlock()
		return x
	}
	if e.exit != nil {
		defer c.mu.Unlock()
		return *e.exit
	}
	if x.Unknown != "" {
		if status, ok := c.reap.status(x.PID, x.StartTime); ok {
			x.Code, x.Unknown = Code(status), ""
			_ = WriteExit(e.container.Bundle, x)
		}
	}
	e.exit = &x
	// The pidfd stays, so that a signal is refused by the kernel, not by luck.
	for name, fd := range e.fds {
		if name != FDPid {
			_ = unix.Close(fd)
			delete(e.fds, name)
		}
	}
	c.touch(x.ID)
	told := c.opened && c.o.OnExit != nil
	c.mu.Unlock()
	if told {
		c.o.OnExit(x)
	}
	return x
}

// IDs are those of every container in the table: what the monitor knows, and what
// was restored.
func (c *Client) IDs() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.table))
}

// Container returns what is known of a container. ok is false for an unknown id.
func (c *Client) Container(id string) (ct Container, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.table[id]
	if !ok {
		return Container{}, false
	}
	ct = e.container
	ct.Exit = e.exit
	return ct, true
}

// Signal sends sig to the init, by pidfd. ErrNotFound, ErrEnded.
func (c *Client) Signal(id string, sig syscall.Signal) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.table[id]
	if !ok {
		return fmt.Errorf("signal %s: %w", id, ErrNotFound)
	}
	fd, ok := e.fds[FDPid]
	if !ok || e.exit != nil {
		return fmt.Errorf("signal %s: %w", id, ErrEnded)
	}
	err := unix.PidfdSendSignal(fd, sig, nil, 0)
	if err == unix.ESRCH {
		return fmt.Errorf("signal %s: %w", id, ErrEnded)
	}
	if err != nil {
		return fmt.Errorf("signal %s with %s: %w", id, sig, err)
	}
	return nil
}

// Exit returns how the init ended, once that is known. It never waits: where no
// report has come it asks the pidfd and the bundle.
func (c *Client) Exit(id string) (Exit, bool) {
	c.mu.Lock()
	e, ok := c.table[id]
	if !ok {
		c.mu.Unlock()
		return Exit{}, false
	}
	if e.exit != nil {
		defer c.mu.Unlock()
		return *e.exit, true
	}
	fd, ok := e.fds[FDPid]
	if ok && !readable(fd) {
		c.mu.Unlock()
		return Exit{}, false
	}
	ct := e.container
	if e.deadSince.IsZero() {
		e.deadSince = time.Now()
	}
	late := time.Since(e.deadSince) > unreported
	status, known := unix.WaitStatus(0), false
	if late && ok {
		status, known = PidfdStatus(fd)
	}
	c.mu.Unlock()
	x, err := ReadExit(ct.Bundle)
	if err != nil || x.PID != ct.PID || x.StartTime != ct.StartTime {
		if !late {
			return Exit{}, false
		}
		x = lostExit(ct, status, known)
		_ = WriteExit(ct.Bundle, x)
	}
	return c.exited(x), true
}

// lostExit is the record of an end that no monitor saw.
func lostExit(ct Container, status unix.WaitStatus, known bool) Exit {
	x := Exit{ID: ct.ID, PID: ct.PID, StartTime: ct.StartTime, At: time.Now(), Code: 255,
		Unknown: "the init ended while no monitor watched it, and the kernel does not tell its status"}
	if known {
		x.Code, x.Unknown = Code(status), ""
	}
	return x
}

// find asks the kernel about a container that no record says the end of. An error
// means that the kernel did not answer.
func (c *Client) find(e *entry) error {
	p := process{e.container.PID, e.container.StartTime}
	fd, err := OpenPidfd(p.pid, p.startTime)
	if err == nil && !readable(fd) {
		e.fds[FDPid] = fd
		return nil
	}
	if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EINVAL) {
		return err
	}
	x := lostExit(e.container, 0, false)
	if err == nil {
		// A zombie: of this process, or of one that will reap it soon.
		defer unix.Close(fd)
		for range 50 {
			c.reap.collect(p)
			status, known := c.reap.status(p.pid, p.startTime)
			if !known {
				status, known = PidfdStatus(fd)
			}
			if known {
				x = lostExit(e.container, status, true)
				break
			}
			time.Sleep(2 * time.Millisecond)
		}
	}
	e.exit = &x
	_ = WriteExit(e.container.Bundle, x) // the caller records it, as it is told now
	return nil
}

// Restore finds out about a container that an earlier daemon made: from the
// monitor's list, else from exit.json, else from the kernel, and in that case
// hands it to the monitor. The result's Exit is set when the init has ended.
func (c *Client) Restore(ctx context.Context, id, bundle string, pid int, startTime uint64) (Container, error) {
	if ct, ok := c.Container(id); ok && ct.PID == pid && ct.StartTime == startTime {
		if x, ok := c.Exit(id); ok {
			ct.Exit = &x
		}
		return ct, nil
	}
	ct, err := ReadContainer(bundle)
	if err != nil || ct.PID != pid || ct.StartTime != startTime {
		ct = Container{ID: id, PID: pid, StartTime: startTime}
		ct.Cgroups, _ = CgroupsOf(pid)
	}
	ct.Bundle = bundle
	e := &entry{container: ct, fds: map[string]int{}}
	if x, err := ReadExit(bundle); err == nil && x.PID == pid && x.StartTime == startTime {
		e.exit = &x
	} else if err := c.find(e); err != nil {
		return ct, err
	}
	c.mu.Lock()
	if old, ok := c.table[id]; ok {
		old.release()
	}
	c.table[id] = e
	c.touch(id)
	conn := c.conn
	ct.Exit = e.exit
	c.mu.Unlock()
	if ct.Exit == nil && conn != nil {
		c.handBack(ctx, conn, id)
	}
	return ct, nil
}
