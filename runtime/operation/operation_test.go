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
