package monitor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

func TestWhereabouts(t *testing.T) {
	sleep := exec.Command("sleep", "600")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	pid := sleep.Process.Pid
	begins := fmt.Sprintf("pid %d (sleep) in state S", pid)
	for end := time.Now().Add(10 * time.Second); !strings.HasPrefix(Whereabouts(pid), begins); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%q does not begin with %q", Whereabouts(pid), begins)
		}
	}
	var pids []int
	for range 12 {
		pids = append(pids, pid)
	}
	err := left("/cg", pids, context.Canceled)
	if !errors.Is(err, context.Canceled) || strings.Count(err.Error(), begins) != 8 || !strings.Contains(err.Error(), "and 4 more") || !strings.Contains(err.Error(), "/cg") {
		t.Errorf("12 processes are told as %v", err)
	}
	if err := sleep.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = sleep.Wait() // its status is the signal
	if got := Whereabouts(pid); got != fmt.Sprintf("pid %d, which is gone", pid) {
		t.Errorf("once it is gone: %q", got)
	}
}

// What sleeps as any process does is never given up; TestB81UninterruptibleSleep
// has one that hangs in the kernel.
func TestSleepersAreNotStuck(t *testing.T) {
	s := stuck{since: time.Now().Add(-time.Hour)}
	if s.look([]int{os.Getpid()}) || !s.since.IsZero() {
		t.Error("this process counts as stuck")
	}
	if s.look(nil) || s.since.IsZero() {
		t.Error("the first look must begin the time")
	}
	s.since = s.since.Add(-stuckPatience)
	if !s.look(nil) {
		t.Error("after its time it must be told")
	}
}

// A process that nobody has waited for has ended all the same.
func TestEnded(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	start, err := StartTime(pid)
	if err != nil {
		t.Fatal(err)
	}
	if Ended(pid, start) {
		t.Error("a process that runs has ended")
	}
	if !Ended(pid, start+1) {
		t.Error("another process of the same pid counts as the one")
	}
	_ = cmd.Process.Kill()
	for limit := time.Now().Add(10 * time.Second); !Ended(pid, start); time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatal("a zombie has not ended")
		}
	}
	_ = cmd.Wait()
	if !Ended(pid, start) {
		t.Error("a process that is gone has not ended")
	}
}
