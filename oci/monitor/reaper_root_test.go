package monitor

import (
	"context"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
)

func running(t *testing.T) *reaper {
	t.Helper()
	leakcheck.Start(t)
	ctx, stop := context.WithCancel(context.Background())
	r, err := startReaper(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		r.wait()
		_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
	})
	return r
}

// orphan starts a process in a session of its own whose parent ends at once.
func orphan(t *testing.T, script string) process {
	t.Helper()
	out, err := exec.Command("sh", "-c", "setsid sh -c '"+script+"' >/dev/null 2>&1 & echo $!").Output()
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	start, err := StartTime(pid)
	if err != nil {
		t.Fatal(err)
	}
	return process{pid, start}
}

func wait(limit time.Duration, ok func() bool) bool {
	for end := time.Now().Add(limit); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

func TestOrphansAreReapedAndRemembered(t *testing.T) {
	r := running(t)
	p := orphan(t, "sleep 0.3; exit 42")
	if !wait(20*time.Second, func() bool { _, ok := r.status(p.pid, p.startTime); return ok }) {
		t.Fatal("the orphan was not reaped")
	}
	if s, _ := r.status(p.pid, p.startTime); Code(s) != 42 {
		t.Errorf("its code is %d, want 42", Code(s))
	}
	if _, ok := r.status(p.pid, p.startTime+1); ok {
		t.Error("another process of that pid has a status")
	}
}

// What os/exec or an exec waits for stays theirs, however late they come.
func TestReaperStealsNoChild(t *testing.T) {
	r := running(t)
	late := exec.Command("sh", "-c", "exit 7")
	if err := late.Start(); err != nil {
		t.Fatal(err)
	}
	c := &Client{reap: r}
	p := orphan(t, "sleep 0.3; exit 8")
	c.Track(p.pid)
	other := orphan(t, "sleep 0.3") // it shows that the reaper has looked
	if !wait(20*time.Second, func() bool { _, ok := r.status(other.pid, other.startTime); return ok }) {
		t.Fatal("the reaper does not look")
	}
	time.Sleep(2500 * time.Millisecond)
	if err := late.Wait(); late.ProcessState == nil || late.ProcessState.ExitCode() != 7 {
		t.Errorf("wait: %v", err)
	}
	var status unix.WaitStatus
	if pid, err := unix.Wait4(p.pid, &status, 0, nil); pid != p.pid || Code(status) != 8 {
		t.Errorf("wait for a tracked process: %d, %v, code %d", pid, err, Code(status))
	}
	c.Untrack(p.pid)
}
