package image

import (
	"context"
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"

	"berth/image/fetch"
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
	leave, err := s.run.store.slots.enter(ctx)
	if err != nil {
		s.run.giveUp(info.Digest)
		return nil, 0, s.failed(err)
	}
	settle := func() {
		leave()
		s.run.giveUp(info.Digest)
	}
	s.run.job.track.layer(info.Digest, StageFetching)
	stream, err := s.open(ctx, info, cache)
	if err != nil {
		settle()
		return nil, 0, s.failed(fmt.Errorf("fetch layer %s: %w", info.Digest, err))
	}
	return &layerStream{ReadCloser: stream, settle: settle}, s.run.sizeOf[info.Digest], nil
}

// open opens a layer where it is.
func (s *source) open(ctx context.Context, info types.BlobInfo, cache types.BlobInfoCache) (io.ReadCloser, error) {
	if s.run.remote != nil {
		return s.run.resume(ctx, info.Digest)
	}
	want := s.run.sizeOf[info.Digest]
	stream, size, err := s.run.src.GetBlob(ctx, info, cache)
	if err == nil && size >= 0 && size != want {
		stream.Close()
		err = fmt.Errorf("%w: it has %d bytes, the manifest says %d", ErrInvalidImage, size, want)
	}
	if err != nil {
		return nil, err
	}
	return s.run.watch(info.Digest, stream), nil
}

// resume opens a layer where it is kept, else at its registry, after what an earlier
// try has left.
func (r *run) resume(ctx context.Context, blob digest.Digest) (io.ReadCloser, error) {
	if kept, err := r.openKept(ctx, blob); kept != nil || err != nil {
		return kept, err
	}
	in := &resumed{size: r.sizeOf[blob], part: r.store.left.open(blob, r.sizeOf[blob])}
	in.from = func(at int64) (io.ReadCloser, error) {
		rest, err := r.remote.Open(ctx, fetch.Blob{Digest: blob, Size: in.size}, at)
		if err != nil {
			return nil, err
		}
		return r.watch(blob, rest), nil
	}
	if in.part != nil && in.part.size > 0 {
		in.old = in.part.size
		r.job.track.resume(blob, in.old)
		r.mu.Lock()
		r.again = true
		r.mu.Unlock()
		return in, nil
	}
	var err error
	if in.rest, err = in.from(0); err != nil {
		in.Close()
		return nil, err
	}
	return in, nil
}

func (r *run) watch(blob digest.Digest, stream io.ReadCloser) io.ReadCloser {
	return &watched{ReadCloser: stream, got: func(n int) { r.job.track.got(blob, n) }}
}
