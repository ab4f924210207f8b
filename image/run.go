package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/signature"
	"go.podman.io/image/v5/types"

	"berth/image/fetch"
	"berth/image/policy"
)

// run is the fetching of one image: what was found out about it, and what it
// has got so far. Its two ends, source and destination, are what the library's
// copy.Image works between.
type run struct {
	store  *Store
	job    job
	src    types.ImageSource
	remote *fetch.Client   // where the layers are; nil: in src
	fresh  map[string]bool // diffIDs for which only the pristine variant will do

	// Set by inspect.
	id      string
	docs    []document      // outermost index first, the image manifest last
	sources *policy.Sources // of signatures
	// signatures by manifest, of those whose signatures were asked for and read
	signatures map[digest.Digest][][]byte
	blobs      blobs
	config     []byte
	image      ispec.Image
	diffOf     map[digest.Digest]digest.Digest // blob → diffID
	sizeOf     map[digest.Digest]int64         // blob → size by the manifest

	mu    sync.Mutex
	have  map[digest.Digest]*entry   // by diffID; each counted once as used
	mine  map[digest.Digest]*claim   // by blob digest
	kept  map[digest.Digest]*os.File // layer blobs set aside, by digest
	local map[digest.Digest]bool     // layer blobs that are read where they are kept
	first error                      // the first error of a layer; guarded by mu
	again bool                       // a layer went on from what an earlier try had left; guarded by mu
}

func (r *run) leaf() document { return r.docs[len(r.docs)-1] }

// inspect reads everything but the layers: indexes down to the image for this
// platform, the policy's word on it, its config.
func (r *run) inspect(ctx context.Context) error {
	unparsed := image.UnparsedInstance(r.src, nil)
	var all []*image.UnparsedImage
	for {
		all = append(all, unparsed)
		doc, err := r.readDocument(ctx, unparsed)
		if err != nil {
			return err
		}
		r.docs = append(r.docs, doc)
		if !doc.isIndex() {
			break
		}
		if len(r.docs) > maxNesting {
			return fmt.Errorf("%w: indexes nested more than %d deep", ErrInvalidImage, maxNesting)
		}
		chosen, err := doc.choose(r.job.sys)
		if err != nil {
			return err
		}
		unparsed = image.UnparsedInstance(r.src, &chosen)
	}
	// Before anything else of the image is read.
	if err := r.admit(ctx, all); err != nil {
		return err
	}
	var err error
	if r.blobs, err = r.leaf().parse(); err != nil {
		return err
	}
	r.id = r.blobs.config.Digest.String()
	if r.blobs.artifact != nil {
		r.id = r.leaf().digest.String() // their configs say nothing, and are often the same
	}
	if r.job.tagsOf != nil {
		r.job.tags = slices.Concat(r.job.tags, r.job.tagsOf(r.id))
	}
	if r.config, err = r.readConfig(ctx); err != nil {
		return err
	}
	if r.blobs.artifact != nil {
		r.image = r.blobs.artifact.config(r.blobs.layers)
	} else if r.image, err = checkConfig(r.config, len(r.blobs.layers)); err != nil {
		return err
	}
	if err := r.mapBlobs(); err != nil {
		return err
	}
	if err := r.checkRoom(); err != nil {
		return err
	}
	r.job.track.plan(r.blobs.layers)
	return nil
}

func (r *run) readDocument(ctx context.Context, u *image.UnparsedImage) (document, error) {
	data, mediaType, err := u.Manifest(ctx)
	if err != nil {
		return document{}, err
	}
	return newDocument(data, mediaType)
}

func (r *run) readConfig(ctx context.Context) ([]byte, error) {
	g := fetch.NewGuard(ctx, r.store.patience())
	defer g.Stop()
	g.Pause() // the wait for an answer has a bound of its own
	d := r.blobs.config
	stream, _, err := r.src.GetBlob(g.Ctx, types.BlobInfo{Digest: d.Digest, Size: d.Size, MediaType: d.MediaType}, noCache)
	if err != nil {
		return nil, g.Explain(fmt.Errorf("read config %s: %w", d.Digest, err))
	}
	defer stream.Close()
	g.Resume()
	data, err := io.ReadAll(io.LimitReader(stream, maxConfig+1))
	if err != nil {
		return nil, g.Explain(fmt.Errorf("read config %s: %w", d.Digest, err))
	}
	if len(data) > maxConfig {
		return nil, fmt.Errorf("%w: config of more than %d bytes", ErrInvalidImage, maxConfig)
	}
	if digest.FromBytes(data) != d.Digest {
		return nil, fmt.Errorf("%w: config does not have its digest %s", ErrInvalidImage, d.Digest)
	}
	return data, nil
}

// mapBlobs pairs the manifest's blobs with the config's diffIDs.
func (r *run) mapBlobs() error {
	r.diffOf = map[digest.Digest]digest.Digest{}
	r.sizeOf = map[digest.Digest]int64{}
	for i, l := range r.blobs.layers {
		diffID := r.image.RootFS.DiffIDs[i]
		if other, ok := r.diffOf[l.Digest]; ok && other != diffID {
			return fmt.Errorf("%w: layer %s is given two diff_ids, %s and %s", ErrInvalidImage, l.Digest, other, diffID)
		}
		r.diffOf[l.Digest], r.sizeOf[l.Digest] = diffID, l.Size
	}
	return nil
}

// copy fetches the layers and records the image.
func (r *run) copy(ctx context.Context) error {
	r.have, r.mine = map[digest.Digest]*entry{}, map[digest.Digest]*claim{}
	r.kept, r.local = map[digest.Digest]*os.File{}, map[digest.Digest]bool{}
	// The real policy has been asked; the library asks again, about our end.
	admit, err := signature.NewPolicyContext(&signature.Policy{
		Default: signature.PolicyRequirements{signature.NewPRInsecureAcceptAnything()},
	})
	if err != nil {
		return err
	}
	defer admit.Destroy()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	end := &endpoint{run: r, fail: cancel}
	_, err = copy.Image(ctx, admit, end, end, &copy.Options{
		SourceCtx:            r.job.sys,
		DestinationCtx:       &types.SystemContext{BlobInfoCacheDir: noCacheDir},
		RemoveSignatures:     true, // checked above; they are not kept
		PreserveDigests:      true,
		MaxParallelDownloads: uint(r.store.options().MaxConcurrentDownloads),
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil && r.first != nil {
		err = r.first // not the "context canceled" of the layers beside it
	}
	r.close(err)
	if err != nil && r.again && classify(err) == ErrInvalidImage {
		return &spoiledError{err}
	}
	return err
}

// spoiledError: what is wrong may be what an earlier try had left, which is
// gone now.
type spoiledError struct{ error }

func (e *spoiledError) Unwrap() error { return e.error }

// failed notes a layer's error and ends the other layers.
func (e *endpoint) failed(err error) error {
	e.run.mu.Lock()
	if e.run.first == nil && !errors.Is(err, context.Canceled) {
		e.run.first = err
	}
	e.run.mu.Unlock()
	e.fail(err)
	return err
}

// close gives back everything that the run counts on. What nobody else counts
// on goes away, or is left for the next try. Called with mu held.
func (r *run) close(err error) {
	keep := false
	if err != nil {
		if keep = worthKeeping(err); !keep {
			r.store.left.drop(maps.Keys(r.diffOf))
		}
		if classify(err) == ErrNoSpace {
			r.store.left.dropAll()
		}
	}
	for blob, cl := range r.mine {
		delete(r.mine, blob)
		r.store.claims.settle(cl)
	}
	for d, e := range r.have {
		delete(r.have, d)
		if keep {
			r.store.left.keepWhole(e)
		} else {
			r.store.layers.release(e)
		}
	}
	for d, f := range r.kept {
		delete(r.kept, d)
		f.Close()
		_ = r.store.disk.removeAll(f.Name()) // else it goes at the next start
	}
}

func wanted(sys *types.SystemContext) string {
	system, arch := "linux", runtime.GOARCH
	if sys != nil && sys.OSChoice != "" {
		system = sys.OSChoice
	}
	if sys != nil && sys.ArchitectureChoice != "" {
		arch = sys.ArchitectureChoice
	}
	return system + "/" + arch
}

func readerOf(data []byte) io.ReadCloser { return io.NopCloser(bytes.NewReader(data)) }
