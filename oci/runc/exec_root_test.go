package runc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"

	"berth/oci"
	"berth/oci/monitor"
)

func (b *box) exec(timeout time.Duration, script string) (oci.ExecResult, error) {
	return b.n.runtime.Exec(context.Background(), b.id, oci.ExecRequest{Timeout: timeout, Limit: 1 << 20,
		Process: &rspec.Process{Args: []string{"/bin/sh", "-c", script}, Env: []string{"PATH=/usr/bin:/bin"}, Cwd: "/"}})
}

// settled waits until only the init is in the container and no cgroup of an
// exec is left.
func (b *box) settled() {
	b.n.t.Helper()
	ct, _ := b.n.client.Container(b.id)
	b.n.eventually("only the init is left", func() bool {
		pids, _ := monitor.Processes(ct.Cgroups.Kill())
		return len(pids) == 1
	})
	if dirs, _ := filepath.Glob(filepath.Join(ct.Cgroups.Kill(), "exec-*")); len(dirs) > 0 {
		b.n.t.Errorf("cgroups are left: %v", dirs)
	}
	if files, _ := filepath.Glob(filepath.Join(b.bundle, "exec-*")); len(files) > 0 {
		b.n.t.Errorf("files are left: %v", files)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestExec(t *testing.T) {
	n := newNode(t)
	b := n.box("exec sleep 1000").run()
	r, err := b.exec(0, "echo hi; echo no >&2; exit 3")
	if err != nil || string(r.Stdout) != "hi\n" || string(r.Stderr) != "no\n" || r.ExitCode != 3 || r.Truncated {
		t.Errorf("exec = %+v, %v", r, err)
	}
	if r, err = b.exec(0, "kill -9 $$"); err != nil || r.ExitCode != 137 {
		t.Errorf("killed by itself: %+v, %v", r, err)
	}
	r, err = n.runtime.Exec(context.Background(), b.id, oci.ExecRequest{Limit: 100, Stdin: strings.NewReader("from outside"),
		Process: &rspec.Process{Args: []string{"/bin/cat"}, Cwd: "/"}})
	if err != nil || string(r.Stdout) != "from outside" {
		t.Errorf("with stdin: %+v, %v", r, err)
	}
	b.settled()
}

func TestExecFailures(t *testing.T) {
	n := newNode(t)
	b := n.box("exec sleep 1000").run()
	_, err := n.runtime.Exec(context.Background(), b.id, oci.ExecRequest{Limit: 100, Process: &rspec.Process{Args: []string{"nosuchcommand"}, Cwd: "/"}})
	var e *oci.ExecError
	if !errors.As(err, &e) || !strings.Contains(err.Error(), `"nosuchcommand": executable file not found`) || strings.Contains(err.Error(), "level=") {
		t.Errorf("no such command: %v", err)
	}
	if _, err := n.runtime.Exec(context.Background(), "never-made", oci.ExecRequest{Process: &rspec.Process{Args: []string{"true"}}}); !errors.Is(err, oci.ErrNotFound) {
		t.Errorf("no such container: %v", err)
	}
	b.settled()
	if err := n.runtime.KillAll(context.Background(), b.id); err != nil {
		t.Fatal(err)
	}
	b.exit()
	if _, err := b.exec(0, "true"); !errors.Is(err, oci.ErrNotRunning) {
		t.Errorf("ended container: %v", err)
	}
}

func TestB71ExecReturnsWhenItsMainProcessEnds(t *testing.T) {
	n := newNode(t)
	b := n.box("exec sleep 1000").run()
	at := time.Now()
	if _, err := b.exec(0, "echo hi"); err != nil {
		t.Fatal(err)
	}
	plain := time.Since(at)
	before := descriptors(t)
	for range 10 {
		at = time.Now()
		r, err := b.exec(0, "echo hi; sleep 600 &")
		if took := time.Since(at); err != nil || string(r.Stdout) != "hi\n" || r.ExitCode != 0 || took > 2*plain+slow(time.Second) {
			t.Fatalf("exec = %+v, %v after %s", r, err, took)
		}
	}
	if now := descriptors(t); now > before {
		t.Errorf("%d descriptors, before %d", now, before)
	}
	ct, _ := n.client.Container(b.id)
	if dirs, _ := filepath.Glob(filepath.Join(ct.Cgroups.Kill(), "exec-*")); len(dirs) > 0 {
		t.Errorf("cgroups are left: %v", dirs)
	}
	// What the execs left on purpose lives, and goes with the container.
	if pids, _ := monitor.Processes(ct.Cgroups.Kill()); len(pids) != 11 {
		t.Errorf("%d processes in the container, want 11", len(pids))
	}
}

func TestB73TimeoutKillsEverythingOfAnExec(t *testing.T) {
	n := newNode(t)
	b := n.box("exec sleep 1000").run()
	for range 5 {
		at := time.Now()
		_, err := b.exec(slow(300*time.Millisecond), "sleep 999 & setsid sleep 998 & sleep 997")
		if took := time.Since(at); !errors.Is(err, oci.ErrExecTimeout) || took < slow(300*time.Millisecond) || took > slow(1300*time.Millisecond) {
			t.Fatalf("exec: %v after %s", err, took)
		}
		if left := sleeping(t, b, "99"); len(left) > 0 {
			t.Fatalf("just after the error these live: %v", left)
		}
	}
	if !alive(b.process.PID) {
		t.Error("the container was hurt")
	}
	if r, err := b.exec(0, "echo well"); err != nil || string(r.Stdout) != "well\n" {
		t.Errorf("exec after it: %+v, %v", r, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(slow(200*time.Millisecond), cancel)
	_, err := n.runtime.Exec(ctx, b.id, oci.ExecRequest{Process: &rspec.Process{Args: []string{"/bin/sleep", "996"}, Cwd: "/"}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled exec: %v", err)
	}
	if left := sleeping(t, b, "99"); len(left) > 0 {
		t.Errorf("after a cancelled exec these live: %v", left)
	}
}

// sleeping lists the living processes of a container whose argument begins so.
func sleeping(t *testing.T, b *box, prefix string) (left []string) {
	t.Helper()
	ct, _ := b.n.client.Container(b.id)
	pids, err := monitor.Processes(ct.Cgroups.Kill())
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		line, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
		if args := strings.Split(string(line), "\x00"); len(args) > 1 && strings.HasPrefix(args[1], prefix) {
			left = append(left, strings.Join(args, " "))
		}
	}
	return left
}

// Without a cgroup for the exec its descendants are found by their parents.
func TestTimeoutWithoutACgroup(t *testing.T) {
	n := newNode(t)
	n.runtime.subCgroups = func() bool { return false }
	b := n.box("exec sleep 1000").run()
	_, err := b.exec(slow(300*time.Millisecond), "sleep 999 & setsid sleep 998 & sleep 997")
	if !errors.Is(err, oci.ErrExecTimeout) {
		t.Fatalf("exec: %v", err)
	}
	if left := sleeping(t, b, "99"); len(left) > 0 {
		t.Errorf("these live: %v", left)
	}
}

func TestB75ExecOutputIsBounded(t *testing.T) {
	n := newNode(t)
	b := n.box("exec sleep 1000").run()
	r, err := b.exec(0, "yes | head -c 50000000; echo end >&2")
	if err != nil || len(r.Stdout) != 1<<20 || !r.Truncated || string(r.Stderr) != "end\n" {
		t.Errorf("exec = %d bytes, %q, truncated %v, %v", len(r.Stdout), r.Stderr, r.Truncated, err)
	}
	if !bytes.HasPrefix(r.Stdout, []byte("y\ny\n")) {
		t.Error("not the beginning is kept")
	}
	at := time.Now()
	if _, err := b.exec(slow(500*time.Millisecond), "yes"); !errors.Is(err, oci.ErrExecTimeout) || time.Since(at) > slow(2*time.Second) {
		t.Errorf("endless: %v", err)
	}
	b.settled()
}

// A binary that is killed while it starts an exec leaves processes in the
// container's PID namespace, whose init cannot end before they are reaped.
func TestKilledExecLeavesNoZombie(t *testing.T) {
	n := newNode(t)
	b := n.box("exec sleep 1000").run()
	hanging := filepath.Join(n.dir, "hanging")
	script := fmt.Sprintf("#!/bin/sh\ncase \" $* \" in *' exec --detach '*) nsenter -F -t %d -p sh -c 'sleep 7 & echo $! $$ > %s/left; sleep 8' & exec sleep 1000;; esac\nexit 1\n", b.process.PID, n.dir)
	if err := os.WriteFile(hanging, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	stuck, err := New(Options{Binary: hanging, Root: filepath.Join(n.dir, "runc"), Monitor: n.client})
	if err != nil {
		t.Fatal(err)
	}
	_, err = stuck.Exec(t.Context(), b.id, oci.ExecRequest{Timeout: 100 * time.Millisecond, Process: &rspec.Process{Args: []string{"/bin/true"}, Cwd: "/"}})
	if !errors.Is(err, oci.ErrExecTimeout) {
		t.Fatalf("exec: %v", err)
	}
	data, err := os.ReadFile(filepath.Join(n.dir, "left"))
	if err != nil {
		t.Fatal(err)
	}
	for pid := range strings.FieldsSeq(string(data)) {
		n.eventually("what it left is reaped", func() bool {
			_, err := os.Stat(filepath.Join("/proc", pid))
			return errors.Is(err, os.ErrNotExist)
		})
	}
}
