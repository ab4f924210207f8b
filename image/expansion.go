package image

import (
	"fmt"
	"io"
	"sync/atomic"
)

// How much a compressed layer may become: something for everyone, and much more
// than anything real for what was sent. What deflates best, zeros, shrinks to a
// thousandth, and zstd can say a gigabyte in some bytes; a root filesystem
// shrinks to a third, text to a tenth. A disk image that is nearly all holes
// passes when one part in a hundred is not, or below the allowance.
const (
	expansionFactor    = 100
	expansionAllowance = 1 << 30
)

// expansion holds a decompressed stream to what its compressed form may become.
// The two ends may be read by different goroutines.
type expansion struct {
	allowance, factor int64
	compressed        atomic.Int64
	left              int64 // until the next look at compressed
	seen              int64
}

// newExpansion is for one stream.
func newExpansion() *expansion {
	return &expansion{allowance: expansionAllowance, factor: expansionFactor, left: expansionAllowance}
}

// compressedEnd passes on and counts what comes in.
func (e *expansion) compressedEnd(r io.Reader) io.Reader {
	return readerFunc(func(b []byte) (int, error) {
		n, err := r.Read(b)
		e.compressed.Add(int64(n))
		return n, err
	})
}

// plainEnd passes on what comes out, as long as it is not too much. The error is
// ErrInvalidImage.
func (e *expansion) plainEnd(r io.Reader) io.Reader {
	return readerFunc(func(b []byte) (int, error) {
		n, err := r.Read(b)
		e.seen += int64(n)
		if e.left -= int64(n); e.left >= 0 {
			return n, err
		}
		got := e.compressed.Load()
		if e.left = e.allowance + e.factor*got - e.seen; e.left < 0 {
			return 0, fmt.Errorf("%w: %d bytes decompress to more than %d, the limit is %d times as much and %d bytes beside",
				ErrInvalidImage, got, e.seen-1, e.factor, e.allowance)
		}
		return n, err
	})
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }
