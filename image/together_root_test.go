package image

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

	"berth/image/layer"
	"berth/sandbox/leakcheck"
)

// Pulls, imports and removals of images that share layers, all at the same time
// for some seconds: then a check finds nothing, and the figures are those of du.
func TestTogether(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	var shared []layerBlob
	for i := range 3 {
		shared = append(shared, gzipLayer(tarOf(t, file{name: fmt.Sprintf("d/shared%d", i), body: strings.Repeat("s", 3000*i)})))
	}
	var refs []string
	for i := range 5 {
		own := gzipLayer(tarOf(t, file{name: "d/"}, file{name: "d/own", body: strings.Repeat("o", 1000*i)}))
		reg.push(fmt.Sprint("app", i), "1", append(shared[:i%3+1:i%3+1], own)...)
		refs = append(refs, reg.ref(fmt.Sprintf("app%d:1", i)))
	}
	s := open(t, filepath.Join(loopMount(t, newDisk(t)), "images"), nil, reg)
	archives := exported(t, s, refs)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
	defer cancel()
	loop := func(do func(i int) error) func() {
		return func() {
			for i := 0; ctx.Err() == nil; i++ {
				if err := do(i % len(refs)); err != nil && !errors.Is(err, ErrNotFound) {
					t.Error(err)
					return
				}
			}
		}
	}
	pull := func(i int) error {
		_, err := s.Pull(t.Context(), PullRequest{Reference: refs[i]})
		return err
	}
	load := func(i int) error { _, err := s.Import(t.Context(), ImportRequest{File: archives[i]}); return err }
	remove := func(i int) error { return s.Remove(t.Context(), refs[len(refs)-1-i]) }
	var wg sync.WaitGroup
	for _, do := range []func(int) error{pull, pull, load, remove, remove} {
		wg.Go(loop(do))
	}
	wg.Wait()
	exact(t, s)
	for _, ref := range refs {
		mustPull(t, s, ref)
	}
	exact(t, s)
	for _, r := range s.List() {
		if err := s.Remove(t.Context(), r.ID); err != nil {
			t.Error(err)
		}
	}
	exact(t, s)
	empty(t, s)
}

// exported are archives of the images, which are not here any more then.
func exported(t *testing.T, s *Store, refs []string) (archives []string) {
	t.Helper()
	for i, ref := range refs {
		mustPull(t, s, ref)
		archive := filepath.Join(t.TempDir(), fmt.Sprint(i, ".tar"))
		if _, err := s.Export(t.Context(), ref, archive); err != nil {
			t.Fatal(err)
		}
		if err := s.Remove(t.Context(), ref); err != nil {
			t.Fatal(err)
		}
		archives = append(archives, archive)
	}
	return archives
}

// exact fails when a check finds anything, or a figure is not that of du.
func exact(t *testing.T, s *Store) {
	t.Helper()
	calm(t, s)
	sound(t, s)
	calm(t, s)
	d, err := s.DiskUsage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if du := duOf(t, s.root); d.Total != du {
		t.Errorf("disk usage %+v, du says %+v", d.Total, du)
	}
	u := s.Usage()
	told := layer.Usage{Bytes: u.Bytes, Inodes: u.Inodes}
	if want := duOf(t, s.root, "*/trash/*", "*/staging/*"); told != want {
		t.Errorf("ImageFsInfo tells %+v, du says %+v", told, want)
	}
	for _, r := range s.List() {
		for _, dir := range r.Layers {
			if _, err := os.Stat(dir); err != nil {
				t.Error(err)
			}
		}
	}
}
