package outside

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
	"berth/sandbox/outside/hung"
	"berth/sandbox/regular"
)

// The test's own program serves the looks.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "look" {
		if err := Serve(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func looker(t *testing.T, limit time.Duration) *Looker {
	t.Helper()
	if os.Geteuid() == 0 {
		leakcheck.Start(t)
	}
	l := New(Options{Command: []string{os.Args[0], "look"}, Limit: limit})
	t.Cleanup(l.Close)
	return l
}

// A Looker answers as one who looks himself.
func TestLooksAgree(t *testing.T) {
	l := looker(t, leakcheck.Patience(10*time.Second))
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	err = errors.Join(os.WriteFile(at("file"), []byte("content"), 0o640), os.Symlink("file", at("link")), os.Symlink("nowhere", at("dangling")),
		os.Symlink("circle", at("circle")), unix.Mkfifo(at("fifo"), 0o600), os.Mkdir(at("dir"), 0o700))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{at("file"), at("link"), at("dangling"), at("circle"), at("fifo"), at("dir"), at("none"), at("dir/a/b"), at("file/x"), at("dangling/x"),
		"/dev/null", at(strings.Repeat("n", 300))} {
		want, wantErr := Here{}.Find(path)
		got, err := l.For(t.Context()).Find(path)
		if got != want || fmt.Sprint(err) != fmt.Sprint(wantErr) {
			t.Errorf("%s: %+v, %v; want %+v, %v", path, got, err, want, wantErr)
		}
		for _, errno := range []unix.Errno{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.ENAMETOOLONG} {
			if errors.Is(err, errno) != errors.Is(wantErr, errno) {
				t.Errorf("%s: %v is %v: %v", path, err, errno, errors.Is(err, errno))
			}
		}
	}
	host := l.For(t.Context())
	if data, err := host.Read(at("link"), 10); string(data) != "content" || err != nil {
		t.Errorf("read %q, %v", data, err)
	}
	if _, err := host.Read(at("fifo"), 10); !errors.Is(err, regular.ErrNot) {
		t.Errorf("a FIFO: %v", err)
	}
	if _, err := host.Read(at("none"), 10); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("nothing: %v", err)
	}
	if err := host.MakeDir(at("made/below")); err != nil {
		t.Error(err)
	}
	if err := host.MakeDir(at("file/below")); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("below a file: %v", err)
	}
	list, err := host.Devices("/dev", []string{"pts", "shm", "mqueue"})
	want, werr := Here{}.Devices("/dev", []string{"pts", "shm", "mqueue"})
	if err != nil || werr != nil || len(list) != len(want) {
		t.Errorf("%d devices, %v; want %d, %v", len(list), err, len(want), werr)
	}
}

// Directories of a log lead through no symlink below the node's own.
func TestLogs(t *testing.T) {
	host := looker(t, leakcheck.Patience(10*time.Second)).For(t.Context())
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	err = errors.Join(os.MkdirAll(at("logs/pod"), 0o755), os.Symlink("logs", at("way")), os.Symlink(dir, at("logs/pod/out")),
		unix.Mkfifo(at("logs/pod/fifo"), 0o600), os.Symlink("/etc/passwd", at("logs/pod/link")))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{"0.log": "logs/pod/0.log", "c/0.log": "logs/pod/c/0.log"} {
		got, err := host.MakeLog(at("way/pod"), path)
		if err != nil || got != at(want) {
			t.Errorf("%s: %s, %v", path, got, err)
		}
	}
	if got, err := host.MakeLog("/", at("root/0.log")[1:]); err != nil || got != at("root/0.log") {
		t.Errorf("in the node's root directory: %s, %v", got, err)
	}
	if info, err := os.Stat(at("logs/pod/c")); err != nil || !info.IsDir() {
		t.Errorf("the log's directory: %v", err)
	}
	for path, want := range map[string]error{"fifo": regular.ErrNot, "link": regular.ErrNot, "c": regular.ErrNot, "out/0.log": unix.ENOTDIR, "fifo/0.log": unix.ENOTDIR} {
		if _, err := host.MakeLog(at("way/pod"), path); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
}

// What does not answer fails by its name after its time and holds up nobody; of one
// path there is one look, however often it is asked about.
func TestAHungFilesystemRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skipf("skipped: mounting needs root, runs as uid %d", os.Geteuid())
	}
	began := make(chan int, 64)
	l := looker(t, 2*time.Second)
	l.o.Await = func(_ context.Context, what string, pid int) func() {
		if strings.Contains(what, "hung") {
			began <- pid
		}
		return func() {}
	}
	l.o.Whereabouts = func(pid int) string { return fmt.Sprintf("pid %d hangs", pid) }
	dir := filepath.Join(t.TempDir(), "hung")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	fs, err := hung.Mount(dir)
	if errors.Is(err, hung.ErrNoFUSE) {
		t.Skipf("skipped: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = fs.Release() })
	host := l.For(t.Context())
	file := filepath.Join(dir, hung.File)
	if data, err := host.Read(file, 100); err != nil || string(data) != hung.Text {
		t.Fatalf("while it answers: %q, %v", data, err)
	}
	<-began
	fs.Hang()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			_, err := host.Find(file)
			if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), file+" does not answer") {
				t.Errorf("got %v", err)
			}
		})
	}
	pid := <-began
	for pid == 0 { // one who waits for the look knows it before it has a process
		pid = <-began
	}
	if _, err := host.Find("/dev/null"); err != nil {
		t.Errorf("another path meanwhile: %v", err)
	}
	wg.Wait()
	for len(began) > 0 {
		if other := <-began; other != pid && other != 0 {
			t.Errorf("process %d hangs at the same path", other)
		}
	}
	if err := unix.Kill(pid, 0); err != nil {
		t.Errorf("process %d of the look is gone before the filesystem answers: %v", pid, err)
	}
	fs.Go()
	for end := time.Now().Add(leakcheck.Patience(10 * time.Second)); unix.Kill(pid, 0) == nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("process %d lives on", pid)
		}
	}
	if f, err := host.Find(file); err != nil || f.Path != file {
		t.Errorf("once it answers again: %+v, %v", f, err)
	}
	if err := fs.Release(); err != nil {
		t.Error(err)
	}
}
