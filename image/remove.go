package image

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// Remove takes an image away, whichever of its names or ids is given: all its
// names go and the image with them. ErrNotFound when there is none. Layers
// that other images need stay; so do those that a container holds, until
// Release. What broken pulls have left goes too. It returns at once: files are
// deleted behind.
func (s *Store) Remove(ctx context.Context, ref string) error {
	r, err := s.Resolve(ref)
	if errors.Is(err, ErrNotFound) && s.removeLost(ref) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove image: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	s.left.giveWay()
	s.change.Lock()
	defer s.change.Unlock()
	s.forgetLost(func(l *lostImage) bool { return l.tried })
	img := s.images[r.ID]
	if img == nil || img.Removed {
		return fmt.Errorf("remove image: %w: %s", ErrNotFound, ref)
	}
	if s.heldBy()[r.ID] {
		gone := img.clone()
		gone.Tags, gone.Digests, gone.Imported, gone.Pinned, gone.Removed = nil, nil, nil, false, true
		next := s.images.with(r.ID, gone)
		if err := s.disk.saveShorter(s.root, next); err != nil {
			return err
		}
		s.images = next
		s.publish()
		s.durable.kickLater()
		return nil
	}
	return s.forget(r.ID)
}

// forget deletes an image for good. Called with change held.
func (s *Store) forget(id string) error {
	img := s.images[id]
	next := s.images.with(id, nil)
	err := s.disk.saveShorter(s.root, next)
	full := full(err)
	if err != nil && !full {
		return err
	}
	// When there is no room for the records, and no reserve, the layers are freed
	// first: records whose layers are missing are dropped at the next start.
	s.images = next
	delete(s.configs, id)
	s.layers.unuse(img.Layers)
	for _, r := range img.Replaced {
		s.layers.unuse(r.Layers)
	}
	s.dropBlobs()
	if full {
		s.trash.wait(s.life)
		err = s.disk.saveShorter(s.root, s.images)
	}
	s.publish()
	s.durable.kickLater()
	return err
}

// dropBlobs removes the blobs that no image refers to. Their files go behind.
// Called with change held.
func (s *Store) dropBlobs() {
	s.blobs.Drop(s.wantedBlobs())
	s.trash.soon(func() { s.blobs.Bury(s.trash.take) })
}

// commit saves new records and makes them visible. Called with change held.
func (s *Store) commit(m images) error {
	if err := s.disk.saveImages(s.root, m); err != nil {
		return err
	}
	s.images = m
	s.publish()
	s.durable.kick()
	return nil
}

// Hold keeps an image's layers for a container, also when the image is
// removed. Idempotent. It returns the image as it is from then on, and that
// record's layers are what is held: those of a record that was found before may
// be gone, when the image was removed and pulled again or repaired since. It
// returns nil, and does nothing, when there is no such image (any more). Holds
// are not stored: after a restart the caller repeats them, then calls Sweep.
func (s *Store) Hold(id, holder string) *Record {
	s.change.Lock()
	defer s.change.Unlock()
	img := s.images[id]
	if img == nil {
		return nil
	}
	if s.holders[holder] == nil {
		s.holders[holder] = map[string]bool{}
	}
	s.holders[holder][id] = true
	return s.record(id, img)
}

// Release ends all of a container's holds. Images that were removed meanwhile
// go. Idempotent.
func (s *Store) Release(holder string) {
	s.change.Lock()
	defer s.change.Unlock()
	if s.holders[holder] == nil {
		return
	}
	delete(s.holders, holder)
	_ = s.sweep() // what stays by an error goes at the next Sweep
}

// Sweep removes the images that were removed while they were held and that
// nobody holds any more, and layers that a repair has replaced. To be called once after a restart, when every
// container has repeated its Hold.
func (s *Store) Sweep() error {
	s.change.Lock()
	defer s.change.Unlock()
	return s.sweep()
}

func (s *Store) sweep() error {
	held := s.heldBy()
	for id, img := range s.images {
		if img.Removed && !held[id] {
			if err := s.forget(id); err != nil {
				return fmt.Errorf("sweep removed images: %w", err)
			}
		}
	}
	for id, img := range s.images {
		if err := s.dropReplaced(id, img); err != nil {
			return fmt.Errorf("sweep replaced layers: %w", err)
		}
	}
	return nil
}

// dropReplaced lets go of the layers of before a repair that no container is
// mounted on any more. Called with change held.
func (s *Store) dropReplaced(id string, img *saved) error {
	unused := func(r replaced) bool {
		return !slices.ContainsFunc(r.Holders, func(holder string) bool { return s.holders[holder][id] })
	}
	if !slices.ContainsFunc(img.Replaced, unused) {
		return nil
	}
	left := img.clone()
	left.Replaced = slices.DeleteFunc(left.Replaced, unused)
	if len(left.Replaced) == 0 {
		left.Replaced = nil
	}
	if err := s.commit(s.images.with(id, left)); err != nil {
		return err
	}
	for _, r := range img.Replaced {
		if unused(r) {
			s.layers.unuse(r.Layers)
		}
	}
	s.publish()
	return nil
}
