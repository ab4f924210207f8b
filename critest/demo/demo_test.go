package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/critest/node"
)

func TestMain(m *testing.M) {
	if err := node.Isolate(); errors.Is(err, node.ErrNotRoot) {
		fmt.Println("skipped: the demo starts containers, which", err)
		os.Exit(0)
	} else if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// watched is an output that calls back when a line shows a text.
type watched struct {
	mu   sync.Mutex
	text strings.Builder
	when string
	then func()
}

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text.Write(p)
	if w.then != nil && strings.Contains(w.text.String(), w.when) {
		w.then()
		w.then = nil
	}
	return len(p), nil
}

// noNodes checks that no temporary folder of a node is left.
func noNodes(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("left in %s: %v (%v)", dir, left, err)
	}
}

func TestTheWholeDemo(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	begin := time.Now()
	out := &watched{}
	if err := run(context.Background(), out); err != nil {
		t.Fatalf("%v\n%s", err, out.text.String())
	}
	if took := time.Since(begin); took > time.Minute {
		t.Errorf("the demo took %v, want less than a minute", took)
	}
	for _, want := range []string{"network setup", "hello from httpd in pod hello", "kill -9", "left behind", "All of it was as it should be"} {
		if !strings.Contains(out.text.String(), want) {
			t.Errorf("the demo does not say %q:\n%s", want, out.text.String())
		}
	}
	noNodes(t, dir)
}

// An interrupted demo says so and leaves as little behind as a whole one.
func TestInterruptedDemo(t *testing.T) {
	for _, when := range []string{"crictl runp", "crictl exec", "kill -9 the daemon, ask"} {
		dir := t.TempDir()
		t.Setenv("TMPDIR", dir)
		ctx, cancel := context.WithCancel(context.Background())
		out := &watched{when: when, then: cancel}
		if err := run(ctx, out); !errors.Is(err, context.Canceled) {
			t.Errorf("interrupted at %q: %v, want the cancellation", when, err)
		} else if errors.Is(err, node.ErrLeak) {
			t.Errorf("interrupted at %q: %v", when, err)
		}
		cancel()
		noNodes(t, dir)
	}
}
