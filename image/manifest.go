package image

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"unicode"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"

	"berth/image/rootfs"
)

const (
	maxManifest = 4 << 20
	maxConfig   = 4 << 20
	maxNesting  = 4    // indexes in indexes
	maxEntries  = 1000 // of an index
	maxUses     = 1000 // layers that an image lists, repeated ones too
)

// document is a manifest or an index with the type it is to be read as.
type document struct {
	data      []byte
	mediaType string
	digest    digest.Digest
}

func (d document) isIndex() bool {
	return d.mediaType == ispec.MediaTypeImageIndex || d.mediaType == manifest.DockerV2ListMediaType
}

// maxAnnotations is how many bytes of a manifest's annotations are kept: every
// list of images carries them.
const maxAnnotations = 16 << 10

// annotations are a manifest's; nil when there are none or too many. Values
// that no CRI message can carry (they are not UTF-8) cannot come out of JSON.
func (d document) annotations() map[string]string {
	var m struct {
		Annotations map[string]string `json:"annotations"`
	}
	if err := json.Unmarshal(d.data, &m); err != nil || len(m.Annotations) == 0 {
		return nil
	}
	size := 0
	for k, v := range m.Annotations {
		size += len(k) + len(v)
	}
	if size > maxAnnotations {
		return nil
	}
	return m.Annotations
}

// newDocument decides what a document is. The type in the document and the one
// it was served with must not contradict each other, nor may it be two things
// at once: whoever checks it and whoever runs it must read the same.
func newDocument(data []byte, served string) (document, error) {
	d := document{data: data, digest: digest.FromBytes(data)}
	if len(data) > maxManifest {
		return d, fmt.Errorf("%w: manifest of %d bytes, at most %d are allowed", ErrInvalidImage, len(data), maxManifest)
	}
	fields, err := topLevel(data)
	if err != nil {
		return d, fmt.Errorf("%w: manifest: %v", ErrInvalidImage, err)
	}
	for _, other := range []string{"config", "layers", "fslayers", "history", "signatures"} {
		if fields["manifests"] != nil && fields[other] != nil {
			return d, fmt.Errorf("%w: the manifest is both an index (manifests) and an image (%s)", ErrInvalidImage, other)
		}
	}
	if fields["layers"] != nil && fields["fslayers"] != nil {
		return d, fmt.Errorf("%w: the manifest has both layers and fsLayers", ErrInvalidImage)
	}
	var own string
	if raw := fields["mediatype"]; raw != nil {
		if err := json.Unmarshal(raw, &own); err != nil {
			return d, fmt.Errorf("%w: manifest: mediaType: %v", ErrInvalidImage, err)
		}
	}
	served, _, _ = strings.Cut(served, ";")
	d.mediaType, err = decideType(strings.TrimSpace(served), own, fields)
	return d, err
}

// topLevel reads the fields of a JSON object by lower-case name, as Go's
// decoder does not mind the case. A field twice is refused.
func topLevel(data []byte) (map[string]json.RawMessage, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, fmt.Errorf("not a JSON object")
	}
	fields := map[string]json.RawMessage{}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, err
		}
		key := fold(fmt.Sprint(t))
		if fields[key] != nil {
			return nil, fmt.Errorf("the field %q is there twice", key)
		}
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return nil, err
		}
		if string(raw) != "null" {
			fields[key] = raw
		}
	}
	if _, err := dec.Token(); err != nil {
		return nil, err
	}
	return fields, nil
}

// fold gives names that Go's decoder takes for the same one form: it knows that
// an "ſ" is an old "s" and that "K" may be a kelvin.
func fold(name string) string {
	return strings.ToLower(strings.Map(func(r rune) rune {
		for next := unicode.SimpleFold(r); next < r; next = unicode.SimpleFold(next) {
			r = next
		}
		return r
	}, name))
}

// decideType picks the type of a document from what it was served as, what it
// says itself and what it looks like.
func decideType(served, own string, fields map[string]json.RawMessage) (string, error) {
	if own != "" && known(served) && own != served {
		return "", fmt.Errorf("%w: manifest was served as %q and says it is %q", ErrInvalidImage, served, own)
	}
	is := own
	if is == "" && known(served) {
		is = served
	}
	if is == "" {
		switch {
		case fields["manifests"] != nil:
			is = ispec.MediaTypeImageIndex
		case fields["layers"] != nil && fields["config"] != nil:
			is = ispec.MediaTypeImageManifest
		case fields["fslayers"] != nil:
			is = manifest.DockerV2Schema1MediaType
		}
	}
	index := is == ispec.MediaTypeImageIndex || is == manifest.DockerV2ListMediaType
	switch {
	case is == manifest.DockerV2Schema1MediaType, is == manifest.DockerV2Schema1SignedMediaType:
		return "", fmt.Errorf("%w: manifests of schema 1 are not supported", ErrInvalidImage)
	case !known(is):
		return "", fmt.Errorf("%w: unknown manifest type %q", ErrInvalidImage, is)
	case index != (fields["manifests"] != nil):
		return "", fmt.Errorf("%w: the manifest does not look like its type %q", ErrInvalidImage, is)
	}
	return is, nil
}

func known(mediaType string) bool {
	switch mediaType {
	case ispec.MediaTypeImageIndex, ispec.MediaTypeImageManifest,
		manifest.DockerV2ListMediaType, manifest.DockerV2Schema2MediaType,
		manifest.DockerV2Schema1MediaType, manifest.DockerV2Schema1SignedMediaType:
		return true
	}
	return false
}

// offers lists the platforms of an index; attestations are not images.
func (d document) offers() string {
	var index ispec.Index
	if err := json.Unmarshal(d.data, &index); err != nil {
		return "nothing readable"
	}
	var all []string
	for _, m := range index.Manifests {
		p := m.Platform
		if p == nil || p.OS == "unknown" {
			continue
		}
		text := p.OS + "/" + p.Architecture
		if p.Variant != "" {
			text += "/" + p.Variant
		}
		all = append(all, text)
		if len(all) == 50 {
			all = append(all, "…")
			break
		}
	}
	if len(all) == 0 {
		return "none"
	}
	return strings.Join(all, ", ")
}

// blobs are what an image manifest refers to.
type blobs struct {
	config   ispec.Descriptor
	layers   []ispec.Descriptor
	artifact *artifact // nil: the layers are a container image's
}

// parse reads an image manifest and refuses what is neither a container image
// nor an artifact, by the name of the type that is not known.
func (d document) parse() (blobs, error) {
	var m ispec.Manifest // a superset of docker's schema 2 in all that matters here
	if err := json.Unmarshal(d.data, &m); err != nil {
		return blobs{}, fmt.Errorf("%w: manifest: %v", ErrInvalidImage, err)
	}
	if len(m.Layers) > maxUses {
		return blobs{}, fmt.Errorf("%w: manifest of %d layers, at most %d are allowed", ErrInvalidImage, len(m.Layers), maxUses)
	}
	if m.Config.Size > maxConfig {
		return blobs{}, fmt.Errorf("%w: config of %d bytes, at most %d are allowed", ErrInvalidImage, m.Config.Size, maxConfig)
	}
	for i, l := range append([]ispec.Descriptor{m.Config}, m.Layers...) {
		if err := checkDigest(l.Digest); err != nil {
			return blobs{}, fmt.Errorf("%w: manifest: blob %d: %v", ErrInvalidImage, i, err)
		}
		if l.Size < 0 || l.Size == 0 && l.Digest != digest.Canonical.FromBytes(nil) {
			return blobs{}, fmt.Errorf("%w: manifest: blob %s has the size %d", ErrInvalidImage, l.Digest, l.Size)
		}
	}
	artifact, err := artifactOf(m, d.mediaType)
	if err != nil {
		return blobs{}, err
	}
	for i, l := range m.Layers {
		if artifact == nil && !isLayerType(l.MediaType) {
			return blobs{}, fmt.Errorf("%w: layer %d has the unknown type %q", ErrInvalidImage, i+1, l.MediaType)
		}
	}
	return blobs{config: m.Config, layers: m.Layers, artifact: artifact}, nil
}

func checkDigest(d digest.Digest) error {
	if err := d.Validate(); err != nil {
		return fmt.Errorf("digest %q: %v", d, err)
	}
	if d.Algorithm() != digest.SHA256 {
		return fmt.Errorf("digest %q: only sha256 is supported", d)
	}
	return nil
}

// isLayerType knows the types of filesystem layers. How a layer is compressed
// is decided by its first bytes, as builders get the label wrong.
func isLayerType(t string) bool {
	for _, base := range []string{
		ispec.MediaTypeImageLayer,
		"application/vnd.oci.image.layer.nondistributable.v1.tar",
		"application/vnd.docker.image.rootfs.diff.tar",
		"application/vnd.docker.image.rootfs.foreign.diff.tar",
	} {
		if rest, ok := strings.CutPrefix(t, base); ok {
			switch rest {
			case "", ".gzip", "+gzip", ".zstd", "+zstd":
				return true
			}
		}
	}
	return false
}

// checkConfig reads an image's config and compares it with the manifest.
func checkConfig(data []byte, layers int) (ispec.Image, error) {
	var c ispec.Image
	if err := json.Unmarshal(data, &c); err != nil {
		return c, fmt.Errorf("%w: config: %v", ErrInvalidImage, err)
	}
	if c.OS != "" && c.OS != "linux" {
		return c, fmt.Errorf("%w: made for the system %q, not for linux", ErrInvalidImage, c.OS)
	}
	if len(c.RootFS.DiffIDs) != layers {
		return c, fmt.Errorf("%w: config has %d diff_ids, the manifest %d layers", ErrInvalidImage, len(c.RootFS.DiffIDs), layers)
	}
	different := map[digest.Digest]bool{}
	for _, d := range c.RootFS.DiffIDs {
		if err := checkDigest(d); err != nil {
			return c, fmt.Errorf("%w: config: diff_ids: %v", ErrInvalidImage, err)
		}
		different[d] = true
	}
	if len(different) > rootfs.MaxLayers {
		return c, fmt.Errorf("%w: %d layers, the kernel stacks at most %d", ErrInvalidImage, len(different), rootfs.MaxLayers)
	}
	return c, nil
}
