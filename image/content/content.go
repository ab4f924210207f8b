// Package content keeps blobs by digest: manifests and configs, and whole
// layers only when the store is told to keep them.
//
// It owns one directory, blobs/, with files sha256/<hex>. It does not know what
// a blob means or who needs it: the caller removes what it no longer refers to.
// A file that exists is complete (written aside, then renamed); after a power
// cut it may be empty or torn all the same, since nothing is synced here, so
// Get checks the digest.
package content

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/opencontainers/go-digest"

	"berth/image/layer"
	"berth/sandbox/regular"
)

// ErrNotFound means that there is no blob of that digest.
var ErrNotFound = errors.New("blob not found")

// ErrCorrupt means that a blob's bytes do not have its digest.
var ErrCorrupt = errors.New("blob is corrupt")

// Store is a directory of blobs. Its methods may be called at the same time.
type Store struct {
	dir string

	mu      sync.Mutex
	known   map[digest.Digest]blob // what is there; guarded by mu
	dropped map[digest.Digest]bool // what waits for Bury, not in known; guarded by mu
	total   layer.Usage            // of known; guarded by mu
	fresh   []digest.Digest        // not settled; guarded by mu
}

type blob struct {
	size  int64
	usage layer.Usage
}

// Open makes the directory when it is missing, and looks at what is in it.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(filepath.Join(dir, "sha256"), 0o700); err != nil {
		return nil, fmt.Errorf("create blob directory: %w", err)
	}
	s := &Store{dir: dir, known: map[digest.Digest]blob{}, dropped: map[digest.Digest]bool{}}
	list, err := os.ReadDir(filepath.Join(dir, "sha256"))
	if err != nil {
		return nil, fmt.Errorf("list blobs: %w", err)
	}
	for _, e := range list {
		if d := digest.NewDigestFromEncoded(digest.SHA256, e.Name()); d.Validate() == nil {
			s.look(d)
		}
	}
	return s, nil
}

// note looks at a blob that just came.
func (s *Store) note(d digest.Digest) {
	s.look(d)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fresh = append(s.fresh, d)
}

// look takes down a blob as it is on the disk now, or that it is not.
func (s *Store) look(d digest.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lookLocked(d)
}

// lookLocked is look with mu held.
func (s *Store) lookLocked(d digest.Digest) {
	path, err := s.Path(d)
	if err != nil || s.dropped[d] {
		return
	}
	old := s.known[d].usage
	s.total = layer.Usage{Bytes: s.total.Bytes - old.Bytes, Inodes: s.total.Inodes - old.Inodes}
	delete(s.known, d)
	info, err := os.Lstat(path)
	if err != nil {
		return
	}
	b := blob{info.Size(), layer.UsageOf(path)}
	s.known[d] = b
	s.total = s.total.Add(b.usage)
}

// Size is a blob's length in bytes, 0 when it is not there. From memory.
func (s *Store) Size(d digest.Digest) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known[d].size
}

// Usage is what all blobs take, as du counts. From memory, but for the
// directories.
func (s *Store) Usage() layer.Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total.Add(layer.UsageOf(s.dir)).Add(layer.UsageOf(filepath.Join(s.dir, "sha256")))
}

// Fresh are the blobs that came since they were settled last.
func (s *Store) Fresh() []digest.Digest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fresh
}

// Settle looks again at what Fresh has told, after the filesystem was synced:
// only then it knows every block. One caller at a time.
func (s *Store) Settle(fresh []digest.Digest) {
	for _, d := range fresh {
		s.look(d)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fresh = slices.Clone(s.fresh[len(fresh):])
}

// Path is where a blob is or would be.
func (s *Store) Path(d digest.Digest) (string, error) {
	if err := d.Validate(); err != nil {
		return "", fmt.Errorf("blob %q: %w", d, err)
	}
	if d.Algorithm() != digest.SHA256 {
		return "", fmt.Errorf("blob %q: only sha256 is supported", d)
	}
	return filepath.Join(s.dir, "sha256", d.Encoded()), nil
}

// Put stores data under its digest, which must match. Storing it again does
// nothing.
func (s *Store) Put(d digest.Digest, data []byte) error {
	path, err := s.Path(d)
	if err != nil {
		return err
	}
	if digest.FromBytes(data) != d {
		return fmt.Errorf("store blob %s: %w", d, ErrCorrupt)
	}
	s.revive(d)
	if _, err := s.Get(d); err == nil {
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return fmt.Errorf("store blob %s: %w", d, err)
	}
	_, err = f.Write(data)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("store blob %s: %w", d, err)
	}
	s.note(d)
	return nil
}

// Adopt takes a finished file, whose digest the caller has checked, as a blob.
// The file must be on the store's filesystem; it is gone from its old place.
func (s *Store) Adopt(d digest.Digest, file string) error {
	path, err := s.Path(d)
	if err != nil {
		return err
	}
	s.revive(d)
	if err := os.Rename(file, path); err != nil {
		return fmt.Errorf("store blob %s: %w", d, err)
	}
	s.note(d)
	return nil
}

// maxBlob bounds, in bytes, what Get reads into memory.
const maxBlob = 64 << 20

// Get returns a blob after checking its digest. For small blobs.
func (s *Store) Get(d digest.Digest) ([]byte, error) {
	path, err := s.Path(d)
	if err != nil {
		return nil, err
	}
	data, err := regular.Read(path, maxBlob)
	if errors.Is(err, fs.ErrNotExist) || s.isDropped(d) {
		return nil, fmt.Errorf("%w: %s", ErrNotFound, d)
	}
	if err != nil {
		return nil, fmt.Errorf("read blob %s: %w", d, err)
	}
	if digest.FromBytes(data) != d {
		return nil, fmt.Errorf("%w: %s", ErrCorrupt, d)
	}
	return data, nil
}

// Has says whether a blob is there; its bytes are not looked at.
func (s *Store) Has(d digest.Digest) bool {
	path, err := s.Path(d)
	if err != nil {
		return false
	}
	_, err = os.Lstat(path)
	return err == nil && !s.isDropped(d)
}

func (s *Store) isDropped(d digest.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dropped[d]
}

// Strays lists the files that are not in keep, leftovers of broken writes
// among them, but not what waits for Bury.
func (s *Store) Strays(keep map[digest.Digest]bool) (names []string, err error) {
	s.mu.Lock()
	dropped := maps.Clone(s.dropped)
	s.mu.Unlock()
	list, err := os.ReadDir(filepath.Join(s.dir, "sha256"))
	if err != nil {
		return nil, fmt.Errorf("list blobs: %w", err)
	}
	for _, e := range list {
		if d := digest.NewDigestFromEncoded(digest.SHA256, e.Name()); d.Validate() != nil || !keep[d] && !dropped[d] {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Sweep removes the strays.
func (s *Store) Sweep(keep map[digest.Digest]bool) error {
	strays, err := s.Strays(keep)
	if err != nil {
		return err
	}
	for _, name := range strays {
		if err := os.RemoveAll(filepath.Join(s.dir, "sha256", name)); err != nil {
			return fmt.Errorf("sweep blobs: %w", err)
		}
		s.look(digest.NewDigestFromEncoded(digest.SHA256, name))
	}
	return nil
}

// Drop forgets the blobs that are not in keep, from memory: their files go with
// Bury. One that is stored again before that stays.
func (s *Store) Drop(keep map[digest.Digest]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for d, b := range s.known {
		if !keep[d] {
			s.total = layer.Usage{Bytes: s.total.Bytes - b.usage.Bytes, Inodes: s.total.Inodes - b.usage.Inodes}
			delete(s.known, d)
			s.dropped[d] = true
		}
	}
}

// Bury hands the file of each dropped blob to take, which moves it away.
func (s *Store) Bury(take func(path string)) {
	for s.buryOne(take) {
	}
}

func (s *Store) buryOne(take func(path string)) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for d := range s.dropped {
		delete(s.dropped, d)
		if path, err := s.Path(d); err == nil {
			take(path)
		}
		return true
	}
	return false
}

// revive takes back that a blob was dropped.
func (s *Store) revive(d digest.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dropped[d] {
		delete(s.dropped, d)
		s.lookLocked(d)
	}
}

// Verify reads a blob of any size and compares it with its digest. A done ctx
// ends it. ErrNotFound, ErrCorrupt.
func (s *Store) Verify(ctx context.Context, d digest.Digest) error {
	path, err := s.Path(d)
	if err != nil {
		return err
	}
	f, err := regular.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s", ErrNotFound, d)
	}
	if err != nil {
		return fmt.Errorf("read blob %s: %w", d, err)
	}
	defer f.Close()
	sum := d.Verifier()
	for buf := make([]byte, 256<<10); ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := f.Read(buf)
		_, _ = sum.Write(buf[:n])
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("read blob %s: %w", d, err)
		}
	}
	if !sum.Verified() {
		return fmt.Errorf("%w: %s", ErrCorrupt, d)
	}
	return nil
}
