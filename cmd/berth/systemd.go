package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// systemd is the manager that started the daemon, by sd_notify(3); the zero value
// is none, and every method then does nothing. As a monitor.Shelf it is the unit's
// descriptor store, which lives as long as the unit is not stopped.
type systemd struct{ socket string }

// notifyLimit is how long systemd may leave its socket full.
const notifyLimit = 5 * time.Second

// firstPassed is the number of the first descriptor that systemd passes on.
const firstPassed = 3

// takeSystemd takes systemd's variables out of the environment and returns what
// they say, with the descriptors that were in the store. It comes before any
// process is started: an OCI runtime that finds NOTIFY_SOCKET believes that the
// container is the service, and fails over the socket it makes for it.
func takeSystemd() (systemd, []monitor.Shelved) {
	s := systemd{socket: os.Getenv("NOTIFY_SOCKET")}
	pid, names := os.Getenv("LISTEN_PID"), strings.Split(os.Getenv("LISTEN_FDNAMES"), ":")
	count, err := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	for _, variable := range []string{"NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "FDSTORE"} {
		_ = os.Unsetenv(variable) // fails for names that are none
	}
	if err != nil || pid != strconv.Itoa(os.Getpid()) {
		return s, nil
	}
	var kept []monitor.Shelved
	for i := range count {
		fd := firstPassed + i
		unix.CloseOnExec(fd)
		if i < len(names) {
			kept = append(kept, monitor.Shelved{Name: names[i], FD: fd})
		}
	}
	return s, kept
}

// shelf is systemd's descriptor store; nil without systemd.
func (s systemd) shelf() monitor.Shelf {
	if s.socket == "" {
		return nil
	}
	return s
}

// tell tells a state ("READY=1").
func (s systemd) tell(state string) error { return s.send(state) }

// Put implements monitor.Shelf.
func (s systemd) Put(name string, fd int) error {
	// Without polling: systemd would drop what seems to have hung up.
	return s.send("FDSTORE=1\nFDPOLL=0\nFDNAME="+name, fd)
}

// Drop implements monitor.Shelf.
func (s systemd) Drop(name string) error { return s.send("FDSTOREREMOVE=1\nFDNAME=" + name) }

func (s systemd) send(text string, fds ...int) error {
	if s.socket == "" {
		return nil
	}
	conn, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make socket: %w", err)
	}
	defer unix.Close(conn)
	limit := unix.NsecToTimeval(notifyLimit.Nanoseconds())
	_ = unix.SetsockoptTimeval(conn, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit)
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if err := unix.Sendmsg(conn, []byte(text), oob, &unix.SockaddrUnix{Name: s.socket}, 0); err != nil {
		return fmt.Errorf("tell systemd %q: %w", text, err)
	}
	return nil
}
