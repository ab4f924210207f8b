package image

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"
)

// allocated fails a fuzz target that takes much more memory than its input
// may cost.
func allocated(t *testing.T, most uint64, do func()) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > most {
		t.Errorf("%d bytes allocated, at most %d are due", n, most)
	}
}

// FuzzManifest reads any document under any type. What is taken must be one
// thing only, for every reader, and name nothing but digests and known types.
func FuzzManifest(f *testing.F) {
	const sum = `"digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size":1`
	layer := `{"mediaType":"` + ispec.MediaTypeImageLayerGzip + `",` + sum + `}`
	image := `{"schemaVersion":2,"mediaType":"` + ispec.MediaTypeImageManifest + `","config":{"mediaType":"` + ispec.MediaTypeImageConfig + `",` + sum + `},"layers":[` + layer + `]`
	entry := `{"mediaType":"` + ispec.MediaTypeImageManifest + `",` + sum + `,"platform":{"os":"linux","architecture":"amd64","variant":"v2"},"annotations":{"a":"b"}}`
	for served, body := range map[string]string{
		ispec.MediaTypeImageManifest:                 image + `}`,
		ispec.MediaTypeImageManifest + "; charset=x": image + `,"manifests":[` + entry + `]}`,
		ispec.MediaTypeImageIndex:                    `{"schemaVersion":2,"manifests":[` + entry + `]}`,
		manifest.DockerV2ListMediaType:               `{"schemaVersion":2,"mediaType":"` + manifest.DockerV2ListMediaType + `","manifests":[` + entry + `,` + entry + `]}`,
		manifest.DockerV2Schema1MediaType:            `{"schemaVersion":1,"fsLayers":[],"history":[]}`,
		"application/json":                           `{"schemaVersion":2,"artifactType":"a/b","config":{"mediaType":"` + ispec.MediaTypeEmptyJSON + `",` + sum + `},"layers":[{` + sum + `,"annotations":{"org.opencontainers.image.title":"a/../b"}}]}`,
		"":                                           image + `,"manifeſts":[` + entry + `],"Config":{}}`,
		"text/plain":                                 strings.Repeat(`{"manifests":[`, 50),
	} {
		f.Add([]byte(body), served)
	}
	f.Fuzz(func(t *testing.T, data []byte, served string) {
		allocated(t, 16<<20+100*uint64(len(data)), func() { readDocument(t, data, served) })
	})
}

func readDocument(t *testing.T, data []byte, served string) {
	doc, err := newDocument(data, served)
	if err != nil {
		if !errors.Is(err, ErrInvalidImage) {
			t.Errorf("%q: %v", data, err)
		}
		return
	}
	var all struct {
		Manifests []json.RawMessage `json:"manifests"`
		Layers    []json.RawMessage `json:"layers"`
		Config    json.RawMessage   `json:"config"`
		FSLayers  []json.RawMessage `json:"fsLayers"`
	}
	if json.Unmarshal(data, &all) == nil {
		image := all.Layers != nil || all.Config != nil && string(all.Config) != "null" || all.FSLayers != nil
		if image && all.Manifests != nil || doc.isIndex() != (all.Manifests != nil) {
			t.Errorf("%q is taken for a %s", data, doc.mediaType)
		}
	}
	_ = doc.annotations()
	if doc.isIndex() {
		if d, err := doc.choose(nil); err == nil && checkDigest(d) != nil {
			t.Errorf("%q gives the entry %q", data, d)
		}
		_ = doc.offers()
		return
	}
	b, err := doc.parse()
	if err != nil {
		return
	}
	if b.artifact != nil {
		for _, names := range b.artifact.files {
			for _, n := range names {
				if !filepath.IsLocal(n) || n != filepath.Clean(n) || n == "." {
					t.Errorf("%q lets a file go to %q", data, n)
				}
			}
		}
	}
	for _, l := range append(b.layers, b.config) {
		if checkDigest(l.Digest) != nil || l.Size < 0 {
			t.Errorf("%q gives the blob %q of %d bytes", data, l.Digest, l.Size)
		}
	}
}

// FuzzConfig reads any config.
func FuzzConfig(f *testing.F) {
	f.Add([]byte(`{"os":"linux","architecture":"amd64","config":{"Env":["A=b"],"Volumes":{"/x":{}}},"rootfs":{"type":"layers","diff_ids":["sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]},"history":[{}]}`), 1)
	f.Add([]byte(`{"rootfs":{"diff_ids":["sha256:e3"]}}`), 1)
	f.Add([]byte(`null`), 0)
	f.Fuzz(func(t *testing.T, data []byte, layers int) {
		allocated(t, 16<<20+100*uint64(len(data)), func() {
			c, err := checkConfig(data, layers)
			if err != nil {
				return
			}
			if len(c.RootFS.DiffIDs) != layers {
				t.Errorf("%q has %d diff_ids, not %d", data, len(c.RootFS.DiffIDs), layers)
			}
			if _, err := json.Marshal(lean(c)); err != nil {
				t.Errorf("%q cannot be kept: %v", data, err)
			}
		})
	})
}

// FuzzDecompress reads any stream as a layer's, with small bounds: it never
// gives more than they allow, nor takes memory for more than a window.
func FuzzDecompress(f *testing.F) {
	zeros := make([]byte, 4<<20)
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	w.Write(zeros)
	w.Close()
	f.Add(z.Bytes())
	f.Add(append(z.Bytes(), z.Bytes()...)) // several members
	e, err := zstd.NewWriter(nil, zstd.WithWindowSize(8<<20))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(e.EncodeAll(zeros, nil))
	f.Add(append([]byte{0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 1, 2, 3, 4}, e.EncodeAll([]byte("behind a frame to skip"), nil)...))
	f.Add([]byte("\xfd7zXZ\x00"))
	f.Add([]byte("BZh9"))
	f.Add([]byte("plain"))
	f.Fuzz(func(t *testing.T, data []byte) {
		const allowance, factor = 1 << 20, 10
		allocated(t, 3*zstdWindow, func() {
			grows := &expansion{allowance: allowance, factor: factor, left: allowance}
			body, closeBody, err := decompress(grows.compressedEnd(bytes.NewReader(data)), atOnce)
			if err != nil {
				return
			}
			defer closeBody()
			n, _ := io.Copy(io.Discard, grows.plainEnd(body)) // any error will do
			if most := allowance + factor*int64(len(data)); n > most {
				t.Errorf("%d bytes give %d, more than %d", len(data), n, most)
			}
		})
	})
}
