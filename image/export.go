package image

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/layer"
	"berth/sandbox/regular"
)

// Exported is an image in an archive.
type Exported struct {
	ID    string   // that it has where it is imported
	Names []string // that it has there
	Bytes int64    // of the archive
	// Exact: manifest and layers are as they came, so digests and signatures hold.
	// Else the layers were packed anew: same files, other digests and another id.
	Exact bool
}

// Export writes an image into an archive that Import and other tools read: an OCI
// layout, beside it docker's own list. By a tag it has this one name, by an id or a
// digest all its tags. The file, an absolute path that must not exist, is compressed
// when its name ends in .gz, .tgz or .zst; it is on the disk, mode 0600, when Export
// returns, and not there at all after an error (ErrFileExists, ErrNotFound,
// ErrInvalidReference, or ctx's). After a crash FILE.partial may be left.
func (s *Store) Export(ctx context.Context, ref, file string) (*Exported, error) {
	r, err := s.Resolve(ref)
	if err != nil {
		return nil, fmt.Errorf("export image: %w", err)
	}
	holder := "export " + file + time.Now().String()
	if s.Hold(r.ID, holder) == nil {
		return nil, fmt.Errorf("export image: %w: %s", ErrNotFound, ref)
	}
	defer s.Release(holder)
	e := &export{store: s, ctx: ctx, names: r.RepoTags}
	if n, err := parseName(ref); err == nil && n.tag() != "" {
		if named := s.view.Load().byName[n.String()]; named != nil && named.ID == r.ID { // its record may be another by now
			e.names = []string{n.tag()}
		}
	}
	bytes, err := e.write(r.ID, file)
	if err != nil {
		return nil, fmt.Errorf("export image %s to %s: %w", ref, file, err)
	}
	id := e.manifest.Config.Digest.String()
	if e.artifact != "" {
		id = e.artifact
	}
	return &Exported{ID: id, Names: e.names, Bytes: bytes, Exact: e.exact}, nil
}

// export is one archive under way.
type export struct {
	store *Store
	ctx   context.Context
	names []string
	exact bool
	// artifact is its id when it is one: docker cannot load it, so its list is left out.
	artifact string

	manifest ispec.Manifest
	small    []smallFile // in their order
	layers   []exportLayer
}

// smallFile is a small file of the archive.
type smallFile struct {
	name string
	data []byte
}

// exportLayer is a layer's blob and how to write it.
type exportLayer struct {
	ispec.Descriptor
	diffID digest.Digest
	copy   func(io.Writer) error
}

func (e *export) write(id, file string) (size int64, err error) {
	if _, err := os.Lstat(file); err == nil {
		return 0, ErrFileExists
	}
	out, err := os.OpenFile(file+".partial", os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return 0, fmt.Errorf("%w: %s.partial, of an export that runs or was interrupted; if none runs, remove it", ErrFileExists, file)
	}
	if err != nil {
		return 0, err
	}
	defer func() {
		_ = out.Close()
		if err != nil {
			_ = os.Remove(out.Name())
		}
	}()
	if err := e.plan(id); err != nil {
		return 0, err
	}
	if err := e.compressed(out, file); err != nil {
		return 0, err
	}
	if err := out.Sync(); err != nil {
		return 0, err
	}
	info, err := out.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), os.Rename(out.Name(), file)
}

// compressed writes the archive as the file's name says.
func (e *export) compressed(out io.Writer, file string) error {
	var z io.WriteCloser
	switch {
	case strings.HasSuffix(file, ".gz"), strings.HasSuffix(file, ".tgz"):
		z = gzip.NewWriter(out)
	case strings.HasSuffix(file, ".zst"):
		var err error
		if z, err = zstd.NewWriter(out); err != nil {
			return err
		}
	default:
		return e.archive(out)
	}
	if err := e.archive(z); err != nil {
		_ = z.Close()
		return err
	}
	return z.Close()
}

// archive writes the members, the small ones first.
func (e *export) archive(out io.Writer) error {
	w := tar.NewWriter(out)
	header := func(name string, size int64) error {
		return w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size, ModTime: time.Unix(0, 0)})
	}
	for _, m := range e.small {
		if err := header(m.name, int64(len(m.data))); err != nil {
			return err
		}
		if _, err := w.Write(m.data); err != nil {
			return err
		}
	}
	written := map[digest.Digest]bool{}
	for _, l := range e.layers {
		if written[l.Digest] {
			continue
		}
		written[l.Digest] = true
		if err := header(blobMember(l.Digest), l.Size); err != nil {
			return err
		}
		sum := digest.SHA256.Digester()
		if err := l.copy(io.MultiWriter(w, sum.Hash())); err != nil {
			return fmt.Errorf("write layer %s: %w", l.Digest, err)
		}
		if sum.Digest() != l.Digest {
			return fmt.Errorf("write layer %s: what is stored does not have this digest (any more): %s", l.Digest, sum.Digest())
		}
	}
	return w.Close()
}

func blobMember(d digest.Digest) string { return "blobs/" + d.Algorithm().String() + "/" + d.Encoded() }

// plan decides what the archive holds.
func (e *export) plan(id string) error {
	d, err := e.store.Inspect(id)
	if err != nil {
		return err
	}
	parts, err := e.store.partsOf(id)
	if err != nil {
		return err
	}
	manifest := []byte(d.Manifest.Content)
	config := []byte(d.Config)
	if err := json.Unmarshal(manifest, &e.manifest); err != nil {
		return err
	}
	e.exact = true
	for _, l := range d.Layers {
		e.exact = e.exact && l.BlobKept
	}
	mediaType := d.Manifest.MediaType
	if d.Artifact != "" {
		return e.planArtifact(d)
	}
	if e.exact {
		err = e.keptLayers(d.Layers)
	} else {
		mediaType = ispec.MediaTypeImageManifest
		if err = e.packedLayers(parts.layers); err == nil {
			manifest, config, err = e.newManifest(config)
		}
	}
	if err != nil {
		return err
	}
	return e.layout(mediaType, manifest, config)
}

// keptLayers are the blobs as they came.
func (e *export) keptLayers(layers []LayerDetails) error {
	for _, l := range layers {
		path, err := e.store.blobs.Path(l.Blob)
		if err != nil {
			return err
		}
		e.layers = append(e.layers, exportLayer{ispec.Descriptor{MediaType: l.MediaType, Digest: l.Blob, Size: l.Size}, l.DiffID,
			func(w io.Writer) error {
				f, err := regular.Open(path)
				if err != nil {
					return err
				}
				defer f.Close()
				_, err = io.Copy(ctxWriter{e.ctx, w}, f)
				return err
			}})
	}
	return nil
}

// planArtifact takes the files: they are the blobs as they came.
func (e *export) planArtifact(d *Details) error {
	e.exact = true
	b, err := document{data: d.Manifest.Content, mediaType: d.Manifest.MediaType}.parse()
	if err != nil {
		return err
	}
	for _, l := range d.Layers {
		e.layers = append(e.layers, exportLayer{ispec.Descriptor{MediaType: l.MediaType, Digest: l.Blob, Size: l.Size}, l.DiffID,
			func(w io.Writer) error {
				f, err := b.artifact.open(l.Dir, l.Blob)
				if err != nil {
					return err
				}
				defer f.Close()
				_, err = io.Copy(ctxWriter{e.ctx, w}, f)
				return err
			}})
	}
	config, err := e.store.blobs.Get(b.config.Digest)
	if err != nil {
		return err
	}
	e.artifact = d.ID
	return e.layout(d.Manifest.MediaType, d.Manifest.Content, config)
}

// packedLayers packs the directories, once for their digests. They are packed
// again into the archive: that takes no room on the disk.
func (e *export) packedLayers(layers []*entry) error {
	for _, l := range layers {
		pack := func(w io.Writer) error {
			return layer.PackLayer(e.ctx, ctxWriter{e.ctx, w}, l.diff(), l.meta.Opaque)
		}
		sum, size := digest.SHA256.Digester(), new(countWriter)
		if err := pack(io.MultiWriter(sum.Hash(), size)); err != nil {
			return err
		}
		e.layers = append(e.layers, exportLayer{ispec.Descriptor{MediaType: ispec.MediaTypeImageLayer, Digest: sum.Digest(), Size: int64(*size)},
			sum.Digest(), pack})
	}
	return nil
}

// newManifest makes the manifest and config of layers that were packed anew. All
// else in the config stays as it is.
func (e *export) newManifest(config []byte) (manifest, newConfig []byte, err error) {
	m := ispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageManifest,
		Annotations: e.manifest.Annotations, Layers: []ispec.Descriptor{}}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(config, &fields); err != nil {
		return nil, nil, err
	}
	rootfs := ispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{}}
	for _, l := range e.layers {
		rootfs.DiffIDs = append(rootfs.DiffIDs, l.diffID)
		m.Layers = append(m.Layers, l.Descriptor)
	}
	if fields["rootfs"], err = json.Marshal(rootfs); err != nil {
		return nil, nil, err
	}
	if newConfig, err = json.Marshal(fields); err != nil {
		return nil, nil, err
	}
	m.Config = ispec.Descriptor{MediaType: ispec.MediaTypeImageConfig, Digest: digest.FromBytes(newConfig), Size: int64(len(newConfig))}
	e.manifest = m
	manifest, err = json.Marshal(m)
	return manifest, newConfig, err
}

// layout makes the small files: those of an OCI layout, docker's list, manifest
// and config.
func (e *export) layout(mediaType string, manifest, config []byte) error {
	own := ispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(manifest), Size: int64(len(manifest))}
	index := ispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageIndex, Manifests: []ispec.Descriptor{}}
	for _, n := range e.names {
		named := own
		named.Annotations = map[string]string{"io.containerd.image.name": n, ispec.AnnotationRefName: n[strings.LastIndex(n, ":")+1:]}
		index.Manifests = append(index.Manifests, named)
	}
	if len(e.names) == 0 {
		index.Manifests = append(index.Manifests, own)
	}
	docker := []dockerItem{{Config: blobMember(e.manifest.Config.Digest), RepoTags: e.names, Layers: []string{}}}
	for _, l := range e.layers {
		docker[0].Layers = append(docker[0].Layers, blobMember(l.Digest))
	}
	type member struct {
		name string
		v    any
	}
	members := []member{{ispec.ImageLayoutFile, ispec.ImageLayout{Version: ispec.ImageLayoutVersion}}, {ispec.ImageIndexFile, index}}
	if e.artifact == "" {
		members = append(members, member{"manifest.json", docker})
	}
	for _, f := range members {
		data, err := json.Marshal(f.v)
		if err != nil {
			return err
		}
		e.small = append(e.small, smallFile{f.name, data})
	}
	e.small = append(e.small, smallFile{blobMember(own.Digest), manifest}, smallFile{blobMember(e.manifest.Config.Digest), config})
	return nil
}

// ctxWriter ends with ctx.
type ctxWriter struct {
	ctx context.Context
	w   io.Writer
}

func (c ctxWriter) Write(b []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.w.Write(b)
}

type countWriter int64

func (c *countWriter) Write(b []byte) (int, error) {
	*c += countWriter(len(b))
	return len(b), nil
}
