package main

import (
	"errors"
	"fmt"
	"log"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// drainLimit is how long output is still read after an init's end while some
// process holds the pipe. What was in the pipe by then is read in any case.
const drainLimit = 200 * time.Millisecond

// logLimit is how much longer a write to the log may take at an init's end: a
// hung filesystem must not keep the exit back.
const logLimit = 3 * time.Second

// container is one container of the monitor.
type container struct {
	info   monitor.Container
	child  bool                  // of this process, which so waits for it
	reaped atomic.Pointer[ended] // set when this process has; nobody else can tell it again
	log    *logFile
	pidfd  int
	stdin  int // write end, -1: none
	buffer int // pipe of a pty, -1: none

	streams [2]*os.File // read ends; [0] is the master with a pty; nil: none
	pumps   sync.WaitGroup

	viewers viewers

	once     sync.Once
	drainEnd atomic.Pointer[time.Time] // when pumps must give up, set at the init's end
	mu       sync.Mutex
	exit     *monitor.Exit // guarded by mu
	gone     bool          // guarded by mu; descriptors are closed
}

// guard keeps a panic in what belongs to one container there.
func guard(what string, f func()) (ok bool) {
	defer func() {
		if p := recover(); p != nil {
			log.Printf("%s: panic: %v\n%s", what, p, debug.Stack())
		}
	}()
	f()
	return true
}

// start begins to read the container's output.
func (c *container) start() {
	c.pumps.Go(func() { guard("log of "+c.info.ID, c.log.catchUp) })
	for stream, f := range c.streams {
		if f == nil {
			continue
		}
		c.pumps.Add(1)
		go func() {
			defer c.pumps.Done()
			if !guard("output of "+c.info.ID, func() { c.log.catchUp(); c.pump(stream, f) }) {
				guard("output of "+c.info.ID, func() { discard(f) })
			}
		}()
	}
}

// idleAfter is how long a stream is silent before its memory is given back.
const idleAfter = 100 * time.Millisecond

// pump moves one stream to the log until its end, or until drain's deadline.
func (c *container) pump(stream int, f *os.File) {
	raw, err := f.SyscallConn()
	if err != nil {
		log.Printf("output of %s: %v", c.info.ID, err)
		return
	}
	p := &pumping{c: c, stream: stream, f: f, raw: raw}
	for {
		n, err := p.fill()
		if n > 0 {
			c.log.flush(stream, false)
			continue
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if !p.expired() {
				continue
			}
			c.rest(stream, raw)
		} else if err != nil && !errors.Is(err, unix.EIO) { // a pty's end
			log.Printf("read output of %s: %v", c.info.ID, err)
		}
		c.log.flush(stream, true)
		return
	}
}

// pumping is one stream being read. Its read deadline has two uses: to notice
// that the stream has become idle, and to end a drain.
type pumping struct {
	c      *container
	stream int
	f      *os.File
	raw    syscall.RawConn
	armed  bool // the deadline runs
	busy   bool // bytes came since it was set
	clean  bool // the tape's memory was given back
}

// fill waits until the stream has bytes and takes up to a turn of them.
func (p *pumping) fill() (n int64, err error) {
	werr := p.raw.Read(func(fd uintptr) bool {
		if n, err = p.c.take(p.stream, int(fd)); err != unix.EAGAIN {
			p.busy, p.clean = true, false
			return true
		}
		if !p.armed && !p.clean {
			p.arm(time.Now().Add(idleAfter))
		}
		return false
	})
	if werr != nil {
		return 0, werr
	}
	return n, err
}

// arm sets the deadline, a zero one ends it; that of a drain stands above it.
func (p *pumping) arm(at time.Time) {
	p.armed, p.busy = !at.IsZero(), false
	_ = p.f.SetReadDeadline(at)
	// A drain that begins now sets its own after this, one that has begun is seen.
	if end := p.c.drainEnd.Load(); end != nil {
		_ = p.f.SetReadDeadline(*end)
	}
}

// expired handles a deadline that has passed: true when it was a drain's.
func (p *pumping) expired() bool {
	if end := p.c.drainEnd.Load(); end != nil && !time.Now().Before(*end) {
		return true
	}
	if p.busy {
		p.arm(time.Now().Add(idleAfter))
		return false
	}
	p.c.log.tape.release(p.stream)
	p.clean = true
	p.arm(time.Time{})
	return false
}

// take reads up to a turn and shows it to whoever is attached.
func (c *container) take(stream, fd int) (n int64, err error) {
	if c.info.IO.Terminal {
		n, err = c.log.tape.read(stream, fd, c.buffer)
	} else {
		n, err = c.log.tape.fill(stream, fd)
	}
	if n > 0 {
		c.show(stream, c.log.tape.last(stream, n))
	}
	return n, err
}

// rest takes what a pipe holds without waiting, at most its capacity, for its
// writers may go on.
func (c *container) rest(stream int, raw syscall.RawConn) {
	_ = raw.Control(func(fd uintptr) {
		for total := int64(0); total <= turn; {
			n, err := c.take(stream, int(fd))
			if n <= 0 || err != nil {
				return
			}
			total += n
			c.log.flush(stream, false)
		}
	})
}

// discard keeps a container from blocking when its output has no other reader.
func discard(f *os.File) {
	b := make([]byte, 16<<10)
	for {
		if _, err := f.Read(b); err != nil {
			return
		}
	}
}

// finish records the end of the init: output first, then exit.json. It runs
// once; the result is for the daemon.
func (c *container) finish(status unix.WaitStatus, at time.Time, unknown string, killed func(*container) bool) (exit monitor.Exit, first bool) {
	c.once.Do(func() {
		first = true
		exit = monitor.Exit{ID: c.info.ID, PID: c.info.PID, StartTime: c.info.StartTime, At: at, Code: 255, Unknown: unknown}
		if unknown == "" {
			exit.Code = monitor.Code(status)
		}
		// The kernel counts a kill before it kills.
		if killed(c) && unknown == "" {
			exit.OOMKilled = status.Signaled() && status.Signal() == unix.SIGKILL
		}
		drained := c.drain()
		c.endViewers()
		exit.Dropped = uint64(c.log.tape.get(wordDropped))
		if err := monitor.WriteExit(c.info.Bundle, exit); err != nil {
			log.Printf("exit of %s: %v", c.info.ID, err)
		}
		c.mu.Lock()
		c.exit = &exit
		c.mu.Unlock()
		if !drained {
			log.Printf("end of %s: its log %s takes no more", c.info.ID, c.info.IO.LogPath)
		}
		go func() { // the log's filesystem may take its time
			c.pumps.Wait()
			c.close()
		}()
	})
	return exit, first
}

// drain waits for the end of the output, not longer than drainLimit for what
// is still written. It says whether the log has everything.
func (c *container) drain() bool {
	end := time.Now().Add(drainLimit)
	c.drainEnd.Store(&end)
	for _, f := range c.streams {
		if f != nil {
			_ = f.SetReadDeadline(end)
		}
	}
	done := make(chan struct{})
	go func() {
		c.pumps.Wait()
		close(done)
	}()
	select {
	case <-done:
		return true
	case <-time.After(drainLimit + logLimit):
		return false
	}
}

// close releases the descriptors. The pumps must have ended.
func (c *container) close() {
	c.mu.Lock()
	gone := c.gone
	c.gone = true
	c.mu.Unlock()
	if gone {
		return
	}
	for _, f := range c.streams {
		if f != nil {
			_ = f.Close()
		}
	}
	c.log.close()
	for _, fd := range []int{c.stdin, c.buffer, c.pidfd} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

func (c *container) ended() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.exit != nil
}

// park sends the container with duplicates of its descriptors. It holds no lock
// while it sends, for the daemon may be slow.
func (c *container) park(conn *monitor.Conn) error {
	info, names, fds := c.duplicates()
	defer closeAll(fds)
	if err := conn.Send(&monitor.Message{Op: monitor.OpPark, Container: &info, FDs: names}, fds...); err != nil {
		return fmt.Errorf("park %s: %w", info.ID, err)
	}
	return nil
}

// duplicates is all that another process needs to go on with the container. The
// descriptors belong to the caller.
func (c *container) duplicates() (info monitor.Container, names []string, fds []int) {
	add := func(name string, dup int) {
		if dup >= 0 {
			names, fds = append(names, name), append(fds, dup)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	info = c.info
	info.Exit = c.exit
	if c.gone {
		return info, nil, nil
	}
	streams := [2]string{monitor.FDStdout, monitor.FDStderr}
	if info.IO.Terminal {
		streams[0] = monitor.FDTTY
	}
	for i, f := range c.streams {
		if f != nil {
			add(streams[i], duplicate(rawFD(f)))
		}
	}
	file, tape := c.log.duplicates()
	add(monitor.FDLog, file)
	add(monitor.FDTape, tape)
	add(monitor.FDStdin, duplicate(c.stdin))
	add(monitor.FDBuffer, duplicate(c.buffer))
	add(monitor.FDPid, duplicate(c.pidfd))
	return info, names, fds
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// rawFD reads a descriptor without making the file blocking, as Fd would.
func rawFD(f syscall.Conn) int {
	fd := -1
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(u uintptr) { fd = int(u) })
	}
	return fd
}
