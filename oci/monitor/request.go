package monitor

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// call sends a request to the present monitor, waiting for one to be there,
// and returns its answer.
func (c *Client) call(ctx context.Context, m *Message) (*Message, error) {
	conn, err := c.lockConnected(ctx, m.Op)
	if err != nil {
		return nil, err
	}
	answer, pid := c.expect(m), c.pid
	c.mu.Unlock()
	defer c.await(ctx, "berth-monitor", pid)()
	return c.send(ctx, conn, m, answer)
}

// await tells Options.Await.
func (c *Client) await(ctx context.Context, what string, pid int) (done func()) {
	if c.o.Await == nil {
		return func() {}
	}
	return c.o.Await(ctx, what, pid)
}

// insist is call for what may be done twice: it goes on with the next monitor when
// one dies over the request.
func (c *Client) insist(ctx context.Context, op, id string) error {
	for {
		_, err := c.call(ctx, &Message{Op: op, Target: id})
		if !errors.Is(err, ErrUnavailable) || ctx.Err() != nil || c.ctx.Err() != nil {
			return err
		}
	}
}

// lockConnected waits for a monitor that takes requests and, without an error,
// leaves c.mu locked: a renewal waits for the requests that are noted by then.
func (c *Client) lockConnected(ctx context.Context, op string) (*Conn, error) {
	for {
		c.mu.Lock()
		if c.conn != nil && !c.paused {
			return c.conn, nil
		}
		changed, m := c.changed, c.missing
		c.mu.Unlock()
		if err := c.awaitChange(ctx, op, m, changed); err != nil {
			return nil, err
		}
	}
}

func (c *Client) awaitChange(ctx context.Context, op string, m missing, changed <-chan struct{}) error {
	defer c.await(ctx, m.what, m.pid)()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s: no monitor: %w: %w", op, ErrUnavailable, ctx.Err())
	case <-c.ctx.Done():
		return fmt.Errorf("%s: client is closed: %w", op, ErrUnavailable)
	}
}

// exchange is call on a given connection, also of a monitor that is not the
// present one yet.
func (c *Client) exchange(ctx context.Context, conn *Conn, m *Message, fds ...int) (*Message, error) {
	c.mu.Lock()
	answer := c.expect(m)
	c.mu.Unlock()
	return c.send(ctx, conn, m, answer, fds...)
}

// expect gives a request its ID and notes it as under way. The caller holds c.mu.
func (c *Client) expect(m *Message) chan *Message {
	c.lastID++
	m.ID = c.lastID
	answer := make(chan *Message, 1)
	c.waiting[m.ID] = answer
	return answer
}

// cancelPatience is how long a create may take to end once it is killed.
const cancelPatience = 5 * time.Second

// send sends what is expected and waits for the answer.
func (c *Client) send(ctx context.Context, conn *Conn, m *Message, answer chan *Message, fds ...int) (*Message, error) {
	defer func() {
		c.mu.Lock()
		delete(c.waiting, m.ID)
		c.mu.Unlock()
	}()
	if err := conn.Send(m, fds...); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	select {
	case a := <-answer:
		return checkAnswer(m.Op, a)
	case <-ctx.Done():
	}
	if m.Op != OpCreate {
		return nil, fmt.Errorf("%s: %w", m.Op, ctx.Err())
	}
	// The create must be over before its leftovers can be removed; one that hangs in
	// the kernel ends when that lets it go, and removals fail until then.
	_ = conn.Send(&Message{Op: OpCancel, Cancel: m.ID})
	select {
	case a := <-answer:
		if a != nil && a.Error == nil {
			return a, nil
		}
		return nil, fmt.Errorf("%s: %w", m.Op, ctx.Err())
	case <-time.After(cancelPatience):
		return nil, fmt.Errorf("%s: it goes on after SIGKILL: %w", m.Op, ctx.Err())
	}
}

func checkAnswer(op string, a *Message) (*Message, error) {
	if a == nil {
		return nil, fmt.Errorf("%s: the connection to the monitor was lost meanwhile: %w", op, ErrUnavailable)
	}
	if a.Error != nil {
		return nil, a.Error
	}
	return a, nil
}
