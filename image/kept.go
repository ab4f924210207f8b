package image

import (
	"context"
	"io"
	"slices"

	"berth/sandbox/regular"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"
)

// openKept opens a layer as it was fetched once (Options.KeepLayerBlobs), for a pull
// that would fetch it again; nil when it is not kept, or not whole: then what is
// fetched takes its place.
func (r *run) openKept(ctx context.Context, blob digest.Digest) (io.ReadCloser, error) {
	s := r.store
	size := r.sizeOf[blob]
	if !s.options().KeepLayerBlobs || size == 0 || s.blobs.Size(blob) != size || s.blobs.Verify(ctx, blob) != nil {
		return nil, context.Cause(ctx)
	}
	path, err := s.blobs.Path(blob)
	if err != nil {
		return nil, err
	}
	f, err := regular.Open(path)
	if err != nil {
		return nil, nil // removed meanwhile, with the image that had it
	}
	r.mu.Lock()
	r.local[blob] = true
	r.mu.Unlock()
	r.job.track.resume(blob, size)
	r.job.track.layer(blob, StageUnpacking)
	return f, nil
}

// keptImage is an image as it is kept here, nil when what is needed of it is
// not: a manifest and the blobs of its damaged layers, all those of a lost image.
func (s *Store) keptImage(id string, img *saved) *keptSource {
	entries := s.layers.entries(img.Layers)
	for _, d := range img.Blobs {
		data, err := s.blobs.Get(d)
		if err != nil {
			continue
		}
		doc, err := newDocument(data, "")
		if err != nil || doc.isIndex() {
			continue
		}
		parts, err := doc.parse()
		if err != nil || id != d.String() && id != parts.config.Digest.String() || len(entries) > 0 && len(parts.layers) != len(entries) {
			continue
		}
		has := true
		for i, l := range parts.layers {
			whole := len(entries) > 0 && !s.layers.isDamaged(entries[i]) // none of a lost image
			has = has && (whole || slices.Contains(img.LayerBlobs, l.Digest))
		}
		if has {
			return &keptSource{store: s, id: id, doc: doc}
		}
	}
	return nil
}

// fromKept unpacks an image's damaged layers again. The policy is not asked: it
// was when the image came, and is whenever the image is used.
func (s *Store) fromKept(ctx context.Context, k *keptSource) error {
	t := s.board.begin("repair", k.id)
	open := func(context.Context) (types.ImageSource, error) { return k, nil }
	id, err := s.fetch(ctx, job{open: open, parallel: true, again: true, track: t})
	if err != nil {
		id, err = "", s.describe("repair", k.id, err, nil)
	}
	t.end(id, err)
	return err
}

// keptSource is an image in the store as something to fetch from.
type keptSource struct {
	store *Store
	id    string
	doc   document
}

func (k *keptSource) Reference() types.ImageReference {
	return &endpoint{run: &run{id: k.id}}
}

func (k *keptSource) Close() error               { return nil }
func (k *keptSource) HasThreadSafeGetBlob() bool { return true }

func (k *keptSource) GetManifest(context.Context, *digest.Digest) ([]byte, string, error) {
	return k.doc.data, k.doc.mediaType, nil
}

func (k *keptSource) GetBlob(_ context.Context, info types.BlobInfo, _ types.BlobInfoCache) (io.ReadCloser, int64, error) {
	path, err := k.store.blobs.Path(info.Digest)
	if err != nil {
		return nil, 0, err
	}
	f, err := regular.Open(path)
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, st.Size(), nil
}

func (k *keptSource) GetSignatures(context.Context, *digest.Digest) ([][]byte, error) {
	return nil, nil
}

func (k *keptSource) LayerInfosForCopy(context.Context, *digest.Digest) ([]types.BlobInfo, error) {
	return nil, nil
}
