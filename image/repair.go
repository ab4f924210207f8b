package image

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
)

var errStillDamaged = errors.New("the image has a damaged layer still")

// repair mends what a check has found.
//
// A damaged layer is fetched again, from the blobs that are kept here
// (Options.KeepLayerBlobs), else by digest from where the image came, with the
// credentials of the auth file. It comes as another directory, and the image
// gets that in one step: containers that run stay on the old one, as what
// overlay has mounted must not change under it, and it goes with the last of
// them. Containers made from then on get the new one.
//
// An image that came from an archive has no place to be fetched from: then the
// message says what to do. What belongs to no image is removed.
func (c *check) repair() map[string]Repair {
	done := map[string]Repair{}
	var strays []string
	for _, f := range c.report.Findings {
		if len(f.Images) == 0 {
			strays = append(strays, f.Where)
		}
		for _, id := range f.Images {
			if _, known := done[id]; !known && c.ctx.Err() == nil {
				done[id] = c.store.mend(c.ctx, id)
			}
		}
	}
	if len(strays) > 0 {
		done[""] = c.tidy(strays)
	}
	return done
}

// mend repairs one image.
func (s *Store) mend(ctx context.Context, id string) Repair {
	s.change.Lock()
	img := s.images[id].clone()
	s.change.Unlock()
	switch {
	case img == nil:
		return Repair{true, "the image was removed meanwhile"}
	case img.Removed:
		return Repair{false, "the image was removed and is kept for its containers only; it goes with the last of them"}
	}
	var problems []string
	attempt := func(from string, err error) bool {
		if err == nil {
			err = s.whole(id)
		}
		if err != nil {
			problems = append(problems, fmt.Sprintf("from %s: %v", from, err))
		}
		return err == nil
	}
	s.dropBadBlobs(ctx, id)
	if kept := s.keptImage(id, img); kept != nil && attempt("the blobs kept here", s.fromKept(ctx, kept)) {
		return Repair{true, "unpacked again from the blobs kept here"}
	}
	for _, name := range img.Digests {
		if s.view.Load().byID[id] == nil {
			return Repair{true, "the image was removed meanwhile"}
		}
		if attempt(name, s.pullAgain(ctx, name)) {
			return Repair{true, "fetched again from " + name}
		}
	}
	return Repair{false, byHand(id, img, problems)}
}

// pullAgain fetches an image that is here. One policy that admits it is enough, be it
// that of a single namespace only: for that the image may have come, and whoever uses
// it is asked by his own.
func (s *Store) pullAgain(ctx context.Context, name string) (err error) {
	for _, namespace := range append([]string{""}, s.policies().Namespaces()...) {
		_, refused := s.Pull(ctx, PullRequest{Reference: name, Namespace: namespace})
		if !errors.Is(refused, ErrSignature) {
			return refused
		}
		if err == nil {
			err = refused
		}
	}
	return err
}

// byHand says what an operator can do about an image.
func byHand(id string, img *saved, problems []string) string {
	var text strings.Builder
	for _, p := range problems {
		text.WriteString(p + "; ")
	}
	name := id
	if len(img.Tags) > 0 {
		name = img.Tags[0]
	}
	if len(img.Digests) == 0 {
		fmt.Fprintf(&text, "the image came from an archive: import it again (berth image import FILE), or pull %s", name)
	} else {
		fmt.Fprintf(&text, "pull %s when its registry answers", img.Digests[0])
	}
	return text.String()
}

// whole says why an image still is damaged, as far as is known without reading
// everything again.
func (s *Store) whole(id string) error {
	s.change.Lock()
	defer s.change.Unlock()
	img := s.images[id]
	if img == nil {
		return nil
	}
	if s.layers.anyDamaged(img.Layers) {
		return errStillDamaged
	}
	for _, d := range img.parts(id) {
		if _, err := s.blobs.Get(d); err != nil {
			return err
		}
	}
	return nil
}

// dropBadBlobs removes kept layer blobs that are damaged: nothing needs them
// but a repair.
func (s *Store) dropBadBlobs(ctx context.Context, id string) {
	s.change.Lock()
	blobs := s.images[id].clone()
	s.change.Unlock()
	if blobs == nil {
		return
	}
	var bad []digest.Digest
	for _, d := range blobs.LayerBlobs {
		if s.blobs.Verify(ctx, d) != nil && ctx.Err() == nil {
			bad = append(bad, d)
		}
	}
	if len(bad) == 0 {
		return
	}
	s.change.Lock()
	defer s.change.Unlock()
	next := s.images
	for id, img := range s.images {
		if slices.ContainsFunc(img.LayerBlobs, func(d digest.Digest) bool { return slices.Contains(bad, d) }) {
			left := img.clone()
			left.LayerBlobs = slices.DeleteFunc(left.LayerBlobs, func(d digest.Digest) bool { return slices.Contains(bad, d) })
			next = next.with(id, left)
		}
	}
	if s.commit(next) == nil {
		s.dropBlobs()
	}
}

// tidy removes what belongs to no image.
func (c *check) tidy(strays []string) Repair {
	s := c.store
	s.change.Lock()
	err := s.blobs.Sweep(s.wantedBlobs())
	if slices.Contains(strays, refsFile) && err == nil {
		err = s.commit(maps.Clone(s.images))
	}
	s.change.Unlock()
	for _, name := range c.strayLayers() {
		s.trash.take(filepath.Join(s.layers.dir, name))
	}
	if err != nil {
		return Repair{false, err.Error()}
	}
	return Repair{true, "what belongs to no image was removed"}
}
