package image

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/opencontainers/go-digest"

	"berth/image/layer"

	"berth/sandbox/regular"
)

// layerMeta is layer.json.
type layerMeta struct {
	Version int           `json:"version"`
	DiffID  digest.Digest `json:"diffID"`
	Variant string        `json:"variant,omitempty"` // layer.Plan.Key; "" is pristine
	Boot    string        `json:"boot"`              // boot id of when it was unpacked
	Durable bool          `json:"durable,omitempty"` // surely on disk
	Usage   layer.Usage   `json:"usage"`             // of diff/
	List    listRef       `json:"list"`              // of what is in diff/; see Store.Check
	Needs   layer.Needs   `json:"needs"`
	Opaque  bool          `json:"opaque,omitempty"`  // hides all layers below
	Damaged bool          `json:"damaged,omitempty"` // found by Check: the next pull brings it anew
}

const layerVersion = 1

// layerKey is what a stored layer is found by.
type layerKey struct {
	diffID  digest.Digest
	variant string
}

// entry is a stored layer.
type entry struct {
	n        int
	dir      string // layers/<n>
	key      layerKey
	meta     layerMeta // as it was when the layer came, without Needs; never changed
	complete bool      // needs nothing of the layers below

	// Guarded by layers.mu.
	usage   layer.Usage // of diff/
	own     layer.Usage // what layers/<n> takes beside it
	durable bool
	damaged bool // not found by its key any more, so that a pull brings it anew
	refs    int  // images and running pulls that need it
}

func (e *entry) diff() string { return filepath.Join(e.dir, "diff") }

// id tells the content of one stored layer from that of any other.
func (k layerKey) id() string { return k.diffID.String() + "+" + k.variant }

// layers are the stored layers. A layer is there as long as somebody counts
// on it: when the last reference goes it is renamed into the trash.
type layers struct {
	dir   string
	trash *trash
	disk  *disk

	mu    sync.Mutex
	byKey map[layerKey]*entry
	byN   map[int]*entry
	next  int

	// torn are directories by their number whose record cannot be read, until
	// spareHeld has looked which of them containers run on.
	torn map[int]string

	total atomic.Pointer[layer.Usage] // of all layers, for readers who take no lock
}

// loadLayers reads layers/. What is not durable from another boot goes to the trash,
// and what is torn waits for spareHeld.
func loadLayers(dir, boot string, t *trash) (*layers, error) {
	l := &layers{dir: dir, trash: t, disk: t.disk, byKey: map[layerKey]*entry{}, byN: map[int]*entry{}, torn: map[int]string{}, next: 1}
	list, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list layers: %w", err)
	}
	for _, item := range list {
		path := filepath.Join(dir, item.Name())
		n, err := strconv.Atoi(item.Name())
		if err != nil || n < 1 {
			t.take(path)
			continue
		}
		l.next = max(l.next, n+1)
		meta, err := readMeta(path)
		key := layerKey{meta.DiffID, meta.Variant}
		if err != nil {
			l.torn[n] = path
			continue
		}
		if !meta.Durable && meta.Boot != boot || l.byKey[key] != nil && !meta.Damaged {
			t.take(path)
			continue
		}
		dropTemporary(path)
		e := newEntry(n, path, meta)
		e.own = ownUsage(path)
		l.byN[n] = e
		if !e.damaged {
			l.byKey[key] = e
		}
	}
	l.sum()
	return l, nil
}

// spareHeld keeps the layers of images that could not be adopted and that containers
// may run on, until the next start: a broken record must not take the files away
// under them. The other torn ones go to the trash.
func (s *Store) spareHeld(stored, adopted images) {
	for _, id := range s.options().Held {
		img := stored[id]
		if img == nil || adopted[id] != nil {
			continue
		}
		for _, n := range distinct(img.Layers) {
			delete(s.layers.torn, n)
			if s.layers.byN[n] != nil {
				s.layers.use([]int{n})
			}
		}
	}
	for _, path := range s.layers.torn {
		s.trash.take(path)
	}
	s.layers.torn = nil
}

// readMeta reads the record of a layer that is there.
func readMeta(dir string) (layerMeta, error) {
	meta, err := readRecord(dir)
	if err != nil {
		return meta, err
	}
	if st, err := os.Stat(filepath.Join(dir, "diff")); err != nil || !st.IsDir() {
		return meta, errors.New("no diff directory")
	}
	return meta, nil
}

func readRecord(dir string) (layerMeta, error) {
	var meta layerMeta
	data, err := regular.Read(filepath.Join(dir, "layer.json"), maxRecords)
	if err != nil {
		return meta, err
	}
	if err := json.Unmarshal(data, &meta); err != nil {
		return meta, err
	}
	if meta.Version != layerVersion || meta.DiffID.Validate() != nil {
		return meta, errors.New("not a layer record")
	}
	return meta, nil
}

func (d *disk) writeMeta(dir string, meta layerMeta) error {
	data, err := json.Marshal(meta)
	if err != nil {
		return err
	}
	return d.write(filepath.Join(dir, "layer.json"), data)
}

// ownUsage is what a layer takes beside its diff directory.
func ownUsage(dir string) layer.Usage {
	u := layer.UsageOf(dir)
	for _, name := range []string{"layer.json", listFile} {
		u = u.Add(layer.UsageOf(filepath.Join(dir, name)))
	}
	return u
}

// newEntry leaves out what a layer needs of others: it may be large, is wanted
// only when an image is settled, and can be read again.
func newEntry(n int, dir string, meta layerMeta) *entry {
	e := &entry{n: n, dir: dir, key: layerKey{meta.DiffID, meta.Variant}, meta: meta}
	e.usage, e.durable, e.damaged = meta.Usage, meta.Durable, meta.Damaged
	e.complete = meta.Needs.None()
	e.meta.Needs = layer.Needs{}
	return e
}

// needs reads what a layer needs of those below.
func (e *entry) needs() (layer.Needs, error) {
	if e.complete {
		return layer.Needs{}, nil
	}
	meta, err := readMeta(e.dir)
	return meta.Needs, err
}

// entries are the layers of an image, which must all be there.
func (l *layers) entries(numbers []int) []*entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := make([]*entry, 0, len(numbers))
	for _, n := range numbers {
		list = append(list, l.byN[n])
	}
	return list
}

// use counts an image as a user of its layers.
func (l *layers) use(numbers []int) {
	for _, e := range l.entries(distinct(numbers)) {
		l.again(e)
	}
}

// unuse undoes use.
func (l *layers) unuse(numbers []int) {
	for _, e := range l.entries(distinct(numbers)) {
		l.release(e)
	}
}

// sizeOf sums up the layers of an image, each once.
func (l *layers) sizeOf(numbers []int) uint64 {
	var size uint64
	list := l.entries(distinct(numbers))
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range list {
		size += e.usage.Bytes
	}
	return size
}

func distinct(numbers []int) []int {
	d := slices.Clone(numbers)
	slices.Sort(d)
	return slices.Compact(d)
}

// acquire counts one more user of a layer, nil when it is not stored.
func (l *layers) acquire(key layerKey) *entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.byKey[key]
	if e != nil {
		e.refs++
	}
	return e
}

// acquireAny is acquire for any variant, the pristine one first.
func (l *layers) acquireAny(d digest.Digest) *entry {
	if e := l.acquire(layerKey{diffID: d}); e != nil {
		return e
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, e := range l.byKey {
		if key.diffID == d {
			e.refs++
			return e
		}
	}
	return nil
}

// stored says whether any variant of a layer is here.
func (l *layers) stored(d digest.Digest) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key := range l.byKey {
		if key.diffID == d {
			return true
		}
	}
	return false
}

// again counts one more user of a layer that the caller already counts on.
func (l *layers) again(e *entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.refs++
}

// release undoes acquire. The last one out takes the layer away.
func (l *layers) release(e *entry) {
	l.mu.Lock()
	e.refs--
	last := e.refs <= 0 && l.byN[e.n] == e
	if last {
		l.drop(e)
	}
	l.mu.Unlock()
	if last {
		l.trash.take(e.dir)
	}
}

// drop takes a layer out of the tables. Called with mu held.
func (l *layers) drop(e *entry) {
	delete(l.byN, e.n)
	if l.byKey[e.key] == e {
		delete(l.byKey, e.key)
	}
	l.sum()
}

// add moves a finished layer from staging into place and returns it with one
// user. When somebody was faster with the same layer, that one is returned and
// the staged one goes to the trash.
func (l *layers) add(staged string, meta layerMeta) (*entry, error) {
	key := layerKey{meta.DiffID, meta.Variant}
	if err := l.disk.writeMeta(staged, meta); err != nil {
		return nil, fmt.Errorf("record layer %s: %w", meta.DiffID, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.byKey[key]; e != nil {
		e.refs++
		l.trash.take(staged)
		return e, nil
	}
	e := newEntry(l.next, filepath.Join(l.dir, strconv.Itoa(l.next)), meta)
	e.own, e.refs = ownUsage(staged), 1
	if err := l.disk.rename(staged, e.dir); err != nil {
		return nil, fmt.Errorf("put layer %s into place: %w", meta.DiffID, err)
	}
	l.next++
	l.byKey[key], l.byN[e.n] = e, e
	l.sum()
	return e, nil
}

// rekey turns a layer that only the caller uses into another variant, so that
// it can be settled in place. It reports false when somebody else counts on
// the layer as it is. From then on the layer is the caller's alone, until add.
func (l *layers) rekey(e *entry) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e.refs != 1 || l.byN[e.n] != e {
		return false
	}
	l.drop(e)
	return true
}

// sum counts all layers anew. Called with mu held.
func (l *layers) sum() {
	var u layer.Usage
	for _, e := range l.byN {
		u = u.Add(e.usage).Add(e.own)
	}
	l.total.Store(&u)
}

// usage is what all layers take. It waits for nobody.
func (l *layers) usage() layer.Usage { return *l.total.Load() }

// pending lists the layers that are not marked durable.
func (l *layers) pending() []*entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var list []*entry
	for _, e := range l.byN {
		if !e.durable {
			list = append(list, e)
		}
	}
	return list
}

// markDurable is called after the filesystem was synced. The count is taken
// again: only now does the filesystem know every block.
func (l *layers) markDurable(e *entry) error {
	meta, err := readMeta(e.dir)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed meanwhile
		}
		return fmt.Errorf("mark layer %s durable: %w", e.key.diffID, err)
	}
	if usage, err := layer.Measure(e.diff()); err == nil {
		meta.Usage = usage
	}
	meta.Durable = true
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byN[e.n] != e {
		return nil // removed meanwhile
	}
	meta.Damaged = e.damaged
	if err := l.disk.writeMeta(e.dir, meta); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("mark layer %s durable: %w", meta.DiffID, err)
	}
	e.usage, e.own, e.durable = meta.Usage, ownUsage(e.dir), true
	l.sum()
	return nil
}

// judge notes what Check found. A damaged layer stays for those who use it, but
// nobody new is given it; one that turns out whole is given out again. The note
// is kept on disk, if that can be written, so that it outlives the daemon.
func (l *layers) judge(e *entry, damaged bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e.damaged == damaged || l.byN[e.n] != e {
		return
	}
	e.damaged = damaged
	if damaged {
		if l.byKey[e.key] == e {
			delete(l.byKey, e.key)
		}
	} else if l.byKey[e.key] == nil {
		l.byKey[e.key] = e
	}
	if meta, err := readRecord(e.dir); err == nil {
		meta.Damaged = damaged
		_ = l.disk.writeMeta(e.dir, meta)
	}
}

func (l *layers) isDamaged(e *entry) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return e.damaged
}

// anyDamaged says whether an image has to get other layers.
func (l *layers) anyDamaged(numbers []int) bool {
	list := l.entries(numbers)
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(list, func(e *entry) bool { return e.damaged })
}

// unused are the layers that nobody counts on.
func (l *layers) unused() []*entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var list []*entry
	for _, e := range l.byN {
		if e.refs == 0 {
			list = append(list, e)
		}
	}
	return list
}

// alone says what a layer takes, and whether only the caller counts on it.
func (l *layers) alone(e *entry) (bytes int64, alone bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return int64(e.usage.Bytes), e.refs == 1
}

// sweep removes the layers that nobody uses. Called at start.
func (l *layers) sweep() {
	unused := l.unused()
	l.mu.Lock()
	for _, e := range unused {
		l.drop(e)
	}
	l.mu.Unlock()
	for _, e := range unused {
		l.trash.take(e.dir)
	}
}
