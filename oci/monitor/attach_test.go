package monitor

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// oldMonitor speaks the protocol as the first release did: it knows no extension
// and refuses what it does not know.
func oldMonitor(t *testing.T, l *net.UnixListener, asked chan<- string) {
	c, err := l.AcceptUnix()
	if err != nil {
		return
	}
	conn := NewConn(c)
	defer conn.Close()
	for {
		m, err := conn.Receive()
		if err != nil {
			return
		}
		m.CloseFDs()
		a := &Message{ID: m.ID, Op: OpAnswer, Version: 1, PID: os.Getpid()}
		if m.Op == OpHello {
			if err := conn.Send(&Message{Op: OpPark, Container: &Container{ID: "old", PID: os.Getpid()}}); err != nil {
				t.Error(err)
			}
		} else {
			asked <- m.Op
			a.Error = &Error{Text: "unknown operation"}
		}
		if err := conn.Send(a); err != nil {
			t.Error(err)
		}
	}
}

// A monitor of an older release goes on serving; it is not asked for what it
// cannot do, and the refusal says why.
func TestOlderMonitorCannotAttach(t *testing.T) {
	dir, err := os.MkdirTemp("", "berth-old")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "monitor.sock")
	lock, err := Lock(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	asked := make(chan string, 10)
	go oldMonitor(t, l, asked)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := Open(ctx, Options{Socket: socket, Binary: "/nonexistent"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	defer unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) // other tests have children
	if _, err := c.Attach(ctx, "old", Want{Stdout: true}); !errors.Is(err, ErrUnsupported) {
		t.Errorf("attach: %v, want ErrUnsupported", err)
	}
	if _, err := c.Attach(ctx, "unknown", Want{Stdout: true}); !errors.Is(err, ErrNotFound) {
		t.Errorf("attach to an unknown container: %v, want ErrNotFound", err)
	}
	if err := c.Reopen(ctx, "old"); err == nil {
		t.Error("the old monitor's refusal is lost")
	}
	if len(asked) != 1 {
		t.Errorf("it was asked %d things, want the reopen alone", len(asked))
	}
}
