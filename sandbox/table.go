package sandbox

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"syscall"
)

// Record is what a Table keeps: an object with an id and a name, copied whole.
type Record[T any] interface {
	*T
	// key gives the id, the unique name and the creation time in nanoseconds.
	key() (id, name string, created int64)
}

// Table holds the records of one kind, in memory and on disk. Readers get
// pointers to records that never change; a change makes a new one. Reads touch
// neither the disk nor a lock that is held across a write.
type Table[T any, R Record[T]] struct {
	dir, file string
	sync      bool // flush the first write of a record to the disk
	disk      disk
	trash     string
	across    bool              // dir is on another filesystem than the trash
	watch     func(old, now *T) // see Watch

	mu    sync.RWMutex
	byID  map[string]*T     // guarded by mu
	names map[string]string // name → id, guarded by mu

	undeleted []string        // directories that could not be deleted yet, guarded by mu
	unsaved   map[string]bool // ids of records that the disk does not have as they are, guarded by mu

	writes sync.Map // id → *sync.Mutex: one writer per record
}

// load reads every record below dir. What is none is told, and moved away where it
// was one; see quarantine.
func (t *Table[T, R]) load(root string, tell func(Problem)) error {
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return fmt.Errorf("read records: %w", err)
	}
	for _, e := range entries {
		dir := filepath.Join(t.dir, e.Name())
		var r T
		err := readRecord(filepath.Join(dir, t.file), &r)
		id, _, _ := R(&r).key()
		if err == nil && id != e.Name() {
			err = fmt.Errorf("%w: it says id %q", errTorn, id)
		}
		if err == nil {
			t.add(&r)
			continue
		}
		if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
			quarantine(root, dir, err, tell)
			continue
		}
		t.loadWithout(root, dir, tell)
	}
	return nil
}

// loadWithout deals with an entry that has no record.
func (t *Table[T, R]) loadWithout(root, dir string, tell func(Problem)) {
	remove, err := without(dir)
	switch {
	case remove:
		if err := os.RemoveAll(dir); err != nil {
			tell(Problem{Path: dir, Err: err})
		}
	case errors.Is(err, errNoRecord) && t.across:
		// Its removal was interrupted, see Remove; or it is lost, and cannot be moved.
		if err := removeTree(dir); err != nil {
			tell(Problem{Path: dir, Err: err})
		}
	case errors.Is(err, errNoRecord):
		quarantine(root, dir, err, tell)
	default:
		tell(Problem{Path: dir, Err: err})
	}
}

// add takes a record that was read. Of two that have one name, which berth never
// makes, the newer one is found by it.
func (t *Table[T, R]) add(r *T) {
	id, name, created := R(r).key()
	t.byID[id] = r
	if other, ok := t.byID[t.names[name]]; ok {
		if _, _, at := R(other).key(); at > created {
			return
		}
	}
	t.names[name] = id
}

// Watch has f called after each Update (old and now) and each Remove of a
// record that was there (now is nil), whether or not the disk took the change.
// A record that Create made is told with its first change. For one record the
// calls come one after the other, in the order of the changes; readers of the
// table see the change already. f may read the table; it must not change it,
// nor wait. To be called before the first change.
func (t *Table[T, R]) Watch(f func(old, now *T)) { t.watch = f }

func (t *Table[T, R]) tell(old, now *T) {
	if t.watch != nil {
		t.watch(old, now)
	}
}

// Create writes a new record before its object has any effect. ErrNameInUse
// names the id that has the name. On error nothing is kept.
func (t *Table[T, R]) Create(r *T) error {
	id, name, _ := R(r).key()
	t.mu.Lock()
	if other, ok := t.names[name]; ok {
		t.mu.Unlock()
		return fmt.Errorf("%w: %q is %s", ErrNameInUse, name, other)
	}
	t.names[name] = id
	t.mu.Unlock()

	if err := t.write(id, r, true); err != nil {
		t.mu.Lock()
		delete(t.names, name)
		t.mu.Unlock()
		_ = os.RemoveAll(t.Dir(id))
		return fmt.Errorf("write record of %s: %w", id, err)
	}
	t.mu.Lock()
	t.byID[id] = r
	t.mu.Unlock()
	_ = t.Save()
	return nil
}

func (t *Table[T, R]) write(id string, r *T, first bool) error {
	b, err := seal(r)
	if err != nil {
		return err
	}
	dir := t.Dir(id)
	if first {
		if err := t.disk.Mkdir(dir); err != nil {
			return err
		}
	}
	if err := replace(t.disk, filepath.Join(dir, t.file), b, first && t.sync); err != nil {
		return err
	}
	if first && t.sync {
		return t.disk.SyncDir(t.dir)
	}
	return nil
}

// Update changes a copy of the record, writes it and puts it in place. Updates
// of one record follow each other. When the disk refuses, the change is
// still seen by readers (memory tells what is true now) and the error returned;
// see Save.
func (t *Table[T, R]) Update(id string, change func(*T)) (*T, error) {
	r, err := t.update(id, change, false)
	if err == nil {
		_ = t.Save()
	}
	return r, err
}

// TryUpdate is Update for a change that is a caller's wish, not a fact: when the
// disk refuses, nothing has changed.
func (t *Table[T, R]) TryUpdate(id string, change func(*T)) (*T, error) {
	return t.update(id, change, true)
}

// Save writes the records that the disk refused before, as far as it takes them now.
// Creates and updates that succeed do so too.
func (t *Table[T, R]) Save() error {
	t.mu.RLock()
	ids := slices.Collect(maps.Keys(t.unsaved))
	t.mu.RUnlock()
	for _, id := range ids {
		if _, err := t.update(id, func(*T) {}, false); err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
	}
	return nil
}

func (t *Table[T, R]) update(id string, change func(*T), try bool) (*T, error) {
	m, _ := t.writes.LoadOrStore(id, new(sync.Mutex))
	m.(*sync.Mutex).Lock()
	defer m.(*sync.Mutex).Unlock()
	old, err := t.Get(id)
	if err != nil {
		return nil, err
	}
	next := *old
	change(&next)
	if try {
		if err := t.write(id, &next, false); err != nil {
			return nil, fmt.Errorf("write record of %s: %w", id, err)
		}
	}
	t.mu.Lock()
	t.byID[id] = &next
	t.mu.Unlock()
	if !try {
		err = t.write(id, &next, false)
	}
	t.saved(id, err == nil)
	t.tell(old, &next)
	if err != nil {
		return &next, fmt.Errorf("write record of %s: %w", id, err)
	}
	return &next, nil
}

// saved notes whether the disk has a record as it is.
func (t *Table[T, R]) saved(id string, is bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if is {
		delete(t.unsaved, id)
	} else {
		t.unsaved[id] = true
	}
}

// Remove forgets a record and deletes its directory, with all in it.
// Idempotent. Its effects must have been undone before. An error that comes when
// the record is gone already, so that Get finds nothing, is about its files: they
// are tried again with the next removal, or at the next start.
func (t *Table[T, R]) Remove(id string) error {
	m, _ := t.writes.LoadOrStore(id, new(sync.Mutex))
	m.(*sync.Mutex).Lock()
	defer m.(*sync.Mutex).Unlock()
	gone := filepath.Join(t.trash, id)
	err := t.disk.Rename(t.Dir(id), gone)
	if errors.Is(err, syscall.EXDEV) {
		// The records' directory is a mount of its own, away from the trash. A
		// directory without its record is deleted at the next start at the latest.
		gone = t.Dir(id)
		err = os.Remove(filepath.Join(gone, t.file))
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove record of %s: %w", id, err)
	}
	t.mu.Lock()
	r, ok := t.byID[id]
	if ok {
		if _, name, _ := R(r).key(); t.names[name] == id {
			delete(t.names, name)
		}
		delete(t.byID, id)
	}
	delete(t.unsaved, id)
	t.mu.Unlock()
	t.writes.Delete(id)
	if ok {
		t.tell(r, nil)
	}
	if err := t.discard(gone); err != nil {
		return fmt.Errorf("delete files of %s: %w", id, err)
	}
	return nil
}

// discard deletes a directory, and those that could not be deleted before. One
// that cannot is tried again with the next.
func (t *Table[T, R]) discard(dir string) error {
	t.mu.Lock()
	again := t.undeleted
	t.undeleted = nil
	t.mu.Unlock()
	var failed []string
	for _, d := range again {
		if removeTree(d) != nil { // whoever removed it was told why
			failed = append(failed, d)
		}
	}
	err := removeTree(dir)
	if err != nil {
		failed = append(failed, dir)
	}
	t.mu.Lock()
	t.undeleted = append(t.undeleted, failed...)
	t.mu.Unlock()
	return err
}

// Dir is the directory of an object's durable files.
func (t *Table[T, R]) Dir(id string) string { return filepath.Join(t.dir, id) }

// Get returns the record of a full id. ErrNotFound.
func (t *Table[T, R]) Get(id string) (*T, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if r, ok := t.byID[id]; ok {
		return r, nil
	}
	return nil, fmt.Errorf("%w: %q", ErrNotFound, id)
}

// Find also takes the beginning of an id, as operators type it. ErrNotFound,
// ErrAmbiguous.
func (t *Table[T, R]) Find(id string) (*T, error) {
	if r, err := t.Get(id); err == nil {
		return r, nil
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	var found *T
	for full, r := range t.byID {
		if id == "" || !strings.HasPrefix(full, id) {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("%w: %q", ErrAmbiguous, id)
		}
		found = r
	}
	if found == nil {
		return nil, fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	return found, nil
}

// Named returns the record that has a name. ErrNotFound.
func (t *Table[T, R]) Named(name string) (*T, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if r, ok := t.byID[t.names[name]]; ok {
		return r, nil
	}
	return nil, fmt.Errorf("%w: %q", ErrNotFound, name)
}

// List returns all records, newest first.
func (t *Table[T, R]) List() []*T { return t.Select(func(*T) bool { return true }) }

// Select returns the records that keep lets through, newest first. keep must
// not use the table.
func (t *Table[T, R]) Select(keep func(*T) bool) []*T {
	var out []*T
	t.mu.RLock()
	for _, r := range t.byID {
		if keep(r) {
			out = append(out, r)
		}
	}
	t.mu.RUnlock()
	sort.Slice(out, func(i, j int) bool {
		idI, _, ti := R(out[i]).key()
		idJ, _, tj := R(out[j]).key()
		if ti != tj {
			return ti > tj
		}
		return idI < idJ
	})
	return out
}
