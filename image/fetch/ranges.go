package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// Ranges says when a blob is read over several connections at once, each for a
// range of it. That pays where a registry or the way to it limits what one
// connection brings; so a blob begins with one, and more are added when most of
// the time goes into waiting for it.
type Ranges struct {
	Connections int     // for one blob at most; 1 or less: no ranges
	Room        *Memory // for what comes out of order; shared by all who read
}

// Memory is how many ranges may be held at one time, by everybody together.
type Memory struct{ slots chan struct{} }

// NewMemory makes room for so many bytes.
func NewMemory(bytes int64) *Memory {
	return &Memory{slots: make(chan struct{}, bytes/rangeSize)}
}

const (
	rangeSize  = 8 << 20     // of one range, held in memory until its turn comes
	splitAfter = time.Second // of waiting, before ranges are thought of
	splitLeast = 4           // ranges to come, else it does not pay
	maxSplits  = 3           // after so many failures a blob goes on as one stream
)

// errNoRange: a part is not the one that was asked for.
var errNoRange = errors.New("the registry ignores ranges")

// piece is a range on its way. It is filled by a goroutine of its own and read
// by the Reader.
type piece struct {
	from   int64
	length int64
	at     int64 // bytes of it that have been read; the Reader's
	room   *Memory

	mu   sync.Mutex
	data []byte        // what is here; guarded by mu
	err  error         // why no more comes; guarded by mu
	more chan struct{} // something has changed
}

// split looks whether the rest should come by ranges, and begins that.
func (r *Reader) split() {
	p := r.client.ranges
	if p.Connections <= 1 || r.body == nil || !r.body.Ranged || len(r.pieces) > 0 || r.splits >= maxSplits ||
		r.waited < r.client.splitAfter || time.Since(r.began) > 2*r.waited || r.blob.Size-r.at < splitLeast*r.client.rangeSize {
		return
	}
	r.next = r.at + r.client.rangeSize // the connection at hand goes on until there
	r.limit = r.next
	r.ranging, r.stop = context.WithCancel(r.guard.Ctx)
	for len(r.pieces) < p.Connections-1 && r.order() {
	}
	if len(r.pieces) == 0 {
		r.stop()
		r.limit = 0
		r.waited, r.began = 0, time.Now() // no room now; look again later
	}
}

// order begins one more range; false when there is none, or no room for it.
func (r *Reader) order() bool {
	length := min(r.client.rangeSize, r.blob.Size-r.next)
	if length <= 0 {
		return false
	}
	room := r.client.ranges.Room
	select {
	case room.slots <- struct{}{}:
	default:
		return false
	}
	p := &piece{from: r.next, length: length, room: room, more: make(chan struct{}, 1)}
	r.next += length
	r.pieces = append(r.pieces, p)
	r.filling.Go(func() { p.fill(r.ranging, r.client, r.blob) })
	return true
}

func (p *piece) fill(ctx context.Context, c *Client, b Blob) {
	err := func() error {
		part, err := c.get(ctx, b, p.from, p.length)
		if err != nil {
			return err
		}
		defer part.Close()
		if part.From != p.from {
			return errNoRange
		}
		buf := make([]byte, p.length)
		for n := 0; n < len(buf); {
			m, err := part.Read(buf[n:])
			n += m
			p.set(buf[:n], nil)
			if n < len(buf) && err != nil {
				if part.Broke != nil && ctx.Err() == nil {
					part.Broke(err)
				}
				return fmt.Errorf("read bytes %d to %d: %w", p.from, p.from+p.length-1, errors.Join(err, io.ErrUnexpectedEOF))
			}
		}
		return io.EOF
	}()
	p.mu.Lock()
	data := p.data
	p.mu.Unlock()
	p.set(data, err)
}

func (p *piece) set(data []byte, err error) {
	p.mu.Lock()
	p.data, p.err = data, err
	p.mu.Unlock()
	select {
	case p.more <- struct{}{}:
	default:
	}
}

// read copies what has come, and waits when nothing has.
func (p *piece) read(ctx context.Context, b []byte) (int, error) {
	for {
		p.mu.Lock()
		data, err := p.data, p.err
		p.mu.Unlock()
		if n := copy(b, data[p.at:]); n > 0 {
			p.at += int64(n)
			return n, nil
		}
		if err != nil {
			return 0, err
		}
		select {
		case <-p.more:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// readPiece reads on from the first range. One that fails ends them all: the
// rest comes as one stream again, and in ranges when that goes well for a while.
func (r *Reader) readPiece(b []byte) (int, error) {
	p := r.pieces[0]
	r.guard.begin()
	n, err := p.read(r.guard.Ctx, b)
	r.at += int64(n)
	if slow := r.guard.end(n); slow != nil {
		return 0, slow
	}
	if err == io.EOF || p.at == p.length {
		r.pieces = r.pieces[1:]
		<-p.room.slots
		for len(r.pieces) < r.client.ranges.Connections && r.order() {
		}
		return n, nil
	}
	if err != nil {
		r.join()
		r.splits++
		if errors.Is(err, errNoRange) {
			r.splits = maxSplits
		}
		if ctx := r.guard.Ctx; ctx.Err() != nil {
			return 0, r.guard.Explain(err)
		}
	}
	return n, nil
}

// join ends all ranges.
func (r *Reader) join() {
	r.stop()
	r.filling.Wait()
	for _, p := range r.pieces {
		<-p.room.slots
	}
	r.pieces, r.limit = nil, 0
	r.waited, r.began = 0, time.Now()
}
