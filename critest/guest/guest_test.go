package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestRootTestsAreChosen(t *testing.T) {
	dir := t.TempDir()
	if _, err := rootTests(dir); !errors.Is(err, errNoTests) {
		t.Errorf("an empty folder: %v", err)
	}
	write(t, dir+"/a_test.go", "package a\nfunc TestMain(m *testing.M) {}\nfunc TestUnit(t *testing.T) {}\nfunc helper() {}\n")
	if names, err := rootTests(dir); err != nil || !slices.Equal(names, []string{"TestUnit"}) {
		t.Errorf("without root tests: %q, %v", names, err)
	}
	write(t, dir+"/b_root_test.go", "package a\nfunc TestReal(t *testing.T) {}\nfunc FuzzReal(f *testing.F) {}\n")
	if names, err := rootTests(dir); err != nil || !slices.Equal(names, []string{"TestReal", "FuzzReal"}) {
		t.Errorf("with root tests: %q, %v", names, err)
	}
}

func TestCompileSaysWhatIsWrong(t *testing.T) {
	top := t.TempDir()
	write(t, top+"/go.mod", "module x\n")
	if err := os.Mkdir(top+"/p", 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, top+"/p/a_test.go", "package p\nfunc TestBroken(t *testing.T) {}\n")
	if _, err := compile(t.Context(), top, "./p/", t.TempDir(), ""); err == nil || !strings.Contains(err.Error(), "compile the tests of p") || !strings.Contains(err.Error(), "undefined: testing") {
		t.Errorf("compile: %v", err)
	}
}

// The script is run by the bash of this machine, with a stand-in for the tests.
func TestScriptGivesEveryStatus(t *testing.T) {
	top := t.TempDir()
	for _, dir := range []string{"good", "it's bad"} {
		if err := os.Mkdir(filepath.Join(top, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	program := filepath.Join(top, "tests")
	if err := os.WriteFile(program, []byte("#!/bin/sh\necho \"--- PASS: $(basename \"$PWD\") $BERTH_GUEST ${BERTH_TEST_SLOW}x $4 $5\"\ncase $PWD in *bad) exit 3;; esac\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("VM_SLOW", "")
	if n, err := strconv.Atoi(slowness()); err != nil || n < 6 || n > 18 {
		t.Errorf("by itself the factor is %d, %v; want 6 to 18", n, err)
	}
	t.Setenv("VM_SLOW", "6")
	text := script(top, []suite{{"it's bad", program, "^(A|B)$"}, {"good", program, "C"}})
	out, err := exec.Command("bash", "-c", text).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	_, good, r := read(string(out), "it's bad", "good")
	if good || len(r.outcomes) != 2 || r.outcomes[0].status != "3" || !r.outcomes[1].good() {
		t.Errorf("outcomes %+v of %s", r.outcomes, out)
	}
	if !strings.Contains(string(out), "--- PASS: good 1 6x -test.run C") {
		t.Errorf("the tests ran otherwise: %s", out)
	}
}

func TestCopyKeepsDataAndHoles(t *testing.T) {
	dir := t.TempDir()
	from, to := dir+"/from", dir+"/to"
	file, err := os.Create(from)
	if err != nil {
		t.Fatal(err)
	}
	size := int64(64 << 20)
	data := bytes.Repeat([]byte("x"), 10000)
	for _, at := range []int64{0, 20<<20 + 5, size - 10000} {
		if _, err := file.WriteAt(data, at); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(file.Truncate(size+100), file.Close(), copyFile(to, from)); err != nil {
		t.Fatal(err)
	}
	a, errA := os.ReadFile(from)
	b, errB := os.ReadFile(to)
	if errA != nil || errB != nil || !bytes.Equal(a, b) {
		t.Errorf("the copy has %d bytes, the original %d, or they differ (%v, %v)", len(b), len(a), errA, errB)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(to, &st); err != nil || st.Blocks*512 > size/4 {
		t.Errorf("the copy takes %d bytes on disk (%v)", st.Blocks*512, err)
	}
}

func TestStampFollowsScriptsAndRelease(t *testing.T) {
	a, errA := stamp("bookworm")
	b, errB := stamp("trixie")
	again, errC := stamp("bookworm")
	if err := errors.Join(errA, errB, errC); err != nil || a == b || a != again || len(a) != 16 {
		t.Errorf("stamps %q, %q, %q, %v", a, b, again, err)
	}
}

// monitorOf returns a qmp whose other end answers with these lines, after greeting.
func monitorOf(t *testing.T, answers ...string) (*qmp, <-chan string) {
	t.Helper()
	ours, theirs := net.Pipe()
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	requests := make(chan string, 10)
	go func() {
		_, _ = theirs.Write([]byte(`{"QMP": {"version": {}}}` + "\n"))
		in := json.NewDecoder(theirs)
		for _, answer := range append([]string{`{"return": {}}`}, answers...) {
			var request json.RawMessage
			if in.Decode(&request) != nil {
				return
			}
			requests <- string(request)
			_, _ = theirs.Write([]byte(answer + "\n"))
		}
	}()
	q, err := newQMP(ours)
	if err != nil {
		t.Fatal(err)
	}
	<-requests
	return q, requests
}

func TestMonitorPassesOverEvents(t *testing.T) {
	q, requests := monitorOf(t, `{"timestamp": {}, "event": "RESUME"}`+"\n"+`{"return": {"status": "running"}}`, `{"error": {"class": "GenericError", "desc": "no such bus"}}`)
	var state struct{ Status string }
	if err := q.do("query-status", nil, &state); err != nil || state.Status != "running" {
		t.Errorf("%q, %v", state.Status, err)
	}
	if got := <-requests; got != `{"execute":"query-status"}` {
		t.Errorf("sent %s", got)
	}
	if err := q.do("device_add", map[string]any{"driver": "x"}, nil); !errors.Is(err, errMonitor) || !strings.Contains(err.Error(), "device_add: no such bus") {
		t.Errorf("a refusal gives %v", err)
	}
	if got := <-requests; got != `{"arguments":{"driver":"x"},"execute":"device_add"}` {
		t.Errorf("sent %s", got)
	}
}

func TestTransferFails(t *testing.T) {
	q, _ := monitorOf(t, `{"return": {}}`, `{"return": {}}`, `{"return": {"status": "active"}}`, `{"return": {"status": "failed", "error-desc": "disk full"}}`)
	if err := q.transfer("migrate", "cat >x"); !errors.Is(err, errMonitor) || !strings.Contains(err.Error(), "migrate failed: disk full") {
		t.Errorf("transfer: %v", err)
	}
}

func TestMountsBeginTheScript(t *testing.T) {
	text := mounts([]string{"/a b", "/c"}, time.Unix(5, 0))
	for _, want := range []string{"date -s @5", "mount -t virtiofs -o ro folder0 '/a b'", "folder1 '/c'", "exit 125"} {
		if !strings.Contains(text, want) {
			t.Errorf("the script lacks %q:\n%s", want, text)
		}
	}
	if out, err := exec.Command("bash", "-n", "-c", text).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestImageScriptsAreScripts(t *testing.T) {
	for _, name := range []string{"build.sh", "agent", "init"} {
		if out, err := exec.Command("bash", "-n", filepath.Join("image", name)).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
}
