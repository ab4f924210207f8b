package runc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/oci"
)

// screen keeps what a client got.
type screen struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (s *screen) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// client is the other end of a session.
type client struct {
	n        *node
	in       *io.PipeWriter
	out, err screen
	resize   chan oci.Size
	hangUp   context.CancelFunc
	ended    chan error
	code     int32 // of an exec, when ended has an error
}

// session runs f with a client at its streams, as the server does: when the
// client hangs up, its streams fail.
func (n *node) session(f func(context.Context, oci.Streams) (int32, error)) *client {
	r, w := io.Pipe()
	c := &client{n: n, in: w, resize: make(chan oci.Size, 1), ended: make(chan error, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	c.hangUp = cancel
	context.AfterFunc(ctx, func() { _ = r.CloseWithError(context.Canceled) })
	go func() {
		code, err := f(ctx, oci.Streams{Stdin: r, Stdout: &c.out, Stderr: &c.err, Resize: c.resize})
		cancel()
		c.code = code
		c.ended <- err
	}()
	n.t.Cleanup(cancel)
	return c
}

func (c *client) type_(text string) {
	c.n.t.Helper()
	if _, err := io.WriteString(c.in, text); err != nil {
		c.n.t.Errorf("type %q: %v", text, err)
	}
}

// sees waits until the client has got text.
func (c *client) sees(text string) {
	c.n.t.Helper()
	c.n.eventually("the client sees "+text, func() bool { return strings.Contains(c.out.String(), text) })
	if c.n.t.Failed() {
		c.n.t.Logf("it saw %q", c.out.String())
	}
}

// end waits for the session's.
func (c *client) end() (int32, error) {
	c.n.t.Helper()
	select {
	case err := <-c.ended:
		return c.code, err
	case <-time.After(slow(30 * time.Second)):
		c.n.t.Fatalf("the session goes on; the client saw %q and %q", c.out.String(), c.err.String())
		return 0, nil
	}
}

func (b *box) session(terminal bool, args ...string) *client {
	return b.n.session(func(ctx context.Context, s oci.Streams) (int32, error) {
		if terminal {
			s.Stderr = nil
		}
		return b.n.runtime.ExecSession(ctx, b.id, oci.SessionRequest{Streams: s,
			Process: &rspec.Process{Args: args, Env: []string{"PATH=/usr/bin:/bin"}, Cwd: "/", Terminal: terminal}})
	})
}

func TestExecSession(t *testing.T) {
	n := newNode(t)
	b := n.box("exec sleep 1000").run()
	before := descriptors(t)
	c := b.session(false, "/bin/sh", "-c", "cat; echo no >&2; exit 7")
	c.type_("hello ")
	c.sees("hello")
	c.type_("world")
	_ = c.in.Close()
	if code, err := c.end(); err != nil || code != 7 || c.out.String() != "hello world" || c.err.String() != "no\n" {
		t.Errorf("code %d, %v, %q, %q", code, err, c.out.String(), c.err.String())
	}
	c = b.session(false, "/bin/sh", "-c", "kill -9 $$")
	if code, err := c.end(); err != nil || code != 137 {
		t.Errorf("killed by itself: %d, %v", code, err)
	}
	c = b.session(false, "/bin/sh", "-c", "echo hi; sleep 600 &")
	if code, err := c.end(); err != nil || code != 0 || c.out.String() != "hi\n" {
		t.Errorf("a child holds the streams: %d, %v, %q", code, err, c.out.String())
	}
	c = b.session(false, "/nope")
	var e *oci.ExecError
	if _, err := c.end(); !errors.As(err, &e) || !strings.Contains(err.Error(), "/nope") || c.err.String() != "" {
		t.Errorf("no such command: %v, stderr %q", err, c.err.String())
	}
	n.eventually("descriptors are back", func() bool { return descriptors(t) <= before })
}

func TestExecSessionWithTerminal(t *testing.T) {
	n := newNode(t)
	b := n.box("exec sleep 1000").run()
	before := descriptors(t)
	c := b.session(true, "/bin/sh")
	c.resize <- oci.Size{Columns: 101, Rows: 37}
	c.type_("tty; while [ \"$(stty size)\" != '37 101' ]; do sleep 0.01; done; echo first $((6*7))\n")
	c.sees("/dev/pts/")
	c.sees("first 42")
	c.type_("trap 'echo winch; stty size' WINCH; echo re''ady\n")
	c.sees("ready")
	c.resize <- oci.Size{Columns: 80, Rows: 24}
	c.n.eventually("the size arrives", func() bool { c.type_("\n"); return strings.Contains(c.out.String(), "24 80") })
	c.type_("sleep 994\n")
	n.eventually("it sleeps", func() bool { return len(sleeping(t, b, "994")) == 1 })
	c.type_("\x03") // the terminal's interrupt, not a byte for the program
	n.eventually("it is interrupted", func() bool { return len(sleeping(t, b, "994")) == 0 })
	c.type_("echo ba''ck\n")
	c.sees("back")
	c.type_("exit 9\n")
	if code, err := c.end(); err != nil || code != 9 {
		t.Errorf("code %d, %v", code, err)
	}
	c = b.session(true, "/nope")
	if _, err := c.end(); err == nil || !strings.Contains(err.Error(), "/nope") {
		t.Errorf("no such command: %v", err)
	}
	b.settled()
	n.eventually("descriptors are back", func() bool { return descriptors(t) <= before })
}

// The client goes: nothing of what it ran stays, whatever that tried.
func TestExecSessionEndsWithItsClient(t *testing.T) {
	n := newNode(t)
	b := n.box("exec sleep 1000").run()
	for _, terminal := range []bool{false, true} {
		c := b.session(terminal, "/bin/sh", "-c", "trap '' HUP TERM; sleep 999 & setsid sleep 998 & echo begun; cat >/dev/null; sleep 997")
		c.sees("begun")
		c.hangUp()
		if _, err := c.end(); !errors.Is(err, context.Canceled) {
			t.Errorf("terminal %v: %v, want canceled", terminal, err)
		}
		b.settled()
	}
	// One that goes while its command starts.
	for i := range 6 {
		c := b.session(i%2 == 0, "/bin/sleep", "996")
		time.Sleep(time.Duration(i) * 8 * time.Millisecond)
		c.hangUp()
		_, _ = c.end()
	}
	b.settled()
}

// A daemon that is killed leaves execs behind: the next one ends them, and no
// other process of the container.
func TestExecsOfAnEarlierDaemonEnd(t *testing.T) {
	n := newNode(t)
	b := n.box("sleep 991 & exec sleep 1000").run()
	left := b.session(false, "/bin/sh", "-c", "sleep 992 & echo left")
	if _, err := left.end(); err != nil {
		t.Fatal(err)
	}
	c := b.session(false, "/bin/sh", "-c", "trap '' TERM HUP; setsid sleep 993 & echo begun; sleep 993")
	c.sees("begun")
	states := n.restart(0, b)
	if !states[b.id].Running {
		t.Errorf("the container: %+v, want running", states[b.id])
	}
	if s := sleeping(t, b, "993"); len(s) > 0 {
		t.Errorf("these live: %v", s)
	}
	if s := sleeping(t, b, "99"); len(s) != 2 {
		t.Errorf("of what belongs to the container these live: %v", s)
	}
	if code, err := c.end(); err != nil || code != 137 {
		t.Errorf("the exec ended with %d, %v", code, err)
	}
	if files, _ := filepath.Glob(filepath.Join(b.bundle, "exec-*")); len(files) > 0 {
		t.Errorf("files are left: %v", files)
	}
}

// blocked is a client that takes a little and then nothing until it hangs up.
type blocked struct {
	ctx context.Context
	got int
}

func (w *blocked) Write(b []byte) (int, error) {
	if w.got += len(b); w.got > 100<<10 {
		<-w.ctx.Done()
		return 0, w.ctx.Err()
	}
	return len(b), nil
}

// A client that reads slowly slows its command down, and gets all of it.
func TestExecSessionWaitsForItsClient(t *testing.T) {
	n := newNode(t)
	b := n.box("exec sleep 1000").run()
	pr, pw := io.Pipe()
	ended := make(chan int32, 1)
	go func() {
		code, err := n.runtime.ExecSession(context.Background(), b.id, oci.SessionRequest{Streams: oci.Streams{Stdout: pw},
			Process: &rspec.Process{Args: []string{"/usr/bin/head", "-c", "1000000", "/dev/zero"}, Cwd: "/"}})
		if err != nil {
			t.Error(err)
		}
		_ = pw.Close()
		ended <- code
	}()
	time.Sleep(300 * time.Millisecond) // more than the drain after an exec's end takes
	if got, err := io.Copy(io.Discard, pr); err != nil || got != 1000000 {
		t.Errorf("got %d bytes, %v", got, err)
	}
	if code := <-ended; code != 0 {
		t.Errorf("code %d", code)
	}
	c := n.session(func(ctx context.Context, _ oci.Streams) (int32, error) {
		return n.runtime.ExecSession(ctx, b.id, oci.SessionRequest{Streams: oci.Streams{Stdout: &blocked{ctx: ctx}},
			Process: &rspec.Process{Args: []string{"/bin/cat", "/dev/zero"}, Cwd: "/"}})
	})
	time.Sleep(200 * time.Millisecond)
	c.hangUp()
	if _, err := c.end(); !errors.Is(err, context.Canceled) {
		t.Errorf("a client that hangs up without reading: %v", err)
	}
	b.settled()
}

// A daemon's own console sockets are files of its user's alone, and gone.
func TestConsoleSocket(t *testing.T) {
	path := t.TempDir() + "/tty"
	c, err := listenConsole(path)
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Mode&0o777 != 0o600 {
		t.Errorf("mode %o, %v; want 600", st.Mode&0o777, err)
	}
	c.close()
	if err := unix.Stat(path, &st); err != unix.ENOENT {
		t.Errorf("the socket is left: %v", err)
	}
}
