package checkpoint

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"berth/sandbox/regular"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// ErrExists: there is a file where the archive should go.
var ErrExists = errors.New("checkpoint exists already")

// Annotations of an archive's manifest, known to the tools that read
// checkpoints (checkpointctl, CRI-O).
const (
	annotationName        = "org.criu.checkpoint.container.name"
	annotationEngine      = "org.criu.checkpoint.engine.name"
	annotationVersion     = "org.criu.checkpoint.engine.version"
	annotationImageName   = "org.criu.checkpoint.rootfsImageName"
	annotationImageID     = "org.criu.checkpoint.rootfsImageID"
	annotationRuntimeName = "org.criu.checkpoint.runtime.name"
)

// Config says which container a checkpoint was taken of; config.dump has it.
type Config struct {
	ID             string    `json:"id"`
	Name           string    `json:"name"`
	ImageName      string    `json:"rootfsImageName"`
	ImageRef       string    `json:"rootfsImageRef"` // the image id
	Runtime        string    `json:"runtime"`        // handler
	Version        string    `json:"engineVersion"`
	CreatedAt      time.Time `json:"createdTime"`
	CheckpointedAt time.Time `json:"checkpointedTime"`
}

// Archive is what goes into an archive, as files.
type Archive struct {
	Config     Config
	Arch       string // GOARCH
	Images     string // directory of CRIU's images
	Spec       string // config.json of the bundle
	RootfsDiff string
	Log        string
	Scratch    string // directory for the layer while it is made; the caller's to remove
}

// WriteArchive makes the archive at path, mode 0600, all at once: on an error
// nothing is there. ErrExists when something is there before. The directory of
// path must exist. It blocks on the disk; a done ctx ends it.
func WriteArchive(ctx context.Context, path string, a Archive) (err error) {
	partial := path + ".partial"
	if _, err := os.Lstat(path); err == nil {
		return fmt.Errorf("write %s: %w", path, ErrExists)
	}
	layer := filepath.Join(a.Scratch, "layer.tar")
	diff, err := a.writeLayer(ctx, layer)
	if err != nil {
		return fmt.Errorf("write layer of checkpoint: %w", err)
	}
	f, err := os.OpenFile(partial, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write checkpoint: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(partial)
		}
	}()
	err = a.writeLayout(ctx, f, layer, diff)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("write checkpoint %s: %w", path, err)
	}
	// Link fails where a rename would replace.
	if err := os.Link(partial, path); err != nil {
		return fmt.Errorf("write checkpoint: %w", err)
	}
	if err := os.Remove(partial); err != nil {
		return fmt.Errorf("write checkpoint: %w", err)
	}
	return nil
}

// writeLayer makes the layer's tar and returns its digest.
func (a Archive) writeLayer(ctx context.Context, path string) (digest.Digest, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	w := tar.NewWriter(io.MultiWriter(f, sum))
	for _, file := range []struct{ name, path string }{{"spec.dump", a.Spec}, {"rootfs-diff.tar", a.RootfsDiff}, {"dump.log", a.Log}} {
		if err := addFile(ctx, w, file.name, file.path); err != nil {
			return "", err
		}
	}
	if err := addJSON(w, "config.dump", a.Config); err != nil {
		return "", err
	}
	entries, err := os.ReadDir(a.Images)
	if err != nil {
		return "", err
	}
	if err := w.WriteHeader(&tar.Header{Name: "checkpoint/", Typeflag: tar.TypeDir, Mode: 0o700}); err != nil {
		return "", err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		if err := addFile(ctx, w, "checkpoint/"+e.Name(), filepath.Join(a.Images, e.Name())); err != nil {
			return "", err
		}
	}
	if err := w.Close(); err != nil {
		return "", err
	}
	return digest.NewDigest(digest.SHA256, sum), f.Close()
}

// writeLayout writes the OCI image layout.
func (a Archive) writeLayout(ctx context.Context, out io.Writer, layer string, diff digest.Digest) error {
	w := tar.NewWriter(out)
	info, err := os.Stat(layer)
	if err != nil {
		return err
	}
	if err := addJSON(w, "oci-layout", ispec.ImageLayout{Version: ispec.ImageLayoutVersion}); err != nil {
		return err
	}
	if err := addFile(ctx, w, blob(diff), layer); err != nil {
		return err
	}
	config := ispec.Image{Created: &a.Config.CheckpointedAt, Platform: ispec.Platform{Architecture: a.Arch, OS: "linux"},
		RootFS: ispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{diff}}}
	configDescriptor, err := addBlob(w, ispec.MediaTypeImageConfig, config)
	if err != nil {
		return err
	}
	annotations := map[string]string{
		annotationName: a.Config.Name, annotationEngine: "berth", annotationVersion: a.Config.Version,
		annotationImageName: a.Config.ImageName, annotationImageID: a.Config.ImageRef, annotationRuntimeName: a.Config.Runtime,
	}
	manifest, err := addBlob(w, ispec.MediaTypeImageManifest, ispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageManifest, Config: configDescriptor,
		Layers:      []ispec.Descriptor{{MediaType: ispec.MediaTypeImageLayer, Digest: diff, Size: info.Size()}},
		Annotations: annotations,
	})
	if err != nil {
		return err
	}
	manifest.Annotations = annotations
	if err := addJSON(w, "index.json", ispec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageIndex, Manifests: []ispec.Descriptor{manifest},
	}); err != nil {
		return err
	}
	return w.Close()
}

func blob(d digest.Digest) string { return "blobs/sha256/" + d.Encoded() }

// addBlob adds a JSON document by its digest.
func addBlob(w *tar.Writer, mediaType string, v any) (ispec.Descriptor, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return ispec.Descriptor{}, err
	}
	d := digest.FromBytes(data)
	return ispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(data))}, addBytes(w, blob(d), data)
}

func addJSON(w *tar.Writer, name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return addBytes(w, name, data)
}

func addBytes(w *tar.Writer, name string, data []byte) error {
	if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o600, Size: int64(len(data))}); err != nil {
		return err
	}
	_, err := w.Write(data)
	return err
}

// addFile adds a file where there is one.
func addFile(ctx context.Context, w *tar.Writer, name, path string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	f, err := regular.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o600, Size: info.Size(), Format: tar.FormatPAX}); err != nil {
		return err
	}
	_, err = io.CopyN(w, f, info.Size())
	return err
}
