package streaming

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	goruntime "runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"

	"berth/oci"
)

// patience is for what comes by itself, on a busy machine.
const patience = 20 * time.Second

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Errorf("not in time: %s", what)
			return
		}
	}
}

// newServer serves until the end of the test, when every goroutine must be gone.
func newServer(t *testing.T, o Options) *Server {
	t.Helper()
	before := goruntime.NumGoroutine()
	if o.Address == "" {
		o.Address = "127.0.0.1:0"
	}
	if o.Lifetime == 0 {
		o.Lifetime = time.Minute
	}
	if o.Idle == 0 {
		o.Idle = time.Hour
	}
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Close()
		if n := s.Sessions(); n != 0 {
			t.Errorf("%d sessions are open after Close", n)
		}
		eventually(t, "goroutines are as before", func() bool { return goruntime.NumGoroutine() <= before })
		if t.Failed() {
			b := make([]byte, 1<<20)
			t.Logf("%s", b[:goruntime.Stack(b, true)])
		}
	})
	return s
}

// must returns the first of a pair.
func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// dialSPDY upgrades to SPDY.
func dialSPDY(t *testing.T, to string, versions ...string) (httpstream.Connection, error) {
	t.Helper()
	rt := must(spdy.NewRoundTripper(nil))(t)
	req := must(http.NewRequest(http.MethodPost, to, nil))(t)
	for _, v := range versions {
		req.Header.Add(httpstream.HeaderProtocolVersion, v)
	}
	res, err := rt.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	return rt.NewConnection(res)
}

// open makes streams by name.
func open(t *testing.T, c httpstream.Connection, names ...string) map[string]httpstream.Stream {
	t.Helper()
	all := map[string]httpstream.Stream{}
	for _, n := range names {
		s, err := c.CreateStream(http.Header{"Streamtype": []string{n}})
		if err != nil {
			t.Fatalf("open stream %s: %v", n, err)
		}
		all[n] = s
	}
	return all
}

// read is all of a stream as text.
func readAll(t *testing.T, r io.Reader) string {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Errorf("read: %v", err)
	}
	return string(b)
}

func decode(t *testing.T, text string) (st status) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &st); err != nil {
		t.Errorf("status %q: %v", text, err)
	}
	return st
}

// dialSocket upgrades to a WebSocket.
func dialSocket(t *testing.T, to string, versions ...string) (*websocket.Conn, *http.Response, error) {
	t.Helper()
	d := websocket.Dialer{Subprotocols: versions}
	ws, res, err := d.Dial(strings.Replace(to, "http", "ws", 1), nil)
	if res != nil && res.Body != nil {
		_ = res.Body.Close()
	}
	return ws, res, err
}

// messages reads until the peer closes and joins what came by channel. The
// error is nil when it said goodbye.
func messages(ws *websocket.Conn) (map[byte]string, error) {
	got := map[byte]string{}
	for {
		_, b, err := ws.ReadMessage()
		if websocket.IsCloseError(err, websocket.CloseNormalClosure) {
			return got, nil
		}
		if err != nil {
			return got, err
		}
		got[b[0]] += string(b[1:])
	}
}

// rawDial opens a connection and sends the beginning of a request.
func rawDial(t *testing.T, to, text string) net.Conn {
	t.Helper()
	u := must(url.Parse(to))(t)
	c := must(net.Dial("tcp", u.Host))(t)
	if _, err := io.WriteString(c, strings.Replace(text, "PATH", u.Path, 1)); err != nil {
		t.Fatal(err)
	}
	return c
}

// echo copies stdin to stdout, names itself on stderr and exits with code.
func echo(code int32) Command {
	return func(_ context.Context, s oci.Streams) (int32, error) {
		if s.Stderr != nil {
			_, _ = io.WriteString(s.Stderr, "echo")
		}
		if s.Stdin != nil && s.Stdout != nil {
			_, _ = io.Copy(s.Stdout, s.Stdin)
		}
		return code, nil
	}
}

// waiter is a command that ends with its context; ended has one word of each.
func waiter() (run Command, ended chan error) {
	ended = make(chan error, 1000)
	return func(ctx context.Context, _ oci.Streams) (int32, error) {
		<-ctx.Done()
		ended <- context.Cause(ctx)
		return 0, ctx.Err()
	}, ended
}

// announced tells when run begins.
func announced(run Command) (Command, chan error) {
	begun := make(chan error, 1)
	return func(ctx context.Context, st oci.Streams) (int32, error) {
		begun <- nil
		return run(ctx, st)
	}, begun
}

func await(t *testing.T, what string, c <-chan error) error {
	t.Helper()
	select {
	case err := <-c:
		return err
	case <-time.After(patience):
		t.Fatalf("not in time: %s", what)
		return nil
	}
}

// pod is a TCP server whose connections are handled by serve, and a Dial to it.
type pod struct {
	l    net.Listener
	work sync.WaitGroup
}

func newPod(t *testing.T, serve func(*net.TCPConn)) Dial {
	t.Helper()
	p := &pod{l: must(net.Listen("tcp", "127.0.0.1:0"))(t)}
	p.work.Go(func() {
		for {
			c, err := p.l.Accept()
			if err != nil {
				return
			}
			p.work.Go(func() {
				defer c.Close()
				serve(c.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() {
		_ = p.l.Close()
		p.work.Wait()
	})
	return func(ctx context.Context, port uint16) (net.Conn, error) {
		if port != 80 {
			return nil, errors.New("connection refused")
		}
		var d net.Dialer
		return d.DialContext(ctx, "tcp", p.l.Addr().String())
	}
}
