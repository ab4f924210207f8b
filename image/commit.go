package image

import (
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/image/layer"
)

// staleLayerError: the only stored variants of a layer were settled for other
// lower layers, so it has to be unpacked anew.
type staleLayerError struct{ diffID string }

func (e *staleLayerError) Error() string {
	return fmt.Sprintf("layer %s was settled for other layers", e.diffID)
}

// commit settles the layers, bottom first, and records the image. Settling
// looks at many directories; nobody else has to wait for it.
func (r *run) commit() error {
	s := r.store
	diffIDs := r.image.RootFS.DiffIDs
	used := s.settled(diffIDs)
	defer func() {
		for _, e := range used {
			s.layers.release(e) // by now the image counts on them, or nobody
		}
	}()
	for i := len(used); i < len(diffIDs); i++ {
		diffID := diffIDs[i]
		e, err := r.settle(diffID, used, slices.Contains(diffIDs[i+1:], diffID))
		if err != nil {
			return err
		}
		used = append(used, e)
	}
	numbers := make([]int, len(used))
	for i, e := range used {
		numbers[i] = e.n
	}
	return r.record(numbers)
}

// settled gives the layers that an image here has for the longest common
// beginning, counted once more: on the same layers, a layer has been settled
// the same way.
func (s *Store) settled(diffIDs []digest.Digest) []*entry {
	s.change.Lock()
	defer s.change.Unlock()
	var best []int
	for id, img := range s.images {
		n := 0
		for _, d := range s.configs[id].RootFS.DiffIDs {
			if n == len(diffIDs) || diffIDs[n] != d {
				break
			}
			n++
		}
		if n > len(best) {
			best = img.Layers[:n]
		}
	}
	used := s.layers.entries(best)
	for i, e := range used {
		if s.layers.isDamaged(e) {
			return used[:i]
		}
		s.layers.again(e)
	}
	return used
}

// settle returns the variant of a layer that fits on lowers, counted once
// more. again says that the layer is needed higher up too.
func (r *run) settle(diffID digest.Digest, lowers []*entry, again bool) (*entry, error) {
	s := r.store
	base := r.have[diffID]
	needs, err := base.needs()
	if err != nil {
		return nil, fmt.Errorf("settle layer %s: %w", diffID, err)
	}
	plan, err := needs.Plan(base.diff(), visible(lowers))
	if err != nil {
		return nil, err
	}
	want := layerKey{diffID, plan.Key()}
	if e := s.layers.acquire(want); e != nil {
		return e, nil
	}
	if base.key.variant != "" {
		return nil, &staleLayerError{diffID.String()}
	}
	meta := base.meta
	meta.Needs = needs
	meta.Variant, meta.Durable, meta.Boot = want.variant, false, s.boot
	dir, err := s.disk.mkdirTemp(s.staging(), "settle-")
	if err != nil {
		return nil, fmt.Errorf("settle layer %s: %w", diffID, err)
	}
	e, err := r.makeVariant(base, dir, plan, meta, again || slices.Contains(lowers, base))
	if err != nil {
		s.discard(dir, err)
		return nil, fmt.Errorf("settle layer %s: %w", diffID, err)
	}
	return e, nil
}

// makeVariant changes the pristine layer itself when nobody else needs it so,
// else a copy.
func (r *run) makeVariant(base *entry, dir string, plan *layer.Plan, meta layerMeta, shared bool) (*entry, error) {
	s := r.store
	diff := filepath.Join(dir, "diff")
	if !shared && s.layers.rekey(base) {
		delete(r.have, base.key.diffID)
		if err := s.disk.rename(base.diff(), diff); err != nil {
			return nil, err
		}
		s.trash.take(base.dir)
	} else {
		if err := s.disk.mkdir(diff); err != nil {
			return nil, err
		}
		if err := layer.Copy(base.diff(), diff); err != nil {
			return nil, err
		}
	}
	if err := plan.Apply(diff); err != nil {
		return nil, err
	}
	if err := s.disk.list(dir, &meta, nil); err != nil {
		return nil, err
	}
	return s.layers.add(dir, meta)
}

// visible are the layers below as layer.Plan wants them: those under an opaque
// root do not count.
func visible(lowers []*entry) []layer.Lower {
	var list []layer.Lower
	for _, e := range lowers {
		if e.meta.Opaque {
			list = list[:0]
		}
		list = append(list, layer.Lower{Dir: e.diff(), ID: e.key.id()})
	}
	return list
}

// record stores manifests and config and writes the image into the records. An
// image that is here already keeps its layers, unless one of them is damaged:
// then it gets the new ones, and the old stay for the containers that are
// mounted on them.
func (r *run) record(numbers []int) error {
	s := r.store
	s.change.Lock()
	defer s.change.Unlock()
	known := s.images[r.id] != nil
	before, img, err := r.recorded(numbers)
	if err != nil {
		return err
	}
	mended := known && s.layers.anyDamaged(img.Layers) && !s.layers.anyDamaged(numbers)
	var old []int
	if mended {
		old = s.setAside(r.id, img)
		img.Layers = numbers
	}
	if err := r.storeBlobs(img); err != nil {
		s.dropBlobs()
		return err
	}
	r.name(img)
	if !r.job.again {
		r.job.setOrigin(img, before)
	}
	img.Annotations = r.leaf().annotations()
	if reflect.DeepEqual(img, s.images[r.id]) && s.images.hasTags(r.job.tags, r.id) {
		return nil // nothing new: no write, no sync
	}
	img.PulledAt = time.Now().UTC()
	next := s.images.with(r.id, img)
	for _, tag := range r.job.tags {
		next = next.takeTag(tag, r.id)
	}
	if known && !mended {
		err := s.commit(next)
		s.dropBlobs() // signatures that were replaced
		return err
	}
	s.layers.use(numbers)
	s.configs[r.id] = lean(r.image)
	if err := s.commit(next); err != nil {
		s.layers.unuse(numbers)
		if !known {
			delete(s.configs, r.id)
		}
		s.dropBlobs()
		return err
	}
	s.layers.unuse(old)
	s.found(r.id)
	return nil
}

// recorded is the image as its records have it, nil when they have none, and a copy
// to be changed; a new one, and one that was lost, has the new layers. Called with
// change held.
func (r *run) recorded(numbers []int) (before, img *saved, err error) {
	s := r.store
	known := s.images[r.id] != nil
	if before = s.images[r.id]; !known {
		before = s.lostImage(r.id, r.job.tags)
	}
	img = before.clone()
	switch {
	case known:
	case img != nil:
		img.Layers = numbers
	case r.job.again:
		return nil, nil, errGone
	default:
		img = &saved{Layers: numbers}
		if a := r.blobs.artifact; a != nil {
			img.Artifact, img.Config = a.kind, r.blobs.config.Digest
		}
	}
	img.Removed, img.Pinned = false, img.Pinned || r.job.pin
	return before, img, nil
}

// name gives the image the names that it was asked for by.
func (r *run) name(img *saved) {
	for _, tag := range r.job.tags {
		img.Tags = appendNew(img.Tags, tag)
	}
	if r.job.repository.named != nil {
		for _, doc := range []document{r.docs[0], r.leaf()} {
			img.Digests = appendNew(img.Digests, r.job.repository.withDigest(doc.digest))
		}
	}
}

// setAside keeps an image's layers for the containers that are mounted on them
// and returns those that nobody needs. Called with change held.
func (s *Store) setAside(id string, img *saved) (unused []int) {
	var holders []string
	for holder, ids := range s.holders {
		if ids[id] {
			holders = append(holders, holder)
		}
	}
	if len(holders) == 0 {
		return img.Layers
	}
	slices.Sort(holders)
	img.Replaced = append(img.Replaced, replaced{Layers: img.Layers, Holders: holders})
	return nil
}

func (r *run) storeBlobs(img *saved) error {
	if err := r.putBlob(r.blobs.config.Digest, r.config); err != nil {
		return err
	}
	for _, doc := range r.docs {
		if err := r.putBlob(doc.digest, doc.data); err != nil {
			return err
		}
		img.Blobs = appendNew(img.Blobs, doc.digest)
	}
	if err := r.storeSignatures(img); err != nil {
		return err
	}
	for d, f := range r.kept {
		if err := f.Close(); err != nil {
			return fmt.Errorf("keep layer %s: %w", d, err)
		}
		if err := r.store.blobs.Adopt(d, f.Name()); err != nil {
			return err
		}
		delete(r.kept, d)
	}
	if r.store.options().KeepLayerBlobs {
		for _, l := range r.blobs.layers { // those too that came with another image
			if l.Size > 0 && r.store.blobs.Size(l.Digest) == l.Size {
				img.LayerBlobs = appendNew(img.LayerBlobs, l.Digest)
			}
		}
	}
	return nil
}

func (r *run) putBlob(d digest.Digest, data []byte) error {
	if err := r.store.disk.may("write", d.String()); err != nil {
		return fmt.Errorf("store blob %s: %w", d, err)
	}
	return r.store.blobs.Put(d, data)
}

func appendNew[T comparable](list []T, item T) []T {
	if slices.Contains(list, item) {
		return list
	}
	return append(list, item)
}
