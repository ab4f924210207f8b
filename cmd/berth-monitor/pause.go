package main

import (
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"

	"golang.org/x/sys/unix"
)

// pause is PID 1 of a pod's shared PID namespace: it sleeps, reaps what the
// containers orphan, and ends at once on SIGTERM or SIGINT, which takes the
// namespace's processes along. It never returns.
func pause() {
	debug.SetGCPercent(-1) // nothing below allocates
	runtime.GOMAXPROCS(1)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGCHLD, unix.SIGTERM, unix.SIGINT)
	for {
		for {
			pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
			if pid <= 0 && err != unix.EINTR {
				break
			}
		}
		if s := <-signals; s == syscall.SIGTERM || s == syscall.SIGINT {
			os.Exit(0)
		}
	}
}
