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
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker/archive"
	"go.podman.io/image/v5/oci/layout"

	"berth/image/policy"
	"berth/sandbox/regular"
)

// ImportRequest names an archive.
type ImportRequest struct {
	File string
	Pin  bool // pin its images, see Store.Pin
	// Bring is asked where to read the archive; nil: where it is.
	Bring Bring

	from Brought // what Bring said
}

// Brought is an archive that others may serve, ready to be read.
type Brought struct {
	At   string // itself, or a copy
	Real string // its own path without symlinks
	Done func() // to be called when it is not read any more
}

// Bring makes an archive ready to be read, or says why it cannot be.
type Bring func(ctx context.Context, file string) (Brought, error)

// bring is for a request without one.
func (r *ImportRequest) bring(ctx context.Context) (err error) {
	if r.Bring != nil {
		r.from, err = r.Bring(ctx, r.File)
		return err
	}
	r.from = Brought{At: r.File, Done: func() {}}
	if r.from.Real, err = filepath.Abs(r.File); err == nil {
		r.from.Real, err = filepath.EvalSymlinks(r.from.Real)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil // whoever opens it says so
	}
	return err
}

// Import takes in the images of an archive as `docker save` or a tool for OCI
// layouts writes them, plain or compressed with gzip or zstd. It returns a
// name, or an id where there is no name, for each image. It blocks; a done ctx
// ends it. Images that were taken in before an error stay, and are returned
// with it. The error is an *Error, that of Bring, or ctx's.
func (s *Store) Import(ctx context.Context, r ImportRequest) ([]string, error) {
	leave, ok := s.flights.enter(s.life)
	if !ok {
		return nil, s.life.Err()
	}
	defer leave()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	if err := r.bring(ctx); err != nil {
		return nil, fmt.Errorf("import %s: %w", r.File, err)
	}
	defer r.from.Done()
	names, err := s.importFile(ctx, r)
	if err != nil {
		err = s.describe("import", r.File, err, nil)
	}
	return names, err
}

func (s *Store) importFile(ctx context.Context, r ImportRequest) ([]string, error) {
	found, err := lookInto(r.from.At)
	if err != nil {
		return nil, err
	}
	if found.oci {
		return s.importLayout(ctx, r)
	}
	if err := found.checkDocker(); err != nil {
		return nil, err
	}
	return s.importDocker(ctx, r, found)
}

// openArchive opens a regular file; it never waits for the writer of a FIFO.
func openArchive(file string) (*os.File, error) {
	in, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: there is no such file", ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidImage, err)
	}
	if info, err := in.Stat(); err != nil || !info.Mode().IsRegular() {
		_ = in.Close()
		return nil, fmt.Errorf("%w: %s is no regular file", ErrInvalidImage, file)
	}
	return in, nil
}

// each calls f for the files of an archive until it says stop. That it is cut off
// is an ErrInvalidImage.
func each(file string, f func(h *tar.Header, body io.Reader) (stop bool, err error)) error {
	err := members(file, f)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: the archive is cut off", ErrInvalidImage)
	}
	return err
}

func members(file string, f func(h *tar.Header, body io.Reader) (stop bool, err error)) error {
	in, err := openArchive(file)
	if err != nil {
		return err
	}
	defer in.Close()
	grows := newExpansion()
	plain, closePlain, err := decompress(grows.compressedEnd(in), atOnce)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidImage, err)
	}
	defer closePlain()
	for tr := tar.NewReader(grows.plainEnd(plain)); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: read archive: %w", ErrInvalidImage, err)
		}
		if stop, err := f(h, tr); stop || err != nil {
			return err
		}
	}
}

// archiveJob is what all images of an archive have in common.
func (s *Store) archiveJob(transport string, r ImportRequest) (job, error) {
	j := job{pin: r.Pin}
	path, err := s.policies().Path("")
	if err != nil {
		return j, err
	}
	if j.policy, err = policy.Read(path); err != nil {
		return j, err
	}
	j.origin = transport + ":" + r.from.Real
	j.sys = s.system()
	return j, nil
}

// importDocker leaves reading the old form of archives to the library.
func (s *Store) importDocker(ctx context.Context, r ImportRequest, found contents) ([]string, error) {
	common, err := s.archiveJob(viaDocker, r)
	if err != nil {
		return nil, err
	}
	file, done, err := s.withoutLinks(ctx, r.from.At, found)
	if err != nil {
		return nil, err
	}
	defer done()
	reader, err := archive.NewReader(common.sys, file)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidImage, err)
	}
	defer reader.Close()
	groups, err := reader.List()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidImage, err)
	}
	var names []string
	for _, refs := range groups {
		j := common
		j.ref = refs[0]
		for _, ref := range refs {
			if named := ref.DockerReference(); named != nil {
				j.tags = append(j.tags, named.String())
			}
		}
		id, err := s.fetchFile(ctx, j, r.File)
		if err != nil {
			return names, err
		}
		names = append(names, firstName(j.tags, id))
	}
	return names, nil
}

// fetchFile fetches one image of an archive, for all to see.
func (s *Store) fetchFile(ctx context.Context, j job, file string) (string, error) {
	j.track = s.board.begin(opImport, firstName(j.tags, file))
	id, err := s.fetch(ctx, j)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: a file that it names is not in the archive: %w", ErrInvalidImage, err)
	}
	if err == nil {
		j.track.end(id, nil)
	} else {
		j.track.end("", s.describe("import", file, err, nil))
	}
	return id, err
}

func firstName(tags []string, id string) string {
	if len(tags) > 0 {
		return tags[0]
	}
	return id
}

// layoutFile are the members of an archive that make the layout.
var layoutFile = regexp.MustCompile(`^(oci-layout|index\.json|manifest\.json|blobs/sha256/[0-9a-f]{64})$`)

func (s *Store) importLayout(ctx context.Context, r ImportRequest) ([]string, error) {
	dir, err := s.disk.mkdirTemp(s.staging(), "import-")
	if err != nil {
		return nil, err
	}
	defer s.disk.removeAll(dir)
	if err := unpackLayout(ctx, r.from.At, dir); err != nil {
		return nil, err
	}
	var index ispec.Index
	if err := readJSON(filepath.Join(dir, ispec.ImageIndexFile), &index); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	j, err := s.archiveJob(viaOCI, r)
	if err != nil {
		return nil, err
	}
	j.parallel = true
	more := dockerTags(dir)
	reader := layout.NewReaderWithRoot(root)
	var done []string
	for i, d := range index.Manifests {
		if !forHere(d.Platform) {
			continue
		}
		if j.ref, err = reader.NewIndexReference(dir, i); err != nil {
			return done, err
		}
		n, err := s.importOne(ctx, layoutImage{j, d, more, r.File})
		if err != nil {
			return done, err
		}
		done = append(done, n)
	}
	if len(done) == 0 {
		return nil, fmt.Errorf("%w: the archive has no image for linux/%s", ErrInvalidImage, runtime.GOARCH)
	}
	return done, nil
}

// unpackLayout writes the layout's files, and nothing else that may be in the
// archive.
func unpackLayout(ctx context.Context, file, dir string) error {
	if err := os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o700); err != nil {
		return err
	}
	return each(file, func(h *tar.Header, body io.Reader) (bool, error) {
		if err := ctx.Err(); err != nil {
			return true, err
		}
		name := path.Clean(h.Name)
		if h.Typeflag != tar.TypeReg || !layoutFile.MatchString(name) {
			return false, nil
		}
		out, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, fs.ErrExist) {
			return true, fmt.Errorf("%w: the archive has %s twice", ErrInvalidImage, name)
		}
		if err != nil {
			return true, err
		}
		_, err = io.Copy(out, body)
		if closeErr := out.Close(); err == nil {
			err = closeErr
		}
		return err != nil, err
	})
}

// forHere: an entry of the archive's own index that names another platform is
// for somebody else.
func forHere(p *ispec.Platform) bool {
	return p == nil || p.OS == "linux" && p.Architecture == runtime.GOARCH
}

// layoutImage is one entry of a layout's index.
type layoutImage struct {
	job
	entry ispec.Descriptor
	more  map[string][]string // image id → further names
	file  string
}

// importOne takes in one entry.
func (s *Store) importOne(ctx context.Context, i layoutImage) (string, error) {
	j, more := i.job, i.more
	if n, ok := annotatedName(i.entry.Annotations); ok {
		j.tags, j.repository = []string{n.tag()}, n
		if n.tag() == "" {
			j.tags = nil
		}
	}
	j.tagsOf = func(id string) []string { return more[id] }
	id, err := s.fetchFile(ctx, j, i.file)
	if err != nil {
		return "", err
	}
	return firstName(slices.Concat(j.tags, more[id]), id), nil
}

// annotatedName is the name that tools write beside an image: containerd's in
// full, or the layout's own, which is a tag alone with some tools and then no
// name.
func annotatedName(a map[string]string) (name, bool) {
	text := a["io.containerd.image.name"]
	if text == "" {
		text = a[ispec.AnnotationRefName]
		if !strings.ContainsAny(text, "/:") {
			return name{}, false
		}
	}
	n, err := parseName(text)
	return n, err == nil
}

// dockerItem is an image in docker's own list, manifest.json.
type dockerItem struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// dockerTags reads docker's own list beside a layout: image id → names.
func dockerTags(dir string) map[string][]string {
	var items []dockerItem
	tags := map[string][]string{}
	if readJSON(filepath.Join(dir, "manifest.json"), &items) != nil {
		return tags // not there, or not needed
	}
	for _, item := range items {
		id := idStart + strings.TrimSuffix(path.Base(item.Config), ".json")
		for _, text := range item.RepoTags {
			if n, err := parseName(text); err == nil && n.tag() != "" {
				tags[id] = appendNew(tags[id], n.tag())
			}
		}
	}
	return tags
}

func readJSON(file string, v any) error {
	data, err := regular.Read(file, maxManifest)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidImage, err)
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("%w: %s: %v", ErrInvalidImage, filepath.Base(file), err)
	}
	return nil
}
