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
// as a mass deletion makes ext4 create files many times slower for minutes.
type trash struct {
	dir   string
	disk  *disk
	seq   atomic.Int64
	kick  chan struct{}
	idle  sync.Cond // signalled when a round of deleting is over
	mu    sync.Mutex
	work  int // directories not yet deleted; guarded by mu
	done  chan struct{}
	leave context.CancelFunc
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
	t.wake()
	return t, nil
}

// take moves a directory into the trash. Should even the rename fail, on a
// filesystem without a free block, it is deleted on the spot.
func (t *trash) take(path string) {
	to := filepath.Join(t.dir, strconv.FormatInt(t.seq.Add(1), 36))
	if err := t.disk.rename(path, to); err != nil {
		_ = t.disk.removeAll(path)
		return
	}
	t.mu.Lock()
	t.work++
	t.mu.Unlock()
	t.wake()
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
			t.mu.Lock()
			t.work--
			t.mu.Unlock()
		}
		t.mu.Lock()
		if t.work <= 0 {
			t.work = 0
			t.idle.Broadcast()
		}
		t.mu.Unlock()
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

// wait blocks until everything in the trash is gone, or ctx is done.
func (t *trash) wait(ctx context.Context) {
	stop := context.AfterFunc(ctx, t.idle.Broadcast)
	defer stop()
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.work > 0 && ctx.Err() == nil {
		t.idle.Wait()
	}
}

func (t *trash) close() {
	t.leave()
	<-t.done
}
