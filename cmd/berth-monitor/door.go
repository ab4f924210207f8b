package main

import (
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// door is the socket at which the monitor listens. Who has the lock has the path
// too: where somebody removes or replaces the socket, the door opens there again.
type door struct {
	path string

	mu       sync.Mutex
	listener *net.UnixListener // guarded by mu
	at       place             // of the socket's file, guarded by mu
	closed   bool              // guarded by mu
}

// place is a file's identity. While a socket that is bound to it is open, no other
// file gets it.
type place struct {
	Dev uint64 `json:"dev"`
	Ino uint64 `json:"ino"`
}

// placeOf is zero where nothing is.
func placeOf(path string) place {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return place{}
	}
	return place{st.Dev, st.Ino}
}

// openDoor begins to listen. The caller has the lock, so what is there is stale.
func openDoor(path string) (*door, error) {
	d := &door{path: path}
	return d, d.open()
}

func (d *door) open() error {
	if err := os.Remove(d.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove stale socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: d.path, Net: "unix"})
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	l.SetUnlinkOnClose(false) // it may be another's by then
	if err := os.Chmod(d.path, 0o600); err != nil {
		_ = l.Close()
		return fmt.Errorf("set mode of socket: %w", err)
	}
	d.listener, d.at = l, placeOf(d.path)
	return nil
}

// resumeDoor goes on with the listener of the build before. at is zero where that
// did not tell.
func resumeDoor(path string, fd int, at place) (*door, error) {
	f := os.NewFile(uintptr(fd), path)
	l, err := net.FileListener(f)
	_ = f.Close()
	if err != nil {
		return nil, fmt.Errorf("take over the socket: %w", err)
	}
	if at == (place{}) {
		at = placeOf(path)
	}
	return &door{path: path, listener: l.(*net.UnixListener), at: at}, nil
}

// save is what resumeDoor needs; keep duplicates a descriptor.
func (d *door) save(keep func(int) int) (fd int, at place) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return keep(rawFD(d.listener)), d.at
}

// accept returns net.ErrClosed once the door is closed.
func (d *door) accept() (*net.UnixConn, error) {
	for {
		d.mu.Lock()
		l := d.listener
		d.mu.Unlock()
		c, err := l.AcceptUnix()
		d.mu.Lock()
		replaced := l != d.listener
		d.mu.Unlock()
		if !replaced || !errors.Is(err, net.ErrClosed) {
			return c, err
		}
	}
}

// close ends accept. Idempotent.
func (d *door) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed && placeOf(d.path) == d.at {
		_ = os.Remove(d.path)
	}
	d.closed = true
	_ = d.listener.Close()
}

// mend opens the door again where its socket is no longer at the path. Who was about
// to be let in by the old one is turned away, and comes again.
func (d *door) mend() (mended bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || placeOf(d.path) == d.at {
		return false, nil
	}
	old := d.listener
	if err := d.open(); err != nil {
		return false, err
	}
	_ = old.Close()
	return true, nil
}

// watch mends the door whenever its file is touched, or SIGHUP asks for a look: a
// daemon that finds nobody listening sends it. It tells of both outcomes, and never
// returns.
func (d *door) watch(tell func(text string)) {
	looks := make(chan os.Signal, 1)
	signal.Notify(looks, syscall.SIGHUP)
	w := newTouches(looks)
	said := ""
	for {
		w.follow(d.path) // before the look, so that nothing comes between
		mended, err := d.mend()
		switch {
		case mended:
			said = ""
			tell(fmt.Sprintf("the socket %s was removed or replaced; the monitor listens there again", d.path))
			continue
		case err != nil && err.Error() != said:
			said = err.Error()
			tell(fmt.Sprintf("the socket %s was removed or replaced, and the monitor cannot listen there again: %v", d.path, err))
		}
		<-looks
	}
}

// touches tells when the file that it follows is removed, renamed or changed.
type touches struct {
	fd    int // of inotify(7); -1: the node has none left, so only a signal tells
	watch int
}

func newTouches(looks chan<- os.Signal) *touches {
	w := &touches{fd: -1, watch: -1}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		log.Printf("watch over the socket: %v", err)
		return w
	}
	w.fd = fd
	f := os.NewFile(uintptr(fd), "inotify")
	go func() {
		events := make([]byte, 4<<10) // what they say does not matter
		for {
			if _, err := f.Read(events); err != nil {
				return
			}
			select {
			case looks <- syscall.SIGHUP:
			default: // a look is due already
			}
		}
	}()
	return w
}

// follow is about the file that is at the path now.
func (w *touches) follow(path string) {
	if w.fd < 0 {
		return
	}
	now, err := unix.InotifyAddWatch(w.fd, path, unix.IN_ATTRIB|unix.IN_MOVE_SELF|unix.IN_DELETE_SELF|unix.IN_DONT_FOLLOW)
	if err != nil {
		now = -1
	}
	if w.watch >= 0 && w.watch != now {
		_, _ = unix.InotifyRmWatch(w.fd, uint32(w.watch)) // it may have gone with its file
	}
	w.watch = now
}
