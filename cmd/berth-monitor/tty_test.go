package main

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// newPty is a pty in raw mode.
func newPty(t *testing.T) (master int, slave *os.File) {
	t.Helper()
	master, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("skipped: no pty: %v", err)
	}
	n, err := unix.IoctlGetInt(master, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return master, slave
}

// What was moved out of a pty and not yet to the tape waits in the buffer for
// the next monitor.
func TestTerminalOutputIsNeverInTheMonitorAlone(t *testing.T) {
	master, slave := newPty(t)
	b := newBench(t, 64)
	buffer, err := bufferPipe()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range b.c.streams {
		_ = f.Close()
	}
	b.c.buffer, b.c.info.IO.Terminal = buffer, true
	b.c.streams = [2]*os.File{os.NewFile(uintptr(master), "tty")}
	if _, err := slave.WriteString("one\n"); err != nil {
		t.Fatal(err)
	}
	// As a monitor that died after the first of two steps.
	if n, err := unix.Splice(master, nil, buffer, nil, turn, unix.SPLICE_F_NONBLOCK); err != nil || n != 5 {
		t.Fatalf("splice moved %d bytes, %v", n, err)
	}
	b.c.start()
	if _, err := slave.WriteString("two\nthr"); err != nil {
		t.Fatal(err)
	}
	_, _ = slave.WriteString("ee")
	_ = slave.Close()
	if got := rebuild(t, b.read(t), 64)[0]; string(got) != "one\r\ntwo\r\nthree" {
		t.Errorf("log = %q", got)
	}
}
