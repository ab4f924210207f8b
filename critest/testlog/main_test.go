package main

import (
	"strings"
	"testing"
)

// stream is `go test -json` of a package with one test of each result.
const stream = `{"Action":"start","Package":"p"}
{"Action":"run","Package":"p","Test":"TestGood"}
{"Action":"output","Package":"p","Test":"TestGood","Output":"=== RUN   TestGood\n"}
{"Action":"output","Package":"p","Test":"TestGood","Output":"    a_test.go:1: chatter\n"}
{"Action":"output","Package":"p","Test":"TestGood","Output":"--- PASS: TestGood (0.00s)\n"}
{"Action":"pass","Package":"p","Test":"TestGood","Elapsed":0.5}
{"Action":"output","Package":"p","Test":"TestSkip","Output":"    a_test.go:2: needs a kernel feature\n"}
{"Action":"output","Package":"p","Test":"TestSkip","Output":"--- SKIP: TestSkip (0.00s)\n"}
{"Action":"skip","Package":"p","Test":"TestSkip"}
`

const failure = `{"Action":"output","Package":"p","Test":"TestBad","Output":"    a_test.go:3: it is broken\n"}
{"Action":"output","Package":"p","Test":"TestBad","Output":"--- FAIL: TestBad (0.00s)\n"}
{"Action":"fail","Package":"p","Test":"TestBad"}
{"Action":"output","Package":"p","Output":"FAIL\tp\t0.1s\n"}
{"Action":"fail","Package":"p"}
`

const success = `{"Action":"output","Package":"p","Output":"PASS\n"}
{"Action":"output","Package":"p","Output":"ok  \tp\t0.1s\n"}
{"Action":"pass","Package":"p"}
`

func run(t *testing.T, text string, names bool) (string, bool) {
	t.Helper()
	var out strings.Builder
	ok, err := digest(strings.NewReader(text), &out, names)
	if err != nil {
		t.Fatal(err)
	}
	return out.String(), ok
}

func TestPassedRunSaysWhatWasSkipped(t *testing.T) {
	got, ok := run(t, stream+success, false)
	if want := "ok  \tp\t0.1s\n1 tests passed, 0 failed, 1 skipped\n  skipped: p TestSkip: a_test.go:2: needs a kernel feature\n"; got != want || !ok {
		t.Errorf("ok %v, output %q, want %q", ok, got, want)
	}
	if got, _ := run(t, stream+success, true); !strings.HasPrefix(got, "--- PASS: TestGood (0.50s)\nok") {
		t.Errorf("with names: %q", got)
	}
}

func TestFailuresAreShown(t *testing.T) {
	got, ok := run(t, stream+failure, false)
	if ok || !strings.Contains(got, "a_test.go:3: it is broken\n--- FAIL: TestBad") || strings.Contains(got, "chatter") {
		t.Errorf("ok %v, output %q", ok, got)
	}
	for name, text := range map[string]string{
		"build":   `{"Action":"build-output","ImportPath":"p","Output":"a.go:1: undefined: x\n"}` + "\n" + `{"Action":"build-fail","ImportPath":"p"}` + "\n",
		"no end":  `{"Action":"output","Package":"p","Test":"TestHang","Output":"panic: undefined: x\n"}` + "\n",
		"package": `{"Action":"output","Package":"p","Output":"undefined: x\n"}` + "\n" + `{"Action":"fail","Package":"p"}` + "\n",
	} {
		if got, ok := run(t, text, false); ok || !strings.Contains(got, "undefined: x") {
			t.Errorf("%s: ok %v, output %q", name, ok, got)
		}
	}
	if got, ok := run(t, "go: no such module\n"+success, false); !ok || !strings.HasPrefix(got, "go: no such module\n") {
		t.Errorf("foreign line: ok %v, output %q", ok, got)
	}
}
