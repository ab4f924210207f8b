package cases

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"berth/critest/images"
	"berth/critest/node"
)

// The monitor's socket goes, as by a cleaner of temporary files, or something else
// stands in its place, and the daemon is killed besides: the next daemon finds the
// same monitor, pods run on, logs are whole. With systemd's store or without.
func TestMonitorWhoseSocketIsGone(t *testing.T) {
	manager := systemd(t)
	for name, o := range map[string]node.Options{"alone": {}, "systemd": {Systemd: manager}} {
		t.Run(name, func(t *testing.T) {
			e := start(t, o)
			e.pull(images.Busybox)
			config := e.sandbox()
			pod := e.run(config)
			signal := e.signals()
			writer := e.counting("writer", pod, config)
			for what, happens := range e.accidents() {
				for _, first := range []string{"kill", "accident"} {
					e.losesSocket(what, happens, first == "kill")
					name := fmt.Sprintf("ends-%d", e.PID())
					if s := e.exited(e.startContainer(pod, command(name, "exit 5"), config)); s.GetExitCode() != 5 {
						t.Errorf("%s: a container ends with %d (%s), want 5", what, s.GetExitCode(), s.GetMessage())
					}
				}
			}
			if err := os.WriteFile(filepath.Join(signal, "end"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if s := e.exited(writer); s.GetExitCode() != 7 {
				t.Errorf("the writer ended with code %d (%s: %s), want 7", s.GetExitCode(), s.GetReason(), s.GetMessage())
			}
			t.Logf("%d lines", e.counted(writer))
			e.removePod(pod)
		})
	}
}

// accidents are what may happen to a socket.
func (e *env) accidents() map[string]func(socket string) error {
	instead := func(make func(path string) error) func(string) error {
		return func(socket string) error {
			if err := make(socket + ".other"); err != nil {
				return err
			}
			return os.Rename(socket+".other", socket)
		}
	}
	return map[string]func(string) error{
		"removed": os.Remove,
		"removed with its lock": func(s string) error {
			_ = os.Remove(s + ".lock") // which is there but once
			return os.Remove(s)
		},
		"a file instead":    instead(func(s string) error { return os.WriteFile(s, nil, 0o600) }),
		"a symlink instead": instead(func(s string) error { return os.Symlink("berth.sock", s) }),
		"another's socket":  instead(e.listens),
	}
}

// listens takes connections at a path and says nothing, until the test ends.
func (e *env) listens(path string) error {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	e.Cleanup(func() { _ = l.Close() })
	return nil
}

// losesSocket kills the daemon and lets something happen to the monitor's socket,
// and starts the next daemon.
func (e *env) losesSocket(what string, happens func(socket string) error, killedFirst bool) {
	e.Helper()
	before := e.Monitors()
	if killedFirst {
		if err := e.Kill(); err != nil {
			e.Fatal(err)
		}
	}
	if err := happens(filepath.Join(e.State(), "monitor.sock")); err != nil {
		e.Fatal(err)
	}
	if !killedFirst {
		if err := e.Kill(); err != nil {
			e.Fatal(err)
		}
	}
	if err := e.Launch(e.ctx); err != nil {
		e.Fatalf("%s: %v", what, err)
	}
	if now := e.Monitors(); len(now) != 1 || now[0] != before[0] {
		e.Fatalf("%s: the monitors are %v, it was %v", what, now, before)
	}
}
