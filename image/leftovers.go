package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/image/layer"
)

// leftovers are what pulls that broke off have fetched and no image uses:
// whole layers, unpacked, and the beginnings of layers as they arrived. The
// next pull goes on from them, also after a restart of the daemon. They go
// when they are old, the oldest first when they are too many bytes, and all at
// once when the disk is full or an image is removed.
type leftovers struct {
	dir     string          // partial/<boot id>: a power cut may have torn what is there
	options func() *Options // those in force
	least   int64           // bytes of a blob below which its beginning is not kept
	quick   time.Duration   // see tooQuick
	disk    *disk
	layers  *layers

	mu       sync.Mutex
	partials map[digest.Digest]*partial
	whole    map[*entry]time.Time // since when; each counted once as used
	timer    *time.Timer          // nil: nothing to expire
	closed   bool

	total atomic.Pointer[layer.Usage]
}

const (
	leastPartial = 8 << 20 // less is fetched again in no time
	leastKept    = 1 << 20 // bytes of a beginning or a layer that are worth keeping
)

// openLeftovers looks for what an earlier daemon left. layers are loaded, and
// those that images use are counted.
func openLeftovers(base string, options func() *Options, l *layers, t *trash) (*leftovers, error) {
	d := l.disk
	left := &leftovers{
		dir: filepath.Join(base, d.boot), options: options, least: leastPartial, quick: tooQuick, disk: d, layers: l,
		partials: map[digest.Digest]*partial{}, whole: map[*entry]time.Time{},
	}
	list, err := os.ReadDir(base)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list partial layers: %w", err)
	}
	for _, item := range list {
		if item.Name() != d.boot || left.limit() <= 0 {
			t.take(filepath.Join(base, item.Name()))
		}
	}
	if err := os.MkdirAll(left.dir, 0o700); err != nil {
		return nil, fmt.Errorf("create directory of partial layers: %w", err)
	}
	left.adoptPartials()
	for _, e := range l.unused() {
		if left.limit() <= 0 {
			break
		}
		if st, err := os.Stat(filepath.Join(e.dir, "layer.json")); err == nil && l.sizeOf([]int{e.n}) >= leastKept {
			l.again(e)
			left.whole[e] = st.ModTime()
		}
	}
	left.expire()
	return left, nil
}

// limit is bytes of all together.
func (l *leftovers) limit() int64 { return l.options().PartialBytes }

// adoptPartials takes over the files that are there.
func (l *leftovers) adoptPartials() {
	list, err := os.ReadDir(l.dir)
	if err != nil {
		return
	}
	for _, item := range list {
		path := filepath.Join(l.dir, item.Name())
		blob := digest.NewDigestFromEncoded(digest.SHA256, item.Name())
		st, err := os.Lstat(path)
		if err != nil || blob.Validate() != nil || !st.Mode().IsRegular() || st.Size() < leastKept {
			_ = l.disk.removeAll(path)
			continue
		}
		l.partials[blob] = &partial{of: l, blob: blob, path: path, size: st.Size(), since: st.ModTime()}
	}
}

// keepWhole takes over the caller's count on a layer, or gives it back.
func (l *leftovers) keepWhole(e *entry) {
	l.mu.Lock()
	_, have := l.whole[e]
	bytes, alone := l.layers.alone(e)
	keep := !have && alone && bytes >= leastKept && l.limit() > 0
	if keep {
		l.whole[e] = time.Now()
	}
	l.mu.Unlock()
	if !keep {
		l.layers.release(e)
		return
	}
	l.expire()
}

// taken tells that somebody else counts on a layer from now on.
func (l *leftovers) taken(e *entry) {
	l.mu.Lock()
	_, have := l.whole[e]
	delete(l.whole, e)
	l.mu.Unlock()
	if have {
		l.layers.release(e)
	}
}

// expire lets go of what is too old or too much, and comes again for the rest.
func (l *leftovers) expire() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.shrink(0)
}

// shrink lets go of what is too old, and of the oldest until there is room for
// so many bytes more. Called with mu held.
func (l *leftovers) shrink(room int64) {
	var all []leftover
	for e, since := range l.whole {
		all = append(all, leftover{since: since, bytes: int64(l.layers.sizeOf([]int{e.n})), whole: e})
	}
	sum := room
	for _, p := range l.partials {
		if p.file != nil {
			sum += p.size // somebody is at it
			continue
		}
		all = append(all, leftover{since: p.since, bytes: p.size, partial: p})
	}
	slices.SortFunc(all, func(a, b leftover) int { return b.since.Compare(a.since) })
	var oldest time.Time
	for _, one := range all {
		sum += one.bytes
		switch {
		case sum <= l.limit() && time.Since(one.since) < l.options().PartialAge:
			oldest = one.since
		case one.partial != nil:
			one.partial.remove()
		default:
			delete(l.whole, one.whole)
			l.layers.release(one.whole)
		}
	}
	if !oldest.IsZero() && l.timer == nil && !l.closed {
		l.timer = time.AfterFunc(time.Until(oldest.Add(l.options().PartialAge)), l.comeAgain)
	}
	l.count()
}

// leftover is one of either kind.
type leftover struct {
	since   time.Time
	bytes   int64
	whole   *entry
	partial *partial
}

func (l *leftovers) comeAgain() {
	l.mu.Lock()
	l.timer = nil
	closed := l.closed
	l.mu.Unlock()
	if !closed {
		l.expire()
	}
}

// drop removes the beginnings of these blobs, but those that somebody is at.
func (l *leftovers) drop(blobs func(yield func(digest.Digest) bool)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for blob := range blobs {
		if p := l.partials[blob]; p != nil && p.file == nil {
			p.remove()
		}
	}
	l.count()
}

// dropAll makes room: on a full disk nothing is kept for later.
func (l *leftovers) dropAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.partials {
		p.remove()
	}
	for e := range l.whole {
		delete(l.whole, e)
		l.layers.release(e)
	}
	l.count()
}

// giveWay lets go of what nobody is at, for who removes images wants room. It
// returns at once: files are deleted behind.
func (l *leftovers) giveWay() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for blob, p := range l.partials {
		if p.file == nil {
			p.gone = true
			delete(l.partials, blob)
			l.layers.trash.take(p.path)
		}
	}
	for e := range l.whole {
		delete(l.whole, e)
		l.layers.release(e)
	}
	l.count()
}

// usage is what the beginnings take that nobody is at, from memory. Layers are
// counted as such.
func (l *leftovers) usage() layer.Usage { return *l.total.Load() }

// count is called with mu held when something has come or gone.
func (l *leftovers) count() {
	u := layer.UsageOf(filepath.Dir(l.dir)).Add(layer.UsageOf(l.dir))
	for _, p := range l.partials {
		if p.file == nil {
			u = u.Add(layer.UsageOf(p.path))
		}
	}
	l.total.Store(&u)
}

// close leaves everything for the next start.
func (l *leftovers) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.timer != nil {
		l.timer.Stop()
	}
}

// worthKeeping says whether what a failed pull has fetched may serve the next
// one. After an error of what was fetched, it must not.
func worthKeeping(err error) bool {
	kind := classify(err)
	for _, passing := range []error{context.Canceled, ErrRegistryUnavailable, ErrUnauthorized, ErrNotFound} {
		if errors.Is(kind, passing) {
			return true
		}
	}
	return errors.Is(err, errAbandoned) || errors.Is(err, context.DeadlineExceeded)
}
