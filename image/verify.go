package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/image/content"
	"berth/image/layer"

	"berth/sandbox/regular"
)

// Finding is one thing that is not as it should be.
type Finding struct {
	Images  []string      // ids of the images it harms, sorted; none when no image needs what it is about
	Layer   digest.Digest // diffID; empty when it is not about a layer
	Where   string        // file or directory below Root, such as layers/7 or blobs/sha256/1f…
	Path    string        // in the layer, "/" is its root; empty when it is about the layer as a whole
	Problem string
}

// Report is the result of a check.
type Report struct {
	Images, Layers int // looked at
	Findings       []Finding
	// Repairs says by image id what a repair has done or why it could not. Only
	// damaged images are in it, and "" is everything that is no image's.
	Repairs map[string]Repair
}

// Repair is what became of one image's damage.
type Repair struct {
	Done    bool
	Message string // what was done, or what has to be done by hand
}

// maxFindings of one layer: a layer that is wrong throughout needs no list of
// all its files.
const maxFindings = 100

// Check reads everything that is stored for the images named (all, and what
// belongs to no image, when none is) and compares it with what came with them:
// blobs with their digests, layers file by file with the list made as they were
// unpacked. It blocks for as long as reading takes; other calls are not held up.
// What the kernel has in memory counts, as it does for containers.
//
// A layer with a finding is given to no image any more that is pulled or
// imported from then on: it is fetched again, and images that have it get the
// new one when they are pulled or imported themselves. Nothing else changes,
// unless repair is set: see Store.repair.
//
// ErrNotFound and ErrInvalidReference for the names. The error is ctx's when
// that is done. One check runs at a time, others wait.
func (s *Store) Check(ctx context.Context, refs []string, repair bool) (*Report, error) {
	ids, err := s.checked(refs)
	if err != nil {
		return nil, fmt.Errorf("check images: %w", err)
	}
	leave, ok := s.flights.enter(s.life)
	if !ok {
		return nil, s.life.Err()
	}
	defer leave()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	select {
	case s.checking <- struct{}{}:
		defer func() { <-s.checking }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	c := &check{store: s, ctx: ctx, report: &Report{}}
	if err := c.images(ids); err != nil {
		return nil, fmt.Errorf("check images: %w", err)
	}
	if len(refs) == 0 {
		c.rest()
	}
	if repair {
		c.report.Repairs = c.repair()
	}
	return c.report, ctx.Err()
}

// checked resolves names; no names are all images, those too that are kept for
// containers only.
func (s *Store) checked(refs []string) (ids []string, err error) {
	for _, ref := range refs {
		r, err := s.Resolve(ref)
		if err != nil {
			return nil, err
		}
		ids = appendNew(ids, r.ID)
	}
	if len(refs) == 0 {
		s.change.Lock()
		defer s.change.Unlock()
		for id := range s.images {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids, nil
}

// check is one running check.
type check struct {
	store  *Store
	ctx    context.Context
	report *Report
}

func (c *check) found(f Finding) { c.report.Findings = append(c.report.Findings, f) }

// images checks images, each layer once.
func (c *check) images(ids []string) error {
	seen := map[int]bool{}
	for _, id := range ids {
		img, entries := c.store.pinImage(id)
		if img == nil {
			continue // removed meanwhile
		}
		c.report.Images++
		err := c.image(id, img, entries, seen)
		for _, e := range entries {
			c.store.layers.release(e)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// pinImage gives an image's record and its layers, counted once more.
func (s *Store) pinImage(id string) (*saved, []*entry) {
	s.change.Lock()
	defer s.change.Unlock()
	img := s.images[id].clone()
	if img == nil {
		return nil, nil
	}
	entries := s.layers.entries(distinct(img.Layers))
	for _, e := range entries {
		s.layers.again(e)
	}
	return img, entries
}

func (c *check) image(id string, img *saved, entries []*entry, seen map[int]bool) error {
	for _, d := range img.parts(id) {
		if _, err := c.store.blobs.Get(d); err != nil {
			c.found(Finding{Images: []string{id}, Where: blobName(d), Problem: problemOf(err)})
		}
	}
	for _, d := range img.LayerBlobs {
		if err := c.store.blobs.Verify(c.ctx, d); err != nil {
			if c.ctx.Err() != nil {
				return c.ctx.Err()
			}
			c.found(Finding{Images: []string{id}, Where: blobName(d), Problem: problemOf(err)})
		}
	}
	for _, e := range entries {
		if seen[e.n] {
			continue
		}
		seen[e.n] = true
		c.report.Layers++
		if err := c.layer(e); err != nil {
			return err
		}
	}
	return nil
}

func blobName(d digest.Digest) string { return filepath.Join("blobs", "sha256", d.Encoded()) }

// problemOf says of a blob's error what the finding does not say itself.
func problemOf(err error) string {
	switch {
	case errors.Is(err, content.ErrNotFound):
		return "missing"
	case errors.Is(err, content.ErrCorrupt):
		return "its content does not have its digest"
	}
	return err.Error()
}

// layer checks one layer and judges it.
func (c *check) layer(e *entry) error {
	f := Finding{Images: c.store.usersOf(e.n), Layer: e.key.diffID, Where: filepath.Join("layers", strconv.Itoa(e.n))}
	count := 0
	err := e.verify(c.ctx, func(d layer.Difference) {
		if count++; count <= maxFindings {
			f.Path, f.Problem = d.Path, d.Problem
			c.found(f)
		}
	})
	if err != nil && c.ctx.Err() == nil {
		count++
		f.Path, f.Problem = "", err.Error()
		c.found(f)
	} else if err != nil {
		return err
	}
	if count > maxFindings {
		f.Path, f.Problem = "", fmt.Sprintf("%d findings more in this layer", count-maxFindings)
		c.found(f)
	}
	c.store.layers.judge(e, count > 0)
	return nil
}

// usersOf are the images that have a layer.
func (s *Store) usersOf(n int) (ids []string) {
	s.change.Lock()
	defer s.change.Unlock()
	for id, img := range s.images {
		if slices.Contains(img.Layers, n) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// rest looks at what belongs to no image: the records, and what nobody knows.
func (c *check) rest() {
	s := c.store
	s.change.Lock()
	data, err := regular.Read(filepath.Join(s.root, refsFile), maxRecords)
	if err == nil {
		_, err = decodeImages(data)
	}
	strays, listErr := s.blobs.Strays(s.wantedBlobs())
	s.change.Unlock()
	if err != nil {
		c.found(Finding{Where: refsFile, Problem: "the records of images cannot be read: " + err.Error()})
	}
	if listErr != nil {
		c.found(Finding{Where: "blobs", Problem: listErr.Error()})
	}
	for _, name := range strays {
		c.found(Finding{Where: filepath.Join("blobs", "sha256", name), Problem: "belongs to no image"})
	}
	for _, name := range c.strayLayers() {
		c.found(Finding{Where: filepath.Join("layers", name), Problem: "belongs to no image"})
	}
}

// strayLayers are directories that are no layer's. One whose removal has just
// begun looks like one for a moment.
func (c *check) strayLayers() []string {
	look := func() (names []string) {
		list, err := os.ReadDir(c.store.layers.dir)
		if err != nil {
			c.found(Finding{Where: "layers", Problem: err.Error()})
		}
		for _, item := range list {
			if !c.store.layers.knows(item.Name()) {
				names = append(names, item.Name())
			}
		}
		return names
	}
	first := look()
	if len(first) == 0 {
		return nil
	}
	select {
	case <-time.After(200 * time.Millisecond):
	case <-c.ctx.Done():
		return nil
	}
	return slices.DeleteFunc(look(), func(name string) bool { return !slices.Contains(first, name) })
}

// knows says whether a directory is a layer's.
func (l *layers) knows(name string) bool {
	n, err := strconv.Atoi(name)
	l.mu.Lock()
	defer l.mu.Unlock()
	return err == nil && l.byN[n] != nil && strconv.Itoa(n) == name
}
