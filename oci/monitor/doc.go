// Package monitor is the protocol between the daemon and the node's one
// berth-monitor, and the daemon's end of it.
//
// It owns the messages and their framing, descriptor passing, the Client that
// starts, finds and replaces the monitor, the exit record's format, and the
// reaping of orphans that fall to the daemon. It does not own what the monitor
// does with a container (cmd/berth-monitor) nor the command line of an OCI
// runtime (oci/runc). It imports nothing but the standard library and x/sys, for
// the monitor links it.
//
// Terms: parking is handing duplicates of a container's descriptors to the
// daemon, so that they stay open when the monitor is killed; adopting is what a
// new monitor does with parked descriptors. The tape is a memfd that holds what
// was read from a container and is not in its log yet.
//
// An attachment is a client's view of a container's output: the monitor copies
// to a socket of the daemon's what it reads beside what it logs, and never waits
// for it. Stdin and the terminal's size need no monitor: the daemon has them
// parked.
//
// Renewing is the monitor's change to another build in place, by execve: same
// process, same children, same descriptors.
//
// On disk: the socket and, beside it, <socket>.lock, held by a living monitor, as is
// a lock on their directory;
// in each bundle monitor.json (the Container, written when it is made) and
// exit.json (its Exit, written once, when its init has ended).
package monitor

import "errors"

// Sentinels of the package; test with errors.Is.
var (
	// ErrUnavailable: no monitor can be reached or started, or it died during
	// the request. What the request did is unknown.
	ErrUnavailable = errors.New("monitor unavailable")
	// ErrExists: the monitor has a container of that id.
	ErrExists = errors.New("container exists in the monitor")
	// ErrNotFound: neither the monitor nor the client knows the container.
	ErrNotFound = errors.New("container not found in the monitor")
	// ErrEnded: the container's init has ended.
	ErrEnded = errors.New("container has ended")
	// ErrVersion: there is no version of the protocol that the running monitor
	// and this daemon both speak.
	ErrVersion = errors.New("no common version")
	// ErrUnsupported: the running monitor is older than what was asked of it.
	ErrUnsupported = errors.New("the running monitor is of an older release and cannot do that")
	// ErrSlow: the reader of an attachment was too far behind to get the last
	// output.
	ErrSlow = errors.New("the client read too slowly, the last output was skipped")
	// ErrProtocol: a message was malformed or too large.
	ErrProtocol = errors.New("malformed message")
)
