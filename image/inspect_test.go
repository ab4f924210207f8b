package image

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Inspect shows manifests and config as they came, and each layer with its size
// and sharers.
func TestInspect(t *testing.T) {
	reg := newRegistry(t)
	base, upper := gzipLayer(tarOf(t, file{name: "a", body: noise(5000)})), zstdLayer(tarOf(t, file{name: "b", body: "b"}))
	_, sharer := reg.push("other", "1", base)
	m, id := reg.push("app", "single", base, upper, base)
	index := ispec.Index{MediaType: ispec.MediaTypeImageIndex, Manifests: []ispec.Descriptor{m}}
	index.SchemaVersion = 2
	index.Manifests[0].Platform = &ispec.Platform{OS: "linux", Architecture: "amd64"}
	at := reg.doc("app", ispec.MediaTypeImageIndex, index, "1")
	s := open(t, t.TempDir(), func(o *Options) { o.KeepLayerBlobs = true }, reg)
	mustPull(t, s, reg.ref("other:1"))
	mustPull(t, s, reg.ref("app:1"))
	calm(t, s)
	d, err := s.Inspect(reg.ref("app:1"))
	if err != nil {
		t.Fatal(err)
	}
	if d.ID != id || digest.FromBytes(d.Config) != digest.Digest(id) {
		t.Errorf("id %s, config %s", d.ID, d.Config)
	}
	if d.Manifest.Digest != m.Digest || digest.FromBytes(d.Manifest.Content) != m.Digest || d.Manifest.MediaType != ispec.MediaTypeImageManifest {
		t.Errorf("manifest %+v", d.Manifest)
	}
	if len(d.Others) != 1 || d.Others[0].Digest != at.Digest || !bytes.Contains(d.Others[0].Content, []byte(m.Digest)) {
		t.Errorf("others %+v", d.Others)
	}
	if len(d.Layers) != 3 || d.Layers[0].Dir != d.Layers[2].Dir || d.Layers[0].Dir == d.Layers[1].Dir {
		t.Fatalf("layers %+v", d.Layers)
	}
	for i, want := range []struct {
		layerBlob
		sharers []string
	}{{base, []string{sharer}}, {upper, nil}} {
		l := d.Layers[i]
		if l.DiffID != digest.FromBytes(want.tar) || l.Blob != digest.FromBytes(want.data) || l.Size != int64(len(want.data)) ||
			l.MediaType != want.mediaType || !slices.Equal(l.SharedBy, want.sharers) || l.Usage.Bytes == 0 || l.Usage.Inodes != 2 || !l.Durable || !l.BlobKept {
			t.Errorf("layer %d: %+v", i, l)
		}
	}
	if _, err := s.Inspect("nothing"); !errors.Is(err, ErrNotFound) {
		t.Errorf("of nothing: %v", err)
	}
}
