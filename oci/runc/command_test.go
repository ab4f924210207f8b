package runc

import (
	"context"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
	"unicode/utf8"

	"berth/oci"
)

func TestMessagesAreTakenOutOfLogs(t *testing.T) {
	for name, c := range map[string]struct{ in, want string }{
		"nothing":        {"", ""},
		"runc's text":    {`time="2026-01-01T00:00:00Z" level=error msg="exec failed: \"x\": not found"` + "\n", `exec failed: "x": not found`},
		"plain":          {"some words\n", "some words"},
		"both":           {"time=\"t\" level=warning msg=\"never mind\"\ntime=\"t\" level=error msg=short\nplain\n", "short; plain"},
		"a broken quote": {`time="t" level=error msg="half`, `"half`},
	} {
		if got := plainLog(c.in); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	log := `{"level":"warning","msg":"never mind"}
not JSON
{"level":"error","msg":"unable to start: \"x\""}
{"level":"error","msg":""}
{"level":"fatal","msg":"and that"}
`
	if got, want := errorsOf(strings.NewReader(log)), `unable to start: "x"; and that`; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := readLog("/no/such/file"); got != "" {
		t.Errorf("no file: %q", got)
	}
}

func TestComplaintsAreBounded(t *testing.T) {
	for _, s := range []string{"short", strings.Repeat("x", stderrLimit), strings.Repeat("é", stderrLimit) + "the cause"} {
		got := bounded(s)
		if len(got) > stderrLimit || !utf8.ValidString(got) || !strings.HasSuffix(s, strings.TrimPrefix(got, "…")) {
			t.Errorf("%d bytes became %d: %.20q", len(s), len(got), got)
		}
	}
}

// TestOutputIsBounded copies as exec does.
func TestOutputIsBounded(t *testing.T) {
	var kept tail
	said := io.MultiReader(strings.NewReader("the beginning"), strings.NewReader(strings.Repeat("x", 20*tailLimit)), strings.NewReader("the cause"))
	if _, err := io.Copy(&kept, said); err != nil {
		t.Fatal(err)
	}
	if n := len(kept.kept); n < tailLimit || n > 2*tailLimit || !strings.HasSuffix(kept.String(), "the cause") {
		t.Errorf("%d bytes are kept, ending in %q", n, kept.kept[max(0, n-20):])
	}
	kept = tail{}
	if _, err := io.Copy(&kept, strings.NewReader("short")); err != nil || kept.String() != "short" {
		t.Errorf("%q, %v", kept.String(), err)
	}
}

func TestSentinels(t *testing.T) {
	for text, want := range map[string]error{
		"container does not exist":                  oci.ErrNotFound,
		"exec failed: container is not running":     oci.ErrNotRunning,
		"cannot exec in a stopped container":        oci.ErrNotRunning,
		"the mount source does not exist, it seems": nil,
		`failed to write "7000": write /sys/fs/cgroup/cpuset/x/cpuset.cpus: numerical result out of range`:                                               oci.ErrLimit,
		"write to `/sys/fs/cgroup/x/cpuset.cpus`: Invalid argument":                                                                                      oci.ErrLimit,
		`runc create failed: unable to start container process: error during container init: exec: "/no/such": stat /no/such: no such file or directory`: oci.ErrProgram,
		`runc create failed: unable to start container process: error during container init: exec: "nosuch": executable file not found in $PATH`:         oci.ErrProgram,
		`exec failed: unable to start container process: exec: "/no/such": stat /no/such: no such file or directory`:                                     oci.ErrProgram,
		`runc create failed: unable to start container process: error during container init: error mounting "/x": no such file or directory`:             nil,
		`failed to write "1": write /sys/fs/cgroup/x/y: no such file or directory`:                                                                       nil,
	} {
		if got := sentinelOf(text); !errors.Is(got, want) {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

// An id is a path element and an argument.
func TestIDsAreChecked(t *testing.T) {
	for _, id := range []string{"", ".", "..", "a/b", "../x", "-f", "--root", "a\x00b"} {
		if checkID(id) == nil {
			t.Errorf("%q is taken", id)
		}
	}
	for _, id := range []string{"a", "0f3c", "a.b-c_d"} {
		if err := checkID(id); err != nil {
			t.Errorf("%q: %v", id, err)
		}
	}
}

// A command that a signal ended has said nothing: the error tells the signal.
// What a binary says of itself lasts, also that it knows no such command. That it was
// killed says nothing.
func TestAnswersOfABinaryLast(t *testing.T) {
	refused, killed := &oci.ExecError{ExitCode: 1}, &oci.ExecError{ExitCode: -1}
	for name, c := range map[string]struct {
		says []error
		asks int
	}{
		"an answer":             {[]error{nil}, 1},
		"no such command":       {[]error{refused}, 1},
		"killed, then answered": {[]error{killed, nil}, 2},
		"late, then refused":    {[]error{context.DeadlineExceeded, killed, refused}, 3},
	} {
		asks := 0
		get := lasting(func() (int, error) { asks++; return asks, c.says[asks-1] })
		for range 5 {
			if n, err := get(); n != asks || err != c.says[asks-1] {
				t.Errorf("%s: %d, %v, want %d, %v", name, n, err, asks, c.says[asks-1])
			}
		}
		if asks != c.asks {
			t.Errorf("%s: asked %d times, want %d", name, asks, c.asks)
		}
	}
}

func TestCauseOfAKilledCommand(t *testing.T) {
	for script, want := range map[string]string{"kill -9 $$": "signal: killed", "exit 3": ""} {
		var exit *exec.ExitError
		if err := exec.Command("sh", "-c", script).Run(); !errors.As(err, &exit) {
			t.Fatal(err)
		}
		got := ""
		if err := causeOf("", exit); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
		if err := causeOf("container does not exist", exit); !errors.Is(err, oci.ErrNotFound) {
			t.Errorf("%s with a complaint: %v", script, err)
		}
	}
}
