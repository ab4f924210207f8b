package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/layer"
)

// destination is the store as the copy sees it: layers go straight into
// directories.
type destination struct{ *endpoint }

// Reference of the destination.
func (d *destination) Reference() types.ImageReference { return d.endpoint }

// Close does nothing: the run gives back what was not committed.
func (d *destination) Close() error { return nil }

// SupportedManifestMIMETypes are those that say which diffIDs they have.
func (d *destination) SupportedManifestMIMETypes() []string {
	return []string{ispec.MediaTypeImageManifest, manifest.DockerV2Schema2MediaType}
}

// SupportsSignatures is nil: there are none to write.
func (d *destination) SupportsSignatures(context.Context) error { return nil }

// DesiredLayerCompression leaves the stream as it is: it is decompressed here.
func (d *destination) DesiredLayerCompression() types.LayerCompression { return types.PreserveOriginal }

// AcceptsForeignLayerURLs is false: every layer is needed.
func (d *destination) AcceptsForeignLayerURLs() bool { return false }

// MustMatchRuntimeOS is false: the platform was chosen before.
func (d *destination) MustMatchRuntimeOS() bool { return false }

// IgnoresEmbeddedDockerReference: names come from the caller only.
func (d *destination) IgnoresEmbeddedDockerReference() bool { return true }

// HasThreadSafePutBlob: layers are unpacked at the same time.
func (d *destination) HasThreadSafePutBlob() bool { return true }

// TryReusingBlob says whether a layer is here already. While somebody else is
// fetching it, it waits for them.
func (d *destination) TryReusingBlob(ctx context.Context, info types.BlobInfo, _ types.BlobInfoCache, _ bool) (bool, types.BlobInfo, error) {
	diffID, ok := d.run.diffOf[info.Digest]
	if !ok {
		return false, types.BlobInfo{}, nil // the config
	}
	reused := types.BlobInfo{Digest: info.Digest, Size: info.Size}
	for {
		if d.run.reuse(diffID) {
			d.run.job.track.layer(info.Digest, StageReused)
			return true, reused, nil
		}
		cl, mine := d.run.store.claims.get(diffID)
		if mine {
			if d.run.reuse(diffID) { // finished between the two looks
				d.run.store.claims.settle(cl)
				d.run.job.track.layer(info.Digest, StageReused)
				return true, reused, nil
			}
			d.run.mu.Lock()
			d.run.mine[info.Digest] = cl
			d.run.mu.Unlock()
			return false, types.BlobInfo{}, nil
		}
		select {
		case <-cl.done:
		case <-ctx.Done():
			return false, types.BlobInfo{}, context.Cause(ctx)
		}
	}
}

// reuse takes a stored layer for this run.
func (r *run) reuse(diffID digest.Digest) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.have[diffID] != nil {
		return true
	}
	var e *entry
	if r.fresh[diffID.String()] {
		e = r.store.layers.acquire(layerKey{diffID: diffID})
	} else {
		e = r.store.layers.acquireAny(diffID)
	}
	if e == nil {
		return false
	}
	r.have[diffID] = e
	r.store.left.taken(e)
	return true
}

// giveUp ends this run's claim on a layer, if it still has it.
func (r *run) giveUp(blob digest.Digest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if cl := r.mine[blob]; cl != nil {
		delete(r.mine, blob)
		r.store.claims.settle(cl)
	}
}

// PutBlob unpacks a layer while it arrives.
func (d *destination) PutBlob(ctx context.Context, stream io.Reader, info types.BlobInfo, _ types.BlobInfoCache, isConfig bool) (types.BlobInfo, error) {
	if isConfig {
		n, err := io.Copy(io.Discard, stream)
		return types.BlobInfo{Digest: info.Digest, Size: n}, err
	}
	e, err := d.unpack(ctx, stream, info.Digest)
	if err != nil {
		return types.BlobInfo{}, err
	}
	d.run.mu.Lock()
	d.run.have[e.key.diffID] = e
	d.run.mu.Unlock()
	d.run.store.left.taken(e)
	d.run.giveUp(info.Digest)
	d.run.job.track.layer(info.Digest, StageDone)
	return types.BlobInfo{Digest: info.Digest, Size: d.run.sizeOf[info.Digest]}, nil
}

// unpack puts a layer into place, in a directory of its own in staging until
// it is whole and has its diffID.
func (d *destination) unpack(ctx context.Context, stream io.Reader, blob digest.Digest) (_ *entry, err error) {
	r := d.run
	dir, err := r.store.disk.mkdirTemp(r.store.staging(), "layer-")
	if err != nil {
		return nil, d.failed(fmt.Errorf("stage layer %s: %w", blob, err))
	}
	defer func() {
		if err != nil {
			r.store.discard(dir, err)
		}
	}()
	diff := filepath.Join(dir, "diff")
	if err := r.store.disk.mkdir(diff); err != nil {
		return nil, d.failed(fmt.Errorf("stage layer %s: %w", blob, err))
	}
	in := &counted{inner: stream, left: r.sizeOf[blob]}
	from, err := r.keep(in, blob)
	if err != nil {
		return nil, d.failed(err)
	}
	got, result, err := d.fill(ctx, from, diff, blob)
	if err != nil {
		return nil, d.failed(fmt.Errorf("unpack layer %s: %w", blob, contentError(err)))
	}
	r.job.track.layer(blob, StageVerifying)
	want := r.diffOf[blob]
	if got != want {
		return nil, d.failed(fmt.Errorf("%w: layer %s unpacks to diff_id %s, the config says %s", ErrInvalidImage, blob, got, want))
	}
	meta := layerMeta{Version: layerVersion, DiffID: want, Boot: r.store.boot, Needs: result.Needs, Opaque: result.Opaque}
	if err := r.store.disk.list(dir, &meta, result.Sums); err != nil {
		return nil, d.failed(err)
	}
	e, err := r.store.layers.add(dir, meta)
	if err != nil {
		return nil, d.failed(err)
	}
	return e, nil
}

// fill puts a blob into its layer's directory: an artifact's as a file.
func (d *destination) fill(ctx context.Context, in io.Reader, diff string, blob digest.Digest) (digest.Digest, *layer.Result, error) {
	a := d.run.blobs.artifact
	if a == nil {
		return d.unpackStream(ctx, in, diff)
	}
	sums, err := a.place(ctx, in, diff, blob)
	return a.diffID(blob), &layer.Result{Sums: sums}, err
}

// unpackStream reads the stream to its end: only there its digest is checked.
func (d *destination) unpackStream(ctx context.Context, in io.Reader, diff string) (digest.Digest, *layer.Result, error) {
	grows := newExpansion()
	body, closeBody, err := decompress(grows.compressedEnd(in), func() (func(), error) { return d.run.store.slots.enterLarge(ctx) })
	if err != nil {
		return "", nil, err
	}
	defer closeBody()
	sum := sha256.New()
	fast := readAhead(grows.plainEnd(body))
	tee := io.TeeReader(fast, sum)
	result, err := layer.Unpack(ctx, diff, tee, layer.Limits{})
	if err == nil {
		_, err = io.Copy(io.Discard, tee) // what stands behind the tar's end counts too
	}
	if err != nil {
		d.fail(err) // ends a read that waits for the registry
	}
	fast.close()
	if err == nil {
		_, err = io.Copy(io.Discard, in)
	}
	if err != nil {
		return "", nil, err
	}
	return digest.NewDigest(digest.SHA256, sum), result, nil
}

// contentError: whatever is neither the stream's fault nor the system's is the
// image's.
func contentError(err error) error {
	var stream *streamError
	var errno syscall.Errno
	if errors.As(err, &stream) || errors.As(err, &errno) || errors.Is(err, context.Canceled) ||
		errors.Is(err, ErrInvalidImage) || errors.Is(err, layer.ErrInvalid) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrInvalidImage, err)
}

// keep copies the layer as it arrives into a file, when the store is told to and
// has not got it.
func (r *run) keep(in io.Reader, blob digest.Digest) (io.Reader, error) {
	_, again := r.src.(*keptSource)
	r.mu.Lock()
	again = again || r.local[blob]
	r.mu.Unlock()
	if again || !r.store.options().KeepLayerBlobs {
		return in, nil
	}
	f, err := os.CreateTemp(r.store.staging(), "blob-")
	if err != nil {
		return nil, fmt.Errorf("keep layer %s: %w", blob, err)
	}
	r.mu.Lock()
	r.kept[blob] = f
	r.mu.Unlock()
	return io.TeeReader(in, f), nil
}

// PutManifest has nothing to store yet: Commit does, with everything else.
func (d *destination) PutManifest(_ context.Context, data []byte, _ *digest.Digest) error {
	if !bytes.Equal(data, d.run.leaf().data) {
		return fmt.Errorf("%w: the manifest changed on the way", ErrInvalidImage)
	}
	return nil
}

// PutSignatures: none are kept.
func (d *destination) PutSignatures(context.Context, [][]byte, *digest.Digest) error { return nil }

// Commit makes the image visible.
func (d *destination) Commit(ctx context.Context, _ types.UnparsedImage) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	d.run.job.track.enter(StageRecording)
	if err := d.run.commit(); err != nil {
		return d.failed(err)
	}
	return nil
}

// discard removes a staged directory: at once when space is short, else as
// fast as a rename.
func (s *Store) discard(dir string, why error) {
	if errors.Is(why, syscall.ENOSPC) || errors.Is(why, syscall.EDQUOT) {
		_ = s.disk.removeAll(dir) // what cannot go now goes at the next start
		return
	}
	s.trash.take(dir)
}
