package runc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"berth/oci/monitor"
)

// consoleLimit is how long the pty may still take when the binary has ended,
// which sends it before.
const consoleLimit = 2 * time.Second

// console waits for the pty of an exec at a socket with a path.
type console struct {
	path     string
	listener *net.UnixListener
	master   chan int
}

func listenConsole(path string) (*console, error) {
	_ = os.Remove(path)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen for the terminal: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("set mode of the terminal's socket: %w", err)
	}
	c := &console{path: path, listener: l, master: make(chan int, 1)}
	go func() { c.master <- monitor.ReceiveConsole(l) }()
	return c, nil
}

// receive returns the pty's master. To be called when the binary has ended.
func (c *console) receive() (*os.File, error) {
	_ = c.listener.SetDeadline(time.Now().Add(consoleLimit))
	fd := <-c.master
	c.master <- -1
	if fd < 0 {
		return nil, errors.New("the OCI runtime sent no terminal")
	}
	return os.NewFile(uintptr(fd), "tty"), nil
}

// close releases all but what receive returned.
func (c *console) close() {
	_ = c.listener.Close()
	if fd := <-c.master; fd >= 0 {
		_ = os.NewFile(uintptr(fd), "tty").Close()
	}
}
