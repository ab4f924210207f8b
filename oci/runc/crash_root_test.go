package runc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci"
	"berth/oci/monitor"
)

// killMonitor kills the monitor with SIGKILL and returns when it is gone, and
// with its pid.
func (n *node) killMonitor() int {
	n.t.Helper()
	pid := n.client.MonitorPID()
	if pid == 0 {
		n.t.Fatal("no monitor to kill")
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
	n.eventually("the monitor is dead", func() bool { return !alive(pid) })
	return pid
}

// replaceMonitor kills the monitor and waits for the next one.
func (n *node) replaceMonitor() {
	n.t.Helper()
	old := n.killMonitor()
	n.eventually("a new monitor", func() bool { pid := n.client.MonitorPID(); return pid != 0 && pid != old })
}

// restart is a daemon that dies and comes back: its client goes, with all that
// was parked, and the next one restores the boxes.
func (n *node) restart(away time.Duration, boxes ...*box) map[string]oci.State {
	n.t.Helper()
	_ = n.client.Close()
	time.Sleep(away)
	n.open()
	return n.restore(boxes...)
}

func (n *node) restore(boxes ...*box) map[string]oci.State {
	n.t.Helper()
	states := map[string]oci.State{}
	for _, b := range boxes {
		st, err := n.runtime.Restore(context.Background(), oci.Handle{ID: b.id, Bundle: b.bundle, Process: b.process})
		if err != nil {
			n.t.Fatal(err)
		}
		states[b.id] = st
	}
	return states
}

// flood writes numbered lines without a pause, some longer than a piece, and
// ends with 42.
const flood = `awk 'BEGIN { for (i = 0; i < 400000; i++) { print "line " i; if (i % 1000 == 0) printf "%20000d\n", i } }'; exit 42`

func checkFlood(t *testing.T, text string) {
	t.Helper()
	i, padded := 0, 0
	for line := range strings.Lines(text) {
		if len(line) == 20001 {
			if strings.TrimSpace(line) != fmt.Sprint(i-1) {
				t.Fatalf("padded line after %d is %q", i-1, strings.TrimSpace(line))
			}
			padded++
			continue
		}
		if line != fmt.Sprintf("line %d\n", i) {
			t.Fatalf("line %d is %.100q", i, line)
		}
		i++
	}
	if i != 400000 || padded != 400 {
		t.Errorf("%d lines and %d padded ones", i, padded)
	}
}

func TestKilledMonitorLosesNoLine(t *testing.T) {
	n := newNode(t)
	b := n.box(flood).run()
	for range 8 {
		time.Sleep(30 * time.Millisecond)
		n.replaceMonitor()
	}
	if x := b.exit(); x.Code != 42 || x.Unknown != "" {
		t.Errorf("exit = %+v", x)
	}
	checkFlood(t, b.output("stdout"))
}

// The container outlives both, and so does what it has written: its pipe is
// found again in it. It stands still in the instant of the kill, for what a monitor has
// read and not yet logged is lost with both.
func TestBothKilledLosesNoLineOfAPipe(t *testing.T) {
	n := newNode(t)
	b := n.box("i=0; while [ $i -lt 300 ]; do echo line $i; i=$((i+1)); sleep 0.01; done; exit 42").run()
	for range 3 {
		time.Sleep(300 * time.Millisecond)
		_ = syscall.Kill(b.process.PID, syscall.SIGSTOP)
		n.eventually("the log stands still", func() bool {
			before := len(b.output("stdout"))
			time.Sleep(slow(100 * time.Millisecond))
			return len(b.output("stdout")) == before
		})
		pid := n.client.MonitorPID()
		_ = n.client.Close() // first, or it would start the next one
		_ = syscall.Kill(pid, syscall.SIGKILL)
		n.eventually("the monitor is dead", func() bool { return !alive(pid) })
		_ = syscall.Kill(b.process.PID, syscall.SIGCONT)
		time.Sleep(100 * time.Millisecond) // the container writes while nobody reads
		n.open()
		if st := n.restore(b)[b.id]; !st.Running {
			t.Fatalf("state = %+v", st)
		}
	}
	x := b.exit()
	if x.Code != 42 && x.Unknown == "" {
		t.Errorf("exit = %+v", x)
	}
	checkCount(t, b.output("stdout"))
	if n := strings.Count(b.output("stdout"), "\n"); n != 300 {
		t.Errorf("%d lines, want 300", n)
	}
}

func TestBothKilledWhileAContainerEnds(t *testing.T) {
	n := newNode(t)
	b := n.box("sleep 0.5; exit 3").run()
	forever := n.box("sleep 1000").run()
	pid := n.client.MonitorPID()
	_ = n.client.Close()
	_ = syscall.Kill(pid, syscall.SIGKILL)
	n.eventually("the init is gone", func() bool { return !alive(b.process.PID) })
	n.open()
	states := n.restore(b, forever)
	// The test, as subreaper, is the init's last parent; elsewhere that is
	// process 1 and nobody knows the code.
	if st := states[b.id]; st.Running || st.Exit == nil || st.Exit.Code != 3 && (st.Exit.Unknown == "" || st.Exit.Code != 255) {
		t.Errorf("ended container: %+v", st.Exit)
	}
	if st := states[forever.id]; !st.Running || st.Exit != nil {
		t.Errorf("living container: %+v", st)
	}
	if err := n.runtime.Signal(forever.id, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	forever.exit()
}

func TestB67ExitsWhileTheDaemonIsAway(t *testing.T) {
	n := newNode(t)
	var boxes []*box
	for i := range 20 {
		b := n.box(fmt.Sprintf("sleep %d; echo bye; exit %d", slow(time.Second)/time.Second, i+1))
		boxes = append(boxes, b.run())
	}
	forever := n.box("sleep 1000").run()
	ends := time.Now().Add(slow(time.Second))
	states := n.restart(slow(2*time.Second), append(boxes, forever)...)
	right := 0
	for i, b := range boxes {
		x := states[b.id].Exit
		if x != nil && x.Code == int32(i+1) && x.Unknown == "" && x.At.Before(ends.Add(slow(time.Second))) && b.output("stdout") == "bye\n" {
			right++
		}
	}
	if right != 20 {
		t.Errorf("%d of 20 exits are right", right)
	}
	if st := states[forever.id]; !st.Running {
		t.Errorf("running container: %+v", st)
	}
	if r, err := forever.exec(0, "echo still here"); err != nil || string(r.Stdout) != "still here\n" {
		t.Errorf("exec after the restart: %+v, %v", r, err)
	}
}

func TestExitsWhileTheMonitorIsDead(t *testing.T) {
	n := newNode(t)
	var boxes []*box
	for i := range 10 {
		boxes = append(boxes, n.box(fmt.Sprintf("sleep 0.%d; exit %d", i, i+1)).run())
	}
	n.killMonitor() // and for some milliseconds there is none
	for i, b := range boxes {
		if x := b.exit(); x.Code != int32(i+1) || x.Unknown != "" {
			t.Errorf("exit = %+v, want code %d", x, i+1)
		}
	}
}

// A second daemon's client takes the place of the first at the same monitor,
// and a monitor that is started beside a living one ends.
func TestOnlyOneMonitor(t *testing.T) {
	n := newNode(t)
	pid := n.client.MonitorPID()
	if l, err := monitor.Lock(n.dir + "/monitor.sock"); !errors.Is(err, unix.EWOULDBLOCK) {
		l.Close()
		t.Errorf("lock beside a living monitor: %v", err)
	}
	p, err := os.StartProcess(n.binary, []string{n.binary, "--socket", n.dir + "/monitor.sock"}, &os.ProcAttr{})
	if err != nil {
		t.Fatal(err)
	}
	state, err := p.Wait()
	if err != nil || state.ExitCode() != monitor.ExitSecond {
		t.Errorf("second monitor: %v, %v", state, err)
	}
	n.restart(0)
	if n.client.MonitorPID() != pid {
		t.Error("the monitor was replaced")
	}
}

// Only SIGTERM means the monitor, and it does not leave containers alone.
func TestMonitorStaysAtSignals(t *testing.T) {
	n := newNode(t)
	b := n.box("i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); sleep 0.01; done; exit 4").run()
	pid := n.client.MonitorPID()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE, syscall.SIGTERM} {
		if err := syscall.Kill(pid, sig); err != nil {
			t.Fatal(err)
		}
		if r, err := b.exec(0, "echo well"); err != nil || string(r.Stdout) != "well\n" {
			t.Errorf("exec after %s: %+v, %v", sig, r, err)
		}
	}
	if x := b.exit(); x.Code != 4 || n.client.MonitorPID() != pid {
		t.Errorf("exit = %+v, the monitor is %d, it was %d", x, n.client.MonitorPID(), pid)
	}
	checkCount(t, b.output("stdout"))
}

func TestLonelyMonitorLeaves(t *testing.T) {
	n := newNode(t)
	pid := n.client.MonitorPID()
	_ = n.client.Close()
	n.eventually("the monitor has left", func() bool { return !alive(pid) })
	n.open()
}

// An ended container does not keep the monitor: its exit.json is enough.
func TestMonitorLeavesEndedContainers(t *testing.T) {
	n := newNode(t)
	b := n.box("exit 6").run()
	b.exit()
	pid := n.client.MonitorPID()
	_ = n.client.Close()
	n.eventually("the monitor has left", func() bool { return !alive(pid) })
	n.open()
	if st := n.restore(b)[b.id]; st.Running || st.Exit == nil || st.Exit.Code != 6 || st.Exit.Unknown != "" {
		t.Errorf("state = %+v", st)
	}
}

// Whoever reads exit.json first may delete at once.
func TestDeleteJustAfterTheExit(t *testing.T) {
	n := newNode(t)
	for range 20 {
		b := n.box("sleep 1000").run()
		_ = syscall.Kill(b.process.PID, syscall.SIGKILL)
		for {
			if _, err := monitor.ReadExit(b.bundle); err == nil {
				break
			}
		}
		if _, ok := n.runtime.Exited(b.id); !ok {
			t.Error("the exit is not known")
		}
		if err := n.client.Forget(context.Background(), b.id); err != nil {
			t.Error(err)
		}
		b.remove()
	}
}

func TestCreateWhileTheMonitorDies(t *testing.T) {
	n := newNode(t)
	for i := range 6 {
		b := n.box("sleep 1000")
		pid := n.client.MonitorPID()
		timer := time.AfterFunc(time.Duration(i*6)*time.Millisecond, func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
		err := b.create()
		timer.Stop()
		if err == nil {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		} else {
			if !errors.Is(err, oci.ErrMonitorUnavailable) {
				t.Errorf("create: %v", err)
			}
			b.gone(t)
		}
		n.eventually("a new monitor", func() bool { p := n.client.MonitorPID(); return p != 0 && p != pid })
		again := n.box("sleep 1000")
		if err := again.create(); err != nil {
			t.Errorf("create after it: %v", err)
		}
	}
}

// A monitor may die when it has written down what it made, and even told of it, and
// before it has answered.
func TestCreateOutlivesItsMonitor(t *testing.T) {
	n := newNode(t)
	failed := 0
	for i := 0; i < 20 || failed == 0 && i < 200; i++ {
		b := n.box("sleep 1000")
		pid := n.client.MonitorPID()
		stop, killed := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(killed)
			for {
				select {
				case <-stop:
					return
				default:
				}
				_, err := os.Lstat(filepath.Join(b.bundle, "monitor.json"))
				if _, known := n.client.Container(b.id); known || err == nil && n.seq%2 == 0 {
					_ = syscall.Kill(pid, syscall.SIGKILL)
					return
				}
			}
		}()
		err := b.create()
		close(stop)
		<-killed
		if err != nil {
			failed++
			b.gone(t)
		} else {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		n.eventually("a new monitor", func() bool { p := n.client.MonitorPID(); return p != 0 && p != pid })
	}
	if failed == 0 {
		t.Error("no monitor died before it had answered")
	}
}

func TestTerminalSurvivesTheMonitor(t *testing.T) {
	n := newNode(t)
	b := n.box("i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); sleep 0.01; done; tty; exit 5")
	b.spec.Process.Terminal, b.io.Terminal = true, true
	b.run()
	time.Sleep(200 * time.Millisecond)
	n.killMonitor()
	if x := b.exit(); x.Code != 5 {
		t.Errorf("exit = %+v", x)
	}
	text := strings.ReplaceAll(b.output("stdout"), "\r\n", "\n")
	lines, ok := strings.CutSuffix(text, "/dev/pts/0\n")
	if !ok {
		t.Errorf("no terminal: %q", text)
	}
	checkCount(t, lines)
}

func TestB65TruthWithoutNotices(t *testing.T) {
	n := newNode(t)
	for range 20 {
		b := n.box("exec sleep 300").run()
		go func() { _ = n.runtime.Signal(b.id, syscall.SIGTERM) }()
		_ = syscall.Kill(b.process.PID, syscall.SIGKILL)
		at := time.Now()
		for {
			if x, ok := n.runtime.Exited(b.id); ok {
				if x.Code != 137 && x.Code != 143 {
					t.Errorf("exit = %+v", x)
				}
				break
			}
			if time.Since(at) > slow(2*time.Second) {
				t.Fatal("not known after 2 s")
			}
			time.Sleep(time.Millisecond)
		}
	}
}
