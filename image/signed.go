package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/image"

	"berth/image/policy"
	"berth/image/registries"
)

// readSignatures asks for the signatures of one of the manifests that inspect
// has read. Of one in a registry they are where containers-registries.d(5) says
// of the place it came from, or else of its name. Who has hosts.toml need not
// write such a file for signatures that are attached to the image.
func (r *run) readSignatures(ctx context.Context, unparsed *image.UnparsedImage, d digest.Digest) ([][]byte, error) {
	from, ok := r.src.(*remote)
	if !ok {
		return policy.ReadSignatures(ctx, unparsed)
	}
	host, repository := from.Place()
	where := r.sources.Of(r.job.repository.named)
	if place, err := parseName(host + "/" + repository + "@" + d.String()); err == nil {
		where = r.sources.Of(place.named, r.job.repository.named)
	}
	list, err := from.aside(ctx, where.Lookaside+"/"+repository, d)
	if err == nil && (where.Attached || from.ByHosts) {
		var attached [][]byte
		attached, err = from.attached(ctx, d)
		list = append(list, attached...)
	}
	if err != nil {
		return nil, err
	}
	return list, policy.Bounded(list)
}

// aside reads what a lookaside has of a manifest: files, or documents of a
// server, numbered from 1.
func (r *remote) aside(ctx context.Context, base string, d digest.Digest) ([][]byte, error) {
	var list [][]byte
	left := int64(policy.MaxSignatureSize)
	for n := 1; ; n++ {
		if n > policy.MaxSignatures {
			return nil, fmt.Errorf("%s has more than %d signatures of %s", base, policy.MaxSignatures, d)
		}
		at := fmt.Sprintf("%s@%s=%s/signature-%d", base, d.Algorithm(), d.Encoded(), n)
		data, err := r.signatureAt(ctx, at, left)
		if errors.Is(err, ErrNotFound) || errors.Is(err, registries.ErrNotFound) {
			return list, nil
		}
		if err == nil {
			data, err = policy.Aside(data)
		}
		if err != nil {
			return nil, fmt.Errorf("read signature %s: %w", at, err)
		}
		left -= int64(len(data))
		list = append(list, data)
	}
}

func (r *remote) signatureAt(ctx context.Context, at string, most int64) ([]byte, error) {
	u, err := url.Parse(at)
	if err != nil {
		return nil, err
	}
	if u.Scheme != "file" {
		return r.Aside(ctx, at, most)
	}
	if r.answer != nil {
		if err := r.answer(ctx, u.Path); errors.Is(err, context.DeadlineExceeded) {
			return nil, fmt.Errorf("%w: lookaside of image.registries_dir: %w", registries.ErrHangs, err)
		} else if err != nil {
			return nil, err
		}
	}
	f, err := openArchive(u.Path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("more than %d bytes", most)
	}
	return data, err
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
