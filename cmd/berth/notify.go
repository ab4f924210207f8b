package main

import (
	"fmt"
	"net"
	"os"
)

// takeNotify takes systemd's socket out of the environment and returns what tells
// systemd a state ("READY=1"); without systemd that does nothing. It comes before
// any process is started: an OCI runtime that finds the variable believes that the
// container is the service, and fails over the socket it makes for it.
func takeNotify() func(state string) error {
	const variable = "NOTIFY_SOCKET"
	socket := os.Getenv(variable)
	_ = os.Unsetenv(variable) // fails for names that are none
	return func(state string) error {
		if socket == "" {
			return nil
		}
		conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: socket, Net: "unixgram"})
		if err != nil {
			return fmt.Errorf("connect to systemd: %w", err)
		}
		defer conn.Close()
		if _, err := conn.Write([]byte(state)); err != nil {
			return fmt.Errorf("tell systemd %s: %w", state, err)
		}
		return nil
	}
}
