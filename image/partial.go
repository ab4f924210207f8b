package image

import (
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/opencontainers/go-digest"
)

// partial is the beginning of a layer as it arrived, in a file: bytes in order
// and without holes, for whose content nobody vouches before the whole layer
// has its digest.
type partial struct {
	of   *leftovers
	blob digest.Digest
	path string

	// Guarded by of.mu.
	size  int64
	since time.Time // of the last write
	file  *os.File  // open as long as a pull is at it; nil: nobody is
	gone  bool      // removed: what is written goes nowhere
}

// tooQuick is the time of waiting for the registry below which a layer is
// rather fetched again than written down while it arrives: writing costs a
// fast pull a tenth of its time.
const tooQuick = 5 * time.Second

// open takes the beginning of a blob for one pull, or begins one. Nil where
// that does not pay or cannot be. To be closed.
func (l *leftovers) open(blob digest.Digest, size int64) *partial {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.limit() <= 0 || l.closed || size < l.least || size > l.limit() || l.tight(size) {
		return nil
	}
	p := l.partials[blob]
	if p == nil {
		p = &partial{of: l, blob: blob, path: filepath.Join(l.dir, blob.Encoded())}
	}
	if p.file != nil || l.disk.may("write", p.path) != nil {
		return nil
	}
	if p.size > size { // another manifest says so
		p.remove()
		return nil
	}
	f, err := os.OpenFile(p.path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil
	}
	p.file, p.since = f, time.Now()
	l.partials[blob] = p
	return p
}

// tight: the disk has hardly room for the layer itself, unpacked.
func (l *leftovers) tight(size int64) bool {
	var st syscall.Statfs_t
	return syscall.Statfs(l.dir, &st) != nil || int64(st.Bavail)*st.Bsize < 8*size
}

// write adds what has arrived. When it cannot, the file goes, and the pull goes
// on without.
func (p *partial) write(b []byte) {
	p.of.mu.Lock()
	defer p.of.mu.Unlock()
	if p.gone {
		return
	}
	err := p.of.disk.may("write", p.path)
	if err == nil {
		_, err = p.file.WriteAt(b, p.size)
	}
	if err == nil && p.of.sum()+int64(len(b)) > p.of.limit() {
		p.of.shrink(int64(len(b)))
	}
	if err != nil || p.of.sum()+int64(len(b)) > p.of.limit() {
		p.remove()
		return
	}
	p.size += int64(len(b))
	p.since = time.Now()
}

// sum is called with mu held.
func (l *leftovers) sum() int64 {
	var n int64
	for e := range l.whole {
		n += int64(l.layers.sizeOf([]int{e.n}))
	}
	for _, p := range l.partials {
		n += p.size
	}
	return n
}

// close leaves the file for the next pull, unless it is over or too little.
func (p *partial) close(over bool) {
	p.of.mu.Lock()
	if over || p.size < leastKept {
		p.remove()
	}
	p.file.Close()
	p.file = nil
	p.of.count()
	p.of.mu.Unlock()
	if !over {
		p.of.expire()
	}
}

// remove gives the space back at once. Called with of.mu held.
func (p *partial) remove() {
	if p.gone {
		return
	}
	p.gone = true
	delete(p.of.partials, p.blob)
	if p.file != nil {
		_ = p.file.Truncate(0) // unlinked it would take its space until it is closed
	}
	_ = p.of.disk.removeAll(p.path) // else it goes at the next start
}

// resumed is a layer's stream: what is left of an earlier try, then the rest
// from the registry. What comes from there is written down as far as that pays.
type resumed struct {
	from func(at int64) (io.ReadCloser, error) // the registry's part, from a byte on
	size int64
	part *partial // nil: nothing is kept
	old  int64    // bytes of part that an earlier try left

	rest   io.ReadCloser // nil: not there yet
	at     int64         // bytes read
	waited time.Duration // for the registry
}

func (r *resumed) Read(b []byte) (int, error) {
	if r.at < r.old {
		n, err := r.part.file.ReadAt(b[:min(int64(len(b)), r.old-r.at)], r.at)
		r.at += int64(n)
		if n > 0 {
			return n, nil
		}
		if err != nil { // removed meanwhile
			r.old = r.at
			r.forget()
		}
	}
	if r.rest == nil {
		rest, err := r.from(r.at)
		if err != nil {
			return 0, err
		}
		r.rest = rest
	}
	before := time.Now()
	n, err := r.rest.Read(b)
	r.waited += time.Since(before)
	r.at += int64(n)
	if r.part != nil && n > 0 {
		r.part.write(b[:n])
		r.weigh()
	}
	return n, err
}

// weigh stops writing down what comes so fast that nobody will miss it.
func (r *resumed) weigh() {
	got := r.at - r.old
	if got < leastKept {
		return
	}
	if whole := time.Duration(float64(r.waited) / float64(got) * float64(r.size)); whole < r.part.of.quick {
		r.forget()
	}
}

func (r *resumed) forget() {
	if r.part != nil {
		r.part.close(true)
		r.part = nil
	}
}

// Close keeps the beginning when it is one.
func (r *resumed) Close() error {
	if r.part != nil {
		r.part.close(r.at == r.size)
		r.part = nil
	}
	if r.rest == nil {
		return nil
	}
	return r.rest.Close()
}
