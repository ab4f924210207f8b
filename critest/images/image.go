// Package images makes the images that tests, the demo and conformance need, on
// the spot and without a network: from Debian's busybox, the host's C library
// and one static program of ours (package standin), plus any hand-made image a
// case wants.
//
// It owns the layer and manifest writers and the table of standard images. It
// does not serve them (package registry) nor fetch their parts (`make deps`
// does). It writes no files. Equal inputs give equal bytes, so digests are
// stable on one machine.
package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"runtime"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/critest/registry"
)

// Media types of docker schema 2, which ispec does not name.
const (
	DockerManifest  = "application/vnd.docker.distribution.manifest.v2+json"
	DockerIndex     = "application/vnd.docker.distribution.manifest.list.v2+json"
	DockerConfig    = "application/vnd.docker.container.image.v1+json"
	DockerLayerGzip = "application/vnd.docker.image.rootfs.diff.tar.gzip"
)

// Compression of a layer's blob.
type Compression int

// The three that both media type families know.
const (
	Gzip Compression = iota
	Zstd
	Plain
)

// String is the compression's name.
func (c Compression) String() string {
	switch c {
	case Gzip:
		return "gzip"
	case Zstd:
		return "zstd"
	}
	return "plain"
}

// Entry is one member of a layer. Header.Size is filled in from Data.
type Entry struct {
	tar.Header
	Data []byte
}

// Layer is a finished blob with both of its digests.
type Layer struct {
	MediaType string
	Blob      []byte
	DiffID    digest.Digest
}

// Image is what Publish needs. Docker selects docker's media types.
type Image struct {
	Config ispec.ImageConfig
	Layers []Layer
	Docker bool
	// Annotations are the manifest's.
	Annotations map[string]string
	// Stamp makes otherwise equal images differ: it becomes the config's author.
	Stamp string
}

// Published names what a registry now serves.
type Published struct {
	Manifest digest.Digest
	Config   digest.Digest
	Body     []byte // the manifest
	Type     string // its media type
}

// File, Dir, Symlink, Hardlink and Whiteout are the entries most layers are made of.
func File(name string, mode int64, data string) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode}, Data: []byte(data)}
}

// Dir is a directory entry.
func Dir(name string, mode int64) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode}}
}

// Symlink is a symbolic link to target.
func Symlink(name, target string) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}}
}

// Hardlink is a second name of target, an earlier member.
func Hardlink(name, target string) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, Mode: 0o755}}
}

// NewLayer packs entries in their order. Times are fixed.
func NewLayer(c Compression, entries ...Entry) (Layer, error) {
	var raw bytes.Buffer
	w := tar.NewWriter(&raw)
	for _, e := range entries {
		h := e.Header
		h.Size = int64(len(e.Data))
		if h.ModTime.IsZero() {
			h.ModTime = time.Unix(1_700_000_000, 0)
		}
		if err := w.WriteHeader(&h); err != nil {
			return Layer{}, fmt.Errorf("write tar entry %q: %w", h.Name, err)
		}
		if _, err := w.Write(e.Data); err != nil {
			return Layer{}, fmt.Errorf("write tar entry %q: %w", h.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		return Layer{}, fmt.Errorf("end the tar: %w", err)
	}
	return Compress(c, raw.Bytes())
}

// Compress makes a layer of a finished tar.
func Compress(c Compression, raw []byte) (Layer, error) {
	l := Layer{DiffID: digest.FromBytes(raw)}
	var out bytes.Buffer
	switch c {
	case Plain:
		l.MediaType, l.Blob = ispec.MediaTypeImageLayer, raw
		return l, nil
	case Zstd:
		l.MediaType = ispec.MediaTypeImageLayerZstd
		w, err := zstd.NewWriter(&out, zstd.WithEncoderConcurrency(1))
		if err != nil {
			return l, fmt.Errorf("make a zstd writer: %w", err)
		}
		if _, err := w.Write(raw); err != nil {
			return l, fmt.Errorf("compress a layer: %w", err)
		}
		if err := w.Close(); err != nil {
			return l, fmt.Errorf("compress a layer: %w", err)
		}
	default:
		l.MediaType = ispec.MediaTypeImageLayerGzip
		w, err := gzip.NewWriterLevel(&out, gzip.BestSpeed)
		if err != nil {
			return l, fmt.Errorf("make a gzip writer: %w", err)
		}
		if _, err := w.Write(raw); err != nil {
			return l, fmt.Errorf("compress a layer: %w", err)
		}
		if err := w.Close(); err != nil {
			return l, fmt.Errorf("compress a layer: %w", err)
		}
	}
	l.Blob = out.Bytes()
	return l, nil
}

// Publish serves the image as repository:tag (and by digest).
func (m Image) Publish(r *registry.Registry, repository, tag string) (Published, error) {
	p, blobs, err := m.encode()
	if err != nil {
		return p, fmt.Errorf("encode %s: %w", repository, err)
	}
	for _, blob := range blobs {
		r.PutBlob(blob)
	}
	r.PutManifest(repository, tag, p.Type, p.Body)
	return p, nil
}

// encode makes config and manifest; blobs are the config and then the layers.
func (m Image) encode() (p Published, blobs [][]byte, err error) {
	config := ispec.Image{
		Author:   m.Stamp,
		Platform: ispec.Platform{Architecture: runtime.GOARCH, OS: "linux"},
		Config:   m.Config,
		RootFS:   ispec.RootFS{Type: "layers"},
	}
	manifest := ispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageManifest, Annotations: m.Annotations}
	configType := ispec.MediaTypeImageConfig
	if m.Docker {
		manifest.MediaType, configType = DockerManifest, DockerConfig
	}
	for _, l := range m.Layers {
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, l.DiffID)
		config.History = append(config.History, ispec.History{CreatedBy: "berth test images"})
		mediaType := l.MediaType
		if m.Docker && mediaType == ispec.MediaTypeImageLayerGzip {
			mediaType = DockerLayerGzip
		}
		manifest.Layers = append(manifest.Layers, descriptor(mediaType, l.Blob))
		blobs = append(blobs, l.Blob)
	}
	raw, err := json.Marshal(config)
	if err != nil {
		return p, nil, fmt.Errorf("encode the config: %w", err)
	}
	manifest.Config = descriptor(configType, raw)
	p = Published{Config: manifest.Config.Digest, Type: manifest.MediaType}
	if p.Body, err = json.Marshal(manifest); err != nil {
		return p, nil, fmt.Errorf("encode the manifest: %w", err)
	}
	p.Manifest = digest.FromBytes(p.Body)
	return p, append([][]byte{raw}, blobs...), nil
}

func descriptor(mediaType string, blob []byte) ispec.Descriptor {
	return ispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(blob), Size: int64(len(blob))}
}

// Index serves an index with these platforms' manifests as repository:tag.
func Index(r *registry.Registry, repository, tag string, members map[string]Published, order []string) (digest.Digest, error) {
	index := ispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageIndex}
	for _, arch := range order {
		p := members[arch]
		r.PutManifest(repository, "", p.Type, p.Body)
		index.Manifests = append(index.Manifests, ispec.Descriptor{
			MediaType: p.Type, Digest: p.Manifest, Size: int64(len(p.Body)),
			Platform: &ispec.Platform{Architecture: arch, OS: "linux"},
		})
	}
	body, err := json.Marshal(index)
	if err != nil {
		return "", fmt.Errorf("encode the index of %s: %w", repository, err)
	}
	return r.PutManifest(repository, tag, index.MediaType, body), nil
}
