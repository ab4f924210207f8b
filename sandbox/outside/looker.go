package outside

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// maxLooks bounds the looks at a time, hanging ones included.
	maxLooks = 64
	// maxIdle is how many processes wait for the next look, and idleFor how long.
	maxIdle = 2
	idleFor = 30 * time.Second
)

// Options of a Looker.
type Options struct {
	Command []string      // serves looks on its standard input and output, see Serve
	Limit   time.Duration // of one look
	// Await hears of each look when it begins, with the pid of its process, and is
	// called back when it is over. May be nil.
	Await func(ctx context.Context, what string, pid int) (done func())
	// Whereabouts says where a process hangs. May be nil.
	Whereabouts func(pid int) string
}

// Looker looks by processes of its own. Its methods may be called from many
// goroutines.
type Looker struct {
	o     Options
	slots chan struct{} // holds one token for each look that runs or hangs

	mu     sync.Mutex
	idle   []*process       // guarded by mu, the longest idle first
	looks  map[string]*look // by path, guarded by mu
	closed bool             // guarded by mu
}

// look is one that runs or hangs.
type look struct {
	since time.Time
	over  chan struct{} // closed when its process is free again, or gone
	pid   atomic.Int64  // of its process; 0 before there is one
}

// process is a child that serves looks.
type process struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *os.File
	reply *json.Decoder
	since time.Time // idle since
}

// New starts nothing yet.
func New(o Options) *Looker {
	return &Looker{o: o, slots: make(chan struct{}, maxLooks), looks: map[string]*look{}}
}

// Close ends the processes; one that hangs ends when the kernel lets it go.
func (l *Looker) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, p := range l.idle {
		go p.end()
	}
	l.idle = nil
}

// For is a Host whose looks end with ctx, or after Options.Limit.
func (l *Looker) For(ctx context.Context) Host { return bound{l, ctx} }

type bound struct {
	l   *Looker
	ctx context.Context
}

func (b bound) Find(path string) (Found, error) {
	a, err := b.l.look(b.ctx, request{Op: "find", Path: path})
	if err != nil || a.Found == nil {
		return Found{}, err
	}
	return *a.Found, nil
}

func (b bound) MakeDir(path string) error {
	_, err := b.l.look(b.ctx, request{Op: "dir", Path: path})
	return err
}

func (b bound) MakeLog(dir, path string) (string, error) {
	a, err := b.l.look(b.ctx, request{Op: "log", Path: dir, Log: path})
	return a.Path, err
}

func (b bound) Read(path string, most int64) ([]byte, error) {
	a, err := b.l.look(b.ctx, request{Op: "read", Path: path, Most: most})
	return a.Data, err
}

func (b bound) Devices(dir string, skip []string) ([]Entry, error) {
	a, err := b.l.look(b.ctx, request{Op: "devices", Path: dir, Skip: skip})
	return a.Entries, err
}

// look has a process answer r.
func (l *Looker) look(ctx context.Context, r request) (reply, error) {
	ctx, cancel := context.WithTimeout(ctx, l.o.Limit)
	defer cancel()
	began := time.Now()
	mine, err := l.begin(ctx, r.Path)
	if err != nil {
		return reply{}, err
	}
	p, err := l.take()
	if err != nil {
		l.over(r.Path, mine)
		return reply{}, err
	}
	a, err := l.ask(ctx, p, r, mine)
	if err != nil && ctx.Err() == nil { // somebody has killed it: a new one then
		p.kill()
		if p, err = start(l.o.Command); err != nil {
			l.over(r.Path, mine)
			return reply{}, err
		}
		a, err = l.ask(ctx, p, r, mine)
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("path %s does not answer, for %s: %s: %w", r.Path, time.Since(began).Round(time.Millisecond), l.whereabouts(p.cmd.Process.Pid), ctx.Err())
	}
	if err != nil {
		go func() {
			p.kill()
			l.over(r.Path, mine)
		}()
		return reply{}, err
	}
	l.put(p)
	l.over(r.Path, mine)
	if a.Error != nil {
		return reply{}, a.Error
	}
	return a, nil
}

// ask tells Await of the look meanwhile.
func (l *Looker) ask(ctx context.Context, p *process, r request, mine *look) (reply, error) {
	mine.pid.Store(int64(p.cmd.Process.Pid))
	if l.o.Await != nil {
		defer l.o.Await(ctx, "path "+r.Path, p.cmd.Process.Pid)()
	}
	return p.ask(ctx, r)
}

func (l *Looker) whereabouts(pid int) string {
	if l.o.Whereabouts == nil {
		return fmt.Sprintf("pid %d", pid)
	}
	return l.o.Whereabouts(pid)
}

// begin waits until nobody looks at path, and for a slot.
func (l *Looker) begin(ctx context.Context, path string) (*look, error) {
	mine := &look{since: time.Now(), over: make(chan struct{})}
	for {
		l.mu.Lock()
		other := l.looks[path]
		if other == nil {
			l.looks[path] = mine
		}
		l.mu.Unlock()
		if other == nil {
			break
		}
		if err := l.waitFor(ctx, path, other); err != nil {
			return nil, err
		}
	}
	select {
	case l.slots <- struct{}{}:
		return mine, nil
	case <-ctx.Done():
		l.mu.Lock()
		delete(l.looks, path)
		l.mu.Unlock()
		close(mine.over)
		return nil, fmt.Errorf("look at path %s: %d other paths do not answer: %w", path, maxLooks, ctx.Err())
	}
}

// waitFor waits until another look at the same path is over.
func (l *Looker) waitFor(ctx context.Context, path string, other *look) error {
	if l.o.Await != nil {
		defer l.o.Await(ctx, "path "+path, int(other.pid.Load()))()
	}
	select {
	case <-other.over:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("path %s does not answer, since %s: %s: %w", path, other.since.Format(time.RFC3339), l.whereabouts(int(other.pid.Load())), ctx.Err())
	}
}

// over ends a look.
func (l *Looker) over(path string, mine *look) {
	l.mu.Lock()
	delete(l.looks, path)
	l.mu.Unlock()
	close(mine.over)
	<-l.slots
}

// take gives an idle process, or a new one.
func (l *Looker) take() (*process, error) {
	l.mu.Lock()
	if n := len(l.idle); n > 0 {
		p := l.idle[n-1]
		l.idle = l.idle[:n-1]
		l.mu.Unlock()
		return p, nil
	}
	l.mu.Unlock()
	return start(l.o.Command)
}

func start(command []string) (*process, error) {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir, cmd.Stderr = "/", os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the terminal's signals are for the daemon
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("look outside: %w", err)
	}
	out, theirs, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("look outside: %w", err)
	}
	defer theirs.Close()
	cmd.Stdout = theirs
	if err := cmd.Start(); err != nil {
		_ = out.Close()
		return nil, fmt.Errorf("look outside: %w", err)
	}
	return &process{cmd: cmd, in: in, out: out, reply: json.NewDecoder(out)}, nil
}

// put keeps a process for the next look, for a while.
func (l *Looker) put(p *process) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.idle) >= maxIdle {
		go p.end()
		return
	}
	p.since = time.Now()
	l.idle = append(l.idle, p)
	time.AfterFunc(idleFor, l.expire)
}

func (l *Looker) expire() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.idle) > 0 && time.Since(l.idle[0].since) >= idleFor {
		go l.idle[0].end()
		l.idle = l.idle[1:]
	}
}

// ask has the process answer. After an error it is of no more use.
func (p *process) ask(ctx context.Context, r request) (a reply, err error) {
	stop := context.AfterFunc(ctx, func() { _ = p.out.SetReadDeadline(time.Unix(1, 0)) })
	if err := json.NewEncoder(p.in).Encode(r); err != nil {
		stop()
		return a, fmt.Errorf("look outside: %w", err)
	}
	err = p.reply.Decode(&a)
	if !stop() && err == nil {
		err = ctx.Err() // it came in the last instant, and the deadline is set for good
	}
	if errors.Is(err, io.EOF) {
		err = errors.New("its process has ended")
	}
	if err != nil {
		return a, fmt.Errorf("look outside at %s: %w", r.Path, err)
	}
	return a, nil
}

// end lets an idle process end by itself.
func (p *process) end() {
	_ = p.in.Close()
	_ = p.cmd.Wait()
	_ = p.out.Close()
}

// kill returns when the kernel has let the process go.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	p.end()
}
