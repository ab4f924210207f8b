package runc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"berth/oci"
)

// attach joins a client to the box and waits until it is attached: sizes are
// taken from then on.
func (b *box) attach(want func(*oci.Streams)) *client {
	b.n.t.Helper()
	c := b.n.session(func(ctx context.Context, s oci.Streams) (int32, error) {
		if b.io.Terminal {
			s.Stderr = nil
		}
		if want != nil {
			want(&s)
		}
		return 0, b.n.runtime.Attach(ctx, b.id, s)
	})
	c.resize <- oci.Size{Columns: 80, Rows: 24}
	b.n.eventually("the client is attached", func() bool { return len(c.resize) == 0 || len(c.ended) > 0 })
	return c
}

// monitorDescriptors counts the monitor's descriptors.
func (n *node) monitorDescriptors() int {
	n.t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.client.MonitorPID()))
	if err != nil {
		n.t.Fatal(err)
	}
	return len(entries)
}

// a shell reads its stdin until the end, and says so.
const reader = "while read -r l; do echo got $l; echo bad $l >&2; done; echo over; sleep 1000"

func TestAttach(t *testing.T) {
	n := newNode(t)
	b := n.box(reader)
	b.io.Stdin = true
	b.run()
	ours, theirs := descriptors(t), n.monitorDescriptors()
	first, second := b.attach(nil), b.attach(func(s *oci.Streams) { s.Stdin, s.Stderr = nil, nil })
	first.type_("one\n")
	first.sees("got one\n")
	second.sees("got one\n")
	n.eventually("stderr is apart", func() bool { return first.err.String() == "bad one\n" })
	if second.err.String() != "" {
		t.Errorf("stderr of a client that did not ask: %q", second.err.String())
	}
	first.hangUp()
	if _, err := first.end(); !errors.Is(err, context.Canceled) {
		t.Errorf("hung up: %v", err)
	}
	// Stdin is open for the next, who sees nothing of before.
	third := b.attach(nil)
	third.type_("two\n")
	third.sees("got two\n")
	_ = third.in.Close() // the end of a client's input is not the container's
	second.sees("got two\n")
	if got := third.out.String(); got != "got two\n" {
		t.Errorf("the third client saw %q", got)
	}
	if err := n.runtime.KillAll(context.Background(), b.id); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]*client{"second": second, "third": third} {
		if _, err := c.end(); err != nil {
			t.Errorf("%s: %v, want nil at the container's end", name, err)
		}
	}
	if got := b.output("stdout"); got != "got one\ngot two\n" {
		t.Errorf("the log has %q", got)
	}
	b.exit()
	c := b.attach(nil)
	if _, err := c.end(); !errors.Is(err, oci.ErrNotRunning) {
		t.Errorf("attach to an ended container: %v", err)
	}
	if err := n.runtime.Attach(context.Background(), "never-made", oci.Streams{}); !errors.Is(err, oci.ErrNotFound) {
		t.Errorf("attach to no container: %v", err)
	}
	n.eventually("descriptors are back", func() bool { return descriptors(t) <= ours && n.monitorDescriptors() <= theirs })
}

// With StdinOnce the first client's end is stdin's, be it that it hangs up, that
// it closes its input, or that its daemon or its monitor dies.
func TestAttachStdinOnce(t *testing.T) {
	for name, end := range map[string]func(*node, *client){
		"hang up":        func(_ *node, c *client) { c.hangUp() },
		"close input":    func(_ *node, c *client) { _ = c.in.Close() },
		"daemon dies":    func(n *node, _ *client) { _ = n.client.Close(); n.open() },
		"monitor dies":   func(n *node, _ *client) { n.replaceMonitor() },
		"container asks": nil,
	} {
		if end == nil {
			continue
		}
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			b := n.box(reader)
			b.io.Stdin, b.io.StdinOnce = true, true
			b.run()
			looker := b.attach(func(s *oci.Streams) { s.Stdin = nil })
			looker.hangUp() // without stdin it is no client of it
			_, _ = looker.end()
			c := b.attach(nil)
			c.type_("one\n")
			c.sees("got one\n")
			end(n, c)
			n.eventually("stdin has ended", func() bool { return strings.HasSuffix(b.output("stdout"), "over\n") })
			if name != "close input" {
				_, _ = c.end()
			}
			n.restore(b)
			late := b.attach(nil)
			late.type_("lost\n")
			late.hangUp()
			if _, err := late.end(); !errors.Is(err, context.Canceled) {
				t.Errorf("a later client: %v, want that it is attached without input", err)
			}
		})
	}
}

func TestAttachWithTerminal(t *testing.T) {
	n := newNode(t)
	b := n.box("trap 'stty size' WINCH; echo ready; while :; do read -r l && echo got $l; done")
	b.io.Terminal, b.io.Stdin, b.spec.Process.Terminal = true, true, true
	b.io.StdinOnce = true // of a terminal it says nothing
	b.run()
	n.eventually("the trap is set", func() bool { return strings.Contains(b.output("stdout"), "ready") })
	for i := range 2 {
		c := b.attach(nil)
		c.resize <- oci.Size{Columns: uint16(100 + i), Rows: 30}
		c.sees(fmt.Sprintf("30 %d", 100+i))
		c.type_("hello\n")
		c.sees("got hello")
		c.hangUp()
		_, _ = c.end()
	}
	n.replaceMonitor()
	c := b.attach(nil)
	c.type_("again\n")
	c.sees("got again")
	c.hangUp()
}

// A container without stdin: what a client sends is dropped.
func TestAttachWithoutStdin(t *testing.T) {
	n := newNode(t)
	b := n.box("cat; echo over; while :; do echo tick; sleep 0.05; done").run()
	c := b.attach(nil)
	c.type_(strings.Repeat("x", 1<<20))
	_ = c.in.Close()
	c.sees("tick")
	c.hangUp()
	n.eventually("the container's stdin was at its end", func() bool { return strings.HasPrefix(b.output("stdout"), "over\n") })
}

// A client that reads slowly misses some and is told; neither the log nor another
// client loses or waits for anything.
func TestAttachSlowClient(t *testing.T) {
	n := newNode(t)
	const lines, length = 400, 64 << 10
	b := n.box(fmt.Sprintf("read -r l; i=0; while [ $i -lt %d ]; do head -c %d /dev/zero | tr '\\0' x; echo; i=$((i+1)); sleep 0.002; done; echo over; read -r l; echo end", lines, length-1))
	b.io.Stdin = true
	b.run()
	gate := make(chan struct{})
	var got screen
	slowOne := b.attach(func(s *oci.Streams) { s.Stdin, s.Stderr, s.Stdout = nil, nil, &gated{&got, gate} })
	dead := b.attach(nil)
	dead.hangUp()
	_, _ = dead.end()
	quick := b.attach(nil)
	quick.type_("go\n")
	quick.sees("over\n")
	if got := len(quick.out.String()); got != lines*length+len("over\n") {
		t.Errorf("the quick client has %d bytes, want %d", got, lines*length+len("over\n"))
	}
	if got := len(b.output("stdout")); got != lines*length+len("over\n") {
		t.Errorf("the log has %d bytes, want %d", got, lines*length+len("over\n"))
	}
	close(gate)
	last := -1
	n.eventually("the slow client has caught up", func() bool {
		time.Sleep(500 * time.Millisecond)
		now := len(got.String())
		same := now > 0 && now == last
		last = now
		return same
	})
	quick.type_("go on\n")
	if _, err := slowOne.end(); err != nil {
		t.Errorf("the slow client: %v, want nil at the container's end", err)
	}
	var skipped int
	text := got.String()
	at := strings.LastIndex(text, "[berth: ")
	if at < 0 || !strings.HasSuffix(text, "this client reads too slowly]\nend\n") {
		t.Fatalf("the slow client was not told; it has %d bytes and last %q", len(text), text[max(0, len(text)-100):])
	}
	if _, err := fmt.Sscanf(text[at:], "[berth: %d bytes", &skipped); err != nil || at-1+skipped != lines*length+len("over\n") {
		t.Errorf("it has %d bytes and was told of %d more, want %d together (%v)", at-1, skipped, lines*length+len("over\n"), err)
	}
}

// gated takes nothing until its gate is open.
type gated struct {
	to   *screen
	gate chan struct{}
}

func (g *gated) Write(b []byte) (int, error) {
	<-g.gate
	return g.to.Write(b)
}

// The last output of a container does not fit: the client is told by an error.
func TestAttachSlowClientAtTheEnd(t *testing.T) {
	n := newNode(t)
	b := n.box("read -r l; head -c 30000000 /dev/zero")
	b.io.Stdin, b.io.LogPath = true, ""
	b.run()
	gate := make(chan struct{})
	var got screen
	c := b.attach(func(s *oci.Streams) { s.Stdout = &gated{&got, gate} })
	c.type_("go\n")
	b.exit()
	close(gate)
	if _, err := c.end(); !errors.Is(err, oci.ErrSlow) {
		t.Errorf("%v, want ErrSlow", err)
	}
	if n := len(got.String()); n < 1<<20 || n >= 30000000 {
		t.Errorf("the client has %d bytes, want what fitted", n)
	}
}

// The daemon goes and comes back, the monitor dies and is replaced: sessions end
// and can be opened again, and the log is whole.
func TestAttachAfterCrashes(t *testing.T) {
	n := newNode(t)
	b := n.box(reader)
	b.io.Stdin = true
	b.run()
	theirs := n.monitorDescriptors()
	lost := b.attach(nil)
	lost.type_("one\n")
	lost.sees("got one\n")
	n.restart(0, b)
	if _, err := lost.end(); err == nil {
		t.Error("a session of a daemon that has gone ends well")
	}
	c := b.attach(nil)
	c.type_("two\n")
	c.sees("got two\n")
	n.eventually("the monitor has let the first go", func() bool { return n.monitorDescriptors() <= theirs+2 })
	n.replaceMonitor()
	if _, err := c.end(); !errors.Is(err, oci.ErrMonitorUnavailable) {
		t.Errorf("a session of a monitor that died: %v, want ErrMonitorUnavailable", err)
	}
	c = b.attach(nil)
	c.type_("three\n")
	c.sees("got three\n")
	c.hangUp()
	_, _ = c.end()
	if got := b.output("stdout"); got != "got one\ngot two\ngot three\n" {
		t.Errorf("the log has %q", got)
	}
}
