package runc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	rspec "github.com/opencontainers/runtime-spec/specs-go"

	"berth/oci"
	"berth/oci/monitor"
)

// installed is a place for a monitor's binary, whose builds change.
type installed struct {
	t      *testing.T
	path   string
	stock  []byte
	serial int
}

func newInstalled(t *testing.T) *installed {
	t.Helper()
	built, err := buildMonitor()
	if err != nil {
		t.Fatal(err)
	}
	stock, err := os.ReadFile(built)
	if err != nil {
		t.Fatal(err)
	}
	i := &installed{t: t, path: filepath.Join(t.TempDir(), "berth-monitor"), stock: stock}
	i.next()
	return i
}

// put installs a program as an upgrade does: by a new file.
func (i *installed) put(program []byte) {
	i.t.Helper()
	if err := os.WriteFile(i.path+".new", program, 0o755); err != nil {
		i.t.Fatal(err)
	}
	if err := os.Rename(i.path+".new", i.path); err != nil {
		i.t.Fatal(err)
	}
}

// next installs another build: the same program, followed by what nobody reads.
func (i *installed) next() {
	i.serial++
	i.put(fmt.Append(bytes.Clone(i.stock), "build ", i.serial))
}

// edited installs a build of changed sources: edits are texts and what stands in
// their place, by file below the module's root.
func (i *installed) edited(edits map[string][2]string) {
	i.t.Helper()
	key := fmt.Sprint(edits)
	if edited[key] == nil {
		edited[key] = i.build(edits)
	}
	i.put(edited[key])
}

// edited are builds of changed sources, which take long.
var edited = map[string][]byte{}

func (i *installed) build(edits map[string][2]string) []byte {
	i.t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		i.t.Skip("skipped: needs the go command, to build a monitor of another release")
	}
	root, dir := filepath.Join("..", ".."), i.t.TempDir()
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	for name, edit := range edits {
		path, err := filepath.Abs(filepath.Join(root, name))
		if err != nil {
			i.t.Fatal(err)
		}
		source, err := os.ReadFile(path)
		if err != nil {
			i.t.Fatal(err)
		}
		if strings.Count(string(source), edit[0]) != 1 {
			i.t.Fatalf("%s has not one %q", name, edit[0])
		}
		changed := filepath.Join(dir, strings.ReplaceAll(name, "/", "-"))
		if err := os.WriteFile(changed, []byte(strings.Replace(string(source), edit[0], edit[1], 1)), 0o600); err != nil {
			i.t.Fatal(err)
		}
		overlay.Replace[path] = changed
	}
	text, err := json.Marshal(overlay)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "overlay.json"), text, 0o600)
	}
	if err != nil {
		i.t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-overlay", filepath.Join(dir, "overlay.json"), "-o", filepath.Join(dir, "monitor"), "./cmd/berth-monitor")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		i.t.Fatalf("build a monitor of another release: %v: %s", err, out)
	}
	program, err := os.ReadFile(filepath.Join(dir, "monitor"))
	if err != nil {
		i.t.Fatal(err)
	}
	return program
}

// speaks is the edit that makes a build speak other versions of the protocol.
func speaks(oldest, newest int) map[string][2]string {
	return map[string][2]string{"oci/monitor/version.go": {
		"	Version = 1 // the newest\n	Oldest  = 1\n", fmt.Sprintf("	Version = %d\n	Oldest  = %d\n", newest, oldest)}}
}

// slowFlood is flood with pauses.
var slowFlood = strings.Replace(flood, `printf "%20000d\n", i`, `{ printf "%20000d\n", i; fflush(); system("sleep 0.02") }`, 1)

func (n *node) renew() {
	n.t.Helper()
	pid := n.client.MonitorPID()
	if done, err := n.client.Renew(context.Background()); err != nil || !done {
		n.t.Fatalf("renew: %v, %v", done, err)
	}
	if now := n.client.MonitorPID(); now != pid {
		n.t.Errorf("the monitor is process %d, it was %d", now, pid)
	}
}

// A monitor becomes another build again and again while containers write, are
// made, run commands and end: no line, no exit and no session is lost.
func TestRenewedMonitorLosesNothing(t *testing.T) {
	i := newInstalled(t)
	n := newNodeOf(t, i.path)
	if done, err := n.client.Renew(context.Background()); err != nil || done {
		t.Errorf("renewal of the installed build: %v, %v", done, err)
	}
	loud := n.box(slowFlood).run()
	tty := n.box("i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); sleep 0.01; done; tty; exit 5")
	tty.spec.Process.Terminal, tty.io.Terminal = true, true
	tty.run()
	talker := n.box("while read -r l; do echo got $l; done; echo over; exit 9")
	talker.io.Stdin, talker.io.StdinOnce = true, true
	talker.run()
	view := talker.attach(nil)
	for round := range 10 {
		i.next()
		n.renew()
		view.type_(fmt.Sprintf("round %d\n", round))
		view.sees(fmt.Sprintf("got round %d\n", round))
		if r, err := talker.exec(0, "echo well"); err != nil || string(r.Stdout) != "well\n" {
			t.Errorf("exec: %+v, %v", r, err)
		}
		if x := n.box(fmt.Sprintf("exit %d", round)).run().exit(); x.Code != int32(round) || x.Unknown != "" {
			t.Errorf("exit of a container of round %d: %+v", round, x)
		}
	}
	if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", talker.process.PID)); err == nil {
		if f := strings.Fields(string(stat)); f[3] != fmt.Sprint(n.client.MonitorPID()) {
			t.Errorf("the container's parent is %s, the monitor is %d", f[3], n.client.MonitorPID())
		}
	}
	_ = view.in.Close()
	if _, err := view.end(); err != nil || !strings.HasSuffix(view.out.String(), "over\n") {
		t.Errorf("the session ended with %v, having seen %q", err, view.out.String())
	}
	for b, want := range map[*box]int32{loud: 42, tty: 5, talker: 9} {
		if x := b.exit(); x.Code != want || x.Unknown != "" {
			t.Errorf("exit = %+v, want %d", x, want)
		}
	}
	checkFlood(t, loud.output("stdout"))
	text, ok := strings.CutSuffix(strings.ReplaceAll(tty.output("stdout"), "\r\n", "\n"), "/dev/pts/0\n")
	if checkCount(t, text); !ok || strings.Count(text, "\n") != 200 {
		t.Errorf("the terminal's log has %d lines and ends with %q", strings.Count(text, "\n"), text[max(0, len(text)-30):])
	}
}

// Exits around a renewal are its next build's to record: the parent is the same.
func TestRenewalMissesNoExit(t *testing.T) {
	i := newInstalled(t)
	n := newNodeOf(t, i.path)
	var boxes []*box
	for k := range 30 {
		boxes = append(boxes, n.box(fmt.Sprintf("read x; sleep 0.%02d; exit %d", 3*k, k+1)))
		boxes[k].io.Stdin = true
		boxes[k].run()
	}
	for _, b := range boxes {
		view := b.attach(nil)
		view.type_("go\n")
		view.hangUp()
	}
	var stop atomic.Bool
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for k, b := range boxes {
			if x := b.exit(); x.Code != int32(k+1) || x.Unknown != "" {
				t.Errorf("exit = %+v, want code %d", x, k+1)
			}
		}
		stop.Store(true)
	}()
	renewals := 0
	for ; !stop.Load(); renewals++ {
		i.next()
		n.renew()
	}
	<-ended
	t.Logf("%d renewals", renewals)
}

// A renewal waits for containers that are being made, also for those that a daemon
// asked for that is gone.
func TestRenewalWaitsForCreations(t *testing.T) {
	i := newInstalled(t)
	n := newNodeOf(t, i.path)
	for _, leave := range []bool{false, true} {
		b := n.box("exec sleep 1000")
		b.spec.Hooks = &rspec.Hooks{CreateRuntime: []rspec.Hook{{Path: "/bin/sleep", Args: []string{"sleep", "1"}}}}
		made := make(chan error, 1)
		go func() { made <- b.create() }()
		n.eventually("the create runs", func() bool { _, err := os.Lstat(filepath.Join(n.dir, "runc", b.id)); return err == nil })
		i.next()
		if leave {
			_ = n.client.Close()
			if err := <-made; !errors.Is(err, oci.ErrMonitorUnavailable) {
				t.Errorf("create: %v", err)
			}
			n.open()
		}
		n.renew()
		if leave {
			continue
		}
		if err := <-made; err != nil {
			t.Errorf("create: %v", err)
		}
	}
}

// What cannot take over does not: the old build goes on, and says why.
func TestRefusedRenewal(t *testing.T) {
	i := newInstalled(t)
	n := newNodeOf(t, i.path)
	b := n.box("i=0; while :; do echo line $i; i=$((i+1)); sleep 0.01; done").run()
	pid := n.client.MonitorPID()
	for name, c := range map[string]struct {
		install func()
		want    string
	}{
		"no program":      {func() { i.put([]byte("hello\n")) }, "exec format"},
		"another program": {func() { i.put([]byte("#!/bin/sh\nexit 0\n")) }, "cannot take over (exit code 0)"},
		"one that fails":  {func() { i.put([]byte("#!/bin/sh\necho sorry; exit 3\n")) }, "exit code 3): sorry"},
		"one for later": {func() {
			i.edited(map[string][2]string{"cmd/berth-monitor/renew.go": {"oldestFormat = 1\n", "oldestFormat = 2\n"}})
		}, "format 1"},
		"nothing any more":    {func() { _ = os.Remove(i.path) }, "no such file"},
		"one that is no file": {func() { _, _ = os.Remove(i.path), os.Mkdir(i.path, 0o755) }, i.path},
	} {
		c.install()
		if done, err := n.client.Renew(context.Background()); err == nil || done || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v; want %q", name, done, err, c.want)
		}
		_ = os.Remove(i.path)
	}
	i.next()
	if n.client.MonitorPID() != pid {
		t.Error("the monitor is another process")
	}
	if x := n.box("exit 6").run().exit(); x.Code != 6 {
		t.Errorf("a container after it: %+v", x)
	}
	if _, ended := n.runtime.Exited(b.id); ended {
		t.Error("the container has ended")
	}
	checkCount(t, b.output("stdout"))
}

// A build that promises to take over and then dies over it is like any monitor
// that dies: the daemon still has every descriptor.
func TestRenewalIntoABrokenBuild(t *testing.T) {
	i := newInstalled(t)
	n := newNodeOf(t, i.path)
	b := n.box("i=0; while [ $i -lt 300 ]; do echo line $i; i=$((i+1)); sleep 0.01; done; exit 42").run()
	i.edited(map[string][2]string{"cmd/berth-monitor/resume.go": {"	st.closeOnExec()\n", "	panic(\"broken\")\n"}})
	if done, err := n.client.Renew(context.Background()); done || !errors.Is(err, monitor.ErrUnavailable) {
		t.Errorf("renew: %v, %v", done, err)
	}
	if x := b.exit(); x.Code != 42 || x.Unknown != "" {
		t.Errorf("exit = %+v", x)
	}
	checkCount(t, b.output("stdout"))
	if lines := strings.Count(b.output("stdout"), "\n"); lines != 300 {
		t.Errorf("%d lines, want 300", lines)
	}
}

// A daemon works with monitors of later releases as long as there is a version
// that both speak. Beyond that it makes the monitor its own, where the state can
// be understood; else it says what does not fit, and touches nothing.
func TestMonitorsOfOtherReleases(t *testing.T) {
	i := newInstalled(t)
	i.edited(speaks(1, 2))
	n := newNodeOf(t, i.path)
	b := n.box("i=0; while :; do echo line $i; i=$((i+1)); sleep 0.01; done").run()
	if x := n.box("exit 6").run().exit(); x.Code != 6 {
		t.Errorf("a container of a later release's monitor: %+v", x)
	}
	i.edited(speaks(2, 3))
	if done, err := n.client.Renew(context.Background()); done || err == nil || !strings.Contains(err.Error(), "versions 2 to 3") {
		t.Errorf("renewal into a monitor that one cannot talk with: %v, %v", done, err)
	}
	pid := n.client.MonitorPID()
	later := n.dial() // a daemon of a later release makes it one
	_ = n.client.Close()
	if err := later.Send(&monitor.Message{ID: 1, Op: monitor.OpRenew, Binary: i.path, Version: 3, Oldest: 3}); err != nil {
		t.Fatal(err)
	}
	if m, err := later.Receive(); err == nil {
		t.Fatalf("renewal by another daemon: %+v", m.Error)
	}
	if err := n.tryOpen(); !errors.Is(err, monitor.ErrVersion) || !strings.Contains(err.Error(), "versions 2 to 3") || !strings.Contains(err.Error(), "version 1:") {
		t.Errorf("open: %v", err)
	}
	i.edited(map[string][2]string{"cmd/berth-monitor/renew.go": {"oldestFormat = 1\n", "oldestFormat = 2\n"}})
	if err := n.tryOpen(); !errors.Is(err, monitor.ErrVersion) || !strings.Contains(err.Error(), "format 1") || !strings.Contains(err.Error(), i.path) {
		t.Errorf("open with a monitor that does not understand the state: %v", err)
	}
	i.next()
	n.open()
	if n.client.MonitorPID() != pid {
		t.Error("the monitor was not renewed but replaced")
	}
	if st := n.restore(b)[b.id]; !st.Running {
		t.Errorf("state = %+v", st)
	}
	if err := n.runtime.Signal(b.id, 9); err != nil {
		t.Fatal(err)
	}
	if x := b.exit(); x != (oci.Exit{ID: b.id, Code: 137, At: x.At}) {
		t.Errorf("exit = %+v", x)
	}
	checkCount(t, b.output("stdout"))
}
