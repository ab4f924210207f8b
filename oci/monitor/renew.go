package monitor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// renewLimit bounds a renewal, and with it the wait of requests that come
// meanwhile. It takes some 50 ms.
const renewLimit = 20 * time.Second

// Renew makes the running monitor become Options.Binary in place, where it is
// another build: same process, same children, same descriptors, no output and no
// exit is lost, attachments go on. Requests wait meanwhile, and it waits for those
// under way. It tells whether there was a change to make; idempotent. After an
// error the old build goes on, or if it is lost the next one is started as
// always. ErrUnsupported, ErrUnavailable, *Error.
func (c *Client) Renew(ctx context.Context) (bool, error) {
	c.renewal.Lock()
	defer c.renewal.Unlock()
	ctx, cancel := context.WithTimeout(ctx, renewLimit)
	defer cancel()
	conn, err := c.lockConnected(ctx, OpRenew)
	if err != nil {
		return false, err
	}
	pid, able := c.pid, c.can[ExtRenew]
	c.mu.Unlock()
	if same, err := runs(pid, c.o.Binary); err != nil || same {
		return false, err
	}
	if !able {
		return false, fmt.Errorf("renew monitor %d: %w", pid, ErrUnsupported)
	}
	defer c.resume()
	if err := c.pause(ctx); err != nil {
		return false, fmt.Errorf("renew monitor %d: wait for its requests: %w", pid, err)
	}
	_, err = c.exchange(ctx, conn, &Message{Op: OpRenew, Binary: c.o.Binary, Version: Version, Oldest: Oldest})
	if !errors.Is(err, ErrUnavailable) {
		return false, fmt.Errorf("renew monitor %d: %w", pid, err)
	}
	if err := c.follow(ctx, conn); err != nil {
		return false, fmt.Errorf("renew monitor %d: %w", pid, err)
	}
	if now := c.MonitorPID(); now != pid {
		return false, fmt.Errorf("renew monitor %d: it ended over it and %d took its place: %w", pid, now, ErrUnavailable)
	}
	same, err := runs(pid, c.o.Binary)
	if err == nil && !same {
		err = fmt.Errorf("renew monitor %d: it runs another build than %s: %w", pid, c.o.Binary, ErrUnavailable)
	}
	return same, err
}

// pause holds requests back and waits until none is under way.
func (c *Client) pause(ctx context.Context) error {
	for {
		c.mu.Lock()
		c.paused = true
		busy := len(c.waiting)
		c.mu.Unlock()
		if busy == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Millisecond):
		}
	}
}

func (c *Client) resume() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.paused = false
	if c.conn == nil {
		c.bereaved()
	}
	c.turn()
}

// follow waits for the connection after conn.
func (c *Client) follow(ctx context.Context, conn *Conn) error {
	for {
		c.mu.Lock()
		now, changed := c.conn, c.changed
		c.mu.Unlock()
		if now != nil && now != conn {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ErrUnavailable, ctx.Err())
		}
	}
}

// renewStranger asks a monitor that refused hello to become binary. nil when it
// has hung up over that.
func renewStranger(conn *Conn, binary string, refusal error) error {
	_ = conn.c.SetReadDeadline(time.Now().Add(renewLimit))
	err := conn.Send(&Message{ID: 2, Op: OpRenew, Binary: binary, Version: Version, Oldest: Oldest})
	for err == nil {
		var m *Message
		if m, err = conn.Receive(); err != nil {
			break
		}
		m.CloseFDs()
		if m.Op == OpAnswer && m.ID == 2 && m.Error != nil {
			err = m.Error
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return fmt.Errorf("%w; nor can it become %s in place: %w; it leaves when its last container has ended", refusal, binary, err)
}

// runs tells whether a process runs a program, by the bytes.
func runs(pid int, program string) (bool, error) {
	running, err := os.Open(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return false, fmt.Errorf("find the program of process %d: %w", pid, err)
	}
	defer running.Close()
	wanted, err := os.Open(program)
	if err != nil {
		return false, fmt.Errorf("read %s: %w", program, err)
	}
	defer wanted.Close()
	a, err := running.Stat()
	if err != nil {
		return false, err
	}
	b, err := wanted.Stat()
	if err != nil || os.SameFile(a, b) {
		return err == nil, err
	}
	if a.Size() != b.Size() {
		return false, nil
	}
	left, right := make([]byte, 64<<10), make([]byte, 64<<10)
	for {
		n, err := io.ReadFull(running, left)
		m, werr := io.ReadFull(wanted, right)
		if !bytes.Equal(left[:n], right[:m]) {
			return false, nil
		}
		if err != nil || werr != nil {
			return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF), nil
		}
	}
}
