package images

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// OCIArchive is the image as a tar of an OCI layout, named name ("docker.io/x/y:1").
func (m Image) OCIArchive(name string) ([]byte, Published, error) {
	p, blobs, err := m.encode()
	if err != nil {
		return nil, p, err
	}
	manifest := descriptor(p.Type, p.Body)
	manifest.Annotations = map[string]string{ispec.AnnotationRefName: name}
	index := ispec.Index{MediaType: ispec.MediaTypeImageIndex, Manifests: []ispec.Descriptor{manifest}}
	index.SchemaVersion = 2
	raw, err := json.Marshal(index)
	if err != nil {
		return nil, p, fmt.Errorf("encode the index: %w", err)
	}
	entries := []Entry{
		File("oci-layout", 0o644, `{"imageLayoutVersion":"1.0.0"}`),
		File("index.json", 0o644, string(raw)),
	}
	for _, blob := range append(blobs, p.Body) {
		entries = append(entries, File("blobs/sha256/"+descriptor("", blob).Digest.Encoded(), 0o644, string(blob)))
	}
	l, err := NewLayer(Plain, entries...)
	return l.Blob, p, err
}

// DockerArchive is the image as `docker save` writes it: layers uncompressed.
func (m Image) DockerArchive(name string) ([]byte, Published, error) {
	p, blobs, err := m.encode()
	if err != nil {
		return nil, p, err
	}
	content := []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}{{Config: p.Config.Encoded() + ".json", RepoTags: []string{name}}}
	entries := []Entry{File(content[0].Config, 0o644, string(blobs[0]))}
	for i, l := range m.Layers {
		z, err := gzip.NewReader(bytes.NewReader(l.Blob))
		if err != nil {
			return nil, p, fmt.Errorf("open layer %d: %w", i, err)
		}
		raw, err := io.ReadAll(z)
		if err != nil {
			return nil, p, fmt.Errorf("inflate layer %d: %w", i, err)
		}
		file := fmt.Sprintf("%d/layer.tar", i)
		content[0].Layers = append(content[0].Layers, file)
		entries = append(entries, File(file, 0o644, string(raw)))
	}
	raw, err := json.Marshal(content)
	if err != nil {
		return nil, p, fmt.Errorf("encode manifest.json: %w", err)
	}
	l, err := NewLayer(Plain, append(entries, File("manifest.json", 0o644, string(raw)))...)
	return l.Blob, p, err
}
