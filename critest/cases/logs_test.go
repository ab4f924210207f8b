package cases

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// piece is one line of a CRI log.
type piece struct {
	stream, tag string
	text        []byte
}

// readLog parses a container's log strictly.
func (e *env) readLog(id string) []piece {
	e.Helper()
	status := e.status(id)
	data, err := os.ReadFile(status.GetLogPath())
	if err != nil {
		e.Fatalf("read the log: %v", err)
	}
	if status.GetState() == cri.ContainerState_CONTAINER_RUNNING {
		data = data[:bytes.LastIndexByte(data, '\n')+1] // the last line may just be being written
	}
	if len(data) > 0 && data[len(data)-1] != '\n' {
		e.Errorf("the log does not end with a newline: %q", data[max(0, len(data)-80):])
	}
	var pieces []piece
	for line := range bytes.Lines(data) {
		f := bytes.SplitN(bytes.TrimSuffix(line, []byte("\n")), []byte(" "), 4)
		if len(f) != 4 {
			e.Fatalf("log line %q has not four parts", line)
		}
		if _, err := time.Parse(time.RFC3339Nano, string(f[0])); err != nil {
			e.Errorf("log line %.80q: %v", line, err)
		}
		p := piece{stream: string(f[1]), tag: string(f[2]), text: f[3]}
		if (p.tag != "P" && p.tag != "F") || (p.stream != "stdout" && p.stream != "stderr") {
			e.Fatalf("log line %.80q: bad stream or tag", line)
		}
		if len(p.text) > 16<<10 {
			e.Errorf("a log piece has %d bytes, more than 16 KiB", len(p.text))
		}
		pieces = append(pieces, p)
	}
	return pieces
}

// logs rebuilds both streams byte by byte.
func (e *env) logs(id string) (stdout, stderr string) {
	e.Helper()
	var streams = map[string]*strings.Builder{"stdout": {}, "stderr": {}}
	for _, p := range e.readLog(id) {
		streams[p.stream].Write(p.text)
		if p.tag == "F" {
			streams[p.stream].WriteByte('\n')
		}
	}
	return streams["stdout"].String(), streams["stderr"].String()
}

// B77: the log rebuilds the output, byte for byte, whatever the output is.
func TestB77LogsRebuildTheOutput(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	long := strings.Repeat("x", 1<<20)
	var lines strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&lines, "%d\n", i)
	}
	for name, c := range map[string]struct{ script, stdout, stderr string }{
		"unterminated":   {"printf abc", "abc", ""},
		"terminated":     {"printf 'abc\\n'", "abc\n", ""},
		"long-line":      {"dd if=/dev/zero bs=64k count=16 2>/dev/null | tr '\\0' x; echo", long + "\n", ""},
		"long-no-end":    {"dd if=/dev/zero bs=64k count=16 2>/dev/null | tr '\\0' x", long, ""},
		"odd-bytes":      {"printf 'a\\000b\\377\\n'", "a\x00b\xff\n", ""},
		"carriage":       {"printf 'a\\rb\\r\\n'", "a\rb\r\n", ""},
		"empty-lines":    {"echo; echo; printf ' \\n'", "\n\n \n", ""},
		"nothing":        {"true", "", ""},
		"slow-half-line": {"printf a; sleep 0.3; printf b; sleep 0.3; echo c", "abc\n", ""},
		"exact-limit":    {"dd if=/dev/zero bs=16384 count=1 2>/dev/null | tr '\\0' y; echo", strings.Repeat("y", 16<<10) + "\n", ""},
		"both-streams": {"i=0; while [ $i -lt 10000 ]; do echo $i; echo $i >&2; i=$((i+1)); done",
			lines.String(), lines.String()},
	} {
		id := e.startContainer(pod, command(name, c.script), config)
		if s := e.exited(id); s.GetExitCode() != 0 {
			t.Errorf("%s: exit code %d", name, s.GetExitCode())
		}
		stdout, stderr := e.logs(id)
		if stdout != c.stdout {
			t.Errorf("%s: stdout %s, want %s", name, digestOf(stdout), digestOf(c.stdout))
		}
		if stderr != c.stderr {
			t.Errorf("%s: stderr %s, want %s", name, digestOf(stderr), digestOf(c.stderr))
		}
		if name == "slow-half-line" {
			if p := e.readLog(id); len(p) != 1 || p[0].tag != "F" {
				t.Errorf("a slow line became %d pieces; want one, whole", len(p))
			}
		}
	}
}

// digestOf shortens an output for a message.
func digestOf(s string) string {
	if len(s) <= 60 {
		return fmt.Sprintf("%q", s)
	}
	return fmt.Sprintf("%d bytes, sha256 %.8x, ending %q", len(s), sha256.Sum256([]byte(s)), s[len(s)-30:])
}

// A log path that leads to something else than a file is refused at once; a FIFO
// that somebody has planted there holds nobody up.
func TestLogsThatAreNoFiles(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	if err := os.MkdirAll(config.GetLogDirectory()+"/dir", 0o755); err != nil {
		t.Fatal(err)
	}
	for name, make := range map[string]func(string) error{
		"fifo": func(path string) error { return syscall.Mkfifo(path, 0o644) },
		"dir":  func(string) error { return nil },
		"link": func(path string) error { return os.Symlink("/etc/passwd", path) },
	} {
		c := command("main-"+name, "true")
		c.LogPath = name
		if err := make(filepath.Join(config.GetLogDirectory(), name)); err != nil {
			t.Fatal(err)
		}
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		e.refused("a "+name+" for a log", err, codes.InvalidArgument, name)
	}
	e.removePod(pod)
}

// A pod that can write to the node's logs exchanges the directory of a container's
// log for a symlink, again and again while logs are opened: nothing is ever
// written where it leads. Symlinks above the pod's directory are the node's own.
func TestLogDirectoryExchangedForASymlink(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	away, real := filepath.Join(e.Dir, "away"), filepath.Join(e.Dir, "real")
	for _, err := range []error{os.Mkdir(away, 0o755), os.Mkdir(real, 0o755), os.Symlink(real, filepath.Join(e.Dir, "link"))} {
		if err != nil {
			t.Fatal(err)
		}
	}
	config := e.sandbox()
	config.LogDirectory = filepath.Join(e.Dir, "link", "pod")
	pod := e.run(config)
	c := command("first", "while :; do echo line; sleep 0.05; done")
	c.LogPath = "first/0.log"
	first := e.startContainer(pod, c, config)
	if got := e.status(first).GetLogPath(); got != filepath.Join(config.LogDirectory, "first/0.log") {
		t.Errorf("the log is said to be %s", got)
	}
	file := filepath.Join(real, "pod", "first", "0.log")
	e.eventually("the log has a line", func() bool { data, _ := os.ReadFile(file); return len(data) > 0 })
	other := filepath.Join(real, "pod", "other")
	if err := os.Symlink(away, other); err != nil {
		t.Fatal(err)
	}
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for folder := filepath.Join(real, "pod", "first"); ; {
			select {
			case <-done:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, folder, unix.AT_FDCWD, other, unix.RENAME_EXCHANGE)
			}
		}
	}()
	refused := 0
	for range 300 {
		if _, err := e.rt.ReopenContainerLog(e.ctx, &cri.ReopenContainerLogRequest{ContainerId: first}); err != nil {
			refused++
		}
	}
	for i := range 5 {
		c := command(fmt.Sprint("new", i), "echo hello")
		c.LogPath = fmt.Sprintf("first/%d.log", i+1)
		if res, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config}); err != nil {
			refused++
		} else if _, err := e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: res.GetContainerId()}); err != nil {
			t.Errorf("start: %v", err)
		}
	}
	close(done)
	<-stopped
	t.Logf("%d of 305 were refused", refused)
	if refused == 0 {
		t.Error("no log met the symlink")
	}
	if left, err := os.ReadDir(away); err != nil || len(left) != 0 {
		t.Errorf("where the symlink led is %v, %v", left, err)
	}
}

// A full log disk wedges nobody: the container runs to its end, and what is lost is
// said, in the daemon's log while it happens and in the container's status.
func TestFullLogDisk(t *testing.T) {
	e := start(t, node.Options{LogLevel: "info"})
	e.pull(images.Busybox)
	config := e.sandbox()
	if err := os.MkdirAll(config.LogDirectory, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", config.LogDirectory, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(config.LogDirectory, 0); err != nil {
			t.Error(err)
		}
	})
	pod := e.run(config)
	id := e.startContainer(pod, command("main", "seq 1000000; while [ ! -e /go ]; do sleep 0.05; done; exit 3"), config)
	e.eventually("the loss is in the daemon's log", func() bool {
		tail := e.LogTail(100)
		return strings.Contains(tail, id) && strings.Contains(tail, "no space left on device") && strings.Contains(tail, "output is dropped")
	})
	why := func() string { out, _ := e.berth("why", "--socket", e.Socket, id[:12]); return out }
	e.eventually("berth why tells of the loss", func() bool {
		return strings.Contains(why(), "output is dropped") && strings.Contains(why(), "no space left on device")
	})
	if err := e.Terminate(); err != nil {
		t.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	e.eventually("a new daemon tells of it too", func() bool { return strings.Contains(why(), "bytes of its output are not in "+config.LogDirectory) })
	if out := e.exec(id, "touch /go; echo well"); out != "well\n" {
		t.Errorf("an exec says %q", out)
	}
	s := e.exited(id)
	if s.GetExitCode() != 3 || s.GetReason() != "Error" || !strings.Contains(s.GetMessage(), "bytes of its output are in no log") {
		t.Errorf("code %d, reason %q, message %q; want 3, Error and the loss", s.GetExitCode(), s.GetReason(), s.GetMessage())
	}
	out, _ := e.logs(id)
	for i, line := range strings.Split(strings.TrimSuffix(out, "\n"), "\n") {
		if line != fmt.Sprint(i+1) && i < 100 {
			t.Fatalf("line %d of the log is %q", i, line)
		}
	}
	e.removePod(pod)
}
