// Command testlog reads `go test -json` and prints what a reader wants of it:
// go's own line per package, everything that a failing test said, and at the end
// which tests were skipped and why. It exits 1 when anything failed.
//
// Usage: go test -json ./... | testlog [-names]
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
)

func main() {
	names := flag.Bool("names", false, "print passed tests, too (not their subtests)")
	flag.Parse()
	ok, err := digest(os.Stdin, os.Stdout, *names)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testlog:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// event is one line of go's stream.
type event struct {
	Action     string
	Package    string
	ImportPath string // of build output
	Test       string
	Output     string
	Elapsed    float64
}

// log is what is known while the stream runs.
type log struct {
	out     io.Writer
	names   bool
	said    map[string][]string // package and test: its output so far
	skipped []string
	counts  map[string]int // results of tests
	failed  bool
}

// frame is go's own chatter between a test's lines.
var frame = regexp.MustCompile(`^\s*(=== |--- )`)

// digest prints the stream; ok is false when a package or its build failed.
func digest(in io.Reader, out io.Writer, names bool) (ok bool, err error) {
	l := &log{out: out, names: names, said: map[string][]string{}, counts: map[string]int{}}
	reader := bufio.NewReader(in)
	for {
		line, err := reader.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				fmt.Fprintf(out, "%s", line) // not of the stream: something that go itself has to say
			} else {
				l.take(e)
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return false, fmt.Errorf("read the stream: %w", err)
		}
	}
	l.end()
	return !l.failed, nil
}

// take handles one event.
func (l *log) take(e event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "build-output":
		fmt.Fprint(l.out, e.Output)
	case "build-fail":
		l.failed = true
	case "output":
		if e.Test == "" {
			l.packageLine(e)
			return
		}
		l.said[key] = append(l.said[key], e.Output)
	case "pass", "skip", "fail":
		l.result(e, key)
	}
}

// packageLine prints what a package says outside of its tests, without PASS,
// which its ok repeats.
func (l *log) packageLine(e event) {
	if e.Output == "PASS\n" || strings.HasPrefix(e.Output, "testing: warning: no tests to run") {
		return
	}
	fmt.Fprint(l.out, e.Output)
}

// result handles the end of a test or package.
func (l *log) result(e event, key string) {
	if e.Test == "" {
		l.failed = l.failed || e.Action == "fail"
		return
	}
	l.counts[e.Action]++
	switch {
	case e.Action == "fail":
		for _, line := range l.said[key] {
			if !strings.HasPrefix(line, "=== ") {
				fmt.Fprint(l.out, line)
			}
		}
	case e.Action == "skip":
		reason := ""
		for _, line := range l.said[key] {
			if !frame.MatchString(line) {
				reason += strings.TrimSpace(line) + " "
			}
		}
		l.skipped = append(l.skipped, fmt.Sprintf("%s %s: %s", e.Package, e.Test, strings.TrimSpace(reason)))
	case l.names && !strings.Contains(e.Test, "/"):
		fmt.Fprintf(l.out, "--- PASS: %s (%.2fs)\n", e.Test, e.Elapsed)
	}
	delete(l.said, key)
}

// end prints the sums, what was skipped, and what never ended.
func (l *log) end() {
	fmt.Fprintf(l.out, "%d tests passed, %d failed, %d skipped\n", l.counts["pass"], l.counts["fail"], l.counts["skip"])
	for _, s := range l.skipped {
		fmt.Fprintln(l.out, "  skipped:", s)
	}
	for key, lines := range l.said {
		l.failed = true
		fmt.Fprintf(l.out, "did not end: %s\n%s", key, strings.Join(lines, ""))
	}
}
