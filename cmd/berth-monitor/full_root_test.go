package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
)

// A full disk neither stops the container nor tears a line, and the log goes on
// when there is room again.
func TestFullDiskDropsWholeLines(t *testing.T) {
	leakcheck.Start(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, 0)
	b := newBench(t, 16384)
	l := b.c.log
	_ = unix.Close(l.fd)
	var err error
	b.path = filepath.Join(dir, "0.log")
	l.path = b.path
	if l.fd, err = openLog(b.path); err != nil {
		t.Fatal(err)
	}
	told := make(chan string, 1)
	l.complain = func(_, text string) { told <- text } // once a minute
	b.c.start()
	line := strings.Repeat("x", 99) + "\n"
	wrote := make(chan struct{})
	go func() {
		defer close(wrote)
		_, _ = b.write[0].WriteString(strings.Repeat(line, 20000))
	}()
	select {
	case <-wrote:
	case <-time.After(10 * time.Second):
		t.Fatal("the writer is blocked")
	}
	if !within(5*time.Second, func() bool { return l.tape.get(wordDropped) > 0 && len(l.tape.data(0)) == 0 }) {
		t.Fatal("nothing was dropped")
	}
	if text := <-told; !strings.Contains(text, b.path) || !strings.Contains(text, "no space left") {
		t.Errorf("the daemon is told %q", text)
	}
	full, err := os.ReadFile(b.path)
	if err != nil {
		t.Fatal(err)
	}
	kept := rebuild(t, full, 16384)[0]
	if len(kept) == 0 || len(kept)%len(line) != 0 || bytes.Count(kept, []byte(line)) != len(kept)/len(line) {
		t.Errorf("%d bytes were kept, not whole lines", len(kept))
	}
	if lost := 20000*len(line) - len(kept); l.tape.get(wordDropped) < int64(lost)*9/10 || l.tape.get(wordDropped) > int64(lost)*11/10 {
		t.Errorf("%d bytes are counted as dropped, it was %d", l.tape.get(wordDropped), lost)
	}
	// Rotation makes room.
	if err := os.Remove(b.path); err != nil {
		t.Fatal(err)
	}
	if err := l.reopen(); err != nil {
		t.Fatal(err)
	}
	_, _ = b.write[0].WriteString("room again\n")
	if got := rebuild(t, b.read(t), 16384)[0]; string(got) != "room again\n" {
		t.Errorf("after making room: %.100q", got)
	}
	l.mu.Lock()
	_ = unix.Close(l.fd)
	l.fd = -1 // or the disk could not be unmounted
	l.mu.Unlock()
}

// Output that cannot be written for now must not keep an exit back for ever.
func TestDrainGivesUpOnAHungLog(t *testing.T) {
	b := newBench(t, 64)
	b.c.start()
	b.c.log.mu.Lock() // as a write that does not return
	_, _ = b.write[0].WriteString("line\n")
	at := time.Now()
	if b.c.drain() {
		t.Error("drain says that the log has everything")
	}
	if took := time.Since(at); took > 2*(drainLimit+logLimit) {
		t.Errorf("drain took %s", took)
	}
	b.c.log.mu.Unlock()
	if got := rebuild(t, b.read(t), 64)[0]; string(got) != "line\n" {
		t.Errorf("log = %q", got)
	}
}

// A child that holds the pipe delays the end only shortly, and what was
// written before is kept, however much it is.
func TestDrainTakesWhatIsInThePipe(t *testing.T) {
	b := newBench(t, 16384)
	text := strings.Repeat("line\n", 40000)
	if _, err := b.write[0].WriteString(text); err != nil {
		t.Fatal(err)
	}
	b.c.start()
	at := time.Now()
	if !b.c.drain() {
		t.Error("drain gave up")
	}
	if took := time.Since(at); took < drainLimit || took > 2*time.Second {
		t.Errorf("drain took %s", took)
	}
	if got := rebuild(t, b.read(t), 16384)[0]; string(got) != text {
		t.Errorf("log has %d bytes, want %d", len(got), len(text))
	}
}

// One container's panic is its own: its output is still drained, others go on.
func TestPanicEndsOneHandling(t *testing.T) {
	broken, well := newBench(t, 64), newBench(t, 64)
	tp := broken.c.log.tape
	broken.c.log.tape = nil // every use panics
	broken.c.start()
	well.c.start()
	wrote := make(chan struct{})
	go func() {
		defer close(wrote)
		_, _ = broken.write[0].Write(make([]byte, 4*turn))
	}()
	select {
	case <-wrote:
	case <-time.After(10 * time.Second):
		t.Fatal("the broken container is blocked")
	}
	_, _ = well.write[0].WriteString("fine\n")
	if got := rebuild(t, well.read(t), 64)[0]; string(got) != "fine\n" {
		t.Errorf("log = %q", got)
	}
	for _, w := range broken.write {
		_ = w.Close()
	}
	broken.c.pumps.Wait()
	broken.c.log.tape = tp
}
