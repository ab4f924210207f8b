package node

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
)

// marker tells the second run of a program that it is the isolated one.
const marker = "BERTH_TEST_ISOLATED"

// ErrNotRoot: namespaces, mounts and containers need root.
var ErrNotRoot = errors.New("needs root")

// Isolate gives the program network, IPC and mount namespaces of its own, so that
// bridges, firewall rules, host ports, shared memory and mounts of a test neither
// meet nor touch those of the machine, and are gone when it ends.
//
// Call it first. In the process that the user started it does not return: it
// runs the same program again inside, passes on SIGINT and SIGTERM, and exits
// with its code. Inside it brings the loopback up and returns. ErrNotRoot.
func Isolate() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w: this is uid %d", ErrNotRoot, os.Geteuid())
	}
	// A reader that goes away (`make demo | head`) must not keep a node from being
	// cleaned up. Caught and not ignored, for children would inherit that.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	if os.Getenv(marker) != "" {
		if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
			return fmt.Errorf("bring the loopback up: %w: %s", err, out)
		}
		return nil
	}
	runtime.LockOSThread() // Pdeathsig is about the thread that forked
	inner := exec.Command("/proc/self/exe", os.Args[1:]...)
	inner.Args[0] = os.Args[0]
	inner.Env = append(os.Environ(), marker+"=1")
	inner.Stdin, inner.Stdout, inner.Stderr = os.Stdin, os.Stdout, os.Stderr
	inner.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:   syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC,
		Unshareflags: syscall.CLONE_NEWNS, // which makes every mount private
		Pdeathsig:    syscall.SIGTERM,
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	if err := inner.Start(); err != nil {
		return fmt.Errorf("start inside new namespaces: %w", err)
	}
	go func() {
		for s := range signals {
			_ = inner.Process.Signal(s) // it may have ended already
		}
	}()
	err := inner.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return fmt.Errorf("wait for the isolated program: %w", err)
	}
	code := inner.ProcessState.ExitCode()
	if code < 0 {
		code = 1 // ended by a signal
	}
	os.Exit(code)
	return nil
}
