package runc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/oci"
	"berth/oci/monitor"
)

// firstSize is how long an exec with a terminal waits for its client to say how
// large that is, which clients do as soon as they are connected: programs ask
// once, as they begin.
const firstSize = 200 * time.Millisecond

// ExecSession implements oci.Runtime.
func (r *Runtime) ExecSession(ctx context.Context, id string, req oci.SessionRequest) (int32, error) {
	x := &running{root: req.Root, stdin: req.Stdin, sinks: [2]io.Writer{orDiscard(req.Stdout), orDiscard(req.Stderr)}}
	if req.Process != nil {
		x.process = *req.Process
	}
	if x.process.Terminal && req.Resize != nil {
		x.process.ConsoleSize = sizeWithin(ctx, req.Resize, firstSize)
		over := make(chan struct{})
		defer close(over)
		x.connected = func() {
			go resize(req.Resize, over, func(s oci.Size) { x.setSize(s) })
		}
	}
	return r.exec(ctx, id, x)
}

func orDiscard(w io.Writer) io.Writer {
	if w == nil {
		return io.Discard
	}
	return w
}

// sizeWithin waits for the first size; nil when none comes in time.
func sizeWithin(ctx context.Context, sizes <-chan oci.Size, limit time.Duration) *rspec.Box {
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case s, ok := <-sizes:
		if ok && s.Columns > 0 && s.Rows > 0 {
			return &rspec.Box{Height: uint(s.Rows), Width: uint(s.Columns)}
		}
	case <-late.C:
	case <-ctx.Done():
	}
	return nil
}

// resize passes sizes on until there are no more or the session is over.
func resize(sizes <-chan oci.Size, over <-chan struct{}, set func(oci.Size)) {
	for {
		select {
		case s, ok := <-sizes:
			if !ok {
				return
			}
			set(s)
		case <-over:
			return
		}
	}
}

// setSize sets the size of the exec's terminal. One that is closed has none.
func (x *running) setSize(s oci.Size) {
	raw, err := x.ends[1].SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Col: s.Columns, Row: s.Rows})
	})
}

// Attach implements oci.Runtime.
func (r *Runtime) Attach(ctx context.Context, id string, s oci.Streams) error {
	a, err := r.monitor.Attach(ctx, id, monitor.Want{Stdout: s.Stdout != nil, Stderr: s.Stderr != nil, Stdin: s.Stdin != nil})
	if err != nil {
		return asOCI(err)
	}
	over := make(chan struct{})
	defer close(over)
	defer a.Close()
	if s.Resize != nil {
		go resize(s.Resize, over, func(size oci.Size) { _ = a.Resize(size.Columns, size.Rows) })
	}
	if s.Stdin != nil {
		in, err := a.Stdin()
		if err == nil {
			defer in.Close()
		} else if !errors.Is(err, monitor.ErrNotFound) {
			return asOCI(err)
		}
		go feedStdin(ctx, a, s.Stdin, in)
	}
	var copies sync.WaitGroup
	for i, sink := range []io.Writer{s.Stdout, s.Stderr} {
		if f := a.Output[i]; f != nil {
			copies.Go(func() { copyTo(f, sink).wait() })
		}
	}
	stop := context.AfterFunc(ctx, func() {
		for _, f := range a.Output {
			if f != nil {
				_ = f.SetReadDeadline(time.Unix(1, 0))
			}
		}
	})
	defer stop()
	err = a.Wait(ctx)
	copies.Wait()
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("attach to %s: %w", id, asOCI(err))
	}
	return err
}

// feedStdin copies a client's input. Where the container has no stdin it is
// read and dropped. Its end is the container's when stdin is for one client.
func feedStdin(ctx context.Context, a *monitor.Attachment, from io.Reader, to *os.File) {
	if to == nil {
		_, _ = io.Copy(io.Discard, from)
		return
	}
	feed(to, from)
	_ = to.Close()
	_ = a.CloseStdin(ctx)
}
