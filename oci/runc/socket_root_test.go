package runc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"berth/oci/monitor"
)

// accidents are what may happen to the monitor's socket.
var accidents = map[string]func(socket string) error{
	"removed":                   os.Remove,
	"moved away":                func(s string) error { return os.Rename(s, s+".away") },
	"replaced by a file":        func(s string) error { return replace(s, func(p string) error { return os.WriteFile(p, nil, 0o600) }) },
	"replaced by a symlink":     func(s string) error { return replace(s, func(p string) error { return os.Symlink("monitor.log", p) }) },
	"replaced by a loop":        func(s string) error { return replace(s, func(p string) error { return os.Symlink("monitor.sock", p) }) },
	"replaced by a dead socket": func(s string) error { return replace(s, bindOnly) },
	"removed with its lock": func(s string) error {
		_ = os.Remove(s + ".lock") // only the first time it is there
		return os.Remove(s)
	},
}

// replace puts something in the socket's place at once.
func replace(socket string, make func(path string) error) error {
	if err := make(socket + ".other"); err != nil {
		return err
	}
	return os.Rename(socket+".other", socket)
}

// bindOnly leaves a socket at which nobody listens.
func bindOnly(path string) error {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	return l.Close()
}

// A monitor whose socket is removed or replaced listens there again by itself, also
// after it has become another build; the next daemon finds it. With the lock gone
// too there is no second one.
func TestSocketIsBack(t *testing.T) {
	i := newInstalled(t)
	n := newNodeOf(t, i.path)
	b := n.box("sleep 1000").run()
	pid, socket := n.client.MonitorPID(), filepath.Join(n.dir, "monitor.sock")
	for name, happens := range accidents {
		for _, how := range []string{"a daemon is there", "no daemon is there", "the daemon renews it"} {
			if how == "no daemon is there" {
				_ = n.client.Close()
			}
			if err := happens(socket); err != nil {
				t.Fatal(err)
			}
			switch how {
			case "a daemon is there":
				n.eventually(name+": the socket is back", func() bool {
					info, err := os.Lstat(socket)
					return err == nil && info.Mode().Type() == os.ModeSocket && info.Mode().Perm() == 0o600
				})
				n.restart(0, b)
			case "no daemon is there":
				n.open()
				n.restore(b)
			default:
				i.next()
				n.renew()
			}
			if now := n.client.MonitorPID(); now != pid {
				t.Fatalf("%s, %s: the monitor is process %d, it was %d", name, how, now, pid)
			}
			if st := n.restore(b)[b.id]; !st.Running {
				t.Errorf("%s, %s: the container is %+v", name, how, st)
			}
		}
	}
	if _, err := os.Lstat(socket + ".away"); err != nil {
		t.Error(err)
	}
}

// Where the node has no inotify instance left a daemon's start wakes the monitor.
func TestSocketIsBackForADaemonThatAsks(t *testing.T) {
	i := newInstalled(t)
	i.edited(map[string][2]string{"cmd/berth-monitor/door.go": {"unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)", "-1, error(unix.EMFILE)"}})
	n := newNodeOf(t, i.path)
	n.box("sleep 1000").run()
	pid := n.client.MonitorPID()
	_ = n.client.Close()
	if err := os.Remove(filepath.Join(n.dir, "monitor.sock")); err != nil {
		t.Fatal(err)
	}
	n.open()
	if now := n.client.MonitorPID(); now != pid {
		t.Errorf("the monitor is process %d, it was %d", now, pid)
	}
}

// A monitor that holds the lock and cannot be reached is named.
func TestUnreachableMonitorIsNamed(t *testing.T) {
	n := newNode(t)
	n.box("sleep 1000").run()
	pid := n.client.MonitorPID()
	_ = n.client.Close()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(n.dir, "monitor.sock")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), slow(time.Second))
	defer cancel()
	c, err := monitor.Open(ctx, monitor.Options{Binary: n.binary, Socket: filepath.Join(n.dir, "monitor.sock")})
	if err == nil {
		_ = c.Close()
	}
	if want := fmt.Sprintf("pid %d (berth-monitor) in state T", pid); !errors.Is(err, monitor.ErrUnavailable) || !strings.Contains(fmt.Sprint(err), want) {
		t.Errorf("the error is %v; want %q in it", err, want)
	}
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	n.open()
	if now := n.client.MonitorPID(); now != pid {
		t.Errorf("the monitor is process %d, it was %d", now, pid)
	}
}

// Who listens at the monitor's path without its lock is not talked to.
func TestStrangerAtTheSocket(t *testing.T) {
	n := newNode(t)
	n.box("sleep 1000").run()
	pid := n.client.MonitorPID()
	_ = n.client.Close()
	_ = syscall.Kill(pid, syscall.SIGKILL)
	n.eventually("the monitor is dead", func() bool { return !alive(pid) })
	socket := filepath.Join(n.dir, "monitor.sock")
	_ = os.Remove(socket)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	defer l.Close()
	n.open()
	if now := n.client.MonitorPID(); now == os.Getpid() || now == pid || now == 0 {
		t.Errorf("the monitor is process %d", now)
	}
}
