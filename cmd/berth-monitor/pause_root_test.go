package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"berth/sandbox/leakcheck"
)

// TestMain lets the test binary stand in for the monitor's pause mode.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "pause" {
		pause()
	}
	os.Exit(m.Run())
}

func TestPauseIsAGoodInit(t *testing.T) {
	leakcheck.Start(t)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		p := exec.Command("/proc/self/exe", "pause")
		p.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		pid := p.Process.Pid
		// Its handlers are there once it sleeps; a PID 1 ignores signals before.
		if !within(5*time.Second, func() bool { return caught(pid, sig) }) {
			t.Fatal("pause handles no signals")
		}
		for range 3 {
			// An orphan that ends falls to the namespace's init.
			out, err := exec.Command("nsenter", "--pid", "--target", fmt.Sprint(pid), "sh", "-c", "(sleep 0.1 &)").CombinedOutput()
			if err != nil {
				t.Fatalf("nsenter: %v: %s", err, out)
			}
		}
		if !within(5*time.Second, func() bool { return len(children(t, pid)) == 0 }) {
			t.Errorf("pause did not reap %v", children(t, pid))
		}
		at := time.Now()
		if err := p.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(); err != nil || time.Since(at) > 2*time.Second {
			t.Errorf("after %s: %v, %s", sig, err, time.Since(at))
		}
	}
}

// caught reads whether a process has a handler for a signal.
func caught(pid int, sig syscall.Signal) bool {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(data), "SigCgt:\t")
	var mask uint64
	_, _ = fmt.Sscanf(rest, "%x", &mask)
	return mask&(1<<(sig-1)) != 0
}

func children(t *testing.T, pid int) []string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(data))
}
