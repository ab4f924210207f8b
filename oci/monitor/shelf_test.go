package monitor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// store is a shelf as systemd's is one.
type store struct {
	mu     sync.Mutex
	things map[string]int // guarded by mu
	fail   error          // guarded by mu
}

func (s *store) Put(name string, fd int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if s.fail == nil && err == nil {
		s.things[name] = dup
	}
	return errors.Join(s.fail, err)
}

func (s *store) Drop(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if fd, ok := s.things[name]; ok {
		_ = unix.Close(fd)
		delete(s.things, name)
	}
	return s.fail
}

func (s *store) failWith(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = err
}

// passed are duplicates, as the next daemon gets them.
func (s *store) passed(t *testing.T) (all []Shelved) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, fd := range s.things {
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, Shelved{name, dup})
	}
	return all
}

func (s *store) names() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.things {
		names = append(names, name)
	}
	return names
}

// shelving is a client that has no monitor.
func shelving(t *testing.T, s *store, shelved []Shelved) *Client {
	t.Helper()
	c := newClient(Options{Shelf: s, Shelved: shelved, OnTrouble: func(err error) { t.Logf("trouble: %v", err) }})
	c.unshelve()
	c.tasks.Add(1)
	go c.shelve(c.ctx)
	t.Cleanup(func() {
		c.end()
		c.tasks.Wait()
		for _, e := range c.table {
			e.release()
		}
	})
	return c
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

// What is parked is on the shelf, in its present state, and comes back from there
// as often as it is asked for.
func TestShelfHasWhatIsParked(t *testing.T) {
	s := &store{things: map[string]int{}}
	c := shelving(t, s, nil)
	dir := t.TempDir()
	for i := range 3 {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		_, _ = fmt.Fprintf(w, "of container %d", i)
		fds := map[string]int{}
		for name, f := range map[string]*os.File{FDStdout: r, FDStdin: w} {
			if fds[name], err = unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil {
				t.Fatal(err)
			}
			_ = f.Close()
		}
		c.park(Container{ID: fmt.Sprintf("%064d", i), Bundle: dir, PID: 100 + i, StartTime: 5}, fds)
	}
	eventually(t, "three things", func() bool { return len(s.names()) == 3 })
	c.dropStdin(fmt.Sprintf("%064d", 1))
	c.exited(Exit{ID: fmt.Sprintf("%064d", 2), PID: 102})
	eventually(t, "the one that ended is off the shelf, the one that changed is there once", func() bool { return len(s.names()) == 2 })
	for range 2 {
		next := shelving(t, s, s.passed(t))
		if ids := next.IDs(); len(ids) != 2 {
			t.Fatalf("from the shelf came %v", ids)
		}
		for i, want := range []map[string]bool{{FDStdout: true, FDStdin: true}, {FDStdout: true}} {
			e := next.table[fmt.Sprintf("%064d", i)]
			if e == nil || len(e.fds) != len(want) || e.container.PID != 100+i || e.container.StartTime != 5 || e.container.Bundle != dir {
				t.Fatalf("container %d is %+v", i, e)
			}
		}
	}
	for _, name := range s.names() {
		if len(name) > 27 || strings.ContainsAny(name, ":\n") {
			t.Errorf("a name is %q", name)
		}
		_ = s.Drop(name)
	}
}

// A store that does not take it now gets it later.
func TestShelfIsTriedAgain(t *testing.T) {
	s := &store{things: map[string]int{}, fail: errors.New("full")}
	c := shelving(t, s, nil)
	fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	c.park(Container{ID: "0123456789abcdef", Bundle: t.TempDir(), PID: 7}, map[string]int{FDTape: fd})
	time.Sleep(50 * time.Millisecond)
	s.failWith(nil)
	eventually(t, "it is there", func() bool { return len(s.names()) == 1 })
	for _, name := range s.names() {
		_ = s.Drop(name)
	}
}

// What is no container of ours, is older than another thing or has ended is
// dropped from the shelf, and its descriptors are closed.
func TestShelfIsTidied(t *testing.T) {
	before := openDescriptors(t)
	s := &store{things: map[string]int{}}
	live, ended := t.TempDir(), t.TempDir()
	if err := WriteExit(ended, Exit{ID: "ended", PID: 9, StartTime: 3}); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	put := func(name string, ct Container, serial int64) {
		socket, err := pack(ct, map[string]int{FDTape: fd}, serial)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(socket)
		if err := s.Put(name, socket); err != nil {
			t.Fatal(err)
		}
	}
	put("berth-old", Container{ID: "live", Bundle: live, PID: 8}, 1)
	put("berth-new", Container{ID: "live", Bundle: live, PID: 8}, 2)
	put("berth-ended", Container{ID: "ended", Bundle: ended, PID: 9, StartTime: 3}, 1)
	put("berth-gone", Container{ID: "gone", Bundle: filepath.Join(live, "no"), PID: 10}, 1)
	for _, name := range []string{"berth-odd", "other"} {
		if err := s.Put(name, fd); err != nil {
			t.Fatal(err)
		}
	}
	c := shelving(t, s, s.passed(t))
	if ids := c.IDs(); len(ids) != 1 || ids[0] != "live" {
		t.Errorf("from the shelf came %v", ids)
	}
	eventually(t, "what is wanted is left, as what it is now", func() bool {
		names := s.names()
		return len(names) == 2 && strings.Contains(strings.Join(names, " "), "other") && strings.Contains(strings.Join(names, " "), "berth-live.")
	})
	c.end()
	c.tasks.Wait()
	for _, name := range s.names() {
		_ = s.Drop(name)
	}
	for _, e := range c.table {
		e.release()
	}
	if now := openDescriptors(t); now > before+1 { // the memfd
		t.Errorf("%d descriptors, before %d", now, before)
	}
}
