package monitor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// startLimit is how long a new monitor may take until it listens.
const startLimit = time.Minute

// Lock takes the lock that one living monitor holds. unix.EWOULDBLOCK when
// another one has it. It is released with the file.
func Lock(socket string) (*os.File, error) {
	f, err := os.OpenFile(socket+".lock", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the monitor's lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("take the lock %s.lock: %w", socket, err)
	}
	return f, nil
}

// dialOrStart connects to the monitor, starting one when nobody listens. Two
// that are started at once settle it by Lock.
func dialOrStart(ctx context.Context, o Options) (*Conn, error) {
	if len(o.Socket) > 100 {
		return nil, fmt.Errorf("socket path %s is longer than 100 bytes: %w", o.Socket, ErrUnavailable)
	}
	deadline := time.Now().Add(startLimit)
	for {
		conn, err := dial(o.Socket)
		if err == nil {
			return conn, nil
		}
		if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		serr := start(ctx, o)
		if serr == nil {
			continue
		}
		if ctx.Err() != nil || time.Now().After(deadline) || !errors.Is(serr, errSecond) {
			return nil, fmt.Errorf("start %s: %w: %w", o.Binary, ErrUnavailable, serr)
		}
		time.Sleep(20 * time.Millisecond) // the other one is about to listen, or to end
	}
}

func dial(socket string) (*Conn, error) {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("connect to the monitor: %w", err)
	}
	return NewConn(c), nil
}

// errSecond: the monitor ended at once since another one has the lock.
var errSecond = errors.New("another monitor holds the lock")

// ExitSecond is the exit status of a monitor that found the lock taken.
const ExitSecond = 9

// start runs a monitor in a session of its own and waits until it listens. Its
// stderr goes to monitor.log beside the socket.
func start(ctx context.Context, o Options) error {
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
	cmd := exec.Command(o.Binary, "--socket", o.Socket, "--ready-fd", "3")
	cmd.Dir = "/"
	cmd.Stderr, cmd.ExtraFiles = log, []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	_ = theirs.Close()
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
	return fmt.Errorf("the monitor ended at once: %v (see monitor.log beside its socket)", err)
}

// ConsoleSocket is a new path for the pty of a container that is being created.
// It stands beside the monitor's own socket, for such paths must be short.
func (c *Client) ConsoleSocket() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lastID++
	return filepath.Join(filepath.Dir(c.o.Socket), fmt.Sprintf("tty-%d-%d", os.Getpid(), c.lastID))
}
