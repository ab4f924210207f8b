package operation

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestSecondCallJoins(t *testing.T) {
	g := NewGroup()
	var runs atomic.Int32
	release := make(chan struct{})
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			id, err := g.Do(t.Context(), Request{Key: "k", Limit: time.Minute}, func(context.Context, *Operation) (string, error) {
				runs.Add(1)
				<-release
				return "id", nil
			})
			if id != "id" || err != nil {
				t.Errorf("got %q, %v", id, err)
			}
		})
	}
	for g.joined("k") == nil {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(20 * time.Millisecond)
	close(release)
	wg.Wait()
	if n := runs.Load(); n != 1 {
		t.Errorf("ran %d times", n)
	}
	if len(g.Running()) != 0 {
		t.Error("an ended operation is still listed")
	}
}

func (g *Group) joined(key string) *Operation {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.running[key]
}

// A caller that gives up learns the step, and its retry gets the result.
func TestGiveUpAndRetry(t *testing.T) {
	g := NewGroup()
	release := make(chan struct{})
	fn := func(ctx context.Context, o *Operation) (string, error) {
		o.Step("network setup")
		<-release
		return "id", ctx.Err()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	r := Request{Key: "k", Verb: "RunPodSandbox", Object: "p", Limit: time.Minute}
	_, err := g.Do(ctx, r, fn)
	var still *StillRunning
	if !errors.As(err, &still) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "RunPodSandbox p: still at step network setup, for ") {
		t.Fatalf("got %v", err)
	}
	close(release)
	id, err := g.Do(t.Context(), r, fn)
	if id != "id" || err != nil {
		t.Errorf("the retry got %q, %v", id, err)
	}
}

func TestPanicIsAnError(t *testing.T) {
	g := NewGroup()
	_, err := g.Do(t.Context(), Request{Key: "k", Verb: "V", Limit: time.Minute}, func(context.Context, *Operation) (string, error) { panic("boom") })
	var p *PanicError
	if !errors.Is(err, ErrPanic) || !errors.As(err, &p) || !strings.Contains(err.Error(), "boom") || !strings.Contains(string(p.Stack), "TestPanicIsAnError") {
		t.Errorf("got %v", err)
	}
	g.Wait(t.Context())
}

func TestOwnDeadline(t *testing.T) {
	g := NewGroup()
	_, err := g.Do(t.Context(), Request{Key: "k", Limit: 10 * time.Millisecond}, func(ctx context.Context, _ *Operation) (string, error) {
		<-ctx.Done()
		return "", ctx.Err()
	})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestCancel(t *testing.T) {
	g := NewGroup()
	started, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := g.Do(t.Context(), Request{Key: "k", Object: "o", Limit: time.Hour}, func(ctx context.Context, _ *Operation) (string, error) {
			close(started)
			<-ctx.Done()
			return "", ctx.Err()
		})
		ended <- err
	}()
	<-started
	g.Close()
	_, err := g.Do(t.Context(), Request{Key: "other", Verb: "V", Object: "o", Limit: time.Hour}, func(context.Context, *Operation) (string, error) {
		t.Error("a closed group began an operation")
		return "", nil
	})
	if !errors.Is(err, ErrClosing) || !strings.HasPrefix(err.Error(), "V o: ") {
		t.Errorf("a new operation of a closed group: %v", err)
	}
	if list := g.Cancel(); len(list) != 1 || list[0].Object != "o" {
		t.Errorf("canceled %v", list)
	}
	if err := <-ended; !errors.Is(err, context.Canceled) || !errors.Is(err, ErrClosing) {
		t.Errorf("got %v", err)
	}
	g.Wait(t.Context())
}

func TestSteps(t *testing.T) {
	o := &Operation{Began: time.Now()}
	o.Step("a")
	o.Step("b")
	s := o.Steps()
	if len(s) != 2 || s[0].Name != "a" || s[1].Name != "b" {
		t.Errorf("got %v", s)
	}
	if len(o.Steps()) != 2 || !strings.HasPrefix(o.Where(), "waiting") {
		t.Error("no step runs any more")
	}
}

func TestLocks(t *testing.T) {
	l := NewLocks()
	open, err := l.Lock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	other, err := l.Lock(t.Context(), "b")
	if err != nil {
		t.Fatal("locks of two objects collide")
	}
	other()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := l.Lock(ctx, "a"); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	open()
	again, err := l.Lock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	again()
	if len(l.held) != 0 {
		t.Error("an open lock is kept")
	}
}

// A client must be able to read why its call was not done in time.
func TestAnswersBeforeTheDeadline(t *testing.T) {
	if ctx, cancel := Early(t.Context()); ctx != t.Context() {
		cancel()
		t.Error("a context without a deadline got one")
	}
	for _, left := range []time.Duration{10 * time.Second, time.Minute, 100 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(t.Context(), left)
		early, stop := Early(ctx)
		end, _ := ctx.Deadline()
		got, ok := early.Deadline()
		if before := end.Sub(got); !ok || before <= 0 || before > 200*time.Millisecond || before > left/5 {
			t.Errorf("%v left: it ends %v before", left, before)
		}
		stop()
		cancel()
	}
	g := NewGroup()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	release := make(chan struct{})
	_, err := g.Do(ctx, Request{Key: "k", Verb: "V", Object: "o", Limit: time.Hour}, func(context.Context, *Operation) (string, error) { <-release; return "", nil })
	close(release)
	var still *StillRunning
	if !errors.As(err, &still) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the caller got %v", err)
	}
	g.Wait(t.Context())
}

// Whoever waits for a lock can tell who has it and where that one is.
func TestLocksTellTheirHolder(t *testing.T) {
	g, l := NewGroup(), NewLocks()
	release := make(chan struct{})
	held := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := g.Do(t.Context(), Request{Key: "a", Verb: "StopContainer", Object: "c", Limit: time.Minute}, func(ctx context.Context, o *Operation) (string, error) {
			open, err := l.Lock(ctx, "x")
			if err != nil {
				return "", err
			}
			defer open()
			o.Step("kill")
			close(held)
			<-release
			return "", nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	<-held
	const holder = "another operation on x: StopContainer c, at step kill, for "
	_, err := g.Do(t.Context(), Request{Key: "b", Verb: "StartContainer", Object: "c", Limit: 50 * time.Millisecond}, func(ctx context.Context, o *Operation) (string, error) {
		done := make(chan struct{})
		defer close(done)
		go func() {
			for len(o.Waits()) == 0 {
				select {
				case <-done:
					t.Error("the operation does not say what it waits for")
					return
				case <-time.After(time.Millisecond):
				}
			}
			if text := o.Waits()[0].Text(); !strings.HasPrefix(text, holder) {
				t.Errorf("it waits for %q", text)
			}
		}()
		_, err := l.Lock(ctx, "x")
		if len(o.Waits()) != 0 {
			t.Error("it waits for what it has given up")
		}
		return "", err
	})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), holder) {
		t.Errorf("got %v", err)
	}
	close(release)
	wg.Wait()
}

// A closed group begins nothing, but what a running operation needs to undo what it
// has done.
func TestAClosedGroupLetsAnOperationUndo(t *testing.T) {
	g := NewGroup()
	closed := make(chan struct{})
	_, err := g.Do(t.Context(), Request{Key: "k", Verb: "V", Limit: time.Minute}, func(ctx context.Context, _ *Operation) (string, error) {
		g.Close()
		close(closed)
		return g.Do(ctx, Request{Key: "part", Verb: "V", Limit: time.Minute}, func(context.Context, *Operation) (string, error) { return "", nil })
	})
	<-closed
	if err != nil {
		t.Errorf("a part of a running operation: %v", err)
	}
	err = g.Track(t.Context(), Request{Verb: "V"}, func(ctx context.Context, _ *Operation) error {
		_, err := g.Do(ctx, Request{Key: "k", Verb: "V", Limit: time.Minute}, func(context.Context, *Operation) (string, error) { return "", nil })
		return err
	})
	if !errors.Is(err, ErrClosing) {
		t.Errorf("a new one: %v", err)
	}
}

// What a caller runs itself is listed while it runs, and once only.
func TestTrack(t *testing.T) {
	g := NewGroup()
	g.Watch(func(*Operation) { t.Error("what ends with its caller is told of") })
	err := g.Track(t.Context(), Request{Verb: "ExecSync", Object: "c"}, func(ctx context.Context, o *Operation) error {
		defer Await(ctx, "path /x", 1)()
		running := g.Running()
		if len(running) != 1 || running[0] != o || From(ctx) != o || !o.Tracked() {
			t.Errorf("running %v", running)
		}
		if w := o.Waits(); len(w) != 1 || w[0].Text() != "path /x" || w[0].PID != 1 || w[0].Since.IsZero() {
			t.Errorf("waits %v", w)
		}
		if broken := g.Cancel(); len(broken) != 0 || ctx.Err() != nil {
			t.Errorf("canceled %v", broken)
		}
		return errPlain
	})
	if err != errPlain || len(g.Running()) != 0 {
		t.Errorf("got %v, running %v", err, g.Running())
	}
	g = NewGroup()
	_ = g.Track(t.Context(), Request{Verb: "RunPodSandbox"}, func(ctx context.Context, _ *Operation) error {
		_, err := g.Do(ctx, Request{Key: "k", Verb: "RunPodSandbox", Limit: time.Minute}, func(context.Context, *Operation) (string, error) {
			if running := g.Running(); len(running) != 1 || running[0].Tracked() {
				t.Errorf("running %v", running)
			}
			return "", nil
		})
		return err
	})
	defer Await(t.Context(), "nothing that anybody lists", 0)()
}

var errPlain = errors.New("plain")

// Whoever joins can tell the operation what it asks for more.
func TestJoinHearsWhatIsShared(t *testing.T) {
	g := NewGroup()
	began, release := make(chan struct{}), make(chan struct{})
	joined := make(chan any, 1)
	do := func(shared any) error {
		_, err := g.Do(t.Context(), Request{Key: "k", Limit: time.Minute, Shared: shared, Join: func(of any) { joined <- of }}, func(context.Context, *Operation) (string, error) {
			close(began)
			<-release
			return "", nil
		})
		return err
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = do("first") })
	<-began
	wg.Go(func() { _ = do("second") })
	if of := <-joined; of != "first" {
		t.Errorf("joined %v", of)
	}
	close(release)
	wg.Wait()
}
