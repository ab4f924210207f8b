package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/critest/node"
)

// Each lie that a list can tell is found, and what is moving is left alone.
func TestListsAreCompared(t *testing.T) {
	m := newModel()
	for name, state := range map[string]string{"w0l0": ready, "w1l0": notReady, "w2l0": gone, "w3l0": moving, "w0l0-a": running} {
		m.set(name, state)
	}
	before := m.now()
	for name, c := range map[string]struct {
		list map[string]string
		want string
	}{
		"true":             {map[string]string{"w0l0": ready, "w1l0": notReady, "w3l0": ready}, ""},
		"moving is absent": {map[string]string{"w0l0": ready, "w1l0": notReady}, ""},
		"incomplete":       {map[string]string{"w0l0": ready}, "w1l0 is SANDBOX_NOTREADY and not listed"},
		"wrong state":      {map[string]string{"w0l0": notReady, "w1l0": notReady}, "w0l0 is SANDBOX_READY and listed as SANDBOX_NOTREADY"},
		"back from death":  {map[string]string{"w0l0": ready, "w1l0": notReady, "w2l0": ready}, "w2l0 is gone and listed as SANDBOX_READY"},
		"a stranger":       {map[string]string{"w0l0": ready, "w1l0": notReady, "w9l9": ready}, "w9l9 is listed, nobody made it"},
	} {
		if got := strings.Join(differs(c.list, before, m.now(), isPod), "; "); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	m.set("w1l0", moving)
	m.set("w1l0", notReady)
	if got := differs(map[string]string{"w0l0": ready}, before, m.now(), isPod); len(got) != 0 {
		t.Errorf("what changed meanwhile was compared: %q", got)
	}
}

func TestLogsAreRead(t *testing.T) {
	const stamp = "2026-11-30T16:00:00.000000000Z stdout "
	for name, c := range map[string]struct {
		text string
		ok   bool
	}{
		"whole":        {stamp + "F 0\n" + stamp + "F 1\n", true},
		"a hole":       {stamp + "F 0\n" + stamp + "F 2\n", false},
		"twice":        {stamp + "F 0\n" + stamp + "F 0\n", false},
		"torn":         {stamp + "F 0\n" + stamp + "P 1\n" + stamp + "F 1\n", false},
		"a last part":  {stamp + "F 0\n" + stamp + "P 1\n", true},
		"no such line": {stamp + "F 0\nnonsense\n", false},
	} {
		path, next := filepath.Join(t.TempDir(), "log"), 0
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := readLog(path, false, &next); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The same seed draws the same lives, another one others.
func TestLivesFollowFromTheSeed(t *testing.T) {
	plan := func(seed uint64) (text string) {
		w := &world{Node: &node.Node{}, seed: seed}
		for number := range 20 {
			l := newLife(w, 3, number)
			text += fmt.Sprint(l.config)
			for _, b := range l.boxes {
				text += fmt.Sprint(b.config)
			}
			for _, s := range l.plan {
				text += s.name
			}
		}
		return text
	}
	if first, again := plan(1), plan(1); first != again || first == plan(2) {
		t.Error("the lives do not follow from the seed")
	}
}

// Growth is found under load and at rest; noise is not growth.
func TestGrowthIsFound(t *testing.T) {
	calm := time.Now()
	for name, c := range map[string]struct {
		load, rest float64 // KiB per minute
		wrong      int64
	}{"flat": {0, 0, 0}, "under load": {1000, 0, 1}, "at rest": {0, 3000, 1}, "slowly": {30, 30, 0}} {
		w, s := &world{Node: &node.Node{}, give: func() {}}, &samples{}
		for i := range 20 * 30 {
			at := time.Duration(i) * sampleEvery
			s.load = append(s.load, sizes{at: calm.Add(at), memory: 40_000 + c.load*at.Minutes() + float64(i%7)*100})
			if i%150 == 149 {
				s.rests = append(s.rests, sizes{at: calm.Add(at), memory: 35_000 + c.rest*at.Minutes()})
			}
		}
		s.judge(w, calm)
		if w.wrong.Load() != c.wrong {
			t.Errorf("%s: %d wrong, want %d", name, w.wrong.Load(), c.wrong)
		}
	}
	if got := median([]sizes{{fds: 3}, {fds: 1}, {fds: 2}}, func(s sizes) float64 { return s.fds }); got != 2 {
		t.Errorf("the median of 1, 2, 3 is %v", got)
	}
}
