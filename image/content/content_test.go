package content

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/go-digest"
)

func TestBlobs(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	data := []byte("blob")
	d := digest.FromBytes(data)
	if _, err := s.Get(d); !errors.Is(err, ErrNotFound) {
		t.Errorf("before: %v", err)
	}
	for range 2 {
		if err := s.Put(d, data); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := s.Get(d); err != nil || string(got) != "blob" {
		t.Errorf("get: %q %v", got, err)
	}
	if err := s.Put(d, []byte("other")); !errors.Is(err, ErrCorrupt) {
		t.Errorf("put of other bytes: %v", err)
	}
	size := s.Usage()
	s.Drop(nil)
	if s.Size(d) != 0 || s.Usage() == size {
		t.Error("a dropped blob still counts")
	}
	if strays, err := s.Strays(nil); err != nil || len(strays) != 0 {
		t.Errorf("a dropped blob is a stray: %q %v", strays, err)
	}
	if _, err := s.Get(d); !errors.Is(err, ErrNotFound) || s.Has(d) {
		t.Errorf("a dropped blob is given out: %v", err)
	}
	bury(t, s, d)
	if _, err := s.Get(d); !errors.Is(err, ErrNotFound) {
		t.Errorf("after: %v", err)
	}
}

// bury checks that Bury gives the files of these blobs, and deletes them.
func bury(t *testing.T, s *Store, want ...digest.Digest) {
	t.Helper()
	n := 0
	s.Bury(func(path string) {
		n++
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	})
	if n != len(want) {
		t.Errorf("%d blobs were buried, want %q", n, want)
	}
	for _, d := range want {
		if path, _ := s.Path(d); exists(path) {
			t.Errorf("%s is there still", d)
		}
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// A pull may want a blob again before its file was deleted.
func TestDroppedBlobComesBack(t *testing.T) {
	for _, text := range []string{"put", "adopted"} {
		s, err := Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		data, d := []byte(text), digest.FromString(text)
		if err := s.Put(d, data); err != nil {
			t.Fatal(err)
		}
		before := s.Usage()
		s.Drop(nil)
		if text == "put" {
			err = s.Put(d, data)
		} else {
			file := filepath.Join(s.dir, "new")
			if err := os.WriteFile(file, data, 0o600); err != nil {
				t.Fatal(err)
			}
			err = s.Adopt(d, file)
		}
		if err != nil {
			t.Fatal(err)
		}
		bury(t, s)
		if got, err := s.Get(d); err != nil || string(got) != text || s.Usage() != before {
			t.Errorf("%s again: %q %v, usage %v, want %v", text, got, err, s.Usage(), before)
		}
	}
}

func TestTornBlobIsKnownAndReplaced(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	d := digest.FromString("whole")
	path, err := s.Path(d)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil { // as after a power cut
		t.Fatal(err)
	}
	if _, err := s.Get(d); !errors.Is(err, ErrCorrupt) {
		t.Errorf("get: %v", err)
	}
	if err := s.Put(d, []byte("whole")); err != nil {
		t.Error(err)
	}
	if got, err := s.Get(d); err != nil || string(got) != "whole" {
		t.Errorf("get: %q %v", got, err)
	}
}

func TestHostileDigests(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []digest.Digest{"", "sha256:", "sha256:../../x", "../x", "sha512:" + digest.Digest(make([]byte, 128))} {
		if _, err := s.Path(d); err == nil {
			t.Errorf("%q has a path", d)
		}
		if err := s.Put(d, nil); err == nil {
			t.Errorf("%q was stored", d)
		}
	}
}

func TestSweepAndAdopt(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	keep, drop := digest.FromString("keep"), digest.FromString("drop")
	file := filepath.Join(dir, "staged")
	if err := os.WriteFile(file, []byte("keep"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Adopt(keep, file); err != nil {
		t.Fatal(err)
	}
	if err := s.Put(drop, []byte("drop")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "sha256", ".new-1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Sweep(map[digest.Digest]bool{keep: true}); err != nil {
		t.Fatal(err)
	}
	list, err := os.ReadDir(filepath.Join(dir, "sha256"))
	if err != nil || len(list) != 1 || list[0].Name() != keep.Encoded() {
		t.Errorf("left: %v %v", list, err)
	}
}
