package fetch

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"sync/atomic"
	"testing"
	"time"
)

// limited sends an answer at so many bytes a hundredth of a second and counts
// how many it sends at once.
type limited struct {
	http.ResponseWriter
	step int
}

func (l *limited) Write(b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		var m int
		m, err = l.ResponseWriter.Write(b[n:min(len(b), n+l.step)])
		n += m
		l.ResponseWriter.(http.Flusher).Flush()
		time.Sleep(10 * time.Millisecond)
	}
	return n, err
}

const (
	testRange = 128 << 10
	testBlob  = 20*testRange + 7
)

// ranging reads a blob from a registry that limits each connection. spoil may
// answer in its place. It tells how many answers ran at once at most.
func ranging(t *testing.T, r Ranges, spoil func(s *server, w http.ResponseWriter, q *http.Request) bool) (most int32, asked []string) {
	t.Helper()
	var now, peak atomic.Int32
	var s *server
	s = newServer(t, testBlob, func(w http.ResponseWriter, q *http.Request) bool {
		n := now.Add(1)
		defer now.Add(-1)
		for old := peak.Load(); n > old && !peak.CompareAndSwap(old, n); old = peak.Load() {
		}
		w = &limited{w, 16 << 10}
		if spoil == nil || !spoil(s, w, q) {
			s.serve(w, q)
		}
		return true
	})
	c := client(t, Patience{}, s)
	c.ranges, c.rangeSize, c.splitAfter = r, testRange, 50*time.Millisecond
	got, err := readFrom(t.Context(), c, s.it(), 0)
	if err != nil || !bytes.Equal(got, s.blob) {
		t.Fatalf("%d bytes, error %v", len(got), err)
	}
	if r.Room != nil && len(r.Room.slots) != 0 {
		t.Errorf("%d ranges are still held", len(r.Room.slots))
	}
	return peak.Load(), s.asked()
}

func TestASlowLayerComesInRanges(t *testing.T) {
	room := NewMemory(16 * rangeSize)
	most, asked := ranging(t, Ranges{4, room}, nil)
	// The registry takes a moment to see that an answer is over.
	if most < 3 || most > 8 || len(asked) < 10 {
		t.Errorf("%d connections at once, asked for %q", most, asked)
	}
	if most, asked = ranging(t, Ranges{1, room}, nil); most != 1 || len(asked) != 1 {
		t.Errorf("one connection only: %d at once, asked for %q", most, asked)
	}
	if most, _ = ranging(t, Ranges{4, NewMemory(rangeSize)}, nil); most > 5 {
		t.Errorf("with room for one range: %d connections at once", most)
	}
}

func TestRangesThatFailEndAsOneStream(t *testing.T) {
	for name, spoil := range map[string]func(s *server, w http.ResponseWriter, q *http.Request) bool{
		"refused": func(_ *server, w http.ResponseWriter, q *http.Request) bool {
			if q.Header.Get("Range") != "" && len(q.Header.Get("Range")) > len("bytes=1234567-") {
				w.WriteHeader(http.StatusForbidden)
				return true
			}
			return false
		},
		"ignored": func(_ *server, _ http.ResponseWriter, q *http.Request) bool {
			q.Header.Del("Range")
			return false
		},
		"broken": func(s *server, w http.ResponseWriter, q *http.Request) bool {
			if len(q.Header.Get("Range")) > len("bytes=1234567-") {
				s.serve(&short{ResponseWriter: w.(*limited).ResponseWriter, left: 50_000}, q)
				panic(http.ErrAbortHandler)
			}
			return false
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, asked := ranging(t, Ranges{4, NewMemory(16 * rangeSize)}, spoil)
			if len(asked) < 3 || len(asked) > 40 {
				t.Errorf("asked for %q", asked)
			}
		})
	}
}

// A layer that is given up in the middle of its ranges gives all of them back.
func TestRangesEndWithTheirReader(t *testing.T) {
	s := newServer(t, testBlob, nil)
	s.hook = func(w http.ResponseWriter, q *http.Request) bool {
		s.serve(&limited{w, 16 << 10}, q)
		return true
	}
	room := NewMemory(16 * rangeSize)
	c := client(t, Patience{}, s)
	c.ranges, c.rangeSize, c.splitAfter = Ranges{4, room}, testRange, 50*time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	r, err := c.Open(ctx, s.it(), 0)
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 32<<10)
	for r.at < 6*testRange {
		if _, err := r.Read(buf); err != nil {
			t.Fatal(err)
		}
	}
	if len(room.slots) == 0 {
		t.Error("there are no ranges")
	}
	cancel()
	for err == nil {
		_, err = r.Read(buf)
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	r.Close()
	if len(room.slots) != 0 {
		t.Errorf("%d ranges are still held", len(room.slots))
	}
}
