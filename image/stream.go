package image

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"runtime/debug"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// layerStream is an open layer. Closing it gives its claim back.
type layerStream struct {
	io.ReadCloser
	settle func() // called once closed
}

func (l *layerStream) Close() error {
	err := l.ReadCloser.Close()
	l.settle()
	return err
}

// watched tells what arrives, also that nothing more does.
type watched struct {
	io.ReadCloser
	got func(n int)
}

func (w *watched) Read(b []byte) (int, error) {
	n, err := w.ReadCloser.Read(b)
	w.got(n)
	return n, err
}

// streamError is an error of the incoming stream, as opposed to one of what
// the stream holds.
type streamError struct{ err error }

func (e *streamError) Error() string { return e.err.Error() }
func (e *streamError) Unwrap() error { return e.err }

// counted marks stream errors and holds a stream to the size that was promised.
type counted struct {
	inner io.Reader
	left  int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.inner.Read(b)
	c.left -= int64(n)
	if c.left < 0 {
		return 0, fmt.Errorf("%w: the blob is longer than the manifest says", ErrInvalidImage)
	}
	if err == io.EOF && c.left > 0 {
		return n, &streamError{fmt.Errorf("the blob ends %d bytes early: %w", c.left, io.ErrUnexpectedEOF)}
	}
	if err != nil && err != io.EOF {
		err = &streamError{err}
	}
	return n, err
}

// What zstd may ask for: a frame refers back by so many bytes, which must be
// kept.
const (
	zstdWindow     = 128 << 20 // the most there is: what "zstd --long" makes at most by default
	zstdWindowMany = 32 << 20  // the most that every layer may take; more is for few at a time
)

// decompress looks at the first bytes, not at labels. large is called, and may
// wait, where the stream takes a lot of memory; leave when it is over. close
// frees the decoder.
func decompress(r io.Reader, large func() (leave func(), err error)) (body io.Reader, closeBody func(), err error) {
	buffered := bufio.NewReaderSize(r, 256<<10)
	magic, err := buffered.Peek(zstd.HeaderMaxSize)
	if err != nil && err != io.EOF {
		return nil, nil, err
	}
	nothing := func() {}
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		z, err := newGunzip(buffered)
		if err != nil {
			return nil, nil, err
		}
		return z, nothing, nil
	case bytes.HasPrefix(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}), isSkippable(magic):
		return decompressZstd(buffered, large)
	case bytes.HasPrefix(magic, []byte{0xfd, '7', 'z', 'X', 'Z'}):
		return nil, nil, fmt.Errorf("%w: layers compressed with xz are not supported", ErrInvalidImage)
	case bytes.HasPrefix(magic, []byte("BZh")):
		return nil, nil, fmt.Errorf("%w: layers compressed with bzip2 are not supported", ErrInvalidImage)
	}
	return buffered, nothing, nil
}

// decompressZstd lets few layers with large windows at their data at a time.
// The first frame tells for all.
func decompressZstd(r *bufio.Reader, large func() (func(), error)) (io.Reader, func(), error) {
	if firstWindow(r) > zstdWindowMany {
		leave, err := large()
		if err != nil {
			return nil, nil, err
		}
		z, err := newZstd(r, zstdWindow)
		if err != nil {
			leave()
			return nil, nil, err
		}
		windows.enter()
		return z, func() { z.Close(); leave(); windows.leave() }, nil
	}
	z, ok := zstdDecoders.Get().(*zstd.Decoder)
	if !ok {
		var err error
		if z, err = newZstd(nil, zstdWindowMany); err != nil {
			return nil, nil, err
		}
	}
	if err := z.Reset(r); err != nil {
		return nil, nil, err
	}
	windows.enter()
	return z, func() {
		if z.Reset(nil) == nil {
			zstdDecoders.Put(z)
		}
		windows.leave()
	}, nil
}

// zstdDecoders are those of layers that are over, each with a window, mostly of 8 MiB:
// the layers of an image come one after another, and would leave so much garbage each.
var zstdDecoders sync.Pool

// windows has garbage collected sooner while there are windows: they are most of the
// heap then, and nothing in them is looked through, so that letting the heap double
// would cost much memory and save hardly any time.
var windows collector

type collector struct {
	mu     sync.Mutex
	open   int // guarded by mu
	before int // the percentage that is in force otherwise; guarded by mu
}

const soonerPercent = 25

func (c *collector) enter() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open++; c.open == 1 {
		c.before = debug.SetGCPercent(soonerPercent)
	}
}

func (c *collector) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open--; c.open == 0 {
		debug.SetGCPercent(c.before)
	}
}

func newZstd(r io.Reader, window uint64) (*zstd.Decoder, error) {
	return zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(window))
}

// firstWindow is the memory that the first frame asks for. Skippable frames
// before it, of which a tool for parallel decompression writes one, are small.
func firstWindow(r *bufio.Reader) uint64 {
	for skip := 0; ; {
		data, _ := r.Peek(skip + zstd.HeaderMaxSize) // short at the stream's end, and then no harm
		var h zstd.Header
		if len(data) < skip || h.Decode(data[skip:]) != nil {
			return 0
		}
		switch {
		case h.Skippable:
			skip += h.HeaderSize + int(h.SkippableSize)
		case h.SingleSegment:
			return h.FrameContentSize
		default:
			return h.WindowSize
		}
	}
}

// isSkippable knows zstd's skippable frames, which may come first.
func isSkippable(b []byte) bool {
	return len(b) >= 4 && b[0]&0xf0 == 0x50 && b[1] == 0x2a && b[2] == 0x4d && b[3] == 0x18
}

// ahead reads on in a goroutine of its own, so that fetching and decompressing
// overlap with hashing and writing.
type ahead struct {
	full  chan chunk
	empty chan []byte
	quit  chan struct{}
	once  sync.Once
	done  chan struct{}
	now   chunk
	at    int
}

type chunk struct {
	data []byte
	err  error
}

const (
	aheadChunks = 4
	aheadSize   = 256 << 10
)

var aheadBuffers = sync.Pool{New: func() any { b := make([]byte, aheadSize); return &b }}

func readAhead(r io.Reader) *ahead {
	a := &ahead{
		full:  make(chan chunk, aheadChunks),
		empty: make(chan []byte, aheadChunks+1),
		quit:  make(chan struct{}),
		done:  make(chan struct{}),
	}
	for range aheadChunks {
		a.empty <- *aheadBuffers.Get().(*[]byte)
	}
	go a.pump(r)
	return a
}

func (a *ahead) pump(r io.Reader) {
	defer close(a.done)
	for {
		var buf []byte
		select {
		case buf = <-a.empty:
		case <-a.quit:
			return
		}
		n, err := fill(r, buf[:aheadSize])
		select {
		case a.full <- chunk{buf[:n], err}:
		case <-a.quit:
			return
		}
		if err != nil {
			return
		}
	}
}

// fill reads until b is full. Unlike io.ReadFull it keeps the reader's own
// error: a stream that breaks off must not look like one that ends.
func fill(r io.Reader, b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		var m int
		m, err = r.Read(b[n:])
		n += m
	}
	return n, err
}

func (a *ahead) Read(b []byte) (int, error) {
	for a.at == len(a.now.data) {
		if a.now.err != nil {
			return 0, a.now.err
		}
		if a.now.data != nil {
			a.empty <- a.now.data[:cap(a.now.data)]
		}
		a.now, a.at = <-a.full, 0
	}
	n := copy(b, a.now.data[a.at:])
	a.at += n
	return n, nil
}

// close ends the goroutine and waits for it: nothing reads the stream after.
func (a *ahead) close() {
	a.once.Do(func() { close(a.quit) })
	<-a.done
	for {
		select {
		case buf := <-a.empty:
			buf = buf[:aheadSize]
			aheadBuffers.Put(&buf)
		default:
			return
		}
	}
}
