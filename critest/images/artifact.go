package images

import (
	"encoding/json"
	"fmt"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/critest/registry"
)

// Blob is a file of an artifact.
type Blob struct {
	Title string // none: it has no name
	Data  []byte
}

// Artifact serves files as an OCI artifact of a type, as oras pushes them.
func Artifact(r *registry.Registry, repository, tag, kind string, blobs ...Blob) (digest.Digest, error) {
	empty := []byte("{}")
	r.PutBlob(empty)
	m := ispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageManifest,
		ArtifactType: kind, Config: descriptor(ispec.MediaTypeEmptyJSON, empty),
	}
	for _, b := range blobs {
		r.PutBlob(b.Data)
		d := descriptor("application/octet-stream", b.Data)
		if b.Title != "" {
			d.Annotations = map[string]string{ispec.AnnotationTitle: b.Title}
		}
		m.Layers = append(m.Layers, d)
	}
	body, err := json.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("encode the artifact %s: %w", repository, err)
	}
	return r.PutManifest(repository, tag, m.MediaType, body), nil
}
