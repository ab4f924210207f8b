package streaming

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Why a session ended early.
var (
	errGone = errors.New("the client has gone")
	errIdle = errors.New("the session was idle for too long")
)

// farewellLimit is how long a client may take to hear why its session ends with
// the server.
const farewellLimit = 2 * time.Second

// watchEvery is how often a connection is asked whether its client is there,
// for nobody may be reading from it.
const watchEvery = time.Second

// session is one connection being served.
type session struct {
	s       *Server
	ctx     context.Context // ends with the session or its client
	end     context.CancelCauseFunc
	request *http.Request
	w       *takeover
	conn    *conn // nil until it is taken over
	watcher sync.WaitGroup
}

// serverClosed tells whether the session ends since the server does. The
// connection is still there then, to say so.
func (x *session) serverClosed() bool { return context.Cause(x.ctx) == ErrClosed }

// close releases the connection. What still reads or writes fails.
func (x *session) close() {
	x.end(nil)
	if x.conn != nil {
		_ = x.conn.Close()
	}
	x.watcher.Wait()
}

// takeover is a response whose connection becomes its session's.
type takeover struct {
	http.ResponseWriter
	x *session
}

// Hijack implements http.Hijacker.
func (t *takeover) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	raw, rw, err := http.NewResponseController(t.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	_ = raw.SetDeadline(time.Time{}) // that of the header
	x := t.x
	c := &conn{Conn: raw, gone: x.end}
	c.used.Store(time.Now().UnixNano())
	x.conn = c
	context.AfterFunc(x.ctx, func() {
		if x.serverClosed() {
			time.AfterFunc(farewellLimit, func() { _ = c.Close() })
			return
		}
		_ = c.Close()
	})
	x.watcher.Go(func() { c.watch(x.ctx, x.s.o.Idle) })
	var from io.Reader = c
	if n := rw.Reader.Buffered(); n > 0 {
		early, _ := rw.Reader.Peek(n)
		from = io.MultiReader(bytes.NewReader(bytes.Clone(early)), c)
	}
	return c, bufio.NewReadWriter(bufio.NewReader(from), bufio.NewWriter(c)), nil
}

// conn is a connection that tells its session when the client has gone. Close
// may be called any number of times: spdystream's worst case is an error there.
type conn struct {
	net.Conn
	gone context.CancelCauseFunc
	used atomic.Int64 // when bytes last moved, Unix nanoseconds
	once sync.Once
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.moved(n)
	if err != nil && !errors.Is(err, syscall.EAGAIN) {
		c.gone(errGone)
	}
	return n, err
}

func (c *conn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.moved(n)
	if err != nil {
		c.gone(errGone)
	}
	return n, err
}

func (c *conn) moved(n int) {
	if n > 0 {
		c.used.Store(time.Now().UnixNano())
	}
}

func (c *conn) Close() error {
	c.once.Do(func() { _ = c.Conn.Close() })
	return nil
}

// watch ends the session when the other end has hung up, which no Read notices
// while the input is held up by someone who does not take it, or when nothing
// has moved for too long. A client whose input fills every buffer on the way
// cannot even hang up; TCP's keepalive notices its end, in a minute or two.
func (c *conn) watch(ctx context.Context, idle time.Duration) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if c.hungUp() {
			c.gone(errGone)
		}
		if time.Since(time.Unix(0, c.used.Load())) > idle {
			c.gone(errIdle)
		}
	}
}

func (c *conn) hungUp() bool {
	under := c.Conn
	if t, ok := under.(*tls.Conn); ok {
		under = t.NetConn()
	}
	sc, ok := under.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return true
	}
	over := false
	err = raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, perr := unix.Poll(p, 0)
		over = perr == nil && n == 1
	})
	return over || err != nil
}
