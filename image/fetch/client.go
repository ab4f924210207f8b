package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/opencontainers/go-digest"
)

// ErrSize: the registry has another number of bytes under the digest than the
// manifest says.
var ErrSize = errors.New("wrong size")

// Blob is what to read, as its manifest describes it.
type Blob struct {
	Digest digest.Digest
	Size   int64 // bytes
}

// Part is one answer.
type Part struct {
	io.ReadCloser
	From   int64 // the byte it begins with: as asked, or 0 when the range was ignored
	Size   int64 // of the whole blob; -1 when the endpoint does not say
	Ranged bool  // the endpoint knows ranges
	// Broke tells the source that the part ended before its time. May be nil.
	Broke func(error)
}

// Source knows the endpoints of an image. Its methods may be called at the same
// time.
type Source interface {
	// Part opens a blob from a byte on; length < 0: to its end. It asks one
	// endpoint after another, and again where that may help, in bounded time;
	// its error is final. A call after a part has broken begins with another
	// endpoint where there is one.
	Part(ctx context.Context, d digest.Digest, from, length int64) (*Part, error)
}

// Client reads blobs of one image. All methods may be called at the same time.
type Client struct {
	source   Source
	patience Patience
	ranges   Ranges
	pause    time.Duration // after a break; doubled with each in a row

	rangeSize  int64         // see the constants of these names
	splitAfter time.Duration //
}

// New makes a client of an image's source. Nothing is connected yet.
func New(source Source, p Patience, r Ranges) *Client {
	return &Client{source: source, patience: p, ranges: r, pause: 200 * time.Millisecond, rangeSize: rangeSize, splitAfter: splitAfter}
}

// get opens a blob from a byte on; length < 0: to its end.
func (c *Client) get(ctx context.Context, b Blob, from, length int64) (*Part, error) {
	p, err := c.source.Part(ctx, b.Digest, from, length)
	if err == nil && p.Size >= 0 && p.Size != b.Size {
		p.Close()
		return nil, fmt.Errorf("%w: the registry has %d bytes for %s, the manifest says %d", ErrSize, p.Size, b.Digest, b.Size)
	}
	return p, err
}
