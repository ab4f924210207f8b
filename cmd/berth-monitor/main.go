// Command berth-monitor is the node's one monitor: the parent of every
// container, the reader of their output, the writer of their CRI logs and exit
// records. It has no configuration and decides nothing; the daemon tells it what
// to run (package oci/monitor has the protocol). It outlives the daemon, and
// ends by itself when there is neither a daemon nor a living container.
//
// As `berth-monitor look` it is a process that the daemon has look at paths that may
// hang (package sandbox/outside). As `berth-monitor pause` it is PID 1 of a pod's shared PID namespace.
//
// It owns exit.json and monitor.json in a bundle and the log files. It writes
// its own troubles to stderr. It links nothing but the standard library and
// x/sys, to stay small.
//
// Terms: a stream is stdout or stderr of a container, or its pty. A piece is one
// line of a CRI log file. The tape (tape.go) holds what was read and is not in
// the log yet, such that kill -9 at any instant neither loses, tears nor
// doubles a line.
package main

import (
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "pause" {
		pause()
	}
	if len(os.Args) > 1 && os.Args[1] == "look" {
		look()
	}
	socket := flag.String("socket", "", "path of the unix socket, made with mode 0600")
	ready := flag.Int("ready-fd", -1, "descriptor that gets one byte when the socket listens")
	resumed := flag.Int("resume", -1, "descriptor of the state that this process left when it was another build")
	check := flag.Bool("check-state", false, "only tell whether this build can go on from the state that is its stdin")
	newest := flag.Int("newest", monitor.Version, "with --check-state: the newest version of the protocol that the daemon speaks")
	oldest := flag.Int("oldest", 0, "with --check-state: the oldest one")
	flag.Parse()
	log.SetFlags(log.LstdFlags | log.LUTC)
	log.SetPrefix(fmt.Sprintf("berth-monitor[%d]: ", os.Getpid()))
	if *check {
		if err := checkState(*newest, *oldest); err != nil {
			log.Fatal(err)
		}
		return
	}
	if *socket == "" || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	if err := serve(*socket, *ready, *resumed); err != nil {
		log.Print(err)
		if errors.Is(err, unix.EWOULDBLOCK) {
			os.Exit(monitor.ExitSecond)
		}
		os.Exit(1)
	}
}

// serve runs the monitor to its end.
func serve(socket string, ready, resumed int) error {
	// A few MiB in all: collect early, and give pages back.
	debug.SetGCPercent(25)
	debug.SetMemoryLimit(64 << 20)
	// Caught, not ignored: containers would inherit that.
	monitor.DefaultThreadSignals()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE, syscall.SIGHUP, syscall.SIGINT)
	// runc inherits it and makes mount points in a rootfs, which every user of the
	// container must get through. The monitor's own files have their modes set.
	unix.Umask(0o022)
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become subreaper: %w", err)
	}
	// Leave the daemon's session also when started by hand; no matter if leading one.
	_, _ = unix.Setsid()
	s, err := begin(socket, resumed)
	if err != nil {
		return err
	}
	defer s.lock.Close()
	if ready >= 0 {
		_, _ = unix.Write(ready, []byte{1})
		_ = unix.Close(ready)
	}
	s.run()
	return nil
}

// begin makes a new monitor, or goes on as the one that this process was.
func begin(socket string, resumed int) (*server, error) {
	if resumed >= 0 {
		return resume(socket, resumed)
	}
	return listen(socket)
}
