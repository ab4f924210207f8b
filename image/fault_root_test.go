package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/opencontainers/go-digest"

	"berth/sandbox/leakcheck"
)

func TestRestartKeepsWhatIsWhole(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("a", "1", gzipLayer(tarOf(t, file{name: "a", body: "a"})), gzipLayer(tarOf(t, file{name: "a2"})))
	reg.push("b", "1", gzipLayer(tarOf(t, file{name: "b", body: "b"})))
	dir := t.TempDir()
	s := open(t, dir, nil, reg)
	a, b := mustPull(t, s, reg.ref("a:1")), mustPull(t, s, reg.ref("b:1"))
	before, _ := json.Marshal(s.List())
	calm(t, s)
	for _, name := range []string{"staging/layer-1/diff/x", "layers/77/diff/x", "layers/odd/x", "blobs/sha256/.new-1", "trash/1/x"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s = reopen(t, s)
	if after, _ := json.Marshal(s.List()); !bytes.Equal(before, after) {
		t.Errorf("the list changed:\n%s\n%s", before, after)
	}
	calm(t, s)
	if got := ls(t, filepath.Join(dir, "layers")); len(got) != 3 {
		t.Errorf("layers: %q", got)
	}
	for _, sub := range []string{"staging", "trash"} {
		if got := ls(t, filepath.Join(dir, sub)); len(got) != 0 {
			t.Errorf("%s: %q", sub, got)
		}
	}
	// A torn manifest or layer takes its image away, and a pull brings it back.
	r, _ := s.Resolve(a)
	if err := os.RemoveAll(r.Layers[1]); err != nil {
		t.Fatal(err)
	}
	path, _ := s.blobs.Path(digest.Digest(b))
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s)
	if len(s.List()) != 0 {
		t.Errorf("%d broken images are listed", len(s.List()))
	}
	mustPull(t, s, reg.ref("a:1"))
	mustPull(t, s, reg.ref("b:1"))
}

// TestAfterAPowerCut makes the store believe that it is another boot.
func TestAfterAPowerCut(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("safe", "1", gzipLayer(tarOf(t, file{name: "a", body: "a"})))
	reg.push("late", "1", gzipLayer(tarOf(t, file{name: "b", body: "b"})))
	dir := t.TempDir()
	s := open(t, dir, nil, reg)
	safe := mustPull(t, s, reg.ref("safe:1"))
	calm(t, s)
	late := mustPull(t, s, reg.ref("late:1"))
	s.Close()
	// Whatever the last round did, take it back for the second image.
	for _, item := range ls(t, filepath.Join(dir, "layers")) {
		path := filepath.Join(dir, "layers", item)
		meta, err := readMeta(path)
		if err != nil {
			t.Fatal(err)
		}
		meta.Boot = "another boot"
		if _, err := os.Stat(filepath.Join(path, "diff", "b")); err == nil {
			meta.Durable = false
		} else if !meta.Durable {
			t.Error("the first image's layer is not marked durable after a sync")
		}
		if err := new(disk).writeMeta(path, meta); err != nil {
			t.Fatal(err)
		}
	}
	s, err := Open(t.Context(), *s.options())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Resolve(safe); err != nil {
		t.Errorf("the durable image: %v", err)
	}
	if _, err := s.Resolve(late); !errors.Is(err, ErrNotFound) {
		t.Errorf("the image that was not durable: %v", err)
	}
	if got := mustPull(t, s, reg.ref("late:1")); got != late {
		t.Errorf("pulled again: %s", got)
	}
}

func TestTornRecords(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("a", "1", gzipLayer(tarOf(t, file{name: "a"})))
	for name, spoil := range map[string]func([]byte) []byte{
		"empty": func([]byte) []byte { return nil },
		"half":  func(b []byte) []byte { return b[:len(b)/2] },
		"bit":   func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
		"zeros": func(b []byte) []byte { return make([]byte, len(b)) },
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, t.TempDir(), nil, reg)
			id := mustPull(t, s, reg.ref("a:1"))
			calm(t, s)
			s.Close()
			path := filepath.Join(s.root, refsFile)
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			torn := spoil(data)
			if err := os.WriteFile(path, torn, 0o600); err != nil {
				t.Fatal(err)
			}
			s = reopen(t, s)
			if _, err := s.Resolve(id); err != nil {
				t.Errorf("the synced records were not used: %v", err)
			}
			aside := filepath.Join(s.root, brokenFile)
			if said := s.Recovered(); !strings.Contains(said, path+": ") || !strings.Contains(said, aside) || !strings.Contains(said, durableFile) {
				t.Errorf("said of the broken records: %q", said)
			}
			if kept, err := os.ReadFile(aside); err != nil || !bytes.Equal(kept, torn) {
				t.Errorf("what was broken is kept: %d bytes, %v", len(kept), err)
			}
			d, err := s.DiskUsage(t.Context())
			if err != nil || d.Unknown.Bytes != 0 {
				t.Errorf("what is kept counts as unknown: %+v, %v", d, err)
			}
			if s = reopen(t, s); s.Recovered() != "" {
				t.Errorf("said again: %q", s.Recovered())
			}
		})
	}
	s := open(t, t.TempDir(), nil, reg)
	s.Close()
	future := []byte(`{"version":99,"sum":"","images":{}}`)
	if err := os.WriteFile(filepath.Join(s.root, refsFile), future, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), *s.options()); err == nil || !strings.Contains(err.Error(), "version 99") {
		t.Errorf("records of a later version: %v", err)
	}
}

// No copy of the records can be read: the start is refused and no layer deleted,
// until a copy is put back or the operator moves them away.
func TestNoCopyOfTheRecords(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("a", "1", gzipLayer(tarOf(t, file{name: "a"})))
	s := open(t, t.TempDir(), nil, reg)
	id := mustPull(t, s, reg.ref("a:1"))
	calm(t, s)
	s.Close()
	refs, durable := filepath.Join(s.root, refsFile), filepath.Join(s.root, durableFile)
	data, err := os.ReadFile(refs)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{refs, durable} {
		if err := os.WriteFile(path, []byte("{broken"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		_, err := Open(t.Context(), *s.options())
		if err == nil || !strings.Contains(err.Error(), refs) || !strings.Contains(err.Error(), durable) || !strings.Contains(err.Error(), "move them all away") {
			t.Fatalf("start: %v", err)
		}
	}
	if err := os.WriteFile(durable, data, 0o600); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s)
	if _, err := s.Resolve(id); err != nil {
		t.Errorf("with a copy put back: %v", err)
	}
	sound(t, s)
	calm(t, s)
	s.Close()
	for _, path := range []string{refs, durable} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	if s = reopen(t, s); len(s.List()) != 0 || s.Recovered() != "" {
		t.Errorf("without records: %d images, %q", len(s.List()), s.Recovered())
	}
	empty(t, s)
}

// faulty fails the k-th change of the disk; once dead, all that follow too.
type faulty struct {
	mu   sync.Mutex
	left int
	err  error
	dead bool // everything after fails as well: the process was killed here
	hit  bool
}

func (f *faulty) check(op, path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left--
	if f.left == 0 || f.left < 0 && f.dead {
		f.hit = true
		return &os.PathError{Op: op, Path: path, Err: f.err}
	}
	return nil
}

// set starts counting anew and says whether a change has failed.
func (f *faulty) set(left int, dead bool) (hit bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left, f.dead = left, dead
	return f.hit
}

// TestFailingDisk lets every single change of the disk fail once in a pull and
// a removal, and after each the store is consistent, also after a restart.
func TestFailingDisk(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	top := gzipLayer(tarOf(t, file{name: "d/e", body: "x"})) // needs settling
	old := gzipLayer(tarOf(t, file{name: "old"}))
	reg.push("app", "old", old)
	reg.push("app", "new", old, gzipLayer(tarOf(t, file{name: "d/", mode: 0o700})), top)
	for _, dead := range []bool{false, true} {
		for k := 1; ; k++ {
			f := &faulty{err: syscall.EIO, dead: dead}
			if !failOnce(t, reg, f, k) {
				if k < 10 {
					t.Errorf("only %d changes were seen", k)
				}
				break
			}
			if t.Failed() {
				t.Fatalf("at change %d, killed: %v", k, dead)
			}
		}
	}
}

func failOnce(t *testing.T, reg *registry, f *faulty, k int) bool {
	t.Helper()
	dir := t.TempDir()
	f.set(1<<30, f.dead)
	s, err := openOn(t.Context(), options(t, dir, nil, reg), &disk{check: f.check, boot: bootID()})
	if err != nil {
		t.Fatal(err)
	}
	oldID := mustPull(t, s, reg.ref("app:old"))
	calm(t, s)
	f.set(k, f.dead)
	newID, pullErr := s.Pull(t.Context(), PullRequest{Reference: reg.ref("app:new")})
	removeErr := s.Remove(t.Context(), oldID)
	s.Close()
	hit := f.set(1<<30, false)
	s, err = Open(context.Background(), *s.options())
	if err != nil {
		t.Errorf("open after a failure: %v", err)
		return false
	}
	defer s.Close()
	got := map[string]bool{}
	for _, r := range s.List() {
		got[r.ID] = true
		for _, dir := range r.Layers {
			if len(ls(t, dir)) == 0 {
				t.Errorf("%s is empty", dir)
			}
		}
	}
	if pullErr == nil && !got[newID] {
		t.Error("an image that was pulled is gone")
	}
	if removeErr == nil && got[oldID] {
		t.Error("an image that was removed is back")
	}
	if removeErr != nil && !got[oldID] && !strings.Contains(removeErr.Error(), "records") {
		t.Errorf("the removal failed (%v) and the image is gone", removeErr)
	}
	mustPull(t, s, reg.ref("app:new"))
	mustPull(t, s, reg.ref("app:old"))
	for _, r := range s.List() {
		if err := s.Remove(t.Context(), r.ID); err != nil {
			t.Error(err)
		}
	}
	empty(t, s)
	return hit
}
