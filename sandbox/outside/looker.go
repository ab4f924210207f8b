package outside

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"
	"sync/atomic"
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
	Limit   time.Duration // of one look; of what takes long, between two signs of life
	// LimitKey is what an operator knows the limit by, for messages. May be empty.
	LimitKey string
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
	op       string
	since    time.Time
	over     chan struct{} // closed when its process is free again, or gone
	answered bool          // it has a reply; to be read when it is over
	pid      atomic.Int64  // of its process; 0 before there is one
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

// Answer tells whether paths answer: it opens and begins to read what lies there,
// of a directory also its files and those of the directories in it, as whoever reads
// configuration there will. What is missing or cannot be read answers. The error is
// of the first that does not.
func (l *Looker) Answer(ctx context.Context, paths ...string) error {
	for _, path := range paths {
		if path == "" {
			continue
		}
		if _, err := l.look(ctx, request{Op: "answer", Path: path}); err != nil {
			return err
		}
	}
	return nil
}

// Fetch copies the regular file at path to the new file at own, mode 0600, or the
// regular files of the directory at path into a new directory, mode 0700. It follows
// a symlink to the top, and none below. The caller removes what there is of it, also
// after an error. It may take long; each Limit something must come.
func (l *Looker) Fetch(ctx context.Context, path, own string) error {
	_, err := l.look(ctx, request{Op: "fetch", Path: path, Own: own})
	return err
}

// Deliver copies the file at own to path, mode 0600, where nothing may be
// (fs.ErrExist), and has it on the disk. Until it is whole it has another name,
// PATH.*.partial, and goes when Deliver fails or, where the filesystem hangs, when it
// answers again. Of a directory at own it copies the content into the empty directory
// at path, in the order of names; there, an error leaves what is written. It may take
// long; each Limit something must go.
func (l *Looker) Deliver(ctx context.Context, own, path string) error {
	_, err := l.look(ctx, request{Op: "deliver", Path: path, Own: own, Partial: path + "." + rand.Text()[:8] + ".partial"})
	return err
}

// Remove removes what is at path, with all below it. Idempotent.
func (l *Looker) Remove(ctx context.Context, path string) error {
	_, err := l.look(ctx, request{Op: "remove", Path: path})
	return err
}

// Relabel sets the SELinux label of a tree, without following symlinks. What cannot
// have one is passed over. It may take long; each Limit it must get on.
func (l *Looker) Relabel(ctx context.Context, path, label string) error {
	_, err := l.look(ctx, request{Op: "relabel", Path: path, Label: label})
	return err
}

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
	a, err := b.l.look(b.ctx, request{Op: "log", Path: dir, Below: path})
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
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	limit := time.AfterFunc(l.o.Limit, func() { cancel(&lateError{l.o.LimitKey}) })
	defer limit.Stop()
	began := time.Now()
	alive := func() { limit.Reset(l.o.Limit) }
	mine, err := l.begin(ctx, r, alive)
	if mine == nil {
		return reply{}, err
	}
	p, err := l.take()
	if err != nil {
		l.over(r.Path, mine)
		return reply{}, err
	}
	a, err := l.ask(ctx, p, question{r, mine, alive})
	if err != nil && ctx.Err() == nil { // somebody has killed it: a new one then
		p.kill()
		if p, err = start(l.o.Command); err != nil {
			l.over(r.Path, mine)
			return reply{}, err
		}
		a, err = l.ask(ctx, p, question{r, mine, alive})
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("path %s does not answer, for %s: %s: %w", r.Path, time.Since(began).Round(time.Millisecond), l.whereabouts(p.cmd.Process.Pid), context.Cause(ctx))
	}
	if err != nil {
		go func() {
			p.kill()
			if r.Op == "deliver" {
				l.discard(r)
			}
			l.over(r.Path, mine)
		}()
		return reply{}, err
	}
	l.put(p)
	mine.answered = true
	l.over(r.Path, mine)
	if a.Error != nil {
		return reply{}, a.Error
	}
	return a, nil
}

// discard removes what a killed process was delivering.
func (l *Looker) discard(r request) {
	p, err := start(l.o.Command)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), l.o.Limit)
	defer cancel()
	_, _ = p.ask(ctx, question{request: request{Op: "remove", Path: r.Partial}, alive: func() {}})
	p.kill()
}

// lateError is the end of a look's own time.
type lateError struct{ key string }

func (e *lateError) Error() string {
	if e.key == "" {
		return context.DeadlineExceeded.Error()
	}
	return context.DeadlineExceeded.Error() + " (" + e.key + ")"
}

func (e *lateError) Is(target error) bool { return target == context.DeadlineExceeded }

// question is a request on its way, and whom its signs of life are told.
type question struct {
	request
	mine  *look
	alive func()
}

// ask tells Await of the look meanwhile.
func (l *Looker) ask(ctx context.Context, p *process, q question) (reply, error) {
	q.mine.pid.Store(int64(p.cmd.Process.Pid))
	if l.o.Await != nil {
		defer l.o.Await(ctx, "path "+q.Path, p.cmd.Process.Pid)()
	}
	return p.ask(ctx, q)
}

func (l *Looker) whereabouts(pid int) string {
	if l.o.Whereabouts == nil {
		return fmt.Sprintf("pid %d", pid)
	}
	return l.o.Whereabouts(pid)
}

// begin waits until nobody looks at the path, and for a slot. Each look that is over
// meanwhile shows that the path answers; whoever asks only for that takes it for his
// own: nil then, without an error.
func (l *Looker) begin(ctx context.Context, r request, alive func()) (*look, error) {
	mine := &look{op: r.Op, since: time.Now(), over: make(chan struct{})}
	for {
		l.mu.Lock()
		other := l.looks[r.Path]
		if other == nil {
			l.looks[r.Path] = mine
		}
		l.mu.Unlock()
		if other == nil {
			break
		}
		if err := l.waitFor(ctx, r.Path, other); err != nil {
			return nil, err
		}
		if other.answered && other.op == "answer" && r.Op == "answer" {
			return nil, nil
		}
		alive()
	}
	select {
	case l.slots <- struct{}{}:
		return mine, nil
	case <-ctx.Done():
		l.mu.Lock()
		delete(l.looks, r.Path)
		l.mu.Unlock()
		close(mine.over)
		if len(l.slots) < maxLooks {
			return nil, fmt.Errorf("look at path %s: %w", r.Path, context.Cause(ctx))
		}
		return nil, fmt.Errorf("look at path %s: %d other paths do not answer: %w", r.Path, maxLooks, context.Cause(ctx))
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
		return fmt.Errorf("path %s does not answer, since %s: %s: %w", path, other.since.Format(time.RFC3339), l.whereabouts(int(other.pid.Load())), context.Cause(ctx))
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
