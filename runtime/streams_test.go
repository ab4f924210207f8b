package runtime

import (
	"context"
	"errors"
	"testing"

	"berth/runtime/streaming"
)

func TestCheckWant(t *testing.T) {
	for name, c := range map[string]struct {
		want streaming.Want
		ok   bool
	}{
		"stdin alone":              {streaming.Want{Stdin: true}, true},
		"all three":                {streaming.Want{Stdin: true, Stdout: true, Stderr: true}, true},
		"a terminal":               {streaming.Want{Stdin: true, Stdout: true, Terminal: true}, true},
		"nothing":                  {streaming.Want{}, false},
		"a terminal of nothing":    {streaming.Want{Terminal: true}, false},
		"a terminal with a stderr": {streaming.Want{Stdout: true, Stderr: true, Terminal: true}, false},
	} {
		if err := checkWant(c.want); (err == nil) != c.ok || err != nil && !errors.Is(err, errInvalid) {
			t.Errorf("%s: %v, want accepted %v", name, err, c.ok)
		}
	}
}

// A pod's life ends what was forwarded to it, and nothing of another pod's.
func TestPodLife(t *testing.T) {
	p := podLife{pods: map[string]life{}}
	a, again, b := p.of("a"), p.of("a"), p.of("b")
	p.end("a")
	p.end("a")
	p.end("never seen")
	if !errors.Is(context.Cause(a), errPodStopped) || !errors.Is(context.Cause(again), errPodStopped) || b.Err() != nil {
		t.Errorf("after the end of a: %v, %v, %v", context.Cause(a), context.Cause(again), b.Err())
	}
	if len(p.pods) != 1 {
		t.Errorf("%d lives are kept, want b's alone", len(p.pods))
	}
	p.end("b")
}
