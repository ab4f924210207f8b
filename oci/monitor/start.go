package monitor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// startLimit is how long a new monitor may take until it listens.
const startLimit = time.Minute

// slowStart is after what time without a monitor somebody should know.
const slowStart = 10 * time.Second

// missing is what requests wait for while there is no monitor.
type missing struct {
	since time.Time
	what  string
	pid   int // of who should listen, 0: not known
}

// awaits notes what the next monitor waits for; whoever waits for a monitor sees it.
func (c *Client) awaits(what string, pid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil || c.missing.what == what && c.missing.pid == pid {
		return
	}
	c.missing.what, c.missing.pid = what, pid
	c.turn()
}

// Missing says what requests wait for when there has been no monitor for 10 s, else
// nothing. It does not block.
func (c *Client) Missing() string {
	c.mu.Lock()
	m, there := c.missing, c.conn != nil
	c.mu.Unlock()
	if there || time.Since(m.since) < slowStart {
		return ""
	}
	if m.pid == 0 {
		return m.what
	}
	return m.what + ": " + Whereabouts(m.pid)
}

// dialOrStart connects to the monitor, starting one when none listens. Two that are
// started at once settle it by Lock. One whose socket was removed, or replaced, is
// asked to listen again.
func (c *Client) dialOrStart(ctx context.Context) (*Conn, error) {
	o := c.o
	if len(o.Socket) > 100 {
		return nil, fmt.Errorf("socket path %s is longer than 100 bytes: %w", o.Socket, ErrUnavailable)
	}
	deadline := time.Now().Add(startLimit)
	var second error // of the last attempt that found another monitor
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		conn, err := dial(o.Socket)
		if err == nil {
			return conn, nil
		}
		if !vacant(err) {
			return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		serr := c.start(ctx)
		if serr == nil {
			continue
		}
		if errors.Is(serr, errSecond) {
			second = c.prompt()
			serr = second
		} else if ctx.Err() != nil && second != nil {
			serr = second
		}
		if ctx.Err() != nil || time.Now().After(deadline) || !errors.Is(serr, errSecond) {
			return nil, fmt.Errorf("start %s: %w: %w", o.Binary, ErrUnavailable, serr)
		}
		select { // the other one is about to listen, or to end
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// dial refuses whoever listens at the monitor's path without having its lock.
func dial(socket string) (*Conn, error) {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("connect to the monitor: %w", err)
	}
	conn := NewConn(c)
	_, pid, err := conn.Peer()
	if err != nil || pid == 0 { // of another PID namespace: nothing is known of it
		return conn, nil
	}
	if is, err := holds(pid, lockOf(socket)); err == nil && !is {
		_ = conn.Close()
		return nil, fmt.Errorf("connect to the monitor: %s listens at %s: %w", Whereabouts(pid), socket, errStranger)
	}
	return conn, nil
}

// errStranger: who listens at the path is no monitor, or one that has ended since.
var errStranger = errors.New("it does not hold the monitor's lock")

// vacant says that no monitor listens at the path, whatever is there.
func vacant(err error) bool {
	for _, is := range []error{errStranger, unix.ECONNREFUSED, unix.ENOENT, unix.ELOOP, unix.EPROTOTYPE} {
		if errors.Is(err, is) {
			return true
		}
	}
	return false
}

// errSecond: the monitor ended at once since another one has the lock.
var errSecond = errors.New("another monitor holds the lock")

// prompt asks the monitor that holds the lock and does not listen to listen again.
// It returns errSecond in any case, with what there is to know of that monitor.
func (c *Client) prompt() error {
	socket := c.o.Socket
	pid := holder(lockOf(socket))
	if pid == 0 {
		return errSecond
	}
	_ = unix.Kill(pid, unix.SIGHUP) // every build catches it
	c.awaits("the monitor that holds the lock to listen at "+socket, pid)
	return fmt.Errorf("%w, %s, and does not listen at %s: see \"A monitor that cannot be reached\" in docs/operating.md",
		errSecond, Whereabouts(pid), socket)
}

// ExitSecond is the exit status of a monitor that found the lock taken.
const ExitSecond = 9

// start runs a monitor in a session of its own and waits until it listens. Its
// stderr goes to monitor.log beside the socket.
func (c *Client) start(ctx context.Context) error {
	o := c.o
	ready, theirs, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make pipe: %w", err)
	}
	defer ready.Close()
	defer theirs.Close()
	log, err := os.OpenFile(filepath.Join(filepath.Dir(o.Socket), "monitor.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return fmt.Errorf("open the monitor's log: %w", err)
	}
	defer log.Close()
	before, _ := log.Seek(0, io.SeekEnd)
	cmd := exec.Command(o.Binary, "--socket", o.Socket, "--ready-fd", "3")
	cmd.Dir = "/"
	cmd.Stderr, cmd.ExtraFiles = log, []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	_ = theirs.Close()
	c.awaits("the monitor "+o.Binary+" to begin", cmd.Process.Pid)
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // also reaps it when it dies much later
	_ = ready.SetReadDeadline(time.Now().Add(startLimit))
	stop := context.AfterFunc(ctx, func() { _ = ready.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if n, err := ready.Read(make([]byte, 1)); n == 1 {
		return nil
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		_ = cmd.Process.Kill()
		return fmt.Errorf("wait for the monitor to listen: %w", err)
	}
	err = <-ended
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == ExitSecond {
		return errSecond
	}
	return fmt.Errorf("the monitor ended at once: %v (%s: %s)", err, log.Name(), lastWords(log.Name(), before))
}

// lastWords is the last line of what was written to a log since it had a size.
func lastWords(log string, size int64) string {
	f, err := os.OpenFile(log, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	said, _ := io.ReadAll(io.NewSectionReader(f, size, 4096))
	lines := strings.Split(strings.TrimSpace(string(said)), "\n")
	return lines[len(lines)-1]
}

// ConsoleSocket is a new path for the pty of a container that is being created.
// It stands beside the monitor's own socket, for such paths must be short.
func (c *Client) ConsoleSocket() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lastID++
	return filepath.Join(filepath.Dir(c.o.Socket), fmt.Sprintf("tty-%d-%d", os.Getpid(), c.lastID))
}
