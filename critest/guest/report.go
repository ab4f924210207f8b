package main

import (
	"bytes"
	"fmt"
	"io"
	"regexp"
	"strings"
	"time"
)

// outcome is what one package's tests came to.
type outcome struct {
	folder                  string
	passed, failed, skipped int // counts of tests, subtests apart
	status                  string
	took                    time.Duration
}

// good: the tests ran, at least one passed and none failed.
func (o outcome) good() bool { return o.status == "0" && o.failed == 0 && o.passed > 0 }

// why says in words what is wrong with an outcome.
func (o outcome) why() string {
	switch {
	case o.status == "":
		return "did not finish"
	case o.failed > 0:
		return fmt.Sprintf("%d failed", o.failed)
	case o.status != "0":
		return "ended with status " + o.status
	default:
		return "nothing passed"
	}
}

// report reads the output of the script as it comes and prints what matters: what
// failing tests said, and why tests were skipped. It is an io.Writer for one goroutine.
type report struct {
	out      io.Writer
	partial  []byte
	said     []string // by the test that runs, until its end and its subtests' are known
	verbose  bool     // print everything instead
	over     bool     // what follows belongs to the next test, but for results of subtests
	now      *outcome
	begin    time.Time
	outcomes []outcome
}

var testEnd = regexp.MustCompile(`^( *)--- (PASS|FAIL|SKIP): `)

func (r *report) Write(p []byte) (int, error) {
	r.partial = append(r.partial, p...)
	for {
		line, rest, ok := bytes.Cut(r.partial, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		r.line(strings.TrimRight(string(line), "\r"))
		r.partial = append([]byte(nil), rest...)
	}
}

func (r *report) line(text string) {
	if folder, ok := strings.CutPrefix(text, beginMark); ok {
		fmt.Fprintf(r.out, "== %s\n", folder)
		r.now, r.begin = &outcome{folder: folder}, time.Now()
		return
	}
	if end, ok := strings.CutPrefix(text, endMark); ok && r.now != nil {
		r.now.status, _, _ = strings.Cut(end, " ")
		r.close()
		return
	}
	if r.verbose || r.now == nil {
		fmt.Fprintln(r.out, text)
	}
	if r.now == nil {
		return
	}
	match := testEnd.FindStringSubmatch(text)
	switch {
	case match != nil:
		r.result(text, match[1] != "", match[2])
	case strings.HasPrefix(text, "=== RUN") && r.over:
		r.said, r.over = nil, false
	case text != "" && text != "PASS" && !strings.HasPrefix(text, "=== "):
		r.said = append(r.said, text)
	}
}

// result counts the end of a test. The results of subtests follow that of their
// test, but what they said came before it.
func (r *report) result(text string, subtest bool, verdict string) {
	if !subtest {
		r.over = true
		switch verdict {
		case "PASS":
			r.now.passed++
		case "FAIL":
			r.now.failed++
		default:
			r.now.skipped++
		}
	}
	if verdict != "PASS" {
		r.flush(text)
	}
}

// flush prints what was said and ends with text.
func (r *report) flush(text string) {
	r.print(append(r.said, text)...)
	r.said = nil
}

func (r *report) print(lines ...string) {
	if r.verbose {
		return // done when they came
	}
	for _, line := range lines {
		fmt.Fprintln(r.out, "   "+line)
	}
}

// close ends the package that runs, if any.
func (r *report) close() {
	if r.now == nil {
		return
	}
	r.now.took = time.Since(r.begin)
	if !r.now.good() { // a panic or a crash, whose words no test's end follows
		r.print(r.said...)
	}
	r.said, r.over = nil, false
	r.outcomes = append(r.outcomes, *r.now)
	r.now = nil
}

// summary prints a line per package and returns whether all of them are good.
func (r *report) summary(folders []string) bool {
	r.close()
	all := true
	fmt.Fprintln(r.out, "\nin the guest:                     passed failed skipped  seconds")
	for _, folder := range folders {
		o := outcome{folder: folder}
		for _, have := range r.outcomes {
			if have.folder == folder {
				o = have
			}
		}
		verdict := ""
		if !o.good() {
			all, verdict = false, "   "+o.why()
		}
		fmt.Fprintf(r.out, "  %-32s %6d %6d %7d %8.0f%s\n", o.folder, o.passed, o.failed, o.skipped, o.took.Seconds(), verdict)
	}
	return all
}
