package main

import (
	"io"
	"strings"
	"testing"
)

// read gives the report the text in small pieces and returns what it printed.
func read(text string, folders ...string) (string, bool, *report) {
	var out strings.Builder
	r := &report{out: &out}
	for len(text) > 0 {
		n := min(7, len(text))
		_, _ = io.WriteString(r, text[:n]) // never fails
		text = text[n:]
	}
	good := r.summary(folders)
	return out.String(), good, r
}

const mixed = beginMark + `a
=== RUN   TestGood
    a_test.go:1: chatter
--- PASS: TestGood (0.01s)
=== RUN   TestParent
=== RUN   TestParent/odd
    a_test.go:2: no such kernel
--- PASS: TestParent (0.01s)
    --- PASS: TestParent/even (0.00s)
    --- SKIP: TestParent/odd (0.00s)
=== RUN   TestBad
    a_test.go:3: broken
--- FAIL: TestBad (0.01s)
    --- PASS: TestBad/one (0.00s)
    --- FAIL: TestBad/two (0.00s)
=== RUN   TestLeft
    a_test.go:4: needs a thing
--- SKIP: TestLeft (0.00s)
FAIL

` + endMark + "1 a\n"

func TestReportTellsFailuresAndReasons(t *testing.T) {
	text, good, r := read(mixed, "a")
	if good {
		t.Error("a package with a failure counts as good")
	}
	if o := r.outcomes[0]; o.passed != 2 || o.failed != 1 || o.skipped != 1 {
		t.Errorf("counted %+v", o)
	}
	for _, want := range []string{"broken", "--- FAIL: TestBad (", "TestBad/two", "no such kernel", "TestParent/odd", "needs a thing", "1 failed"} {
		if !strings.Contains(text, want) {
			t.Errorf("the report lacks %q:\n%s", want, text)
		}
	}
	for _, noise := range []string{"chatter", "=== RUN", "TestBad/one", "TestParent/even"} {
		if strings.Contains(text, noise) {
			t.Errorf("the report has %q:\n%s", noise, text)
		}
	}
}

func TestReportVerdicts(t *testing.T) {
	pass := "--- PASS: TestA (0.00s)\n"
	for name, c := range map[string]struct {
		text, want string
		good       bool
	}{
		"passed":        {beginMark + "a\n" + pass + "PASS\n\n" + endMark + "0 a\n", "1      0       0", true},
		"crashed":       {beginMark + "a\n" + pass + "panic: oh\n" + endMark + "2 a\n", "ended with status 2", false},
		"cut":           {beginMark + "a\n" + pass, "did not finish", false},
		"never started": {"", "did not finish", false},
		"ran nothing":   {beginMark + "a\ntesting: warning: no tests to run\nPASS\n\n" + endMark + "0 a\n", "nothing passed", false},
		"only skipped":  {beginMark + "a\n--- SKIP: TestA (0.00s)\n" + endMark + "0 a\n", "nothing passed", false},
	} {
		text, good, _ := read(c.text, "a")
		if good != c.good || !strings.Contains(text, c.want) {
			t.Errorf("%s: good %v, want %v; no %q in:\n%s", name, good, c.good, c.want, text)
		}
	}
	if text, _, _ := read(beginMark+"a\n"+pass+"panic: oh\n"+endMark+"2 a\n", "a"); !strings.Contains(text, "panic: oh") {
		t.Errorf("the panic is not in the report:\n%s", text)
	}
}
