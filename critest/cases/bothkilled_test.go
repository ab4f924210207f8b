package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/cri-tools/pkg/common"

	"berth/critest/images"
	"berth/critest/node"
)

// killBoth kills daemon and monitor at once and returns when both are gone.
func (e *env) killBoth() {
	e.Helper()
	monitors := e.Monitors()
	_ = syscall.Kill(e.PID(), syscall.SIGKILL)
	for _, pid := range monitors {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	if err := e.Kill(); err != nil {
		e.Fatal(err)
	}
	e.eventually("both are gone", func() bool { return len(e.Daemons()) == 0 })
}

// standStill stops a container that writes until all that it has written is logged.
func (e *env) standStill(id string) (goOn func()) {
	e.Helper()
	pid := e.pid(id)
	signal := func(s syscall.Signal) {
		if err := syscall.Kill(pid, s); err != nil {
			e.Fatal(err)
		}
	}
	signal(syscall.SIGSTOP)
	e.eventually("the log stands still", func() bool {
		before, _ := e.logs(id)
		time.Sleep(200 * time.Millisecond)
		now, _ := e.logs(id)
		return len(now) == len(before)
	})
	return func() { signal(syscall.SIGCONT) }
}

// systemd is a manager with a descriptor store, for one node.
func systemd(t *testing.T) *node.Systemd {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth-systemd-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	manager, err := node.NewSystemd(filepath.Join(dir, "notify"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := manager.Close(); err != nil {
			t.Error(err)
		}
	})
	return manager
}

// With systemd's descriptor store both may be killed at once: what runs runs on
// with all of its streams, what ends meanwhile has its code and its last output.
func TestBothKilledWithADescriptorStore(t *testing.T) {
	manager := systemd(t)
	e := start(t, node.Options{LogLevel: "info", Systemd: manager})
	if !slices.Contains(manager.Said(), "READY=1") {
		t.Errorf("the daemon has said %q, not READY=1", manager.Said())
	}
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	signal := e.signals()
	writer := e.counting("writer", pod, config)
	talk := func(name string, tty, once bool) string {
		c := command(name, "while read -r l; do echo got $l; done; echo over; exit 9")
		c.Stdin, c.Tty, c.StdinOnce = true, tty, once
		return e.startContainer(pod, c, config)
	}
	plain, tty, once := talk("plain", false, false), talk("tty", true, false), talk("once", false, true)
	for round := range 3 {
		ends := e.startContainer(pod, command(fmt.Sprintf("ends%d", round), "printf begin; sleep 1; echo; echo the last word; exit 5"), config)
		e.eventually("the store has every container", func() bool { return len(manager.Stored()) == []int{5, 5, 4}[round] })
		time.Sleep(200 * time.Millisecond)
		e.killBoth()
		time.Sleep(1500 * time.Millisecond) // one ends, the others write
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
		s := e.exited(ends)
		if known := kernelAtLeast(t, 6, 15); known && s.GetExitCode() != 5 || !known && s.GetExitCode() != 5 && s.GetMessage() == "" {
			t.Errorf("what ended while both were gone has code %d (%s: %s), want 5", s.GetExitCode(), s.GetReason(), s.GetMessage())
		}
		if out, _ := e.logs(ends); out != "begin\nthe last word\n" {
			t.Errorf("what ended while both were gone logged %q", out)
		}
		for _, id := range []string{plain, tty} {
			s := e.dial(common.TransportWebsocket, e.attachURL(id, true, id == tty), true, id == tty)
			s.types(fmt.Sprintf("round %d\n", round))
			s.sees(fmt.Sprintf("got round %d", round))
			s.hangUp()
			_ = s.end()
		}
		if round == 1 { // a stdin that is over must not be open in the store
			s := e.dial(common.TransportWebsocket, e.attachURL(once, true, false), true, false)
			s.types("hello\n")
			s.sees("got hello")
			s.hangUp()
			_ = s.end()
			if s := e.exited(once); s.GetExitCode() != 9 {
				t.Errorf("the end of its stdin ended a container with code %d, want 9", s.GetExitCode())
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
	e.eventually("the store is empty", func() bool { return len(manager.Stored()) == 0 })
}

// Without such a store containers live on while they only write, states are true,
// and nothing is left behind of those that cannot go on. What a monitor has read, and
// not yet logged, is lost with both (docs/operating.md): so the writer stands still in
// the instant of the kill, and then no line may be missing.
func TestBothKilledWithoutADescriptorStore(t *testing.T) {
	e := start(t, node.Options{LogLevel: "info"})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	script := "i=0; while :; do echo line $i; i=$((i+1)); sleep 0.01; done"
	writer := e.startContainer(pod, command("writer", script), config)
	quiet := e.startContainer(pod, command("quiet", "sleep 100000"), config)
	ends := e.startContainer(pod, command("ends", "sleep 1; exit 5"), config)
	c := command("tty", "while read -r l; do echo got $l; done; exit 9")
	c.Stdin, c.Tty = true, true
	tty := e.startContainer(pod, c, config)
	c = command("reader", "while read -r l; do echo got $l; done; exit 9")
	c.Stdin = true
	reader := e.startContainer(pod, c, config)
	for range 3 {
		goOn := e.standStill(writer)
		e.killBoth()
		goOn()
		time.Sleep(1200 * time.Millisecond)
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{writer, quiet} {
			if out := e.exec(id, "echo well"); out != "well\n" {
				t.Errorf("exec after both were killed: %q", out)
			}
		}
		before, _ := e.logs(writer)
		e.eventually("the log goes on", func() bool { now, _ := e.logs(writer); return len(now) > len(before) })
	}
	out, _ := e.logs(writer)
	for i, l := range strings.Split(strings.TrimSuffix(out, "\n"), "\n") {
		if l != fmt.Sprintf("line %d", i) {
			t.Fatalf("line %d of the log is %q", i, l)
		}
	}
	// The kernel ends these with the last process that had the other end.
	for name, id := range map[string]string{"ends": ends, "tty": tty, "reader": reader} {
		s := e.exited(id)
		if s.GetExitCode() == 255 && s.GetMessage() == "" {
			t.Errorf("%s ended with code 255 and without a word why it is not known", name)
		}
		t.Logf("%s: code %d, %s: %s", name, s.GetExitCode(), s.GetReason(), s.GetMessage())
	}
	e.removePod(pod)
}
