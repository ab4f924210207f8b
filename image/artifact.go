package image

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/cespare/xxhash/v2"
	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"

	"berth/image/layer"
	"berth/image/rootfs"
	"berth/sandbox/regular"
)

// An artifact is a manifest whose blobs are files instead of filesystem layers.
// It is stored as an image is: each different blob becomes a layer that holds
// the blob as a file, below every name the manifest gives it; the layers lie
// side by side, so that a mount of them all shows the artifact as one directory.
// Everything that counts, shares, syncs and removes layers holds for it.

// artifact says what is to become of an artifact's blobs.
type artifact struct {
	kind  string                     // its type, for messages
	files map[digest.Digest][]string // blob → where it goes in the volume; none for an empty one
}

// maxArtifactFiles is how many layers a mount takes, less the one that an
// image volume needs below them.
const maxArtifactFiles = rootfs.MaxLayers - 1

// artifactOf tells whether a manifest is an artifact's: nil where it is that of
// a container image. What is neither is refused by the name of its type.
func artifactOf(m ispec.Manifest, mediaType string) (*artifact, error) {
	stacked, titled := true, false
	for _, l := range m.Layers {
		stacked = stacked && isLayerType(l.MediaType)
		titled = titled || l.Annotations[ispec.AnnotationTitle] != ""
	}
	kind := m.Config.MediaType
	if m.ArtifactType != "" {
		kind = m.ArtifactType
	}
	switch m.Config.MediaType {
	case "application/octet-stream", "application/json", "text/html", "":
		// What registries of old have made of the type of docker's configs.
		if mediaType == manifest.DockerV2Schema2MediaType && stacked && len(m.Layers) > 0 {
			return nil, nil
		}
	}
	switch m.Config.MediaType {
	case ispec.MediaTypeImageConfig, manifest.DockerV2Schema2ConfigMediaType:
		if stacked || m.ArtifactType == "" {
			return nil, nil
		}
	default:
		// Layers of a filesystem that nobody calls files: an image of a kind
		// that is not known, whose config says how to run it.
		if mediaType != ispec.MediaTypeImageManifest || kind == "" || stacked && !titled && m.ArtifactType == "" && len(m.Layers) > 0 {
			return nil, fmt.Errorf("%w: neither a container image nor an artifact: its config has the unknown type %q", ErrInvalidImage, m.Config.MediaType)
		}
	}
	if len(m.Layers) > maxArtifactFiles {
		return nil, fmt.Errorf("%w: artifact of %d files, at most %d are allowed", ErrInvalidImage, len(m.Layers), maxArtifactFiles)
	}
	a := &artifact{kind: kind, files: map[digest.Digest][]string{}}
	return a, a.name(m.Layers)
}

// name gives every blob its place. Two files must not want the same one, nor
// one of them what is a directory for another.
func (a *artifact) name(blobs []ispec.Descriptor) error {
	taken := map[string]bool{} // path → is a file
	for i, b := range blobs {
		title, ok := b.Annotations[ispec.AnnotationTitle]
		if !ok {
			if b.Digest == ispec.DescriptorEmptyJSON.Digest {
				continue
			}
			title = strings.Replace(b.Digest.String(), ":", "-", 1)
		}
		name, err := fileName(title)
		if err != nil {
			return fmt.Errorf("%w: artifact: file %d: %v", ErrInvalidImage, i, err)
		}
		if _, ok := taken[name]; ok {
			return fmt.Errorf("%w: artifact: file %d: the name %q is there twice, or also a directory", ErrInvalidImage, i, name)
		}
		taken[name] = true
		for dir := filepath.Dir(name); dir != "."; dir = filepath.Dir(dir) {
			if taken[dir] {
				return fmt.Errorf("%w: artifact: file %d: the name %q is below the file %q", ErrInvalidImage, i, name, dir)
			}
			taken[dir] = false
		}
		a.files[b.Digest] = append(a.files[b.Digest], name)
	}
	for _, names := range a.files {
		slices.Sort(names)
	}
	return nil
}

// fileName makes a path of a title, refusing what leads out of the volume or
// what no filesystem takes.
func fileName(title string) (string, error) {
	name := filepath.Clean(title)
	switch {
	case title == "" || !filepath.IsLocal(title) || name == "." || strings.HasSuffix(title, "/"):
		return "", fmt.Errorf("the title %.300q is no name of a file in a directory", title)
	case strings.ContainsFunc(title, unicode.IsControl):
		return "", fmt.Errorf("the title %.300q has a control character", title)
	case len(name) > 1024:
		return "", fmt.Errorf("the title %.40q… is longer than 1024 bytes", title)
	}
	for part := range strings.SplitSeq(name, "/") {
		if len(part) > 255 {
			return "", fmt.Errorf("the title %.40q… has a part of more than 255 bytes", title)
		}
	}
	return name, nil
}

// open gives the bytes of a blob back from the directory of its layer.
func (a *artifact) open(dir string, blob digest.Digest) (io.ReadCloser, error) {
	if names := a.files[blob]; len(names) > 0 {
		return regular.Open(filepath.Join(dir, names[0]))
	}
	return readerOf(ispec.DescriptorEmptyJSON.Data), nil // the only one without a name
}

// diffID is what the layer of a blob is known by: its content and its names.
func (a *artifact) diffID(blob digest.Digest) digest.Digest {
	return digest.FromString("file of an artifact\x00" + blob.String() + "\x00" + strings.Join(a.files[blob], "\x00"))
}

// config is in the place of an image's config: nothing but the layers.
func (a *artifact) config(blobs []ispec.Descriptor) ispec.Image {
	c := ispec.Image{RootFS: ispec.RootFS{Type: "layers"}}
	for _, b := range blobs {
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, a.diffID(b.Digest))
	}
	return c
}

// fileTime is when all files of artifacts were changed last: nobody says.
var fileTime = time.Unix(0, 0)

// place writes a blob into the directory of its layer and checks its digest.
func (a *artifact) place(ctx context.Context, in io.Reader, dir string, blob digest.Digest) (layer.Sums, error) {
	names := a.files[blob]
	out, sums := io.Writer(io.Discard), layer.Sums{}
	sum, list := sha256.New(), xxhash.New()
	if len(names) > 0 {
		first := filepath.Join(dir, names[0])
		if err := os.MkdirAll(filepath.Dir(first), 0o755); err != nil {
			return nil, err
		}
		f, err := os.OpenFile(first, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		out = f
	}
	if _, err := io.Copy(io.MultiWriter(out, sum, list), in); err != nil {
		return nil, err
	}
	if got := digest.NewDigest(digest.SHA256, sum); got != blob {
		return nil, fmt.Errorf("%w: it has the digest %s", ErrInvalidImage, got)
	}
	for _, n := range names {
		path := filepath.Join(dir, n)
		if n != names[0] {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				return nil, err
			}
			if err := os.Link(filepath.Join(dir, names[0]), path); err != nil {
				return nil, err
			}
		}
	}
	if f, ok := out.(*os.File); ok {
		if err := sums.Note(f, list.Sum64()); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	return sums, settleFiles(dir)
}

// settleFiles gives what place has made the modes and times that every node
// gives it, whatever the daemon's umask.
func settleFiles(dir string) error {
	var all []string
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		all = append(all, path)
		mode := os.FileMode(0o644)
		if d.IsDir() {
			mode = 0o755
		}
		return os.Chmod(path, mode)
	})
	if err != nil {
		return err
	}
	for _, path := range slices.Backward(all) { // a directory after what is in it
		if err := os.Chtimes(path, fileTime, fileTime); err != nil {
			return err
		}
	}
	return nil
}
