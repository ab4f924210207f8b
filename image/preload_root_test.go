package image

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/sandbox/leakcheck"
)

// preloadAll is one run: what became of each file, by its path below the directory.
func preloadAll(t *testing.T, s *Store, dir string) map[string]Preloaded {
	t.Helper()
	var mu sync.Mutex
	done := map[string]Preloaded{}
	err := s.Preload(t.Context(), dir, nil, func(p Preloaded) {
		mu.Lock()
		defer mu.Unlock()
		done[strings.TrimPrefix(p.File, dir+"/")] = p
	})
	if err != nil {
		t.Fatal(err)
	}
	return done
}

// preloadDir has an archive of each kind and what is none.
func preloadDir(t *testing.T) string {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "pinned"), 0o700); err != nil {
		t.Fatal(err)
	}
	oci, _ := ociArchive(t, plainLayer, "a:1", "b:1")
	gz, _ := dockerArchive(t, gzipLayer, "c:1")
	zst, _ := ociArchive(t, zstdLayer, "d:1")
	for name, from := range map[string]string{"oci.tar": oci, "docker.tar.gz": gz, "pinned/oci.tar.zst": zst, ".half.tar": oci, "notes.txt": oci} {
		if err := os.Rename(copied(t, from), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "broken.tar"), []byte("broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func copied(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "copy")
	if err := os.WriteFile(out, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return out
}

// Every archive is imported once, also over restarts, whatever becomes of its
// images; one that changes is imported again; a broken one is tried each time.
func TestPreload(t *testing.T) {
	leakcheck.Start(t)
	dir := preloadDir(t)
	s := open(t, t.TempDir(), nil)
	if done := preloadAll(t, s, filepath.Join(dir, "none")); len(done) != 0 {
		t.Errorf("of no directory: %v", done)
	}
	done := preloadAll(t, s, dir)
	var names []string
	for file, p := range done {
		if (p.Err != nil) != (file == "broken.tar") || p.Pinned != strings.HasPrefix(file, "pinned/") || p.Took <= 0 {
			t.Errorf("%s: %+v", file, p)
		}
		names = append(names, p.Images...)
	}
	slices.Sort(names)
	if want := []string{"docker.io/library/a:1", "docker.io/library/b:1", "docker.io/library/c:1", "docker.io/library/d:1"}; len(done) != 4 || !slices.Equal(names, want) {
		t.Fatalf("%v, want %v of 4 files", done, want)
	}
	for _, r := range s.List() {
		if r.Pinned != (r.RepoTags[0] == "docker.io/library/d:1") {
			t.Errorf("%v is pinned: %v", r.RepoTags, r.Pinned)
		}
	}
	only := func(when string, want ...string) {
		t.Helper()
		var got []string
		for file := range preloadAll(t, s, dir) {
			if file != "broken.tar" {
				got = append(got, file)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: imported %v, want %v", when, got, want)
		}
	}
	only("again")
	if err := s.Remove(t.Context(), "c:1"); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s)
	only("restarted, an image removed")
	later := time.Now().Add(time.Minute)
	if err := os.Chtimes(filepath.Join(dir, "docker.tar.gz"), later, later); err != nil {
		t.Fatal(err)
	}
	only("a file changed", "docker.tar.gz")
	if _, err := s.Resolve("c:1"); err != nil {
		t.Error(err)
	}
	away := filepath.Join(t.TempDir(), "away")
	if err := os.Rename(filepath.Join(dir, "oci.tar"), away); err != nil {
		t.Fatal(err)
	}
	only("a file taken away")
	if err := os.Rename(away, filepath.Join(dir, "oci.tar")); err != nil {
		t.Fatal(err)
	}
	only("and put back", "oci.tar")
	if err := os.WriteFile(filepath.Join(s.root, preloadedFile), []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n := len(preloadAll(t, s, dir)); n != 4 {
		t.Errorf("without a record %d files are imported", n)
	}
}

// After a power cut a record counts only where what was imported is surely there.
func TestPreloadAfterAPowerCut(t *testing.T) {
	leakcheck.Start(t)
	dir := preloadDir(t)
	s := open(t, t.TempDir(), nil)
	preloadAll(t, s, dir)
	boots := func(id string) {
		s.Close()
		next, err := openOn(t.Context(), Options{Root: s.root}, &disk{boot: id})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { next.Close() })
		s = next
	}
	boots("next")
	if done := preloadAll(t, s, dir); len(done) != 1 || len(s.List()) != 4 {
		t.Errorf("after a sync %v are imported again, %d images are there", done, len(s.List()))
	}
	known := s.loadPreloads()
	for name, k := range known {
		k.Durable = false
		known[name] = k
	}
	if err := s.savePreloads(known); err != nil {
		t.Fatal(err)
	}
	if n := len(s.loadPreloads()); n != 0 {
		t.Errorf("%d records of another boot count without a sync", n)
	}
}

// A store that closes, or a caller that ends, ends a run; what was not done is not
// taken for done.
func TestPreloadThatIsBrokenOff(t *testing.T) {
	leakcheck.Start(t)
	dir := preloadDir(t)
	s := open(t, t.TempDir(), nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Preload(ctx, dir, nil, func(p Preloaded) { t.Errorf("%+v", p) }); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if done := preloadAll(t, s, dir); len(done) != 4 {
		t.Errorf("afterwards: %v", done)
	}
	file := filepath.Join(dir, "docker.tar.gz")
	if err := s.Preload(t.Context(), file, nil, nil); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("a file instead of a directory: %v", err)
	}
}
