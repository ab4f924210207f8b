package main

import (
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// drainKept is how much of what the OCI runtime writes during a create is kept, of its
// end. It is less than a pipe holds.
const drainKept = 32 << 10

// drain reads a pipe that the OCI runtime shares with the container to be, so that a
// talkative one never waits for a reader.
type drain struct {
	f    *os.File
	all  sync.WaitGroup
	kept []byte // when all is done
}

func drained(f *os.File) *drain {
	d := &drain{f: f}
	d.all.Go(func() {
		buf := make([]byte, 4096)
		for {
			n, err := f.Read(buf)
			if d.keep(buf[:max(n, 0)]); err != nil {
				return // by end, or all writers have gone
			}
		}
	})
	return d
}

func (d *drain) keep(b []byte) {
	d.kept = append(d.kept, b...)
	if over := len(d.kept) - drainKept; over > 0 {
		d.kept = append(d.kept[:0], d.kept[over:]...)
	}
}

// end stops the reading and gives what was kept.
func (d *drain) end() []byte {
	_ = d.f.SetReadDeadline(time.Unix(1, 0))
	d.all.Wait()
	_ = d.f.SetReadDeadline(time.Time{})
	for buf := make([]byte, 4096); ; { // what is there already; it does not block
		n, err := unix.Read(rawFD(d.f), buf)
		if n <= 0 && err != unix.EINTR {
			return d.kept
		}
		d.keep(buf[:max(n, 0)])
	}
}

// talk are the drains of a create's output, stdout and stderr; of a terminal's only
// the second, in the OCI runtime's own pipe. Nil: nobody listens.
type talk [2]*drain

// listen begins to drain what the OCI runtime says. The processes of a checkpoint that
// is restored write there themselves, and nothing of that may get lost: they wait.
func (k *creation) listen() (t talk) {
	switch {
	case slices.Contains(k.r.Args, "restore"):
	case k.r.IO.Terminal:
		t[1] = drained(k.child[1])
	default:
		t[0], t[1] = drained(k.c.streams[0]), drained(k.c.streams[1])
	}
	return t
}

// end stops listening and gives what was said last, on stderr. Into a container's own
// pipes, which are empty then, it puts back what it has kept: hooks write there what
// belongs into the log.
func (t talk) end(into []*os.File) (said []byte) {
	for i, d := range t {
		if d == nil {
			continue
		}
		said = d.end()
		if t[0] != nil && into != nil && len(said) > 0 {
			_, _ = into[1+i].Write(said)
		}
	}
	return said
}
