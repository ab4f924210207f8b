package runc

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A container that floods its log cannot keep others' lines back.
func TestFloodStarvesNobody(t *testing.T) {
	n := newNode(t)
	for range 3 {
		b := n.box("exec yes 0123456789012345678901234567890123456789012345678901234567890123456789")
		b.io.LogPath = "" // no disk is this big
		b.run()
	}
	loud := n.box("yes | head -c 100000000")
	loud.run()
	quiet := n.box("for i in 1 2 3 4 5 6 7 8 9 10; do date +%s.%N; sleep 0.1; done").run()
	quiet.exit()
	data, err := os.ReadFile(quiet.log)
	if err != nil {
		t.Fatal(err)
	}
	lines := 0
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		logged, err := time.Parse(time.RFC3339Nano, f[0])
		said, serr := strconv.ParseFloat(f[3], 64)
		if err != nil || serr != nil {
			t.Fatalf("line %q", line)
		}
		if late := float64(logged.UnixNano())/1e9 - said; late > slow(time.Second).Seconds() {
			t.Errorf("a line was logged %.3f s late", late)
		}
		lines++
	}
	if lines != 10 {
		t.Errorf("%d lines, want 10", lines)
	}
	_ = os.Truncate(loud.log, 0)
}

// An idle container costs the monitor little: no process, no buffer.
func TestIdleContainersAreCheap(t *testing.T) {
	n := newNode(t)
	const count = 25
	start := func(count int) int {
		for range count {
			n.box("echo started; exec sleep 1000").run()
		}
		time.Sleep(3 * time.Second) // it tidies up when requests have ceased
		return memory(t, n.client.MonitorPID())
	}
	before := start(2) // the code has been used once
	each := (start(count) - before) / count
	t.Logf("monitor %d KiB, %d KiB for each of %d containers", before, each, count)
	if each > 40 {
		t.Errorf("a container costs the monitor %d KiB", each)
	}
	if before > 12<<10 {
		t.Errorf("the monitor itself has %d KiB", before)
	}
}

// memory is what a process has of its own, in KiB. Its proportional share of the
// binary would change with every other monitor on the machine.
func memory(t *testing.T, pid int) (kib int) {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), "\nPss_Anon:")
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		t.Fatal(err)
	}
	return kib
}

// When Start returns, the container's program runs, and none of the binary's own
// code, which a signal would end in a way of its own.
func TestStartReturnsWhenTheProgramRuns(t *testing.T) {
	n := newNode(t)
	for range 15 {
		b := n.box("exec sleep 1000")
		if err := b.create(); err != nil {
			t.Fatal(err)
		}
		exe := fmt.Sprintf("/proc/%d/exe", b.process.PID)
		before, err := os.Readlink(exe)
		if err != nil {
			t.Fatal(err)
		}
		if err := n.runtime.Start(context.Background(), b.id); err != nil {
			t.Fatal(err)
		}
		if now, err := os.Readlink(exe); err != nil || now == before {
			t.Errorf("after Start the init runs %s (%v)", now, err)
		}
		b.remove()
	}
}
