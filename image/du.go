package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"

	"berth/image/layer"
)

// DiskUsage says what takes the space below Root. The kinds add up to Total,
// which is what du counts there while nothing changes.
type DiskUsage struct {
	Root   string
	Total  layer.Usage
	Layers layer.Usage // unpacked layers with their records and lists
	Blobs  layer.Usage // manifests, configs, signatures, layers as they came where those are kept
	// Partial are the beginnings of layers that broken pulls have left; Staging
	// what is being unpacked; Trash what is being deleted.
	Partial, Staging, Trash layer.Usage
	Records                 layer.Usage // of images; the reserve for a full disk; the root directory
	Unknown                 layer.Usage // what is no part of the store
	Images                  []ImageUsage
}

// ImageUsage is what one image takes. Total is with everything that it shares
// with other images; Unique is what goes when it is removed, as soon as no
// container uses it.
type ImageUsage struct {
	ID         string
	Names      []string // tags, else digests, else none
	Removed    bool     // kept for its containers only
	Total      layer.Usage
	Unique     layer.Usage
	SharedWith []string // ids, sorted
}

// DiskUsage counts everything. Layers were counted as they came; the rest is
// looked at, which blocks on the disk, a done ctx ends it.
func (s *Store) DiskUsage(ctx context.Context) (*DiskUsage, error) {
	d := &DiskUsage{Root: s.root, Images: s.imageUsages()}
	list, err := os.ReadDir(s.root)
	if err != nil {
		return nil, fmt.Errorf("count disk usage: %w", err)
	}
	d.Records = layer.UsageOf(s.root)
	measured := map[string]*layer.Usage{"blobs": &d.Blobs, "partial": &d.Partial, "staging": &d.Staging, "trash": &d.Trash}
	seen := map[string]fs.FileInfo{}
	for _, item := range list {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		path := filepath.Join(s.root, item.Name())
		switch kind := measured[item.Name()]; {
		case kind != nil:
			*kind, err = measure(path)
		case item.Name() == "layers":
			d.Layers, d.Unknown, err = s.layersUsage(d.Unknown)
		case isRecord(item.Name()):
			d.Records = d.Records.Add(onceOf(path, seen))
		default:
			var u layer.Usage
			u, err = measure(path)
			d.Unknown = d.Unknown.Add(u)
		}
		if err != nil {
			return nil, fmt.Errorf("count disk usage: %w", err)
		}
	}
	for _, u := range []layer.Usage{d.Layers, d.Blobs, d.Partial, d.Staging, d.Trash, d.Records, d.Unknown} {
		d.Total = d.Total.Add(u)
	}
	return d, nil
}

// measure is layer.Measure of what may go meanwhile.
func measure(path string) (layer.Usage, error) {
	u, err := layer.Measure(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return u, err
}

func isRecord(name string) bool {
	return name == refsFile || name == durableFile || name == reserveFile || name == preloadedFile || name == syncedFile || name == brokenFile || name == lostFile || strings.HasPrefix(name, temporary)
}

// onceOf counts a file that may have two names there once.
func onceOf(path string, seen map[string]fs.FileInfo) layer.Usage {
	info, err := os.Lstat(path)
	if err != nil {
		return layer.Usage{}
	}
	for _, other := range seen {
		if os.SameFile(info, other) {
			return layer.Usage{}
		}
	}
	seen[path] = info
	return layer.UsageOf(path)
}

// layersUsage is what layers take, and what else is in their directory.
func (s *Store) layersUsage(unknown layer.Usage) (known, _ layer.Usage, err error) {
	list, err := os.ReadDir(s.layers.dir)
	if err != nil {
		return known, unknown, err
	}
	for _, item := range list {
		if s.layers.knows(item.Name()) {
			continue
		}
		u, err := measure(filepath.Join(s.layers.dir, item.Name()))
		if err != nil {
			return known, unknown, err
		}
		unknown = unknown.Add(u)
	}
	return layer.UsageOf(s.layers.dir).Add(s.layers.usage()), unknown, nil
}

// ofImage is a layer or a blob, by number or digest.
type ofImage struct {
	layer int
	blob  digest.Digest
}

// imageUsages counts images, sorted by their first name.
func (s *Store) imageUsages() []ImageUsage {
	s.change.Lock()
	defer s.change.Unlock()
	users := map[ofImage][]string{}
	for id, img := range s.images {
		for _, p := range img.all(id) {
			users[p] = append(users[p], id)
		}
	}
	sizes := map[ofImage]layer.Usage{}
	for p := range users {
		sizes[p] = s.sizeOfPart(p)
	}
	list := make([]ImageUsage, 0, len(s.images))
	for id, img := range s.images {
		u := ImageUsage{ID: id, Names: slices.Clone(img.Tags), Removed: img.Removed}
		if len(u.Names) == 0 {
			u.Names = slices.Clone(img.Digests)
		}
		slices.Sort(u.Names)
		for _, p := range img.all(id) {
			u.Total = u.Total.Add(sizes[p])
			if len(users[p]) == 1 {
				u.Unique = u.Unique.Add(sizes[p])
			}
			for _, other := range users[p] {
				if other != id {
					u.SharedWith = appendNew(u.SharedWith, other)
				}
			}
		}
		slices.Sort(u.SharedWith)
		list = append(list, u)
	}
	slices.SortFunc(list, func(a, b ImageUsage) int {
		if c := slices.Compare(a.Names, b.Names); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list
}

// all are the parts of an image, each once.
func (s *saved) all(id string) (parts []ofImage) {
	numbers := slices.Clone(s.Layers)
	for _, r := range s.Replaced {
		numbers = append(numbers, r.Layers...)
	}
	for _, n := range distinct(numbers) {
		parts = append(parts, ofImage{layer: n})
	}
	for _, d := range slices.Concat(s.parts(id), s.LayerBlobs) {
		parts = appendNew(parts, ofImage{blob: d})
	}
	return parts
}

func (s *Store) sizeOfPart(p ofImage) layer.Usage {
	if p.blob != "" {
		path, err := s.blobs.Path(p.blob)
		if err != nil {
			return layer.Usage{}
		}
		return layer.UsageOf(path)
	}
	s.layers.mu.Lock()
	defer s.layers.mu.Unlock()
	e := s.layers.byN[p.layer]
	if e == nil {
		return layer.Usage{}
	}
	return e.usage.Add(e.own)
}
