package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"berth/sandbox/regular"
)

const (
	preloadedFile = "preloaded.json"
	pinnedDir     = "pinned" // below the preload directory
	// preloadsAtOnce bounds the archives that are read at the same time: each takes
	// a processor.
	preloadsAtOnce = 4
)

// Preloaded is what became of one archive of the preload directory.
type Preloaded struct {
	File   string // absolute
	Pinned bool
	Images []string // a name of each image that it brought, or its id; also before an error
	Took   time.Duration
	Err    error // an *Error, or ctx's; nil: it was imported
}

// preloaded.json: which archives were imported, by their paths below the directory.
type preloads map[string]preload

type preload struct {
	Size    int64  `json:"size"`
	ModTime int64  `json:"modTime"` // Unix nanoseconds
	Boot    string `json:"boot"`    // boot id of when it was imported
	// Durable: what it brought is surely on disk. Else, after a reboot, the record
	// does not count, as images may not have lived through it.
	Durable bool `json:"durable,omitempty"`
}

// Preload imports the archives *.tar, *.tar.gz and *.tar.zst of a directory (see
// Import), and those of its directory "pinned" with a pin, several at the same time.
// Each is imported once, whatever becomes of its images then: it is known by name,
// size and time of change as long as it is there. One that fails keeps no other out, and is tried again
// at the next call. report is called with each that was tried, by several at once. A
// directory that is not there has no archives. It blocks until all is done; the error
// is of the directory, the record, or ctx. bring is that of an ImportRequest.
func (s *Store) Preload(ctx context.Context, dir string, bring Bring, report func(Preloaded)) error {
	p := &preloading{store: s, dir: dir, bring: bring, report: report, known: s.loadPreloads()}
	there := map[string]bool{}
	var group errgroup.Group
	group.SetLimit(min(preloadsAtOnce, runtime.GOMAXPROCS(0)))
	for _, sub := range []string{"", pinnedDir} {
		list, err := os.ReadDir(filepath.Join(dir, sub))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("preload images: %w", errors.Join(err, group.Wait()))
		}
		for _, item := range list {
			if name := filepath.Join(sub, item.Name()); isPreload(item.Name()) {
				there[name] = true
				group.Go(func() error { return p.file(ctx, name) })
			}
		}
	}
	err := group.Wait()
	if err == nil {
		err = p.settle(there)
	}
	if err != nil {
		return fmt.Errorf("preload images: %w", err)
	}
	return nil
}

// isPreload tells an archive by its name, and leaves alone what begins with a dot,
// as tools name what they have not finished copying.
func isPreload(name string) bool {
	for _, end := range []string{".tar", ".tar.gz", ".tar.zst"} {
		if strings.HasSuffix(name, end) {
			return !strings.HasPrefix(name, ".")
		}
	}
	return false
}

// preloading is one run.
type preloading struct {
	store  *Store
	dir    string
	bring  Bring
	report func(Preloaded)

	mu      sync.Mutex
	known   preloads // guarded by mu
	changed bool     // guarded by mu
}

// file imports one archive, unless that was done. The error is of the record, or
// ctx's.
func (p *preloading) file(ctx context.Context, name string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	out := Preloaded{File: filepath.Join(p.dir, name), Pinned: filepath.Dir(name) == pinnedDir}
	began := time.Now()
	before, err := os.Stat(out.File)
	if err == nil && p.has(name, before) {
		return nil
	}
	if err == nil {
		out.Images, err = p.store.Import(ctx, ImportRequest{File: out.File, Pin: out.Pinned, Bring: p.bring})
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	out.Took, out.Err = time.Since(began), err
	p.report(out)
	after, statErr := os.Stat(out.File)
	if err != nil || statErr != nil || after.Size() != before.Size() || !after.ModTime().Equal(before.ModTime()) {
		return nil // changed while it was read: it is read again at the next start
	}
	return p.note(name, before)
}

func (p *preloading) has(name string, info fs.FileInfo) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, ok := p.known[name]
	return ok && k.Size == info.Size() && k.ModTime == info.ModTime().UnixNano()
}

func (p *preloading) note(name string, info fs.FileInfo) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[name] = preload{Size: info.Size(), ModTime: info.ModTime().UnixNano(), Boot: p.store.boot}
	p.changed = true
	return p.store.savePreloads(p.known)
}

// settle forgets archives that are gone and makes the record count also after a
// power cut.
func (p *preloading) settle(there map[string]bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, k := range p.known {
		p.changed = p.changed || !k.Durable || !there[name]
		k.Durable = true
		if p.known[name] = k; !there[name] {
			delete(p.known, name)
		}
	}
	if !p.changed {
		return nil
	}
	if err := p.store.durable.sync(); err != nil {
		return err
	}
	if err := p.store.savePreloads(p.known); err != nil {
		return err
	}
	p.store.change.Lock()
	defer p.store.change.Unlock()
	p.store.publish() // which counts the record
	return nil
}

// loadPreloads reads the record. One that cannot be read is none: then every
// archive is imported again, which does no harm.
func (s *Store) loadPreloads() preloads {
	all := preloads{}
	data, err := regular.Read(filepath.Join(s.root, preloadedFile), maxRecords)
	if err != nil || json.Unmarshal(data, &all) != nil || all == nil {
		return preloads{}
	}
	for name, k := range all {
		if !k.Durable && k.Boot != s.boot {
			delete(all, name)
		}
	}
	return all
}

func (s *Store) savePreloads(all preloads) error {
	data, err := json.Marshal(all)
	if err != nil {
		return fmt.Errorf("encode record of preloaded archives: %w", err)
	}
	if err := s.disk.write(filepath.Join(s.root, preloadedFile), data); err != nil {
		return fmt.Errorf("save record of preloaded archives: %w", err)
	}
	return nil
}
