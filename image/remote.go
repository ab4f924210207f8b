package image

import (
	"context"
	"io"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"

	"berth/image/fetch"
	"berth/image/registries"
)

// remote is an image in a registry, fetched from whichever endpoint has it.
// Every wait for an answer is bounded there; that for a blob's bytes is not.
type remote struct {
	*registries.Source
	ref    types.ImageReference                             // the name, as signature policies see it
	answer func(ctx context.Context, paths ...string) error // as PullRequest.Answer
}

// Reference of the image.
func (r *remote) Reference() types.ImageReference { return r.ref }

// GetManifest reads a manifest from the first endpoint that has it.
func (r *remote) GetManifest(ctx context.Context, instance *digest.Digest) ([]byte, string, error) {
	if instance == nil {
		return r.Manifest(ctx, "")
	}
	return r.Manifest(ctx, *instance)
}

// GetBlob opens a blob as one connection. Layers are read by package fetch.
func (r *remote) GetBlob(ctx context.Context, info types.BlobInfo, _ types.BlobInfoCache) (io.ReadCloser, int64, error) {
	b, err := r.Blob(ctx, registries.Range{Digest: info.Digest})
	if err != nil {
		return nil, 0, err
	}
	return b, b.Size, nil
}

// Part is how package fetch reads layers.
func (r *remote) Part(ctx context.Context, d digest.Digest, from, length int64) (*fetch.Part, error) {
	b, err := r.Blob(ctx, registries.Range{Digest: d, Offset: from, Length: max(length, 0)})
	if err != nil {
		return nil, err
	}
	return &fetch.Part{ReadCloser: b, From: b.Offset, Size: b.Size, Ranged: b.Ranged, Broke: b.Failed}, nil
}

// HasThreadSafeGetBlob is true.
func (r *remote) HasThreadSafeGetBlob() bool { return true }

// GetSignatures gives none: see judged.
func (r *remote) GetSignatures(context.Context, *digest.Digest) ([][]byte, error) { return nil, nil }

// LayerInfosForCopy: the layers are those of the manifest.
func (r *remote) LayerInfosForCopy(context.Context, *digest.Digest) ([]types.BlobInfo, error) {
	return nil, nil
}
