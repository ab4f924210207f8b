package leash

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"berth/oci/monitor"
	"berth/sandbox/leakcheck"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world is a daemon's directory and what runs in it.
type world struct {
	*testing.T
	dir string
	l   *Leash
}

func newWorld(t *testing.T) *world {
	leakcheck.Start(t)
	w := &world{T: t, dir: t.TempDir()}
	w.open()
	t.Cleanup(func() {
		w.l.Close()
		if _, err := os.Stat(w.l.dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the cgroup %s is left: %v", w.l.dir, err)
		}
	})
	return w
}

func (w *world) open() {
	w.Helper()
	var err error
	w.l, err = Open(w.dir)
	must(w.T, err)
}

// run starts a script as a plugin; it is read to its first line. Its end is waited
// for by wait.
func (w *world) run(verb, pod, script string) (end func(bool), wait func()) {
	w.Helper()
	cgroup, end, err := w.l.Hold(verb, pod)
	must(w.T, err)
	cmd := exec.Command("sh", "-c", script)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
	out, err := cmd.StdoutPipe()
	must(w.T, err)
	must(w.T, cmd.Start())
	line := make([]byte, 64)
	if _, err := out.Read(line); err != nil {
		w.Fatal(err)
	}
	return end, func() { _ = cmd.Wait() }
}

// child is a script whose child leaves its session and environment, and says its pid
// in a file.
func (w *world) child(name, then string) string {
	return "setsid env -i sh -c 'echo $$ > " + filepath.Join(w.dir, name) + "; echo; exec >&-; " + then + "' & sleep 1000"
}

func (w *world) alive(name string) bool {
	w.Helper()
	text, err := os.ReadFile(filepath.Join(w.dir, name))
	must(w.T, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	must(w.T, err)
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// A run that ended well leaves what it started alone, one that did not takes it
// along.
func TestEnd(t *testing.T) {
	w := newWorld(t)
	end, wait := w.run("ADD", "p", "setsid env -i sh -c 'echo $$ > "+w.dir+"/kept; echo; exec >&-; exec sleep 1000' & wait -n 2>/dev/null; exit 0")
	wait()
	end(false)
	if !w.alive("kept") {
		t.Error("what a plugin left that succeeded is gone")
	}
	text, err := os.ReadFile(w.dir + "/kept")
	must(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	must(t, err)
	must(t, syscall.Kill(pid, syscall.SIGKILL))
	end, wait = w.run("ADD", "p", w.child("gone", "exec sleep 1000"))
	go wait()
	end(true)
	if w.alive("gone") {
		t.Error("what a plugin left that failed is there")
	}
	if left := w.l.Left(); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

// The cgroup of all runs, which is empty most of the time, is removed by somebody who
// tidies up: it is made again.
func TestRemovedByOthers(t *testing.T) {
	w := newWorld(t)
	must(t, os.Remove(w.l.dir))
	end, wait := w.run("ADD", "p", "echo")
	wait()
	end(true)
	if left := w.l.Left(); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

// A later daemon ends what an earlier one has begun, and waits for a DEL.
func TestWhatAnEarlierDaemonLeft(t *testing.T) {
	w := newWorld(t)
	_, add := w.run("ADD", "a", w.child("add", "exec sleep 1000"))
	_, del := w.run("DEL", "d", "echo; while [ ! -e "+w.dir+"/go ]; do sleep 0.02; done; touch "+w.dir+"/done")
	_, hung := w.run("DEL", "h", w.child("hung", "exec sleep 1000"))
	for _, wait := range []func(){add, del, hung} {
		go wait()
	}
	must(t, os.Mkdir(filepath.Join(w.l.dir, "GC..ABCDEFGH"), 0o755)) // nothing runs there any more
	w.open()
	if left := w.l.Left(); len(left) != 3 {
		t.Errorf("left for %q", left)
	}
	must(t, w.l.Settle(t.Context(), "a", time.Hour))
	if w.alive("add") {
		t.Error("an ADD goes on")
	}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := w.l.Settle(short, "d", time.Hour); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a DEL that goes on: %v", err)
	}
	must(t, os.WriteFile(w.dir+"/go", nil, 0o600))
	must(t, w.l.Settle(t.Context(), "d", time.Hour))
	if _, err := os.Stat(w.dir + "/done"); err != nil {
		t.Errorf("a DEL was not waited for: %v", err)
	}
	must(t, w.l.Settle(t.Context(), "h", 0))
	if w.alive("hung") {
		t.Error("a DEL goes on beyond its time")
	}
	must(t, w.l.Settle(t.Context(), "nobody", time.Hour))
	if left := w.l.Left(); len(left) != 0 {
		t.Errorf("left for %q", left)
	}
}

// What ran where the daemon no longer is, is found by the note.
func TestADaemonInAnotherCgroup(t *testing.T) {
	w := newWorld(t)
	own, err := monitor.OwnCgroup()
	must(t, err)
	old := filepath.Join(own, "berth-test-"+leakcheck.Name(t))
	must(t, os.Mkdir(old, 0o755))
	defer os.Remove(old)
	now := w.l.dir
	w.l.dir = old
	_, wait := w.run("ADD", "a", "echo; exec sleep 1000")
	go wait()
	must(t, os.WriteFile(w.dir+"/leash", []byte(old), 0o600))
	w.open()
	if left := w.l.Left(); len(left) != 1 || left[0] != "a" || w.l.dir != now {
		t.Errorf("left for %q; the cgroup is %s, want %s", left, w.l.dir, now)
	}
	must(t, w.l.Settle(t.Context(), "a", 0))
	for _, broken := range []func() error{
		func() error { return os.WriteFile(w.dir+"/leash", []byte("\x00no path"), 0o600) },
		func() error { return errors.Join(os.Remove(w.dir+"/leash"), syscall.Mkfifo(w.dir+"/leash", 0o600)) },
	} {
		must(t, broken())
		w.open()
	}
	if text, err := os.ReadFile(w.dir + "/leash"); err != nil || string(text) != now {
		t.Errorf("the note says %q, %v", text, err)
	}
}

// Without a Leash nothing is held.
func TestNoLeash(t *testing.T) {
	var l *Leash
	cgroup, end, err := l.Hold("ADD", "p")
	if cgroup != nil || err != nil {
		t.Errorf("%v, %v", cgroup, err)
	}
	end(true)
	must(t, l.Settle(t.Context(), "p", 0))
	if left := l.Left(); left != nil {
		t.Errorf("left: %q", left)
	}
	l.Close()
}
