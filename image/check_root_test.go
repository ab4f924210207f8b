package image

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"berth/sandbox/leakcheck"
)

// findings of a check, each as one line.
func findings(t *testing.T, s *Store, repair bool, refs ...string) (lines []string, r *Report) {
	t.Helper()
	r, err := s.Check(t.Context(), refs, repair)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range r.Findings {
		lines = append(lines, fmt.Sprintf("%d %s %s: %s", len(f.Images), f.Where, f.Path, f.Problem))
	}
	return lines, r
}

// sound fails when a check finds anything.
func sound(t *testing.T, s *Store) {
	t.Helper()
	if lines, _ := findings(t, s, false); len(lines) != 0 {
		t.Errorf("a check finds %q", lines)
	}
}

// twoImages pushes two images with the same base.
func twoImages(t *testing.T, reg *registry) {
	t.Helper()
	base := gzipLayer(tarOf(t, file{name: "d/", mode: 0o700, uid: 5}, file{name: "d/base", body: strings.Repeat("base", 9999)}, file{name: "l", kind: '1', link: "d/base"}))
	reg.push("one", "1", base, gzipLayer(tarOf(t, file{name: "d/one", body: "settled on the base"})))
	reg.push("two", "1", base, gzipLayer(tarOf(t, file{name: "two", body: "two"})))
}

// layerWith is the image's layer that holds a file.
func layerWith(t *testing.T, s *Store, ref, name string) string {
	t.Helper()
	r, err := s.Resolve(ref)
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range r.Layers {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			return dir
		}
	}
	t.Fatalf("no layer of %s has %s: %q", ref, name, r.Layers)
	return ""
}

// TestB39CheckAndRepair damages what is stored in every way; a check says which
// image and what, and a repair mends it from the registry. So does a plain pull
// after a check.
func TestB39CheckAndRepair(t *testing.T) {
	leakcheck.Start(t)
	for name, test := range map[string]struct {
		damage func(t *testing.T, s *Store, base, config string) error
		want   []string // parts of the findings
	}{
		"truncated": {func(t *testing.T, s *Store, base, _ string) error { return os.Truncate(base+"/d/base", 12) },
			[]string{"2 layers/N /d/base: modified at", "12 bytes, should have 39996", "2 layers/N /l: modified at"}},
		"altered": {func(t *testing.T, s *Store, base, _ string) error {
			return os.WriteFile(base+"/l", []byte(strings.Repeat("evil", 9999)), 0)
		}, []string{"/d/base: ", "other content", "/l: "}},
		"missing":   {func(t *testing.T, s *Store, base, _ string) error { return os.Remove(base + "/d/base") }, []string{"2 layers/N /d: modified", "2 layers/N /d/base: missing", "/l: 1 names, should have 2"}},
		"added":     {func(t *testing.T, s *Store, base, _ string) error { return os.Mkdir(base+"/x", 0o700) }, []string{"/x: not in the layer"}},
		"mode":      {func(t *testing.T, s *Store, base, _ string) error { return os.Chmod(base+"/d", 0o755) }, []string{"/d: mode 0755, should be 0700"}},
		"owner":     {func(t *testing.T, s *Store, base, _ string) error { return os.Chown(base+"/d", 0, 0) }, []string{"/d: owner 0:0, should be 5:0"}},
		"no diff":   {func(t *testing.T, s *Store, base, _ string) error { return os.RemoveAll(base) }, []string{"2 layers/N /: missing"}},
		"no list":   {func(t *testing.T, s *Store, base, _ string) error { return os.Remove(base + "/../files") }, []string{"2 layers/N : the layer's list of files cannot be read"}},
		"bad list":  {func(t *testing.T, s *Store, base, _ string) error { return os.Truncate(base+"/../files", 20) }, []string{"2 layers/N : the layer's list of files is damaged"}},
		"no record": {func(t *testing.T, s *Store, base, _ string) error { return os.Remove(base + "/../layer.json") }, []string{"2 layers/N : the layer's record cannot be read"}},
		"all gone":  {func(t *testing.T, s *Store, base, _ string) error { return os.RemoveAll(filepath.Dir(base)) }, []string{"2 layers/N : the layer's record cannot be read"}},
		"config":    {func(t *testing.T, s *Store, _, config string) error { return os.Truncate(config, 3) }, []string{"1 blobs/sha256/B : its content does not have its digest"}},
		"no config": {func(t *testing.T, s *Store, _, config string) error { return os.Remove(config) }, []string{"1 blobs/sha256/B : missing"}},
	} {
		t.Run(name, func(t *testing.T) {
			reg := newRegistry(t)
			twoImages(t, reg)
			s := open(t, t.TempDir(), nil, reg)
			one := mustPull(t, s, reg.ref("one:1"))
			mustPull(t, s, reg.ref("two:1"))
			sound(t, s)
			damage := func() {
				t.Helper()
				base := layerWith(t, s, one, "d/base")
				config, _ := s.blobs.Path(digest.Digest(one))
				if err := test.damage(t, s, base, config); err != nil {
					t.Fatal(err)
				}
				lines, _ := findings(t, s, false)
				text := strings.Join(lines, "\n")
				for _, want := range test.want {
					want = strings.Replace(want, "layers/N", "layers/"+filepath.Base(filepath.Dir(base)), 1)
					want = strings.Replace(want, "sha256/B", "sha256/"+filepath.Base(config), 1)
					if !strings.Contains(text, want) {
						t.Fatalf("%q is not among\n%s", want, text)
					}
				}
			}
			damage()
			_, r := findings(t, s, true)
			for id, did := range r.Repairs {
				if !did.Done || !strings.Contains(did.Message, "@sha256:") {
					t.Errorf("%s: %+v", id, did)
				}
			}
			sound(t, s)
			damage()
			mustPull(t, s, reg.ref("one:1"))
			mustPull(t, s, reg.ref("two:1"))
			sound(t, s)
			s = reopen(t, s)
			if len(s.List()) != 2 {
				t.Errorf("%d images after a restart", len(s.List()))
			}
			sound(t, s)
			for _, r := range s.List() {
				if err := s.Remove(t.Context(), r.ID); err != nil {
					t.Error(err)
				}
			}
			empty(t, s)
		})
	}
}

// TestRepairLeavesRunningContainersAlone: containers stay on the directories
// they are mounted on, new ones get the new, and the old go with their last
// container, also after a restart.
func TestRepairLeavesRunningContainersAlone(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	twoImages(t, reg)
	s := open(t, t.TempDir(), nil, reg)
	id := mustPull(t, s, reg.ref("one:1"))
	s.Hold(id, "runs")
	s.Hold(id, "ends")
	old, _ := s.Resolve(id)
	base := layerWith(t, s, id, "d/base")
	if err := os.Truncate(base+"/d/base", 1); err != nil {
		t.Fatal(err)
	}
	if _, r := findings(t, s, true); !r.Repairs[id].Done {
		t.Fatalf("%+v", r.Repairs)
	}
	sound(t, s)
	renewed, _ := s.Resolve(id)
	if slices.Contains(renewed.Layers, base) {
		t.Error("a new container would get the damaged layer")
	}
	s.Hold(id, "new")
	there := func(dirs []string) (n int) {
		for _, dir := range dirs {
			if _, err := os.Stat(dir); err == nil {
				n++
			}
		}
		return n
	}
	s.Release("ends")
	if there(old.Layers) != 2 {
		t.Error("the layer of a running container is gone")
	}
	s = reopen(t, s)
	s.Hold(id, "runs")
	s.Hold(id, "new")
	if err := s.Sweep(); err != nil {
		t.Fatal(err)
	}
	if there(old.Layers) != 2 || there(renewed.Layers) != 2 {
		t.Error("after a restart: a layer that a container is mounted on is gone")
	}
	sound(t, s)
	s.Release("runs")
	calm(t, s)
	if _, err := os.Stat(base); err == nil {
		t.Error("the damaged layer stays after its last container")
	}
	if n := len(ls(t, filepath.Join(s.root, "layers"))); n != 2 {
		t.Errorf("%d layers are stored, want 2", n)
	}
	s.Release("new")
	sound(t, s)
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	empty(t, s)
}

// TestRepairWithoutARegistry: kept blobs will do; else the message says what to
// do, and importing the archive again does it.
func TestRepairWithoutARegistry(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	twoImages(t, reg)
	away := func(t *testing.T) { reg.setHook(refuseAll) }
	spoil := func(t *testing.T, s *Store, id string) {
		t.Helper()
		r, err := s.Resolve(id)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(r.Layers[0], 0o777); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("kept blobs", func(t *testing.T) {
		s := open(t, t.TempDir(), func(o *Options) { o.KeepLayerBlobs = true }, reg)
		id := mustPull(t, s, reg.ref("one:1"))
		spoil(t, s, id)
		away(t)
		defer reg.setHook(nil)
		if _, r := findings(t, s, true); !r.Repairs[id].Done || !strings.Contains(r.Repairs[id].Message, "kept here") {
			t.Errorf("%+v", r.Repairs)
		}
		sound(t, s)
		// A damaged kept blob is of no use, and is dropped.
		spoil(t, s, id)
		for _, d := range s.images[id].LayerBlobs {
			path, _ := s.blobs.Path(d)
			if err := os.Truncate(path, 9); err != nil {
				t.Fatal(err)
			}
		}
		if _, r := findings(t, s, true); r.Repairs[id].Done {
			t.Errorf("%+v", r.Repairs)
		}
		reg.setHook(nil)
		if _, r := findings(t, s, true); !r.Repairs[id].Done {
			t.Errorf("%+v", r.Repairs)
		}
		sound(t, s)
		if err := s.Remove(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		empty(t, s)
	})
	t.Run("nothing kept", func(t *testing.T) {
		s := open(t, t.TempDir(), nil, reg)
		id := mustPull(t, s, reg.ref("one:1"))
		spoil(t, s, id)
		away(t)
		defer reg.setHook(nil)
		_, r := findings(t, s, true)
		if did := r.Repairs[id]; did.Done || !strings.Contains(did.Message, "pull "+reg.host+"/one@sha256:") || !strings.Contains(did.Message, "503") {
			t.Errorf("%+v", did)
		}
		if _, err := s.Resolve(id); err != nil {
			t.Errorf("the image is gone by a repair that failed: %v", err)
		}
	})
	t.Run("from an archive", func(t *testing.T) {
		s := open(t, t.TempDir(), nil, reg)
		path, ids := ociArchive(t, plainLayer, "busybox:latest", "docker.io/other/tool:2")
		if _, err := s.Import(t.Context(), ImportRequest{File: path}); err != nil {
			t.Fatal(err)
		}
		spoil(t, s, ids[0])
		reg.setHook(refuseAll)
		defer reg.setHook(nil)
		_, r := findings(t, s, false, ids[0])
		if len(r.Findings) == 0 {
			t.Fatal("no findings")
		}
		s = reopen(t, s) // what was found is not forgotten
		if _, err := s.Import(t.Context(), ImportRequest{File: path}); err != nil {
			t.Fatal(err)
		}
		sound(t, s)
	})
}

// TestCheckFindsStrays: what belongs to no image is found and removed, and an
// image can be checked by itself.
func TestCheckFindsStrays(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	twoImages(t, reg)
	s := open(t, t.TempDir(), nil, reg)
	one, two := mustPull(t, s, reg.ref("one:1")), mustPull(t, s, reg.ref("two:1"))
	for _, name := range []string{"layers/77/diff", "layers/odd", "blobs/sha256/" + strings.Repeat("a", 64), "blobs/sha256/.new-1"} {
		if err := os.MkdirAll(filepath.Join(s.root, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Truncate(filepath.Join(s.root, refsFile), 5); err != nil {
		t.Fatal(err)
	}
	want := []string{"0 refs.json : the records of images cannot be read: unexpected end of JSON input",
		"0 blobs/sha256/.new-1 : belongs to no image", "0 blobs/sha256/" + strings.Repeat("a", 64) + " : belongs to no image",
		"0 layers/77 : belongs to no image", "0 layers/odd : belongs to no image"}
	if lines, _ := findings(t, s, false); !slices.Equal(lines, want) {
		t.Errorf("found %q", lines)
	}
	if _, r := findings(t, s, true); !r.Repairs[""].Done {
		t.Errorf("%+v", r.Repairs)
	}
	sound(t, s)
	if err := os.Chmod(layerWith(t, s, two, "two"), 0o777); err != nil {
		t.Fatal(err)
	}
	if lines, r := findings(t, s, false, one); len(lines) != 0 || r.Images != 1 || r.Layers != 2 {
		t.Errorf("the other image: %q %+v", lines, r)
	}
	if lines, _ := findings(t, s, false, two, reg.ref("two:1")); len(lines) != 1 {
		t.Errorf("the damaged image: %q", lines)
	}
	for ref, want := range map[string]error{"nobody:1": ErrNotFound, "UPPER": ErrInvalidReference} {
		if _, err := s.Check(t.Context(), []string{one, ref}, false); !errors.Is(err, want) {
			t.Errorf("check %q: %v", ref, err)
		}
	}
}
