package image

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// trash deletes directories behind everybody's back. A deletion is a rename,
// so it is instant and nothing half-deleted is ever seen; the files go slowly,
// as a mass deletion makes ext4 create files many times slower for minutes. That
// keeps it bounded all the same: it goes faster than files can be made, and
// without a pause when space is short or somebody waits.
type trash struct {
	dir   string
	disk  *disk
	seq   atomic.Int64
	kick  chan struct{}
	idle  sync.Cond // signalled when nothing is left to be deleted
	mu    sync.Mutex
	work  int // directories not yet deleted; guarded by mu
	done  chan struct{}
	leave context.CancelFunc
	hurry atomic.Int32 // who waits for it to be empty
	moves sync.WaitGroup
}

func openTrash(dir string, d *disk) (*trash, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create trash: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	t := &trash{dir: dir, disk: d, kick: make(chan struct{}, 1), done: make(chan struct{}), leave: cancel}
	t.idle.L = &t.mu
	list, err := os.ReadDir(dir)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("list trash: %w", err)
	}
	t.work = len(list)
	t.seq.Store(time.Now().UnixNano()) // never a name that is there already
	go t.run(ctx)
	if t.work > 0 {
		t.wake()
	}
	return t, nil
}

// take moves a directory into the trash. Should even the rename fail, on a
// filesystem without a free block, it is deleted on the spot.
func (t *trash) take(path string) {
	to := filepath.Join(t.dir, strconv.FormatInt(t.seq.Add(1), 36))
	t.count(1) // before it can be found there, and deleted
	if err := t.disk.rename(path, to); err != nil {
		_ = t.disk.removeAll(path)
		t.count(-1)
		return
	}
	t.wake()
}

// soon runs what moves something into the trash, behind the caller's back: even a
// rename can wait for the disk.
func (t *trash) soon(move func()) {
	t.count(1)
	t.moves.Go(func() {
		move()
		t.count(-1)
	})
}

// count changes the number of directories that wait to be deleted.
func (t *trash) count(by int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.work = max(t.work+by, 0); t.work == 0 {
		t.idle.Broadcast()
	}
}

func (t *trash) wake() {
	select {
	case t.kick <- struct{}{}:
	default:
	}
}

func (t *trash) run(ctx context.Context) {
	defer close(t.done)
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.kick:
		}
		list, _ := os.ReadDir(t.dir)
		for _, item := range list {
			t.delete(ctx, filepath.Join(t.dir, item.Name()))
			if ctx.Err() != nil {
				return
			}
			t.count(-1)
		}
	}
}

// delete removes one tree, directory by directory, with a breath in between.
func (t *trash) delete(ctx context.Context, path string) {
	const batch = 512
	budget := batch
	var walk func(dir string)
	walk = func(dir string) {
		list, err := os.ReadDir(dir)
		if err != nil {
			return
		}
		for _, item := range list {
			if ctx.Err() != nil {
				return
			}
			p := filepath.Join(dir, item.Name())
			if item.IsDir() {
				walk(p)
			}
			os.Remove(p)
			if budget--; budget <= 0 {
				budget = batch
				if !t.mayRest() {
					continue
				}
				select {
				case <-ctx.Done():
				case <-time.After(2 * time.Millisecond):
				}
			}
		}
	}
	walk(path)
	os.Remove(path)
}

// busy says whether anything is being deleted.
func (t *trash) busy() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.work > 0
}

// wait blocks until everything in the trash is gone, or ctx is done. Meanwhile
// deletion does not dawdle.
func (t *trash) wait(ctx context.Context) {
	t.hurry.Add(1)
	defer t.hurry.Add(-1)
	stop := context.AfterFunc(ctx, t.idle.Broadcast)
	defer stop()
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.work > 0 && ctx.Err() == nil {
		t.idle.Wait()
	}
}

// mayRest says whether there is time for a breath: nobody waits, and space is
// not short.
func (t *trash) mayRest() bool {
	if t.hurry.Load() > 0 {
		return false
	}
	space, err := freeOf(t.dir)
	return err == nil && !space.isShort()
}

func (t *trash) close() {
	t.moves.Wait()
	t.leave()
	<-t.done
}
