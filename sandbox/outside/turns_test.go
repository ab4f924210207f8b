package outside

import (
	"sync"
	"testing"
	"time"

	"berth/sandbox/leakcheck"
)

// running has somebody look at a path, or several one after the other without a gap.
func running(l *Looker, op, path string, takes ...time.Duration) {
	other := &look{op: op, since: time.Now(), over: make(chan struct{}), answered: true}
	l.mu.Lock()
	l.looks[path] = other
	l.mu.Unlock()
	time.AfterFunc(takes[0], func() {
		if len(takes) > 1 {
			running(l, op, path, takes[1:]...)
		} else {
			l.mu.Lock()
			delete(l.looks, path)
			l.mu.Unlock()
		}
		close(other.over)
	})
}

// Who only asks whether a path answers needs no look of his own when one that was
// running has ended.
func TestAnAnswerIsForAllWhoAskMeanwhile(t *testing.T) {
	l := New(Options{Command: []string{"/does/not/exist"}, Limit: leakcheck.Patience(10 * time.Second)})
	defer l.Close()
	running(l, "answer", "/here", 200*time.Millisecond)
	var all sync.WaitGroup
	for range 500 {
		all.Go(func() {
			if err := l.Answer(t.Context(), "/here"); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	running(l, "find", "/here", 10*time.Millisecond) // does not show that it can be read
	if err := l.Answer(t.Context(), "/here"); err == nil {
		t.Error("a look of another kind was taken for an answer")
	}
}

// A path that answers others one after the other is not said to be silent.
func TestTurnsAreNotSilence(t *testing.T) {
	limit := leakcheck.Patience(2 * time.Second)
	l := looker(t, limit)
	dir := t.TempDir()
	takes := limit * 3 / 4
	running(l, "find", dir, takes, takes)
	begun := time.Now()
	if _, err := l.For(t.Context()).Find(dir); err != nil {
		t.Errorf("after %s: %v", time.Since(begun), err)
	}
}
