package main

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// A monitor that dies between reopening a log and parking the new file leaves
// the daemon with the old one; the tape says which is right.
func TestAdoptionGoesOnInTheReopenedLog(t *testing.T) {
	for _, parked := range []string{"old", "new", "none"} {
		b := newBench(t, 64)
		l := b.c.log
		l.tape.set(wordInode, inode(l.fd))
		old := duplicate(l.fd)
		defer unix.Close(old)
		if err := os.Rename(b.path, b.path+".1"); err != nil {
			t.Fatal(err)
		}
		if err := l.reopen(); err != nil {
			t.Fatal(err)
		}
		logFD := map[string]int{"old": duplicate(old), "new": duplicate(l.fd), "none": -1}
		next := &container{pidfd: -1, stdin: -1, buffer: -1, streams: b.c.streams}
		next.info.IO.LogPath, next.info.IO.MaxLine = b.path, 64
		if err := next.takeOverLog(duplicate(l.tape.fd), logFD[parked]); err != nil {
			t.Fatal(err)
		}
		for name, fd := range logFD {
			if name != parked && fd >= 0 {
				_ = unix.Close(fd)
			}
		}
		l.close()
		b.c.log = next.log
		b.c.start()
		_, _ = b.write[0].WriteString("line\n")
		if got := rebuild(t, b.read(t), 64)[0]; string(got) != "line\n" {
			t.Errorf("with the %s file parked: the log is %q", parked, got)
		}
	}
}

// Without its tape a log goes on after its last whole line.
func TestAdoptionWithoutATape(t *testing.T) {
	b := newBench(t, 64)
	l := b.c.log
	whole := "2026-01-01T00:00:00.000000000Z stdout F whole\n"
	if _, err := unix.Write(l.fd, []byte(whole+"2026-01-01T00:00:00.000000000Z stdout F to")); err != nil {
		t.Fatal(err)
	}
	next := &container{pidfd: -1, stdin: -1, buffer: -1}
	next.info.IO.LogPath, next.info.IO.MaxLine = b.path, 64
	if err := next.takeOverLog(-1, -1); err != nil {
		t.Fatal(err)
	}
	l.close()
	b.c.log = next.log
	b.c.start()
	_, _ = b.write[0].WriteString("next\n")
	if got := rebuild(t, b.read(t), 64)[0]; string(got) != "whole\nnext\n" {
		t.Errorf("log = %q", got)
	}
}

// A pipe is found again in a process that holds it, however it is numbered there.
func TestFindPipe(t *testing.T) {
	read, write, err := pipe(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	defer write.Close()
	c := &container{}
	c.info.PID = os.Getpid()
	fd := c.findPipe(uint64(inode(rawFD(write))))
	if fd < 0 {
		t.Fatal("not found")
	}
	defer unix.Close(fd)
	_, _ = write.WriteString("x")
	b := make([]byte, 8)
	if n, err := unix.Read(fd, b); n != 1 || err != nil || b[0] != 'x' {
		t.Errorf("read %d bytes, %v", n, err)
	}
	if fd := c.findPipe(1); fd >= 0 {
		t.Error("a pipe that is not there was found")
	}
}
