package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/sandbox/leakcheck"
)

// reopen closes a store and opens it again, as after a restart.
func reopen(t *testing.T, s *Store) *Store {
	t.Helper()
	s.Close()
	again, err := Open(context.Background(), *s.options())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { again.Close() })
	return again
}

// calm waits until nothing goes on behind.
func calm(t *testing.T, s *Store) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	s.trash.wait(ctx)
	if err := s.durable.sync(); err != nil {
		t.Fatal(err)
	}
	if ctx.Err() != nil {
		t.Fatal("the trash is not emptied")
	}
}

func TestUsageEqualsDu(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	var files []file
	for i := range 300 {
		files = append(files, file{name: fmt.Sprintf("d%d/f%d", i%7, i), body: strings.Repeat("x", i*97)})
	}
	files = append(files, file{name: "link", kind: '1', link: "d1/f1"}, file{name: "long", kind: '2', link: strings.Repeat("s", 200)})
	base := gzipLayer(tarOf(t, files...))
	reg.push("a", "1", base, gzipLayer(tarOf(t, file{name: "a"})))
	reg.push("b", "1", base, gzipLayer(tarOf(t, file{name: "b", body: strings.Repeat("b", 1<<20)})))
	s := open(t, t.TempDir(), nil, reg)
	check := func(s *Store, when string) {
		t.Helper()
		calm(t, s)
		for flag, got := range map[string]uint64{"--block-size=1": s.Usage().Bytes, "--inodes": s.Usage().Inodes} {
			out, err := exec.Command("du", "-s", flag, s.root).Output()
			for end := time.Now().Add(leakcheck.Patience(10 * time.Second)); err != nil && time.Now().Before(end); {
				out, err = exec.Command("du", "-s", flag, s.root).Output() // a round of syncing took a file away meanwhile
			}
			if err != nil {
				t.Fatal(err)
			}
			if want := strings.Fields(string(out))[0]; want != fmt.Sprint(got) {
				t.Errorf("%s: du %s says %s, Usage %d", when, flag, want, got)
			}
		}
	}
	check(s, "empty")
	mustPull(t, s, reg.ref("a:1"))
	check(s, "one image")
	id := mustPull(t, s, reg.ref("b:1"))
	check(s, "two images")
	if r, _ := s.Resolve(id); r.Size < 1<<20 || r.Size > s.Usage().Bytes {
		t.Errorf("size %d of %d", r.Size, s.Usage().Bytes)
	}
	reg.pushArtifact("c", part{"d/x", strings.Repeat("x", 1<<20), ""}, part{"y", strings.Repeat("x", 1<<20), ""}, part{"z", "", ""})
	mustPull(t, s, reg.ref("c:1"))
	check(s, "an artifact too")
	s = reopen(t, s)
	check(s, "after a restart")
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	check(s, "after a removal")
}

func TestHeldLayersSurviveRemoval(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("app", "1", gzipLayer(tarOf(t, file{name: "f", body: "x"})))
	s := open(t, t.TempDir(), nil, reg)
	id := mustPull(t, s, reg.ref("app:1"))
	r, err := s.Resolve(id)
	if err != nil {
		t.Fatal(err)
	}
	there := func() bool {
		_, err := os.Stat(filepath.Join(r.Layers[0], "f"))
		return err == nil
	}
	s.Hold(id, "one")
	s.Hold(id, "one")
	s.Hold(id, "two")
	s.Hold("sha256:unknown", "two")
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Resolve(id); !errors.Is(err, ErrNotFound) || len(s.List()) != 0 {
		t.Errorf("a removed image is visible: %v", err)
	}
	s.Release("one")
	s.Release("one")
	if !there() {
		t.Fatal("the layer is gone while a container uses it")
	}
	// A restart: the caller repeats its holds, then sweeps.
	s = reopen(t, s)
	s.Hold(id, "two")
	if err := s.Sweep(); err != nil || !there() {
		t.Fatalf("after a restart: %v, there %v", err, there())
	}
	// Pulled again while it is held: the same layers, visible again.
	before := reg.got("/blobs/")
	mustPull(t, s, reg.ref("app:1"))
	if n := reg.got("/blobs/") - before; n != 1 {
		t.Errorf("%d blobs fetched again, want the config only", n)
	}
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	s.Release("two")
	empty(t, s)
	if there() {
		t.Error("the layer stays after the last release")
	}
}

// What was resolved before an image was removed and pulled again, or repaired,
// has other layers than those that are held.
func TestHoldTellsTheLayersOfNow(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("app", "1", gzipLayer(tarOf(t, file{name: "f", body: "x"})))
	for name, change := range map[string]func(s *Store, r *Record){
		"pulled again": func(s *Store, r *Record) {
			if err := s.Remove(t.Context(), r.ID); err != nil {
				t.Fatal(err)
			}
			mustPull(t, s, reg.ref("app:1"))
		},
		"repaired": func(s *Store, r *Record) {
			if err := os.Truncate(filepath.Join(r.Layers[0], "f"), 0); err != nil {
				t.Fatal(err)
			}
			if _, report := findings(t, s, true); !report.Repairs[r.ID].Done {
				t.Fatalf("%+v", report.Repairs)
			}
		},
	} {
		s := open(t, t.TempDir(), nil, reg)
		found, err := s.Resolve(mustPull(t, s, reg.ref("app:1")))
		if err != nil {
			t.Fatal(err)
		}
		change(s, found)
		calm(t, s)
		held := s.Hold(found.ID, "container")
		if held == nil || held.Layers[0] == found.Layers[0] {
			t.Fatalf("%s: held is %+v, found was %+v", name, held, found)
		}
		if err := s.Remove(t.Context(), found.ID); err != nil {
			t.Fatal(err)
		}
		if data, err := os.ReadFile(filepath.Join(held.Layers[0], "f")); err != nil || string(data) != "x" {
			t.Errorf("%s: the layer that is held has %q, %v", name, data, err)
		}
		s.Close()
	}
}

func TestHoldsAreRepeatedAfterARestartOrEnd(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("app", "1", gzipLayer(tarOf(t, file{name: "f", body: "x"})))
	s := open(t, t.TempDir(), nil, reg)
	id := mustPull(t, s, reg.ref("app:1"))
	if s.Hold(id, "three") == nil || s.Hold("sha256:unknown", "three") != nil {
		t.Error("Hold does not say whether it holds")
	}
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s)
	if err := s.Sweep(); err != nil {
		t.Fatal(err)
	}
	empty(t, s)
}

func TestKeepLayerBlobs(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	l := zstdLayer(tarOf(t, file{name: "f", body: "x"}))
	reg.push("a", "1", l)
	s := open(t, t.TempDir(), func(o *Options) { o.KeepLayerBlobs = true }, reg)
	id := mustPull(t, s, reg.ref("a:1"))
	kept := func() bool {
		return slices.ContainsFunc(ls(t, filepath.Join(s.root, "blobs/sha256")), func(n string) bool {
			data, _ := os.ReadFile(filepath.Join(s.root, "blobs/sha256", n))
			return bytes.Equal(data, l.data)
		})
	}
	if !kept() {
		t.Error("the layer is not kept as it was fetched")
	}
	s = reopen(t, s)
	if !kept() {
		t.Error("the kept layer is gone after a restart")
	}
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	empty(t, s)
}

func TestResolve(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	s := open(t, t.TempDir(), nil, reg)
	path, ids := ociArchive(t, plainLayer, "busybox:latest", "docker.io/other/tool:2")
	if _, err := s.Import(t.Context(), ImportRequest{File: path}); err != nil {
		t.Fatal(err)
	}
	for ref, id := range map[string]string{
		"busybox": ids[0], "busybox:latest": ids[0], "library/busybox": ids[0], "docker.io/library/busybox:latest": ids[0],
		"index.docker.io/busybox": ids[0], "other/tool:2": ids[1], ids[1]: ids[1], ids[1][7:]: ids[1], ids[1][:19]: ids[1],
	} {
		if r, err := s.Resolve(ref); err != nil || r.ID != id {
			t.Errorf("resolve %q: %v %v", ref, r, err)
		}
	}
	for ref, want := range map[string]error{
		"other/tool": ErrNotFound, "busybox:2": ErrNotFound, strings.Repeat("0", 64): ErrNotFound, "sha256:" + strings.Repeat("0", 64): ErrNotFound,
		"": ErrInvalidReference, "UPPER/case": ErrInvalidReference, "a b": ErrInvalidReference, "x@sha256:12": ErrInvalidReference,
	} {
		if _, err := s.Resolve(ref); !errors.Is(err, want) {
			t.Errorf("resolve %q: %v, want %v", ref, err, want)
		}
		if _, err := s.Pull(t.Context(), PullRequest{Reference: ref}); want == ErrInvalidReference && !errors.Is(err, want) {
			t.Errorf("pull %q: %v", ref, err)
		}
	}
}

func TestUnavailableAndMissing(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	gone := newRegistry(t)
	gone.host = "127.0.0.1:1"
	s := open(t, t.TempDir(), nil, reg, gone)
	status := func(code int) {
		reg.setHook(func(w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(code)
			return true
		})
	}
	for name, test := range map[string]struct {
		ref  string
		code int
		want error
	}{
		"refused":   {gone.ref("a:1"), 0, ErrRegistryUnavailable},
		"missing":   {reg.ref("a:1"), 0, ErrNotFound},
		"500":       {reg.ref("a:1"), 500, ErrRegistryUnavailable},
		"503":       {reg.ref("a:1"), 503, ErrRegistryUnavailable},
		"403":       {reg.ref("a:1"), 403, ErrUnauthorized},
		"plain 404": {reg.ref("a:1"), 404, ErrNotFound},
	} {
		reg.setHook(nil)
		if test.code != 0 {
			status(test.code)
		}
		_, err := s.Pull(t.Context(), PullRequest{Reference: test.ref})
		if !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
	}
	empty(t, s)
}

// TestPullsAndRemovalsAtTheSameTime lets images that share layers come and go.
func TestPullsAndRemovalsAtTheSameTime(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	var shared []layerBlob
	for i := range 4 {
		shared = append(shared, gzipLayer(tarOf(t, file{name: fmt.Sprintf("d%d/f", i), body: "x"}, file{name: fmt.Sprintf("s%d", i)})))
	}
	for i := range 4 {
		reg.push(fmt.Sprintf("app%d", i), "1", append(slices.Clone(shared[i:]), shared[:i]...)...)
	}
	s := open(t, t.TempDir(), nil, reg)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			ref := reg.ref(fmt.Sprintf("app%d:1", i%4))
			for n := range 12 {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				if n%3 == 2 {
					ctx, cancel = context.WithTimeout(t.Context(), 5*time.Millisecond)
				}
				id, err := s.Pull(ctx, PullRequest{Reference: ref})
				cancel()
				if err != nil {
					if n%3 != 2 || !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("pull: %v", err)
					}
					continue
				}
				holder := fmt.Sprint(i)
				if r := s.Hold(id, holder); r != nil {
					for _, dir := range r.Layers {
						if _, err := os.Stat(dir); err != nil {
							t.Errorf("a layer that is held: %v", err)
						}
					}
					if len(r.Layers) != 4 {
						t.Errorf("%d layers", len(r.Layers))
					}
				}
				if err := s.Remove(t.Context(), id); err != nil && !errors.Is(err, ErrNotFound) {
					t.Errorf("remove: %v", err)
				}
				s.Release(holder)
			}
		})
	}
	wg.Wait()
	s.flights.wait()
	for _, r := range s.List() {
		if err := s.Remove(t.Context(), r.ID); err != nil {
			t.Error(err)
		}
	}
	empty(t, s)
}
