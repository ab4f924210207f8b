package image

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// The rate is that of the last seconds: a burst is forgotten, a stall shows.
func TestMeter(t *testing.T) {
	began := time.Unix(1000, 0)
	at := func(seconds float64) time.Time { return began.Add(time.Duration(seconds * float64(time.Second))) }
	m := meter{began: began}
	m.add(at(0.05), 1000)
	for _, step := range []struct {
		at   float64
		add  int64
		want float64
	}{
		{0.05, 0, 0}, // too early to tell
		{0.5, 0, 2000},
		{1, 1000, 2000},
		{4, 0, 500},
		{5.5, 0, 2000 / 5.5},
		{6, 0, 200},
		{7.5, 11000, 2000},
		{20, 0, 0},
		{20.5, 550, 100},
		{1e6, 0, 0},
	} {
		m.add(at(step.at), step.add)
		if got := m.rate(at(step.at)); got != step.want {
			t.Errorf("at %v s: %v bytes/s, want %v", step.at, got, step.want)
		}
	}
}

func TestProgressOfLayers(t *testing.T) {
	var b board
	var last Progress
	b.ended = func(p Progress) { last = p }
	tr := b.begin("pull", "registry.example/app:1")
	now := func() Progress { return tr.snapshot(time.Now()) }
	if p := now(); p.Stage != StageResolving || len(p.Layers) != 0 {
		t.Errorf("at the beginning: %+v", p)
	}
	if _, ok := func() (time.Duration, bool) { p := now(); return p.Left() }(); ok {
		t.Error("a pull that resolves knows how long it takes")
	}
	blob := func(i int) digest.Digest { return digest.FromString(fmt.Sprint(i)) }
	tr.plan([]ispec.Descriptor{{Digest: blob(0), Size: 100}, {Digest: blob(1), Size: 50}, {Digest: blob(0), Size: 100}, {Digest: blob(2), Size: 10}})
	tr.layer(blob(1), StageReused)
	tr.layer(blob(0), StageFetching)
	tr.resume(blob(0), 40)
	tr.got(blob(0), 30)
	tr.got(blob(9), 30) // none of the image's
	p := now()
	if len(p.Layers) != 3 || p.Bytes != 70 || p.Total != 110 || p.Stage != StageFetching {
		t.Fatalf("under way: %+v", p)
	}
	if l := p.Layers[0]; l.Stage != StageFetching || l.Bytes != 70 || l.Resumed != 40 || l.Total != 100 {
		t.Errorf("the layer under way: %+v", l)
	}
	if p.Layers[1].Stage != StageReused || p.Layers[2].Stage != StageWaiting {
		t.Errorf("the others: %+v", p.Layers[1:])
	}
	tr.got(blob(0), 30)
	if l := now().Layers[0]; l.Stage != StageUnpacking {
		t.Errorf("with its last byte: %+v", l)
	}
	tr.layer(blob(0), StageFetching) // a second try from the start
	if l := now().Layers[0]; l.Bytes != 0 || l.Resumed != 0 {
		t.Errorf("tried again: %+v", l)
	}
	tr.end("", &Error{Op: "pull image", kind: ErrNoSpace})
	if last.Stage != StageFailed || last.Reason() != "no_space" || last.Ended.IsZero() || len(last.Layers) != 3 {
		t.Errorf("the last state: %+v", last)
	}
	if n := len(b.current(last.Ended.Add(lingering))); n != 1 {
		t.Errorf("%d pulls are shown right after the end", n)
	}
	if n := len(b.current(last.Ended.Add(lingering + 1))); n != 0 {
		t.Errorf("%d pulls are shown long after the end", n)
	}
}

func TestLeft(t *testing.T) {
	for _, c := range []struct {
		p    Progress
		want time.Duration
		ok   bool
	}{
		{Progress{Bytes: 50, Total: 150, Rate: 10}, 10 * time.Second, true},
		{Progress{Bytes: 50, Total: 150}, 0, false},
		{Progress{Rate: 10}, 0, false},
		{Progress{Total: 1 << 60, Rate: 0.001}, 0, false},
	} {
		if got, ok := c.p.Left(); got != c.want || ok != c.ok {
			t.Errorf("%+v: %v, %v", c.p, got, ok)
		}
	}
}

func TestReasons(t *testing.T) {
	for err, want := range map[error]string{
		nil:              "",
		context.Canceled: "canceled",
		fmt.Errorf("x: %w", ErrRegistryUnavailable): "registry_unavailable",
		fmt.Errorf("x: %w", ErrSignature):           "signature",
		errors.New("x"):                             "other",
	} {
		if got := (&Progress{Err: err}).Reason(); got != want {
			t.Errorf("%v: %q, want %q", err, got, want)
		}
	}
}
