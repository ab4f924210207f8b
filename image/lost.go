package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/sandbox/regular"
)

// lostImage is an image of which a start has not found all layers, or had to drop
// some that a power cut may have torn, and whose layers are all kept as they were
// fetched (Options.KeepLayerBlobs). It is invisible. A start unpacks it again behind
// and gives it back as it was; a pull of it is as good. One whose blobs are no good
// either stays for what a pull can use of them, as leftovers do: until an image is
// removed, or for Options.PartialAge.
type lostImage struct {
	*saved
	tried bool // to unpack it, and that failed; guarded by Store.change
}

// lostFile are the lost images, written as refs.json is. It is not synced: torn by a
// power cut it is none, and the images are pulled.
const lostFile = "lost.json"

// errGone ends a repair whose image was removed.
var errGone = errors.New("the image was removed meanwhile")

// findLost sets s.lost: images of the records that could not be adopted, and those
// that an earlier start has found and not got to. It leaves the records without them
// to the caller, who writes those afterwards.
func (s *Store) findLost(stored, adopted images) error {
	s.lost = map[string]*lostImage{}
	if !s.options().KeepLayerBlobs {
		return s.saveLost()
	}
	look := func(all images) {
		for id, img := range all {
			if adopted[id] == nil && s.lost[id] == nil && s.allKept(id, img) {
				lost := img.clone()
				lost.Layers, lost.Replaced = nil, nil
				s.lost[id] = &lostImage{saved: lost}
			}
		}
	}
	look(stored)
	if data, err := regular.Read(filepath.Join(s.root, lostFile), maxRecords); err == nil {
		if earlier, err := decodeImages(data); err == nil {
			look(earlier)
		}
	}
	return s.saveLost()
}

// allKept says whether nothing but the directories of an image's layers is missing,
// as far as that can be said without reading the layers.
func (s *Store) allKept(id string, img *saved) bool {
	if img.Removed || img.Artifact != "" {
		return false
	}
	for _, d := range img.parts(id) {
		if _, err := s.blobs.Get(d); err != nil {
			return false
		}
	}
	lost := img.clone()
	lost.Layers = nil
	return s.keptImage(id, lost) != nil && !slices.ContainsFunc(img.LayerBlobs, func(d digest.Digest) bool { return !s.blobs.Has(d) })
}

// saveLost writes the lost images down, or that there are none. Called with change
// held.
func (s *Store) saveLost() error {
	path := filepath.Join(s.root, lostFile)
	if len(s.lost) == 0 {
		if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return s.disk.removeAll(path)
	}
	all := images{}
	for id, l := range s.lost {
		all[id] = l.saved
	}
	data, err := encodeImages(all)
	if err != nil {
		return fmt.Errorf("encode records of lost images: %w", err)
	}
	if err := s.disk.write(path, data); err != nil {
		return fmt.Errorf("save records of lost images: %w", err)
	}
	return nil
}

// restoreLost unpacks the lost images again, one after another, behind.
func (s *Store) restoreLost() {
	s.change.Lock()
	var ids []string
	for id := range s.lost {
		ids = append(ids, id)
	}
	s.change.Unlock()
	slices.Sort(ids)
	leave, open := s.flights.enter(s.life)
	if !open {
		return
	}
	go func() {
		defer leave()
		for _, id := range ids {
			s.restore(s.life, id)
		}
	}()
}

func (s *Store) restore(ctx context.Context, id string) {
	s.change.Lock()
	l := s.lost[id]
	s.change.Unlock()
	if l == nil || ctx.Err() != nil {
		return // a pull was faster, or the store is closing: the next start goes on
	}
	err := errGone
	if k := s.keptImage(id, l.saved); k != nil {
		err = s.fromKept(ctx, k)
	}
	if err == nil || ctx.Err() != nil {
		return
	}
	s.change.Lock()
	defer s.change.Unlock()
	if errors.Is(err, ErrNoSpace) {
		s.forgetLost(func(other *lostImage) bool { return other == l })
		return
	}
	l.tried = true
	age := time.AfterFunc(s.options().PartialAge, func() {
		s.change.Lock()
		defer s.change.Unlock()
		if s.life.Err() == nil {
			s.forgetLost(func(other *lostImage) bool { return other == l })
		}
	})
	context.AfterFunc(s.life, func() { age.Stop() })
}

// lostImage gives a lost image's record to whoever has its layers again, nil when
// there is none. Names that other images have since are theirs, but for those in
// tags. Called with change held.
func (s *Store) lostImage(id string, tags []string) *saved {
	l := s.lost[id]
	if l == nil {
		return nil
	}
	img := l.clone()
	img.Tags = slices.DeleteFunc(img.Tags, func(tag string) bool {
		for _, other := range s.images {
			if slices.Contains(other.Tags, tag) {
				return !slices.Contains(tags, tag)
			}
		}
		return false
	})
	return img
}

// found takes an image that is here again from the lost. A record that stays by an
// error is dropped at the next start. Called with change held.
func (s *Store) found(id string) {
	if s.lost[id] != nil {
		delete(s.lost, id)
		_ = s.saveLost()
		s.publish() // which counts that record
	}
}

// forgetLost gives lost images up, and their blobs. Called with change held.
func (s *Store) forgetLost(which func(*lostImage) bool) (some bool) {
	for id, l := range s.lost {
		if which(l) {
			delete(s.lost, id)
			some = true
		}
	}
	if some {
		_ = s.saveLost() // one that stays by an error is looked at again at the next start
		s.dropBlobs()
		s.publish()
	}
	return some
}

// removeLost is Remove for an image that is lost.
func (s *Store) removeLost(ref string) bool {
	id, _ := asID(ref)
	names, _ := s.readings(ref)
	s.change.Lock()
	defer s.change.Unlock()
	for lost, l := range s.lost {
		named := slices.ContainsFunc(names, func(n name) bool {
			return slices.Contains(l.Tags, n.String()) || slices.Contains(l.Digests, n.String())
		})
		if named || lost == id {
			return s.forgetLost(func(other *lostImage) bool { return other == l })
		}
	}
	return false
}
