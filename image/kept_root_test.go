package image

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/sandbox/leakcheck"
)

func keepBlobs(o *Options) { o.KeepLayerBlobs = true }

// keptImages is twoImages with layers large enough to be left by a broken pull, one of
// each compression.
func keptImages(t *testing.T, reg *registry) (base, one, two layerBlob) {
	t.Helper()
	base = gzipLayer(tarOf(t, file{name: "d/", mode: 0o700, uid: 5}, file{name: "d/base", body: strings.Repeat("base", 1<<19)}))
	one = zstdLayer(tarOf(t, file{name: "d/one", body: "settled on the base"}))
	two = plainLayer(tarOf(t, file{name: "two", body: "two"}))
	reg.push("one", "1", base, one)
	reg.push("two", "1", base, two)
	return base, one, two
}

// blobGets counts the requests for these layers.
func blobGets(reg *registry, layers ...layerBlob) (n int) {
	for _, l := range layers {
		n += reg.got("/blobs/" + digest.FromBytes(l.data).String())
	}
	return n
}

// comesBack waits for an image that is unpacked behind.
func comesBack(t *testing.T, s *Store, ref string) *Record {
	t.Helper()
	for end := time.Now().Add(leakcheck.Patience(10 * time.Second)); ; time.Sleep(10 * time.Millisecond) {
		if r, err := s.Resolve(ref); err == nil {
			return r
		} else if time.Now().After(end) {
			t.Fatalf("the image is not back: %v; %+v", err, s.Progress())
		}
	}
}

// TestKeptBlobsServePulls: a pull of an image whose layer is damaged fetches nothing
// of what is kept, and what is kept but spoilt is fetched, once.
func TestKeptBlobsServePulls(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	base, one, two := keptImages(t, reg)
	s := open(t, t.TempDir(), keepBlobs, reg)
	id := mustPull(t, s, reg.ref("one:1"))
	other := mustPull(t, s, reg.ref("two:1"))
	if !slices.Contains(s.images[other].LayerBlobs, digest.FromBytes(base.data)) {
		t.Error("the blob that came with another image is not the second one's")
	}
	damage := func() {
		t.Helper()
		for _, dir := range []string{layerWith(t, s, id, "d/base"), layerWith(t, s, id, "d/one")} {
			if err := os.Chmod(filepath.Join(dir, "d"), 0o777); err != nil {
				t.Fatal(err)
			}
		}
		if lines, _ := findings(t, s, false); len(lines) == 0 {
			t.Fatal("the damage is not found")
		}
	}
	damage()
	before := s.images[id].LayerBlobs
	mustPull(t, s, reg.ref("one:1"))
	mustPull(t, s, reg.ref("two:1"))
	sound(t, s)
	if n := blobGets(reg, base, one, two); n != 3 {
		t.Errorf("%d requests for three layers", n)
	}
	if p, _ := s.Fetched(); p != int64(len(base.data)+len(one.data)+len(two.data)) {
		t.Errorf("%d bytes count as fetched", p)
	}
	if !slices.Equal(s.images[id].LayerBlobs, before) {
		t.Errorf("kept are %q, were %q", s.images[id].LayerBlobs, before)
	}
	damage()
	path, _ := s.blobs.Path(digest.FromBytes(base.data))
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	mustPull(t, s, reg.ref("one:1"))
	mustPull(t, s, reg.ref("two:1"))
	sound(t, s) // the kept blob too
	if n := blobGets(reg, base); n != 2 {
		t.Errorf("the spoilt blob was asked for %d times more, want once", n-1)
	}
	if n := blobGets(reg, one, two); n != 2 {
		t.Errorf("whole blobs were asked for %d times more", n-2)
	}
	for _, r := range s.List() {
		if err := s.Remove(t.Context(), r.ID); err != nil {
			t.Error(err)
		}
	}
	empty(t, s)
}

// TestB39KeptBlobsAfterAPowerCut: an image whose layers a start drops, or does not
// find, is unpacked again from the kept blobs, with all its names and without a
// registry.
func TestB39KeptBlobsAfterAPowerCut(t *testing.T) {
	leakcheck.Start(t)
	for name, lose := range map[string]func(t *testing.T, dir string){
		"not marked": func(t *testing.T, dir string) {
			meta, err := readRecord(dir)
			if err == nil {
				meta.Durable = false
				err = (&disk{}).writeMeta(dir, meta)
			}
			if err != nil {
				t.Fatal(err)
			}
		},
		"gone": func(t *testing.T, dir string) {
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
		},
		"no record": func(t *testing.T, dir string) {
			if err := os.Truncate(filepath.Join(dir, "layer.json"), 0); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			reg := newRegistry(t)
			base, one, two := keptImages(t, reg)
			o := options(t, t.TempDir(), keepBlobs, reg)
			s, err := openOn(t.Context(), o, &disk{boot: "before"})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { s.Close() }()
			id := mustPull(t, s, reg.ref("one:1"))
			mustPull(t, s, reg.ref("two:1"))
			reg.push("one", "other", base, one) // the same image, another name
			mustPull(t, s, reg.ref("one:other"))
			if _, err := s.Pin(id, true); err != nil {
				t.Fatal(err)
			}
			calm(t, s)
			was := *s.images[id]
			dirs := slices.Clone(s.view.Load().byID[id].Layers)
			s.Close()
			for _, dir := range dirs {
				lose(t, filepath.Dir(dir))
			}
			reg.setHook(refuseAll)
			s, err = openOn(t.Context(), o, &disk{boot: "after"})
			if err != nil {
				t.Fatal(err)
			}
			comesBack(t, s, reg.ref("one:1"))
			r := comesBack(t, s, reg.ref("one:other"))
			comesBack(t, s, reg.ref("two:1"))
			if got := r.saved; r.ID != id || !r.Pinned || !slices.Equal(got.Tags, was.Tags) || !slices.Equal(got.Digests, was.Digests) || !slices.Equal(got.LayerBlobs, was.LayerBlobs) {
				t.Errorf("the image is %+v, was %+v", got, was)
			}
			s.flights.wait()
			sound(t, s)
			calm(t, s)
			if n := blobGets(reg, base, one, two); n != 3 {
				t.Errorf("%d requests for three layers", n)
			}
			if len(s.lost) != 0 || slices.Contains(ls(t, s.root), lostFile) {
				t.Errorf("the lost are %v still", s.lost)
			}
			s = reopen(t, s)
			if len(s.List()) != 2 {
				t.Errorf("%d images after a restart", len(s.List()))
			}
			sound(t, s)
		})
	}
}

// loseAll makes a store whose image has no layer any more, and opens it again. The
// blobs that are named are torn.
func loseAll(t *testing.T, reg *registry, torn ...layerBlob) (*Store, string) {
	t.Helper()
	o := options(t, t.TempDir(), keepBlobs, reg)
	s, err := openOn(t.Context(), o, &disk{boot: "before"})
	if err != nil {
		t.Fatal(err)
	}
	id := mustPull(t, s, reg.ref("one:1"))
	calm(t, s)
	s.Close()
	for _, n := range s.images[id].Layers {
		if err := os.RemoveAll(filepath.Join(s.root, "layers", fmt.Sprint(n))); err != nil {
			t.Fatal(err)
		}
	}
	for _, l := range torn {
		path, _ := s.blobs.Path(digest.FromBytes(l.data))
		if err := os.WriteFile(path, make([]byte, len(l.data)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	reg.setHook(refuseAll)
	if s, err = openOn(t.Context(), o, &disk{boot: "after"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	s.flights.wait()
	reg.setHook(nil)
	return s, id
}

// TestLostImageWithATornBlob: the image stays absent, and a pull fetches what is torn
// and nothing else. What is kept for that goes with a removal, also of that image.
func TestLostImageWithATornBlob(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	base, one, _ := keptImages(t, reg)
	s, id := loseAll(t, reg, one)
	if len(s.List()) != 0 || len(s.lost) != 1 || !s.lost[id].tried {
		t.Fatalf("listed are %v, lost %v", s.List(), s.lost)
	}
	mustPull(t, s, reg.ref("one:1"))
	if n := blobGets(reg, base); n != 1 {
		t.Errorf("the whole blob was asked for %d times", n)
	}
	if n := blobGets(reg, one); n != 2 {
		t.Errorf("the torn blob was asked for %d times, want 2", n)
	}
	sound(t, s)
	if len(s.lost) != 0 {
		t.Errorf("lost are %v", s.lost)
	}

	s, _ = loseAll(t, reg, one)
	if err := s.Remove(t.Context(), reg.ref("one:1")); err != nil || len(s.lost) != 0 {
		t.Errorf("removal of a lost image: %v, lost are %v", err, s.lost)
	}
	empty(t, s)

	s, _ = loseAll(t, reg, one)
	other := mustPull(t, s, reg.ref("two:1"))
	if err := s.Remove(t.Context(), other); err != nil || len(s.lost) != 0 {
		t.Errorf("removal of another image: %v, lost are %v", err, s.lost)
	}
	empty(t, s)
}
