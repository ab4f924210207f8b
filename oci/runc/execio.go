package runc

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// pipes makes the streams of an exec, owned by its user, and begins to read
// them. The result is the process's ends.
func (x *running) pipes(u rspec.User) (stdio [3]*os.File, err error) {
	defer func() {
		if err != nil {
			for _, f := range stdio {
				if f != nil {
					_ = f.Close()
				}
			}
		}
	}()
	for i := range x.out {
		r, w, err := os.Pipe()
		if err != nil {
			return stdio, fmt.Errorf("make pipe: %w", err)
		}
		stdio[1+i], x.out[i] = w, collect(r, x.req.Limit)
		if err := own(w, u); err != nil {
			return stdio, err
		}
	}
	if x.req.Stdin == nil {
		stdio[0], err = os.Open(os.DevNull)
		return stdio, err
	}
	if stdio[0], x.stdin, err = os.Pipe(); err != nil {
		return stdio, fmt.Errorf("make pipe: %w", err)
	}
	return stdio, own(stdio[0], u)
}

func own(f *os.File, u rspec.User) error {
	if err := f.Chown(int(u.UID), int(u.GID)); err != nil {
		return fmt.Errorf("give pipe to uid %d: %w", u.UID, err)
	}
	return nil
}

// feed copies the request's stdin until its end or the exec's. The copy may
// outlive the exec while Stdin itself blocks; the reader's owner ends that.
func (x *running) feed() {
	if x.stdin == nil {
		return
	}
	in, out := x.req.Stdin, x.stdin
	go func() {
		_, _ = io.Copy(out, in)
		_ = out.Close()
	}()
}

// collector reads a stream to its end and keeps its beginning.
type collector struct {
	f     *os.File
	limit int64
	done  chan struct{}
	buf   []byte // the reader's until done
	cut   bool   // the reader's until done
}

// chunks are borrowed while a stream is read.
var chunks = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

func collect(f *os.File, limit int64) *collector {
	c := &collector{f: f, limit: limit, done: make(chan struct{})}
	go c.run()
	return c
}

func (c *collector) run() {
	defer close(c.done)
	chunk := chunks.Get().(*[]byte)
	defer chunks.Put(chunk)
	for {
		n, err := c.f.Read(*chunk)
		c.keep((*chunk)[:n])
		if errors.Is(err, os.ErrDeadlineExceeded) {
			c.rest(*chunk)
			return
		}
		if err != nil {
			return
		}
	}
}

func (c *collector) keep(b []byte) {
	room := max(0, c.limit-int64(len(c.buf)))
	if int64(len(b)) > room {
		b, c.cut = b[:room], true
	}
	c.buf = append(c.buf, b...)
}

// rest takes what is in the pipe without waiting, at most its capacity.
func (c *collector) rest(chunk []byte) {
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
			c.keep(chunk[:n])
			total += n
		}
	})
}

// finish waits for the stream's end, but only for so long.
func (c *collector) finish(limit time.Duration) {
	_ = c.f.SetReadDeadline(time.Now().Add(limit))
	<-c.done
}

func (c *collector) bytes() []byte { return c.buf }

func (c *collector) close() {
	_ = c.f.SetReadDeadline(time.Unix(1, 0))
	<-c.done
	_ = c.f.Close()
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
