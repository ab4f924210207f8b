package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"time"
)

const (
	maxBreaks = 5        // in a row, without progress between them
	progress  = 64 << 10 // bytes that count as progress
)

// Reader is one blob as a stream. When the connection breaks it goes on with
// another; its user sees an error only when there is no going on. It is for
// one goroutine.
type Reader struct {
	client *Client
	blob   Blob
	guard  *Guard
	body   *Part // nil: to be opened

	// Ranges, see split.
	pieces  []*piece // in order, from limit on or from at on
	limit   int64    // where body is to stop; 0: at the end
	next    int64    // where the next range is to begin
	splits  int      // failures
	filling sync.WaitGroup
	ranging context.Context    // of the ranges
	stop    context.CancelFunc // ends them
	began   time.Time          // of the stream at hand
	waited  time.Duration      // for it

	at     int64 // bytes of the blob that have been read
	mark   int64 // at when the last break happened
	breaks int   // in a row
}

// Open begins to read a blob at a byte. It blocks until an endpoint answers.
// The reader must be closed. Errors: ErrIdle, ErrSlow, ErrSize, those of the
// source and of the network.
func (c *Client) Open(ctx context.Context, b Blob, from int64) (*Reader, error) {
	r := &Reader{client: c, blob: b, at: from, mark: from, guard: NewGuard(ctx, c.patience)}
	if from == b.Size {
		r.guard.Pause()
		return r, nil
	}
	if err := r.connect(); err != nil {
		r.guard.Stop()
		return nil, err
	}
	return r, nil
}

// Read implements io.Reader. io.EOF comes only after the blob's last byte.
func (r *Reader) Read(b []byte) (int, error) {
	for {
		if r.at == r.blob.Size {
			return 0, r.end()
		}
		if len(r.pieces) > 0 && r.at >= r.limit {
			r.drop()
			if n, err := r.readPiece(b); n > 0 || err != nil {
				return n, err
			}
			continue
		}
		if r.body == nil {
			if err := r.connect(); err != nil {
				return 0, err
			}
		}
		n, err := r.read(b)
		if n > 0 || err == nil {
			r.split()
			return n, nil // the error comes again
		}
		if r.guard.Ctx.Err() != nil {
			return 0, r.guard.Explain(err)
		}
		if err := r.broke(err); err != nil {
			return 0, err
		}
	}
}

// end is io.EOF unless there are more bytes than promised.
func (r *Reader) end() error {
	if r.body == nil || r.body.Size >= 0 {
		return io.EOF
	}
	r.guard.begin()
	n, err := io.ReadFull(r.body, make([]byte, 1))
	if slow := r.guard.end(n); slow != nil {
		return slow
	}
	if n > 0 {
		return fmt.Errorf("%w: %s has more than the %d bytes that the manifest says", ErrSize, r.blob.Digest, r.blob.Size)
	}
	if err != io.EOF {
		return r.guard.Explain(err)
	}
	return io.EOF
}

// read is one read of the part at hand.
func (r *Reader) read(b []byte) (int, error) {
	end := r.blob.Size
	if len(r.pieces) > 0 {
		end = r.limit
	}
	r.guard.begin()
	n, err := r.body.Read(b[:min(int64(len(b)), end-r.at)])
	r.at += int64(n)
	r.waited += time.Since(r.guard.since)
	if slow := r.guard.end(n); slow != nil {
		return 0, slow
	}
	if err == io.EOF && r.at < r.blob.Size {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// connect opens the rest of the blob. The source bounds its own waits.
func (r *Reader) connect() error {
	for {
		r.guard.Pause()
		p, err := r.client.get(r.guard.Ctx, r.blob, r.at, -1)
		if err != nil {
			return r.guard.Explain(err)
		}
		r.body, r.began, r.waited = p, time.Now(), 0
		if err = r.skip(r.at - p.From); err == nil {
			return nil
		}
		if r.guard.Ctx.Err() != nil {
			return r.guard.Explain(err)
		}
		if err := r.broke(err); err != nil {
			return err
		}
	}
}

// skip passes over bytes that are here already.
func (r *Reader) skip(n int64) error {
	if n == 0 {
		return nil
	}
	buf := make([]byte, 64<<10)
	for n > 0 {
		r.guard.begin()
		m, err := r.body.Read(buf[:min(int64(len(buf)), n)])
		n -= int64(m)
		if slow := r.guard.end(m); slow != nil {
			return slow
		}
		if n > 0 && err != nil {
			return fmt.Errorf("pass over what is here: %w", errors.Join(err, io.ErrUnexpectedEOF))
		}
	}
	return nil
}

// broke is what stands between a break and the next part. It returns err when
// there should be none.
func (r *Reader) broke(err error) error {
	if r.body.Broke != nil {
		r.body.Broke(err)
	}
	r.drop()
	if r.at-r.mark >= progress {
		r.breaks = 0
	}
	r.mark = r.at
	r.breaks++
	pause := r.client.pause << (r.breaks - 1)
	pause += rand.N(pause / 2) // so that a blip does not bring everybody back at once
	if r.breaks >= maxBreaks {
		return err
	}
	select {
	case <-time.After(pause):
		return nil
	case <-r.guard.Ctx.Done():
		return r.guard.Explain(r.guard.Ctx.Err())
	}
}

func (r *Reader) drop() {
	if r.body != nil {
		r.body.Close()
		r.body = nil
	}
}

// Close ends the stream and its connection.
func (r *Reader) Close() error {
	r.guard.Stop()
	if len(r.pieces) > 0 {
		r.join()
	}
	r.drop()
	return nil
}
