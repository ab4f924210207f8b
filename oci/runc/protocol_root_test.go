package runc

import (
	"errors"
	"net"
	"strings"
	"testing"

	"berth/oci/monitor"
)

// dial is a connection to the monitor beside the client's.
func (n *node) dial() *monitor.Conn {
	n.t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: n.dir + "/monitor.sock", Net: "unix"})
	if err != nil {
		n.t.Fatal(err)
	}
	conn := monitor.NewConn(c)
	n.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func TestMonitorRefusesBadRequests(t *testing.T) {
	n := newNode(t)
	b := n.box("exec sleep 1000").run()
	conn := n.dial()
	complete := monitor.Create{ID: "x", Bundle: b.bundle, Args: []string{"/bin/true"}, PidFile: "/nowhere", IO: monitor.IO{MaxLine: 100}}
	without := func(change func(*monitor.Create)) *monitor.Create {
		c := complete
		change(&c)
		return &c
	}
	for name, c := range map[string]struct {
		m    monitor.Message
		want string
		is   error
	}{
		"another version":     {monitor.Message{Op: monitor.OpHello, Version: 99}, "version", monitor.ErrVersion},
		"no such operation":   {monitor.Message{Op: "dance"}, `"dance"`, nil},
		"create of nothing":   {monitor.Message{Op: monitor.OpCreate}, "incomplete", nil},
		"create without args": {monitor.Message{Op: monitor.OpCreate, Create: without(func(c *monitor.Create) { c.Args = nil })}, "incomplete", nil},
		"a relative command":  {monitor.Message{Op: monitor.OpCreate, Create: without(func(c *monitor.Create) { c.Args = []string{"true"} })}, "incomplete", nil},
		"endless pieces":      {monitor.Message{Op: monitor.OpCreate, Create: without(func(c *monitor.Create) { c.IO.MaxLine = 1 << 30 })}, "incomplete", nil},
		"a taken id":          {monitor.Message{Op: monitor.OpCreate, Create: without(func(c *monitor.Create) { c.ID = b.id })}, b.id, monitor.ErrExists},
		"a runtime that lies": {monitor.Message{Op: monitor.OpCreate, Create: &complete}, "pid file", nil},
		"no such runtime":     {monitor.Message{Op: monitor.OpCreate, Create: without(func(c *monitor.Create) { c.Args = []string{"/no/such/runtime"} })}, "/no/such/runtime", nil},
		"adoption of nothing": {monitor.Message{Op: monitor.OpAdopt}, "incomplete", nil},
		"adoption of a ghost": {monitor.Message{Op: monitor.OpAdopt, Container: &monitor.Container{ID: "ghost", Bundle: b.bundle, PID: 1, StartTime: 5}}, "ghost", nil},
		"reopen of nobody":    {monitor.Message{Op: monitor.OpReopen, Target: "nobody"}, "nobody", monitor.ErrNotFound},
		"forget the living":   {monitor.Message{Op: monitor.OpForget, Target: b.id}, "has not ended", nil},
	} {
		c.m.ID = 7
		if err := conn.Send(&c.m); err != nil {
			t.Fatal(err)
		}
		a, err := conn.Receive()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if a.ID != 7 || a.Error == nil || !strings.Contains(a.Error.Text, c.want) {
			t.Errorf("%s: answer %+v, error %+v", name, a, a.Error)
			continue
		}
		if c.is != nil && !errors.Is(a.Error, c.is) {
			t.Errorf("%s: %v is not %v", name, a.Error, c.is)
		}
	}
	// None of it took the daemon's place or hurt the container.
	if r, err := b.exec(0, "echo well"); err != nil || string(r.Stdout) != "well\n" {
		t.Errorf("exec after it: %+v, %v", r, err)
	}
	if _, ended := n.runtime.Exited(b.id); ended {
		t.Error("the container has ended")
	}
}

// Garbage on the socket ends that connection alone.
func TestMonitorSurvivesGarbage(t *testing.T) {
	n := newNode(t)
	for _, garbage := range []string{"\xff\xff\xff\xff", "GET / HTTP/1.1\r\n\r\n", "\x00\x00\x00\x02{]"} {
		c, err := net.Dial("unix", n.dir+"/monitor.sock")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte(garbage)); err != nil {
			t.Fatal(err)
		}
		if m, err := c.Read(make([]byte, 1)); m > 0 || err == nil {
			t.Errorf("%q was answered", garbage)
		}
		_ = c.Close()
	}
	if b := n.box("exit 4").run(); b.exit().Code != 4 {
		t.Error("the monitor does not work any more")
	}
}
