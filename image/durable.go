package image

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"time"

	"berth/image/layer"
	"berth/sandbox/regular"
)

// durability follows changes to the disk: sync the filesystem, then say so in
// the layers' records and keep the image records' synced version. One round
// covers every change made before it began.
type durability struct {
	store  *Store
	wanted chan struct{}
	later  chan struct{}
	stop   chan struct{}
	done   chan struct{}
	round  sync.Mutex // held during a round
}

func startDurability(s *Store) *durability {
	d := &durability{store: s, wanted: make(chan struct{}, 1), later: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{})}
	go d.run()
	if len(s.layers.pending()) > 0 || !haveCopy(s.root) {
		d.kick()
	}
	return d
}

// kick asks for a round and does not wait for it.
func (d *durability) kick() {
	select {
	case d.wanted <- struct{}{}:
	default:
	}
}

// removalRest is how long a removal may wait for its round. While the filesystem
// writes its journal, the next removal waits for that, so a round after each of many
// would cost more than the removals.
const removalRest = 2 * time.Second

// kickLater asks for a round after a removal. Without one nothing is lost and
// nothing lies: records that a power cut brings back name layers that are there,
// whole, or are dropped because they are not.
func (d *durability) kickLater() {
	select {
	case d.later <- struct{}{}:
	default:
	}
}

func (d *durability) run() {
	defer close(d.done)
	var rested <-chan time.Time
	for {
		select {
		case <-d.stop:
			return
		case <-d.later:
			if rested == nil {
				rested = time.After(removalRest)
			}
			continue
		case <-rested:
		case <-d.wanted:
		}
		rested = nil
		// An error means "not durable yet": the next change tries again,
		// and after a power cut the layers are pulled again.
		_ = d.sync()
	}
}

// sync does one round.
func (d *durability) sync() error {
	d.round.Lock()
	defer d.round.Unlock()
	root, disk := d.store.root, d.store.disk
	pending, fresh := d.store.layers.pending(), d.store.blobs.Fresh()
	if len(pending)+len(fresh) == 0 && haveCopy(root) {
		return nil // an earlier round was late enough
	}
	next := filepath.Join(root, syncedFile)
	_ = disk.removeAll(next)
	copyErr := disk.copyRefs(root, next)
	if err := layer.SyncFS(root); err != nil {
		return err
	}
	select {
	case <-d.stop:
		return nil // it took too long for close, the store is somebody else's
	default:
	}
	d.store.blobs.Settle(fresh)
	for _, e := range pending {
		if err := d.store.layers.markDurable(e); err != nil {
			return err
		}
	}
	if copyErr != nil {
		return copyErr
	}
	if err := disk.rename(next, filepath.Join(root, durableFile)); err != nil {
		return err
	}
	_ = disk.removeAll(next) // renaming one name of a file to another leaves both
	if len(pending) > 0 {
		// The marks themselves: without them what is on disk would be dropped.
		if err := layer.SyncFS(root); err != nil {
			return err
		}
	}
	d.store.change.Lock()
	defer d.store.change.Unlock()
	d.store.publishAnew() // with the sizes as they are now
	return nil
}

// copyRefs makes a copy of refs.json, so that damage to the one leaves the other; on
// a full disk only a second name, until a later round finds room.
func (d *disk) copyRefs(root, to string) error {
	refs := filepath.Join(root, refsFile)
	data, err := regular.Read(refs, maxRecords)
	if err == nil {
		err = d.write(to, data)
	}
	if full(err) {
		err = d.link(refs, to)
	}
	return err
}

// haveCopy says whether the durable version is a whole copy of refs.json.
func haveCopy(root string) bool {
	a, err := regular.Read(filepath.Join(root, refsFile), maxRecords)
	if err != nil {
		return false
	}
	b, err := regular.Read(filepath.Join(root, durableFile), maxRecords)
	if err != nil || !bytes.Equal(a, b) {
		return false
	}
	one, errA := os.Stat(filepath.Join(root, refsFile))
	other, errB := os.Stat(filepath.Join(root, durableFile))
	return errA == nil && errB == nil && !os.SameFile(one, other)
}

// close does not wait for a slow disk: what is not marked by then is marked
// after the next start.
func (d *durability) close() {
	close(d.stop)
	select {
	case <-d.done:
	case <-time.After(2 * time.Second):
	}
}
