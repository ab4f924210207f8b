package runc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"

	"berth/oci"
	"berth/oci/monitor"
)

func TestLifeOfAContainer(t *testing.T) {
	n := newNode(t)
	b := n.box("echo out; echo err >&2; printf tail; exit 7").run()
	x := b.exit()
	if x.Code != 7 || x.OOMKilled || x.Unknown != "" || time.Since(x.At) > time.Minute {
		t.Errorf("exit = %+v", x)
	}
	if got := b.output("stdout"); got != "out\ntail" {
		t.Errorf("stdout = %q", got)
	}
	if got := b.output("stderr"); got != "err\n" {
		t.Errorf("stderr = %q", got)
	}
	if err := b.n.runtime.Signal(b.id, syscall.SIGTERM); !errors.Is(err, oci.ErrNotRunning) {
		t.Errorf("signal after the end: %v", err)
	}
	if err := b.n.runtime.ReopenLog(context.Background(), b.id); !errors.Is(err, oci.ErrNotRunning) {
		t.Errorf("reopen after the end: %v", err)
	}
	on, err := monitor.ReadExit(b.bundle)
	if err != nil || on.Code != 7 || !on.At.Equal(x.At) {
		t.Errorf("exit.json = %+v, %v", on, err)
	}
	n.eventually("the exit is told once", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return len(n.exits[b.id]) == 1
	})
}

func TestSignalCodes(t *testing.T) {
	n := newNode(t)
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGUSR1} {
		b := n.box("trap 'exit 9' USR1; while :; do sleep 0.01; done").run()
		time.Sleep(slow(100 * time.Millisecond))
		if err := n.runtime.Signal(b.id, sig); err != nil {
			t.Fatal(err)
		}
		want := map[syscall.Signal]int32{syscall.SIGKILL: 137, syscall.SIGUSR1: 9}[sig]
		if x := b.exit(); x.Code != want || x.OOMKilled {
			t.Errorf("after %s: %+v", sig, x)
		}
	}
}

func TestCreateFailures(t *testing.T) {
	n := newNode(t)
	for name, c := range map[string]struct {
		break_ func(*box)
		want   string
	}{
		"no such command":  {func(b *box) { b.spec.Process.Args = []string{"/no/such/command"} }, "no such file"},
		"not in PATH":      {func(b *box) { b.spec.Process.Args = []string{"nosuchcommand"} }, "executable file not found"},
		"a missing source": {func(b *box) { b.spec.Mounts[2].Source, b.spec.Mounts[2].Type = "/no/such/source", "bind" }, "/no/such/source"},
		"a missing folder": {func(b *box) { b.io.LogPath = "/no/such/folder/0.log" }, "/no/such/folder/0.log"},
		"a bad namespace":  {func(b *box) { b.spec.Linux.Namespaces[2].Path = "/no/such/namespace" }, "/no/such/namespace"},
	} {
		t.Run(name, func(t *testing.T) {
			b := n.box("true")
			c.break_(b)
			err := b.create()
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("create: %v", err)
			}
			if name == "a missing folder" && !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the errno is lost: %v", err)
			}
			if err != nil && strings.Contains(err.Error(), "level=") {
				t.Errorf("the message is a log line: %v", err)
			}
			b.gone(t)
		})
	}
}

// gone checks that nothing of a container is left but its bundle.
func (b *box) gone(t *testing.T) {
	t.Helper()
	if _, err := os.Lstat(filepath.Join(b.n.dir, "runc", b.id)); err == nil {
		t.Error("the runtime's state is left")
	}
	for _, pattern := range []string{"/sys/fs/cgroup/*/" + b.id, "/sys/fs/cgroup/" + b.id} {
		if dirs, _ := filepath.Glob(pattern); len(dirs) > 0 {
			t.Errorf("cgroups are left: %v", dirs)
		}
	}
	for _, name := range []string{"init.pid", "monitor.json"} {
		if _, err := os.Lstat(filepath.Join(b.bundle, name)); err == nil {
			t.Errorf("%s is left in the bundle", name)
		}
	}
	if _, ok := b.n.client.Container(b.id); ok {
		t.Error("the monitor client knows the container")
	}
}

func TestCancelledCreateLeavesNothing(t *testing.T) {
	n := newNode(t)
	for i := range 10 {
		b := n.box("true")
		if err := oci.WriteBundle(b.bundle, b.spec); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), slow(time.Duration(i*4)*time.Millisecond))
		_, err := n.runtime.Create(ctx, oci.CreateRequest{ID: b.id, Bundle: b.bundle, IO: b.io})
		cancel()
		if err == nil {
			continue // it was quicker
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("create: %v", err)
		}
		b.gone(t)
	}
}

func TestCreateTwice(t *testing.T) {
	n := newNode(t)
	b := n.box("sleep 1000")
	if err := b.create(); err != nil {
		t.Fatal(err)
	}
	if err := b.create(); !errors.Is(err, oci.ErrExists) {
		t.Errorf("second create: %v", err)
	}
	if err := n.runtime.Start(context.Background(), b.id); err != nil {
		t.Errorf("the first container is hurt: %v", err)
	}
}

func TestDeleteIsIdempotent(t *testing.T) {
	n := newNode(t)
	if err := n.runtime.Delete(context.Background(), "never-made"); err != nil {
		t.Errorf("delete of an unknown id: %v", err)
	}
	for _, prepare := range []func(*box){func(b *box) { b.run() }, func(b *box) {
		if err := b.create(); err != nil {
			t.Fatal(err)
		}
	}} {
		b := n.box("sleep 1000")
		prepare(b)
		for range 2 {
			if err := n.runtime.Delete(context.Background(), b.id); err != nil {
				t.Errorf("delete: %v", err)
			}
		}
		if alive(b.process.PID) {
			t.Error("the init lives")
		}
		_ = os.Remove(filepath.Join(b.bundle, "monitor.json"))
		b.gone(t)
	}
}

func TestUpdateFeaturesVersion(t *testing.T) {
	n := newNode(t)
	b := n.box("sleep 1000").run()
	limit := int64(64 << 20)
	if err := n.runtime.Update(context.Background(), b.id, &rspec.LinuxResources{Memory: &rspec.LinuxMemory{Limit: &limit}}); err != nil {
		t.Fatal(err)
	}
	ct, _ := n.client.Container(b.id)
	name := "memory.limit_in_bytes"
	if ct.Cgroups.Unified != "" {
		name = "memory.max"
	}
	if data, err := os.ReadFile(filepath.Join(ct.Cgroups.Memory, name)); err != nil || strings.TrimSpace(string(data)) != fmt.Sprint(limit) {
		t.Errorf("%s = %q, %v", name, data, err)
	}
	if v, err := n.runtime.Version(context.Background()); err != nil || !strings.HasPrefix(v, "runc version ") {
		t.Errorf("version = %q, %v", v, err)
	}
	f, err := n.runtime.Features(context.Background())
	if err != nil || f.OCIVersionMax == "" {
		t.Errorf("features = %+v, %v", f, err)
	}
	var e *oci.ExecError
	if err := n.runtime.Update(context.Background(), "never-made", &rspec.LinuxResources{}); !errors.As(err, &e) || !errors.Is(err, oci.ErrNotFound) || e.ExitCode <= 0 {
		t.Errorf("update of an unknown id: %#v", err)
	}
}

func TestB69OOMKilledIsKnownAtTheExit(t *testing.T) {
	n := newNode(t)
	var wg sync.WaitGroup
	slots := make(chan struct{}, 2)
	for range 20 {
		b := n.box("exec dd if=/dev/zero of=/dev/null bs=64M")
		limit := int64(15 << 20)
		b.spec.Linux.Resources = &rspec.LinuxResources{Memory: &rspec.LinuxMemory{Limit: &limit, Swap: &limit}}
		wg.Add(1)
		go func() {
			defer wg.Done()
			slots <- struct{}{}
			defer func() { <-slots }()
			if err := b.create(); err != nil {
				t.Errorf("create: %v", err)
				return
			}
			if err := n.runtime.Start(context.Background(), b.id); err != nil {
				// dd may be killed before the binary has looked
				t.Logf("start: %v", err)
			}
			if x := b.exit(); x.Code != 137 || !x.OOMKilled {
				t.Errorf("exit = %+v", x)
			}
		}()
	}
	wg.Wait()
	killed := n.box("sleep 1000").run()
	if err := n.runtime.Signal(killed.id, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if x := killed.exit(); x.Code != 137 || x.OOMKilled {
		t.Errorf("killed by hand: %+v", x)
	}
}

func TestB83KillAllInASharedPIDNamespace(t *testing.T) {
	n := newNode(t)
	pause := n.box("exec sleep 1000").run()
	for name, ns := range map[string]string{"pod": fmt.Sprintf("/proc/%d/ns/pid", pause.process.PID), "node": ""} {
		t.Run(name, func(t *testing.T) {
			join := func(b *box) *box {
				if b.spec.Linux.Namespaces[0].Path = ns; ns == "" {
					b.spec.Linux.Namespaces = b.spec.Linux.Namespaces[1:] // the node's
				}
				return b.run()
			}
			other := join(n.box("exec sleep 1000"))
			b := join(n.box("sleep 901 & setsid sleep 902 & exec sleep 903"))
			ct, _ := n.client.Container(b.id)
			n.eventually("three processes", func() bool {
				pids, _ := monitor.Processes(ct.Cgroups.Kill())
				return len(pids) == 3
			})
			pids, _ := monitor.Processes(ct.Cgroups.Kill())
			if err := n.runtime.KillAll(context.Background(), b.id); err != nil {
				t.Fatal(err)
			}
			for _, pid := range pids {
				if alive(pid) {
					t.Errorf("pid %d lives", pid)
				}
			}
			if x := b.exit(); x.Code != 137 {
				t.Errorf("exit = %+v", x)
			}
			if err := n.runtime.KillAll(context.Background(), b.id); err != nil {
				t.Errorf("again: %v", err)
			}
			for _, c := range []*box{other, pause} {
				if _, ended := n.runtime.Exited(c.id); ended || !alive(c.process.PID) {
					t.Error("another container was killed")
				}
			}
		})
	}
}

// The init's end is one thing, the end of what it left another.
func TestB83RestIsKilledAfterTheInit(t *testing.T) {
	n := newNode(t)
	b := n.box("sleep 901 & exec sleep 903")
	b.spec.Linux.Namespaces = b.spec.Linux.Namespaces[1:] // the node's PIDs
	b.run()
	ct, _ := n.client.Container(b.id)
	n.eventually("two processes", func() bool { pids, _ := monitor.Processes(ct.Cgroups.Kill()); return len(pids) == 2 })
	pids, _ := monitor.Processes(ct.Cgroups.Kill())
	if err := n.runtime.Signal(b.id, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	at := time.Now()
	b.exit()
	if took := time.Since(at); took > slow(2*time.Second) {
		t.Errorf("the exit came after %s, held back by what has the pipe", took)
	}
	if err := n.runtime.Delete(context.Background(), b.id); err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		if alive(pid) {
			t.Errorf("pid %d lives", pid)
		}
	}
}

func TestB87OnlyStandardStreamsReachAContainer(t *testing.T) {
	n := newNode(t)
	b := n.box("ls /proc/self/fd; sleep 1000").run()
	// ls has a descriptor of its own for the directory.
	n.eventually("four descriptors", func() bool { return b.output("stdout") == "0\n1\n2\n3\n" })
	r, err := b.exec(0, "ls /proc/self/fd")
	if err != nil || string(r.Stdout) != "0\n1\n2\n3\n" {
		t.Errorf("exec: %q, %v", r.Stdout, err)
	}
}

// What the monitor ignores or blocks for itself must not be inherited.
func TestSignalsAreNotInherited(t *testing.T) {
	n := newNode(t)
	b := n.box("grep -E '^Sig(Ign|Blk)' /proc/self/status").run()
	b.exit()
	if got := b.output("stdout"); got != "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n" {
		t.Errorf("signals of a container: %q", got)
	}
}

func TestB89StreamsBelongToTheUser(t *testing.T) {
	n := newNode(t)
	for _, tty := range []bool{false, true} {
		b := n.box("echo x >/dev/stderr; echo y >/proc/1/fd/1; sleep 1000")
		b.spec.Process.User = rspec.User{UID: 1000, GID: 1000}
		b.spec.Process.Terminal, b.io.Terminal = tty, tty
		b.io.UID, b.io.GID = 1000, 1000
		b.run()
		want := func() bool { return b.output("stderr") == "x\n" && b.output("stdout") == "y\n" }
		if tty {
			want = func() bool { return b.output("stdout") == "x\r\ny\r\n" }
		}
		n.eventually(fmt.Sprintf("both lines, tty %v", tty), want)
		if tty {
			continue
		}
		r, err := n.runtime.Exec(context.Background(), b.id, oci.ExecRequest{Limit: 100, Process: &rspec.Process{
			Args: []string{"/bin/sh", "-c", "echo x >/dev/stderr; echo y >/dev/stdout"}, Cwd: "/", User: rspec.User{UID: 1000, GID: 1000}}})
		if err != nil || string(r.Stdout) != "y\n" || string(r.Stderr) != "x\n" {
			t.Errorf("exec: %+v, %v", r, err)
		}
	}
}

func TestReopenLog(t *testing.T) {
	n := newNode(t)
	b := n.box("i=0; while :; do echo line $i; i=$((i+1)); sleep 0.01; done").run()
	n.eventually("some lines", func() bool { return len(b.output("stdout")) > 50 })
	if err := os.Rename(b.log, b.log+".1"); err != nil {
		t.Fatal(err)
	}
	if err := n.runtime.ReopenLog(context.Background(), b.id); err != nil {
		t.Fatal(err)
	}
	n.eventually("lines in the new file", func() bool { return len(b.output("stdout")) > 50 })
	if err := n.runtime.Signal(b.id, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.exit()
	old, err := os.ReadFile(b.log + ".1")
	if err != nil {
		t.Fatal(err)
	}
	before, err := rebuild(old, "stdout")
	if err != nil {
		t.Fatal(err)
	}
	checkCount(t, before+b.output("stdout"))
}

// checkCount checks for "line 0", "line 1", … without a gap or a repeat.
func checkCount(t *testing.T, text string) {
	t.Helper()
	i := 0
	for line := range strings.Lines(text) {
		if line != fmt.Sprintf("line %d\n", i) {
			t.Errorf("line %d is %q", i, line)
			return
		}
		i++
	}
}
