package image

import (
	"context"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"

	"berth/image/policy"
)

// readSignatures asks for the signatures of one of the manifests that inspect
// has read. For one in a registry the library is asked, which alone knows where
// they are kept; its interfaces for that are closed.
func (r *run) readSignatures(ctx context.Context, unparsed *image.UnparsedImage, d digest.Digest) ([][]byte, error) {
	if _, ok := r.src.(*remote); !ok {
		return policy.ReadSignatures(ctx, unparsed)
	}
	named, err := reference.WithDigest(reference.TrimNamed(r.job.repository.named), d)
	if err != nil {
		return nil, err
	}
	ref, err := docker.NewReference(named)
	if err != nil {
		return nil, err
	}
	src, err := ref.NewImageSource(ctx, r.job.sys)
	if err != nil {
		return nil, err
	}
	defer src.Close()
	return policy.ReadSignatures(ctx, image.UnparsedInstance(src, nil))
}
