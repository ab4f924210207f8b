package monitor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// attachBuffer is how many bytes of output, about, may wait for a client of an
// attach. They wait in the socket to it, which is memory only while they do.
const attachBuffer = 8 << 20

// attachLimit is how long attaching may wait for the monitor.
const attachLimit = 10 * time.Second

// Want says what an attachment is to have.
type Want struct {
	Stdout, Stderr bool // with a pty all output is stdout
	Stdin          bool
}

// Attachment is an open view of a container's output and the way to its stdin.
// Close must be called.
type Attachment struct {
	// Output are the read ends for stdout and stderr, nil when not wanted. They
	// end with the container or its monitor: Wait says which.
	Output [2]*os.File

	c       *Client
	id      string
	session uint64
	once    bool // stdin is closed when the session ends
	ended   chan struct{}
	err     error // set before ended is closed
	closed  bool  // guarded by c.mu: ended is closed
}

// Attach opens a view of what a container writes from now on. Neither the log nor
// other views wait for its reader: when that lags by more than about 8 MiB of a
// stream, bytes are skipped until it has caught up half of them, and a line in
// their place says how many. ErrNotFound, ErrEnded, ErrUnsupported,
// ErrUnavailable.
func (c *Client) Attach(ctx context.Context, id string, w Want) (*Attachment, error) {
	ctx, cancel := context.WithTimeout(ctx, attachLimit)
	defer cancel()
	a := &Attachment{c: c, id: id, ended: make(chan struct{})}
	m := &Message{Op: OpAttach, Target: id, Input: w.Stdin}
	var theirs []int
	defer func() { closeAll(theirs) }()
	for i, name := range [2]string{FDStdout, FDStderr} {
		if wanted := [2]bool{w.Stdout, w.Stderr}; !wanted[i] {
			continue
		}
		r, fd, err := attachSocket()
		if err != nil {
			a.closeOutput()
			return nil, err
		}
		a.Output[i] = r
		m.FDs, theirs = append(m.FDs, name), append(theirs, fd)
	}
	if err := a.open(ctx, m, theirs); err != nil {
		a.closeOutput()
		return nil, fmt.Errorf("attach to %s: %w", id, err)
	}
	return a, nil
}

// open registers the attachment and asks the monitor for it.
func (a *Attachment) open(ctx context.Context, m *Message, fds []int) error {
	c := a.c
	conn, err := c.lockConnected(ctx, m.Op)
	if err != nil {
		return err
	}
	e, ok := c.table[a.id]
	switch {
	case !ok:
		err = ErrNotFound
	case e.exit != nil:
		err = ErrEnded
	case !c.can[ExtAttach]:
		err = fmt.Errorf("monitor %d: %w", c.pid, ErrUnsupported)
	}
	if err != nil {
		c.mu.Unlock()
		return err
	}
	a.once = m.Input && e.container.IO.StdinOnce && !e.container.IO.Terminal
	answer := c.expect(m)
	a.session = m.ID
	c.attached[a.session] = a
	c.mu.Unlock()
	if _, err = c.send(ctx, conn, m, answer, fds...); err != nil {
		c.endSession(a, err)
		// The monitor may have attached all the same, after the end of our patience.
		_ = conn.Send(&Message{ID: a.session, Op: OpDetach, Target: a.id, Session: a.session})
		return err
	}
	return nil
}

// attachSocket makes a pair of which the write end never blocks and takes up to
// attachBuffer.
func attachSocket() (read *os.File, write int, err error) {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("make socket pair: %w", err)
	}
	_ = unix.Shutdown(p[1], unix.SHUT_RD)
	if unix.SetsockoptInt(p[1], unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, attachBuffer) != nil {
		// Without CAP_NET_ADMIN it is net.core.wmem_max, less but not wrong.
		_ = unix.SetsockoptInt(p[1], unix.SOL_SOCKET, unix.SO_SNDBUF, attachBuffer)
	}
	return os.NewFile(uintptr(p[0]), "attach"), p[1], nil
}

// Stdin returns the way to the container's stdin, for the caller to close: the
// pipe, or the pty's master. ErrNotFound when the container has none (any more).
func (a *Attachment) Stdin() (*os.File, error) { return a.c.stdin(a.id) }

// Resize sets the size of the container's pty. ErrNotFound when it has none.
func (a *Attachment) Resize(columns, rows uint16) error {
	a.c.mu.Lock()
	defer a.c.mu.Unlock()
	e, ok := a.c.table[a.id]
	if !ok {
		return fmt.Errorf("resize terminal of %s: %w", a.id, ErrNotFound)
	}
	fd, ok := e.fds[FDTTY]
	if !ok {
		return fmt.Errorf("resize terminal of %s: %w", a.id, ErrNotFound)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: rows}); err != nil {
		return fmt.Errorf("resize terminal of %s: %w", a.id, err)
	}
	return nil
}

func (c *Client) stdin(id string) (*os.File, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.table[id]
	if !ok {
		return nil, fmt.Errorf("stdin of %s: %w", id, ErrNotFound)
	}
	fd, ok := e.fds[FDStdin]
	if e.container.IO.Terminal {
		fd, ok = e.fds[FDTTY]
	}
	if !ok {
		return nil, fmt.Errorf("stdin of %s: %w", id, ErrNotFound)
	}
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("stdin of %s: %w", id, err)
	}
	// Shared with the other duplicates, none of which is read or written by
	// someone who minds. It lets a write be given up.
	_ = unix.SetNonblock(dup, true)
	return os.NewFile(uintptr(dup), "stdin"), nil
}

// CloseStdin closes a container's stdin for good when it is to have one client
// only (IO.StdinOnce) and no pty; else it does nothing. Idempotent.
func (a *Attachment) CloseStdin(ctx context.Context) error {
	if !a.once {
		return nil
	}
	a.c.dropStdin(a.id)
	_, err := a.c.call(ctx, &Message{Op: OpStdin, Target: a.id})
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return err
}

// dropStdin closes the parked duplicate.
func (c *Client) dropStdin(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dropStdinLocked(id)
}

func (c *Client) dropStdinLocked(id string) {
	if e, ok := c.table[id]; ok {
		e.noStdin = true
		if fd, ok := e.fds[FDStdin]; ok {
			_ = unix.Close(fd)
			delete(e.fds, FDStdin)
			c.touch(id) // or the shelf would keep it open
		}
	}
}

// Wait waits until the attachment has ended by itself: nil when the container
// has, ErrSlow when its last output was skipped, or ErrUnavailable when the
// monitor was lost.
func (a *Attachment) Wait(ctx context.Context) error {
	select {
	case <-a.ended:
		return a.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close ends the attachment, and with it the container's stdin where that is
// for one client only. The container goes on.
func (a *Attachment) Close() {
	c := a.c
	c.mu.Lock()
	conn, open := c.conn, !a.closed
	c.mu.Unlock()
	if a.once {
		c.dropStdin(a.id)
	}
	if open && conn != nil {
		// The monitor closes its stdin with the session; nobody waits for the answer.
		_ = conn.Send(&Message{Op: OpDetach, Target: a.id, Session: a.session})
	}
	c.endSession(a, nil)
	a.closeOutput()
}

func (a *Attachment) closeOutput() {
	for _, f := range a.Output {
		if f != nil {
			_ = f.Close()
		}
	}
}

func (c *Client) endSession(a *Attachment, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endSessionLocked(a, err)
}

func (c *Client) endSessionLocked(a *Attachment, err error) {
	delete(c.attached, a.session)
	if !a.closed {
		a.err, a.closed = err, true
		close(a.ended)
	}
}

// detached takes the monitor's word that an attachment is over.
func (c *Client) detached(m *Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	a, ok := c.attached[m.Session]
	if !ok {
		return
	}
	var err error
	if m.Error != nil {
		err = m.Error
	}
	c.endSessionLocked(a, err)
}

// keepSessions ends what a renewed monitor did not go on with: nothing, but for
// containers that ended meanwhile. The caller holds c.mu.
func (c *Client) keepSessions(kept []uint64) {
	for session, a := range c.attached {
		if slices.Contains(kept, session) {
			continue
		}
		var err error
		if e, ok := c.table[a.id]; ok && e.exit == nil {
			err = fmt.Errorf("the monitor was replaced, attach again: %w", ErrUnavailable)
		}
		if a.once {
			c.dropStdinLocked(a.id)
		}
		c.endSessionLocked(a, err)
	}
}

// detachAll ends what the lost monitor served. A stdin that was for one client
// must not be handed to the next monitor. The caller holds c.mu.
func (c *Client) detachAll() {
	for _, a := range c.attached {
		if a.once {
			c.dropStdinLocked(a.id)
		}
		c.endSessionLocked(a, fmt.Errorf("the monitor died and is replaced, attach again: %w", ErrUnavailable))
	}
}
