package runc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci"
	"berth/oci/monitor"
)

// fifreeze and fithaw are requests of ioctl(2) that x/sys does not name.
const (
	fifreeze = 0xc0045877
	fithaw   = 0xc0045878
)

// disk mounts an ext4 that can be frozen: whoever writes to it then hangs in the
// kernel.
func (n *node) disk() (dir string, freeze, thaw func()) {
	n.t.Helper()
	image, dir := filepath.Join(n.dir, "disk.img"), filepath.Join(n.dir, "disk")
	if err := errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(image, nil, 0o600), os.Truncate(image, 32<<20)); err != nil {
		n.t.Fatal(err)
	}
	for _, argv := range [][]string{{"mkfs.ext4", "-q", "-F", image}, {"mount", "-o", "loop", image, dir}} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			n.t.Skipf("skipped: no ext4 on a loop device here: %s: %v: %s", argv[0], err, out)
		}
	}
	root, err := os.Open(dir)
	if err != nil {
		n.t.Fatal(err)
	}
	call := func(request uint) {
		if err := unix.IoctlSetInt(int(root.Fd()), request, 0); err != nil && err != unix.EINVAL {
			n.t.Error(err)
		}
	}
	n.t.Cleanup(func() {
		call(fithaw)
		_ = root.Close()
		n.eventually("the disk can be unmounted", func() bool { return unix.Unmount(dir, 0) == nil })
	})
	return dir, func() { call(fifreeze) }, func() { call(fithaw) }
}

const counts = "i=0; while [ $i -lt 40 ]; do echo line $i; i=$((i+1)); sleep 0.05; done; sleep 1000"

// hangingLog is a node whose client tells, and a container whose log hangs, which is
// known after 10 s.
func hangingLog(t *testing.T, i *installed) (n *node, s *said, b *box, thaw func()) {
	n = newNodeOf(t, i.path)
	_ = n.client.Close()
	s = &said{awaits: map[string]int{}}
	var err error
	if n.client, err = monitor.Open(t.Context(), monitor.Options{Binary: i.path, Socket: filepath.Join(n.dir, "monitor.sock"),
		OnTrouble: s.trouble, Await: s.await}); err != nil {
		t.Fatal(err)
	}
	n.runtime.monitor = n.client
	dir, freeze, thaw := n.disk()
	b = n.box(counts)
	b.log = filepath.Join(dir, "0.log")
	b.io.LogPath = b.log
	b.run()
	n.eventually("it logs", func() bool { info, err := os.Stat(b.log); return err == nil && info.Size() > 0 })
	freeze()
	n.eventually("the daemon knows that the log hangs", func() bool { return n.client.LogTrouble(b.id) != "" })
	return n, s, b, thaw
}

// A log that hangs holds up its container's output alone. The monitor is not renewed
// over it, and the refusal names container and path; a request to open it again is
// refused at once, as often as it comes. When it answers nothing is missing.
func TestLogThatHangs(t *testing.T) {
	i := newInstalled(t)
	n, s, b, thaw := hangingLog(t, i)
	defer thaw()
	want := fmt.Sprintf("container %s: the log %s has not answered for 1", b.id, b.log)
	if text := n.client.LogTrouble(b.id); !strings.HasPrefix(text, want) || !s.told(want) {
		t.Errorf("it is said %q, and in the log %q; want %q", text, s.troubles, want)
	}
	i.next()
	if _, err := n.client.Renew(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("renewal: %v, want %q in it", err, want)
	}
	for range 70 { // more than there may be requests at a time
		ctx, cancel := context.WithTimeout(t.Context(), slow(5*time.Second))
		if err := n.runtime.ReopenLog(ctx, b.id); err == nil || !strings.Contains(err.Error(), "has not answered") {
			t.Errorf("reopen: %v", err)
		}
		cancel()
	}
	other := n.box("echo hello; exit 3").run()
	if x := other.exit(); x.Code != 3 || other.output("stdout") != "hello\n" {
		t.Errorf("another container: %+v", x)
	}
	thaw()
	n.eventually("it is said that the log answers", func() bool { return s.told("answers again") && n.client.LogTrouble(b.id) == "" })
	n.allLines(b)
	n.renew()
}

// allLines waits until the log has all that counts writes.
func (n *node) allLines(b *box) {
	n.t.Helper()
	var want strings.Builder
	for i := range 40 {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	n.eventually("the log has every line", func() bool { return b.output("stdout") == want.String() })
}

// A monitor is killed while a log hangs: the thread that hangs keeps its sockets and its
// lock, so there is no other one until the log answers. Requests say so, with the pid.
func TestKilledMonitorWithALogThatHangs(t *testing.T) {
	i := newInstalled(t)
	n, s, b, thaw := hangingLog(t, i)
	defer thaw()
	other := n.box("sleep 1000").run()
	old := n.client.MonitorPID()
	if err := unix.Kill(old, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	requests, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { _ = n.client.Reopen(requests, "any") }()
	n.eventually("a request says for whom it waits", func() bool { return s.awaited("berth-monitor") == old })
	want := fmt.Sprintf("pid %d (berth-monitor) in state Z, a thread of it in state D", old)
	n.eventually("where the monitor is", func() bool { return strings.HasPrefix(monitor.Whereabouts(old), want) })
	thaw()
	n.eventually("there is another monitor", func() bool { pid := n.client.MonitorPID(); return pid != 0 && pid != old })
	if st := n.restore(b, other); st[b.id] != (oci.State{Running: true, Started: true}) || st[other.id] != st[b.id] {
		t.Errorf("the containers are %+v", st)
	}
	n.allLines(b)
}
