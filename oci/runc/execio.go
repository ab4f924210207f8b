package runc

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// stdio makes the streams of an exec and returns the process's ends. With a
// terminal they are for the binary alone, whose complaints go to its log.
func (x *running) stdio() (stdio [3]*os.File, err error) {
	defer func() {
		if err != nil {
			closeFiles(stdio)
		}
	}()
	if x.stdin == nil || x.process.Terminal {
		stdio[0], err = os.Open(os.DevNull)
	} else {
		stdio[0], x.ends[0], err = x.ownedPipe(false)
	}
	for i := 1; i < 3 && err == nil; i++ {
		if x.process.Terminal {
			stdio[i], err = os.OpenFile(os.DevNull, os.O_WRONLY, 0)
		} else {
			x.ends[i], stdio[i], err = x.ownedPipe(true)
		}
	}
	return stdio, err
}

// ownedPipe is a pipe of which the process's end is its user's, so that it may
// be opened again by /dev/stderr and alike.
func (x *running) ownedPipe(writes bool) (r, w *os.File, err error) {
	if r, w, err = os.Pipe(); err != nil {
		return nil, nil, fmt.Errorf("make pipe: %w", err)
	}
	theirs := r
	if writes {
		theirs = w
	}
	uid, gid := x.root.UID+x.process.User.UID, x.root.GID+x.process.User.GID
	if err := theirs.Chown(int(uid), int(gid)); err != nil {
		closeFiles([3]*os.File{r, w})
		return nil, nil, fmt.Errorf("give pipe to uid %d: %w", uid, err)
	}
	return r, w, nil
}

func closeFiles(files [3]*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// connect begins to move bytes. The copy of stdin may outlive the exec while
// its Reader itself blocks; the reader's owner ends that.
func (x *running) connect() {
	for i, f := range x.ends[1:] {
		if f != nil {
			x.out[i] = copyTo(f, x.sinks[i])
		}
	}
	if x.connected != nil {
		x.connected()
	}
	if x.stdin == nil {
		return
	}
	in, pipe := x.stdin, x.ends[0]
	if x.process.Terminal {
		// The end of a client's input is no end of a terminal.
		go feed(x.ends[1], in)
		return
	}
	go func() {
		defer pipe.Close()
		feed(pipe, in)
	}()
}

// feed copies a client's input. When nobody takes it any more it is still
// read, for the client may send more over the same connection.
func feed(to *os.File, from io.Reader) {
	if _, err := io.Copy(to, from); err != nil {
		_, _ = io.Copy(io.Discard, from)
	}
}

// copier reads a stream to its end and writes it to a sink. When the sink takes
// no more the stream is still read.
type copier struct {
	f    *os.File
	sink io.Writer
	done chan struct{}
}

// chunks are borrowed while a stream is read.
var chunks = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

func copyTo(f *os.File, sink io.Writer) *copier {
	c := &copier{f: f, sink: sink, done: make(chan struct{})}
	go c.run()
	return c
}

func (c *copier) run() {
	defer close(c.done)
	chunk := chunks.Get().(*[]byte)
	defer chunks.Put(chunk)
	for {
		n, err := c.f.Read(*chunk)
		c.write((*chunk)[:n])
		if errors.Is(err, os.ErrDeadlineExceeded) {
			c.rest(*chunk)
			return
		}
		if err != nil { // of a pty EIO: no process has it any more
			return
		}
	}
}

func (c *copier) write(b []byte) {
	if len(b) == 0 {
		return
	}
	if _, err := c.sink.Write(b); err != nil {
		c.sink = io.Discard
	}
}

// rest takes what is in the pipe without waiting, at most its capacity.
func (c *copier) rest(chunk []byte) {
	raw, err := c.f.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		for total := 0; total < 64<<10; {
			n, err := unix.Read(int(fd), chunk)
			if n <= 0 || err != nil {
				return
			}
			c.write(chunk[:n])
			total += n
		}
	})
}

// finish waits for the stream's end, but only for so long, and then until what
// was in it is written.
func (c *copier) finish(limit time.Duration) {
	_ = c.f.SetReadDeadline(time.Now().Add(limit))
	<-c.done
}

func (c *copier) wait() { <-c.done }

// stop ends the copy now, or when the sink lets it.
func (c *copier) stop() {
	_ = c.f.SetReadDeadline(time.Unix(1, 0))
	<-c.done
}

// keeper is a sink that keeps the beginning of a stream.
type keeper struct {
	limit int64
	buf   []byte
	cut   bool // there was more
}

func (k *keeper) Write(b []byte) (int, error) {
	n := len(b)
	if room := max(0, k.limit-int64(len(k.buf))); int64(n) > room {
		b, k.cut = b[:room], true
	}
	k.buf = append(k.buf, b...)
	return n, nil
}

// makeGroup makes the exec's own cgroup and returns the binary's options for
// it; none where the binary or the cgroup has no way.
func (x *running) makeGroup(ct monitor.Container, name string) []string {
	if x.inside == "" || !x.r.subCgroups() {
		return nil
	}
	dir := filepath.Join(x.inside, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil
	}
	x.group = dir
	switch x.inside {
	case ct.Cgroups.Unified: // v2 names no controller
	case ct.Cgroups.Freezer:
		name = "freezer:" + name
	case ct.Cgroups.Pids:
		name = "pids:" + name
	case ct.Cgroups.Memory:
		name = "memory:" + name
	}
	return []string{"--cgroup", name}
}
