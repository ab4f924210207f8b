package image

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/opencontainers/go-digest"

	"berth/image/layer"
)

// Details is everything that is stored of an image.
type Details struct {
	*Record
	Manifest ManifestDetails
	// Indexes are those the image was found through, and manifests of other pulls
	// of the same image.
	Others []ManifestDetails
	Config json.RawMessage // as it came
	Layers []LayerDetails  // bottom first, one for each diffID of the config
}

// ManifestDetails is a manifest or an index as it came.
type ManifestDetails struct {
	Digest    digest.Digest
	MediaType string
	Content   json.RawMessage
	// Signatures are what is stored of its signatures, checked or not: digests.
	Signatures []digest.Digest
}

// LayerDetails is one layer of an image.
type LayerDetails struct {
	DiffID    digest.Digest
	Blob      digest.Digest // as the registry or archive had it
	MediaType string
	Size      int64       // of the blob, by the manifest
	Usage     layer.Usage // unpacked
	Dir       string      // where it is unpacked, absolute
	SharedBy  []string    // ids of the other images that have it, sorted
	Durable   bool        // surely on disk: a power cut does not take it away
	BlobKept  bool        // also stored as it came
}

// Inspect reads everything that is stored of an image, whichever of its names or
// ids is given. It blocks on the disk. ErrNotFound, ErrInvalidReference.
func (s *Store) Inspect(ref string) (*Details, error) {
	r, err := s.Resolve(ref)
	if err != nil {
		return nil, fmt.Errorf("inspect image: %w", err)
	}
	d := &Details{Record: r}
	parts, err := s.partsOf(r.ID)
	if err != nil {
		return nil, fmt.Errorf("inspect image: %w", err)
	}
	if d.Config, err = s.RawConfig(r.ID); err != nil {
		return nil, err
	}
	manifest, err := s.readDocuments(r.ID, parts, d)
	if err != nil {
		return nil, fmt.Errorf("inspect image %s: %w", r.ID, err)
	}
	for i, e := range parts.layers {
		l := LayerDetails{DiffID: e.key.diffID, Dir: e.diff(), SharedBy: parts.sharers[e.n]}
		if i < len(manifest.layers) {
			l.Blob, l.MediaType, l.Size = manifest.layers[i].Digest, manifest.layers[i].MediaType, manifest.layers[i].Size
			l.BlobKept = s.blobs.Has(l.Blob)
		}
		l.Usage, l.Durable = s.layers.stateOf(e)
		d.Layers = append(d.Layers, l)
	}
	return d, nil
}

// parts are what an image's record refers to.
type parts struct {
	blobs   []digest.Digest
	signed  map[digest.Digest][]digest.Digest // manifest → its signatures
	layers  []*entry
	sharers map[int][]string // layer number → ids of other images
}

func (s *Store) partsOf(id string) (*parts, error) {
	s.change.Lock()
	defer s.change.Unlock()
	img := s.images[id]
	if img == nil {
		return nil, fmt.Errorf("%w: %s", ErrNotFound, id)
	}
	p := &parts{blobs: slices.Clone(img.Blobs), signed: maps.Clone(img.Signatures), layers: s.layers.entries(img.Layers), sharers: map[int][]string{}}
	for other, o := range s.images {
		for _, n := range distinct(o.Layers) {
			if other != id && slices.Contains(img.Layers, n) {
				p.sharers[n] = append(p.sharers[n], other)
			}
		}
	}
	for _, ids := range p.sharers {
		slices.Sort(ids)
	}
	return p, nil
}

// readDocuments fills in the manifests and returns what the image's own refers
// to: of several, the one that came last.
func (s *Store) readDocuments(id string, p *parts, d *Details) (own blobs, err error) {
	for _, at := range slices.Backward(p.blobs) {
		data, err := s.blobs.Get(at)
		if err != nil {
			return blobs{}, err
		}
		doc, err := newDocument(data, "")
		if err != nil {
			return blobs{}, err
		}
		details := ManifestDetails{Digest: at, MediaType: doc.mediaType, Content: data, Signatures: p.signed[at]}
		if !doc.isIndex() && d.Manifest.Digest == "" {
			if own, err = doc.parse(); err != nil {
				return blobs{}, err
			}
			if own.config.Digest.String() == id || own.artifact != nil && at.String() == id {
				d.Manifest = details
				continue
			}
		}
		d.Others = append(d.Others, details)
	}
	if d.Manifest.Digest == "" {
		return blobs{}, fmt.Errorf("%w: no manifest of it is stored", ErrInvalidImage)
	}
	return own, nil
}

// stateOf is what changes of a layer.
func (l *layers) stateOf(e *entry) (layer.Usage, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return e.usage, e.durable
}
