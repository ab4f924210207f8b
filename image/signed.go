package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"

	"berth/image/policy"
	"berth/image/registries"
)

// readSignatures asks for the signatures of one of the manifests that inspect
// has read. For one in a registry the library is asked, which alone knows where
// they are kept. It does not know hosts.toml: of such a registry those are read
// that are attached to the image.
func (r *run) readSignatures(ctx context.Context, unparsed *image.UnparsedImage, d digest.Digest) ([][]byte, error) {
	from, ok := r.src.(*remote)
	if !ok {
		return policy.ReadSignatures(ctx, unparsed)
	}
	if from.ByHosts {
		return from.attached(ctx, d)
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

// attached reads what cosign has put beside a manifest: a manifest of its own,
// under a tag made of the digest, with the signatures as layers.
func (r *remote) attached(ctx context.Context, d digest.Digest) ([][]byte, error) {
	data, err := r.Tagged(ctx, strings.Replace(d.String(), ":", "-", 1)+".sig")
	if errors.Is(err, registries.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var m ispec.Manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, fmt.Errorf("read the manifest of the signatures: %w", err)
	}
	if len(m.Layers) > policy.MaxSignatures {
		return nil, fmt.Errorf("the manifest has %d signatures, at most %d are read", len(m.Layers), policy.MaxSignatures)
	}
	var list [][]byte
	left := policy.MaxSignatureSize
	for _, l := range m.Layers {
		payload, err := r.small(ctx, l.Digest, left)
		if err != nil {
			return nil, err
		}
		blob, err := policy.Sigstore(l.MediaType, payload, l.Annotations)
		if err != nil {
			return nil, err
		}
		if left -= len(blob); left < 0 {
			return nil, fmt.Errorf("the manifest's signatures have more than %d bytes", policy.MaxSignatureSize)
		}
		list = append(list, blob)
	}
	return list, nil
}

// small reads a blob whole and checks it.
func (r *remote) small(ctx context.Context, d digest.Digest, most int) ([]byte, error) {
	if err := checkDigest(d); err != nil {
		return nil, err
	}
	b, err := r.Blob(ctx, registries.Range{Digest: d})
	if err != nil {
		return nil, err
	}
	defer b.Close()
	data, err := io.ReadAll(io.LimitReader(b, int64(most)+1))
	if err != nil {
		return nil, err
	}
	if len(data) > most || digest.FromBytes(data) != d {
		return nil, fmt.Errorf("%w: blob %s is too large or has another digest", ErrInvalidImage, d)
	}
	return data, nil
}
