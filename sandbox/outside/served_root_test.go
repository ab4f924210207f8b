package outside

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
	"berth/sandbox/outside/hung"
)

// Files and trees come and go whole, and nothing that is there is replaced.
func TestFetchAndDeliver(t *testing.T) {
	l := looker(t, leakcheck.Patience(10*time.Second))
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	large := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	err := errors.Join(os.MkdirAll(at("tree/containers/0"), 0o755), os.WriteFile(at("tree/pod.json"), []byte("{}"), 0o600),
		os.WriteFile(at("tree/containers/0/diff"), large, 0o600), os.Symlink("/etc/passwd", at("tree/link")), unix.Mkfifo(at("tree/fifo"), 0o600),
		os.Symlink("tree", at("way")), os.Mkdir(at("empty"), 0o755))
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if err := l.Fetch(ctx, at("way"), at("own")); err != nil {
		t.Fatal(err)
	}
	if err := l.Deliver(ctx, at("own"), at("empty")); err != nil {
		t.Fatal(err)
	}
	for _, tree := range []string{"own", "empty"} {
		if data, err := os.ReadFile(at(tree + "/containers/0/diff")); err != nil || !bytes.Equal(data, large) {
			t.Errorf("%s: %d bytes, %v", tree, len(data), err)
		}
		if list, err := os.ReadDir(at(tree)); err != nil || len(list) != 2 {
			t.Errorf("%s: %v, %v; want no link and no FIFO", tree, list, err)
		}
	}
	if err := l.Deliver(ctx, at("own/containers/0/diff"), at("file")); err != nil {
		t.Fatal(err)
	}
	if err := l.Deliver(ctx, at("own/pod.json"), at("file")); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a file that is there: %v", err)
	}
	if data, err := os.ReadFile(at("file")); err != nil || !bytes.Equal(data, large) {
		t.Errorf("the file has %d bytes, %v", len(data), err)
	}
	if err := l.Fetch(ctx, at("tree/fifo"), at("other")); err == nil {
		t.Error("a FIFO is fetched")
	}
	if rest, _ := filepath.Glob(at("*.partial")); rest != nil {
		t.Errorf("left: %v", rest)
	}
	if err := errors.Join(l.Remove(ctx, at("empty")), l.Remove(ctx, at("empty"))); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(at("empty")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("removed: %v", err)
	}
	if err := l.Answer(ctx, "", at("none"), at("tree"), at("file"), "/dev"); err != nil {
		t.Error(err)
	}
}

// What gets on is not given up, however long it takes in all.
func TestSignsOfLife(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skipf("skipped: setting labels needs root, runs as uid %d", os.Geteuid())
	}
	limit := 2 * time.Second
	l := looker(t, limit)
	dir := t.TempDir()
	fifo := filepath.Join(dir, "slow")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	// The daemon's own end of a delivery is a pipe that is filled by and by.
	done := make(chan error, 1)
	go func() { done <- l.Deliver(t.Context(), fifo, filepath.Join(dir, "out")) }()
	w, err := os.OpenFile(fifo, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for time.Since(began) < 2*limit {
		if _, err := w.WriteString("more"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(limit / 8)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A tree is labelled whole, links themselves and not what they lead to.
func TestRelabel(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skipf("skipped: setting labels needs root, runs as uid %d", os.Geteuid())
	}
	l := looker(t, leakcheck.Patience(10*time.Second))
	dir := t.TempDir()
	top, other := filepath.Join(dir, "top"), filepath.Join(dir, "other")
	err := errors.Join(os.MkdirAll(filepath.Join(top, "a/b"), 0o755), os.WriteFile(filepath.Join(top, "a/b/file"), nil, 0o600),
		os.WriteFile(other, nil, 0o600), os.Symlink(other, filepath.Join(top, "link")))
	if err != nil {
		t.Fatal(err)
	}
	const label = "system_u:object_r:container_file_t:s0:c1,c2"
	if err := l.Relabel(t.Context(), top, label); err != nil {
		t.Fatal(err)
	}
	get := func(path string) string {
		buf := make([]byte, 256)
		n, err := unix.Lgetxattr(path, "security.selinux", buf)
		if err != nil {
			return ""
		}
		return strings.TrimRight(string(buf[:n]), "\x00")
	}
	for _, path := range []string{top, filepath.Join(top, "a/b"), filepath.Join(top, "a/b/file"), filepath.Join(top, "link")} {
		if got := get(path); got != label {
			t.Errorf("%s: %q", path, got)
		}
	}
	if got := get(other); got == label {
		t.Error("what a link leads to is labelled")
	}
	if err := l.Relabel(t.Context(), filepath.Join(dir, "none"), label); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing: %v", err)
	}
}

// Each thing that is done at a path ends in its time where nothing answers, with the
// key of that time; and a filesystem that somebody serves is told from the node's own.
func TestHungServedRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skipf("skipped: mounting needs root, runs as uid %d", os.Geteuid())
	}
	l := looker(t, time.Second)
	l.o.LimitKey = "some.key"
	dir := t.TempDir()
	at := filepath.Join(dir, "hung")
	if err := os.Mkdir(at, 0o755); err != nil {
		t.Fatal(err)
	}
	hangs, err := hung.Mount(at)
	if errors.Is(err, hung.ErrNoFUSE) {
		t.Skipf("skipped: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = hangs.Release() })
	ctx, file, own := t.Context(), filepath.Join(at, hung.File), filepath.Join(dir, "own")
	if err := l.Fetch(ctx, file, own); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(own); err != nil || string(data) != hung.Text {
		t.Errorf("fetched %q, %v", data, err)
	}
	for path, want := range map[string]bool{file: true, filepath.Join(at, "new"): true, own: false, filepath.Join(dir, "new"): false} {
		if f, err := l.For(ctx).Find(path); err != nil || f.Served != want {
			t.Errorf("%s: %+v, %v", path, f, err)
		}
	}
	hangs.Hang()
	for name, err := range map[string]error{
		"answer":  l.Answer(ctx, own, at),
		"fetch":   l.Fetch(ctx, file, filepath.Join(dir, "other")),
		"deliver": l.Deliver(ctx, own, filepath.Join(at, "new")),
		"relabel": l.Relabel(ctx, filepath.Join(at, "tree"), "label"),
		"remove":  l.Remove(ctx, filepath.Join(at, "gone")),
	} {
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "path "+at) || !strings.Contains(err.Error(), "does not answer") || !strings.Contains(err.Error(), "(some.key)") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := hangs.Release(); err != nil {
		t.Error(err)
	}
}
