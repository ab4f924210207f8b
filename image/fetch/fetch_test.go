package fetch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
)

// server has one blob, and does what its hook wants.
type server struct {
	*httptest.Server
	blob []byte
	hook func(w http.ResponseWriter, q *http.Request) bool

	mu     sync.Mutex
	ranges []string // of all requests for the blob
}

func newServer(t *testing.T, size int, hook func(w http.ResponseWriter, q *http.Request) bool) *server {
	t.Helper()
	s := &server{hook: hook, blob: make([]byte, size)}
	for i := range s.blob {
		s.blob[i] = byte(i * 7 >> 3)
	}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

func (s *server) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	if strings.Contains(q.URL.Path, "/blobs/") {
		s.mu.Lock()
		s.ranges = append(s.ranges, q.Header.Get("Range"))
		s.mu.Unlock()
	}
	if s.hook == nil || !s.hook(w, q) {
		s.serve(w, q)
	}
}

func (s *server) serve(w http.ResponseWriter, q *http.Request) {
	http.ServeContent(w, q, "", time.Time{}, bytes.NewReader(s.blob))
}

func (s *server) asked() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.ranges)
}

func (s *server) it() Blob { return Blob{Digest: digest.FromBytes(s.blob), Size: int64(len(s.blob))} }

func client(t *testing.T, p Patience, servers ...*server) *Client {
	t.Helper()
	if p.Idle == 0 {
		p.Idle = time.Minute
	}
	c := New(source(servers), p, Ranges{})
	c.pause = time.Millisecond
	return c
}

// source asks one server after another, beginning with the next one after a break.
type source []*server

// turns guards the order of the servers in every source.
var turns sync.Mutex

func (s source) first() *server {
	turns.Lock()
	defer turns.Unlock()
	return s[0]
}

func (s source) turn(error) {
	turns.Lock()
	defer turns.Unlock()
	copy(s, append(s[1:len(s):len(s)], s[0]))
}

func (s source) Part(ctx context.Context, d digest.Digest, from, length int64) (*Part, error) {
	first := s.first()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, first.URL+"/blobs/"+d.String(), nil)
	if err != nil {
		return nil, err
	}
	if from > 0 || length >= 0 {
		text := fmt.Sprintf("bytes=%d-", from)
		if length >= 0 {
			text += fmt.Sprint(from + length - 1)
		}
		q.Header.Set("Range", text)
	}
	answer, err := first.Client().Do(q)
	if err != nil {
		return nil, err
	}
	p := &Part{ReadCloser: answer.Body, Size: answer.ContentLength, Ranged: answer.Header.Get("Accept-Ranges") == "bytes", Broke: s.turn}
	switch answer.StatusCode {
	case http.StatusOK:
		return p, nil
	case http.StatusPartialContent:
		_, err = fmt.Sscanf(answer.Header.Get("Content-Range"), "bytes %d-", &p.From)
		p.Size, p.Ranged = -1, true
		return p, err
	}
	answer.Body.Close()
	return nil, fmt.Errorf("answer %d", answer.StatusCode)
}

func readFrom(ctx context.Context, c *Client, b Blob, from int64) ([]byte, error) {
	r, err := c.Open(ctx, b, from)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// cut sends so many bytes of the answer to the first requests, then hangs up.
func cut(times *int, after int) func(http.ResponseWriter, *http.Request, *server) {
	return func(w http.ResponseWriter, q *http.Request, s *server) {
		if *times--; *times < 0 {
			s.serve(w, q)
			return
		}
		s.serve(&short{ResponseWriter: w, left: after}, q)
		panic(http.ErrAbortHandler)
	}
}

// short swallows what comes after so many bytes.
type short struct {
	http.ResponseWriter
	left int
}

func (s *short) Write(b []byte) (int, error) {
	n := min(len(b), s.left)
	s.left -= n
	if _, err := s.ResponseWriter.Write(b[:n]); err != nil {
		return 0, err
	}
	if n < len(b) {
		s.ResponseWriter.(http.Flusher).Flush()
		return n, errors.New("cut")
	}
	return n, nil
}

func TestABrokenStreamGoesOn(t *testing.T) {
	const size = 1 << 20
	for _, from := range []int64{0, 1000, size} {
		for _, knows := range []bool{true, false} {
			t.Run(fmt.Sprintf("from %d, ranges %v", from, knows), func(t *testing.T) {
				var s *server
				left := 3
				breaks := cut(&left, 200_000)
				s = newServer(t, size, func(w http.ResponseWriter, q *http.Request) bool {
					if !knows {
						q.Header.Del("Range")
					}
					breaks(w, q, s)
					return true
				})
				got, err := readFrom(t.Context(), client(t, Patience{}, s), s.it(), from)
				if err != nil || !bytes.Equal(got, s.blob[from:]) {
					t.Fatalf("%d bytes, error %v", len(got), err)
				}
				want := map[int64][]string{
					0:    {"", "bytes=200000-", "bytes=400000-", "bytes=600000-"},
					1000: {"bytes=1000-", "bytes=201000-", "bytes=401000-", "bytes=601000-"},
					size: nil,
				}[from]
				if knows && !slices.Equal(s.asked(), want) {
					t.Errorf("ranges %q, want %q", s.asked(), want)
				}
			})
		}
	}
}

func TestTriesEndWithoutProgress(t *testing.T) {
	var s *server
	left := 1000
	breaks := cut(&left, 10)
	s = newServer(t, 100_000, func(w http.ResponseWriter, q *http.Request) bool { breaks(w, q, s); return true })
	got, err := readFrom(t.Context(), client(t, Patience{}, s), s.it(), 0)
	if err == nil || len(got) != 10*maxBreaks || len(s.asked()) != maxBreaks {
		t.Errorf("%d bytes in %d requests, error %v", len(got), len(s.asked()), err)
	}
}

func TestTheNextEndpointGoesOnWhereTheFirstBroke(t *testing.T) {
	left := 1
	var first *server
	breaks := cut(&left, 300_000)
	first = newServer(t, 500_000, func(w http.ResponseWriter, q *http.Request) bool { breaks(w, q, first); return true })
	second := newServer(t, 500_000, nil)
	got, err := readFrom(t.Context(), client(t, Patience{}, first, second), first.it(), 0)
	if err != nil || !bytes.Equal(got, first.blob) {
		t.Fatalf("%d bytes, error %v", len(got), err)
	}
	if !slices.Equal(second.asked(), []string{"bytes=300000-"}) {
		t.Errorf("the second was asked %q", second.asked())
	}
}

// What the source says is final: it has tried all there is.
func TestASourceWithoutTheBlobIsAskedOnce(t *testing.T) {
	s := newServer(t, 1000, func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(http.StatusNotFound); return true })
	if _, err := readFrom(t.Context(), client(t, Patience{}, s), s.it(), 0); err == nil || len(s.asked()) != 1 {
		t.Errorf("%d requests, error %v", len(s.asked()), err)
	}
}

func TestAStallEndsByTheIdleRule(t *testing.T) {
	var s *server
	s = newServer(t, 100_000, func(w http.ResponseWriter, q *http.Request) bool {
		_, _ = w.Write(s.blob[:1000])
		w.(http.Flusher).Flush()
		<-q.Context().Done()
		return true
	})
	blob := s.it()
	got, err := readFrom(t.Context(), client(t, Patience{Idle: 300 * time.Millisecond}, s), blob, 0)
	if !errors.Is(err, ErrIdle) || len(got) != 1000 {
		t.Errorf("%d bytes, error %v", len(got), err)
	}
}

func TestADripEndsByTheRateRule(t *testing.T) {
	var s *server
	s = newServer(t, 100_000, func(w http.ResponseWriter, q *http.Request) bool {
		for i := 0; q.Context().Err() == nil; i++ {
			_, _ = w.Write(s.blob[i : i+1])
			w.(http.Flusher).Flush()
			time.Sleep(10 * time.Millisecond)
		}
		return true
	})
	p := Patience{Idle: time.Minute, MinRate: 1024, Window: 400 * time.Millisecond}
	if _, err := readFrom(t.Context(), client(t, p, s), s.it(), 0); !errors.Is(err, ErrSlow) {
		t.Errorf("got %v", err)
	}
}

// A reader that takes its time is not the registry's fault, nor is one pause of
// an else quick registry.
func TestPatienceCountsWaitingOnly(t *testing.T) {
	var s *server
	pause := true
	s = newServer(t, 4<<20, func(w http.ResponseWriter, q *http.Request) bool {
		if pause {
			pause = false
			_, _ = w.Write(s.blob[:1000])
			w.(http.Flusher).Flush()
			time.Sleep(500 * time.Millisecond)
			_, _ = w.Write(s.blob[1000:])
			return true
		}
		return false
	})
	c := client(t, Patience{Idle: 5 * time.Second, MinRate: 1 << 20, Window: 400 * time.Millisecond}, s)
	r, err := c.Open(t.Context(), s.it(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var got bytes.Buffer
	for range 4 {
		if _, err := io.CopyN(&got, r, 1<<20); err != nil {
			t.Fatal(err)
		}
		time.Sleep(300 * time.Millisecond)
	}
	if !bytes.Equal(got.Bytes(), s.blob) {
		t.Error("other bytes")
	}
}

func TestSizesAreThoseOfTheManifest(t *testing.T) {
	for _, chunked := range []bool{false, true} {
		for _, extra := range []int{-5, 5} {
			var s *server
			s = newServer(t, 1000, func(w http.ResponseWriter, q *http.Request) bool {
				q.Header.Del("Range")
				if chunked {
					w.(http.Flusher).Flush()
				}
				_, _ = w.Write(append(slices.Clone(s.blob), 1, 2, 3, 4, 5)[:1000+extra])
				return true
			})
			_, err := readFrom(t.Context(), client(t, Patience{}, s), s.it(), 0)
			if chunked && extra < 0 {
				if !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Errorf("chunked, too short: %v", err)
				}
				continue
			}
			if !errors.Is(err, ErrSize) {
				t.Errorf("chunked %v, %+d bytes: %v", chunked, extra, err)
			}
		}
	}
}
