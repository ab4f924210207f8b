package image

import (
	"context"
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"
)

// source hands the inspected image to the copy: manifest and config from
// memory, layers from the registry under guard.
type source struct{ *endpoint }

// Reference of the source.
func (s *source) Reference() types.ImageReference { return s.endpoint }

// Close leaves the connection open: the run's owner closes it.
func (s *source) Close() error { return nil }

// GetManifest gives the manifest of the image for this platform.
func (s *source) GetManifest(context.Context, *digest.Digest) ([]byte, string, error) {
	doc := s.run.leaf()
	return doc.data, doc.mediaType, nil
}

// HasThreadSafeGetBlob is the real source's word, unless the job knows better.
func (s *source) HasThreadSafeGetBlob() bool {
	return s.run.job.parallel || s.run.src.HasThreadSafeGetBlob()
}

// GetSignatures gives none: they have been checked.
func (s *source) GetSignatures(context.Context, *digest.Digest) ([][]byte, error) { return nil, nil }

// LayerInfosForCopy: the layers are those of the manifest.
func (s *source) LayerInfosForCopy(context.Context, *digest.Digest) ([]types.BlobInfo, error) {
	return nil, nil
}

// GetBlob opens a layer. Whatever becomes of the stream, closing it gives the
// layer's claim back, so that others who wait for it can go on.
func (s *source) GetBlob(ctx context.Context, info types.BlobInfo, cache types.BlobInfoCache) (io.ReadCloser, int64, error) {
	if info.Digest == s.run.blobs.config.Digest {
		return readerOf(s.run.config), int64(len(s.run.config)), nil
	}
	// A layer comes from the image's registry. An image must not be able to
	// make the node fetch from wherever it likes.
	info.URLs = nil
	s.run.job.track.layer(info.Digest, StageFetching)
	g := newGuard(ctx, s.run.store.opt.IdleTimeout)
	stream, size, err := s.run.src.GetBlob(g.ctx, info, cache)
	g.pause()
	want := s.run.sizeOf[info.Digest]
	switch {
	case err != nil:
		err = g.explain(fmt.Errorf("fetch layer %s: %w", info.Digest, err))
	case size >= 0 && size != want:
		stream.Close()
		err = fmt.Errorf("%w: layer %s has %d bytes, the manifest says %d", ErrInvalidImage, info.Digest, size, want)
	default:
		settle := func() { s.run.giveUp(info.Digest) }
		return &layerStream{guard: g, inner: stream, settle: settle, got: func(n int) { s.run.job.track.got(info.Digest, n) }}, size, nil
	}
	g.stop()
	s.run.giveUp(info.Digest)
	return nil, 0, s.failed(err)
}
