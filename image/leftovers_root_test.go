package image

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/image/layer"
	"berth/sandbox/leakcheck"
)

// randomLayer does not compress: what it takes on disk, on the wire and in the
// store is about the same.
func randomLayer(t *testing.T, name string, size int) layerBlob {
	t.Helper()
	data := make([]byte, size)
	random := rand.New(rand.NewPCG(uint64(size), uint64(name[0])))
	for i := 0; i+8 <= size; i += 8 {
		binary.NativeEndian.PutUint64(data[i:], random.Uint64())
	}
	return gzipLayer(tarOf(t, file{name: name, body: string(data)}))
}

// breaking is a registry whose blobs break off after so many bytes, and then
// are refused until it is mended.
type breaking struct {
	*registry
	mu     sync.Mutex
	after  map[digest.Digest]int
	ranges map[digest.Digest][]string // of all requests
}

func newBreaking(t *testing.T) *breaking {
	b := &breaking{registry: newRegistry(t), after: map[digest.Digest]int{}, ranges: map[digest.Digest][]string{}}
	b.setHook(func(w http.ResponseWriter, q *http.Request) bool {
		_, d, ok := strings.Cut(q.URL.Path, "/blobs/")
		if !ok {
			return false
		}
		blob := digest.Digest(d)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.ranges[blob] = append(b.ranges[blob], q.Header.Get("Range"))
		n, broken := b.after[blob]
		if !broken {
			return false
		}
		if len(b.ranges[blob]) > 1 {
			w.WriteHeader(http.StatusNotFound)
			return true
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(b.blobs[blob])))
		w.Write(b.blobs[blob][:n])
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	return b
}

func (b *breaking) breakAt(l layerBlob, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.after[digest.FromBytes(l.data)] = n
}

// mend gives the ranges that were asked for and forgets them.
func (b *breaking) mend(l layerBlob) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := digest.FromBytes(l.data)
	asked := b.ranges[d]
	delete(b.after, d)
	delete(b.ranges, d)
	return asked
}

// slow makes a store write down beginnings however quickly they come.
func slow(s *Store) *Store {
	s.left.least, s.left.quick = 0, 0
	return s
}

func beginnings(t *testing.T, s *Store) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(s.root, "partial", "*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func equalsDu(t *testing.T, s *Store) {
	t.Helper()
	calm(t, s)
	want, err := layer.Measure(s.root)
	if got := s.Usage(); err != nil || got.Bytes != want.Bytes || got.Inodes != want.Inodes {
		t.Errorf("usage %d bytes, %d inodes; du has %d and %d (%v)", got.Bytes, got.Inodes, want.Bytes, want.Inodes, err)
	}
}

const mib = 1 << 20

func TestALayerGoesOnAfterAFailedPull(t *testing.T) {
	leakcheck.Start(t)
	for _, restart := range []bool{false, true} {
		for _, power := range []bool{false, true} {
			if power && !restart {
				continue
			}
			t.Run(fmt.Sprintf("restart %v, power cut %v", restart, power), func(t *testing.T) {
				reg := newBreaking(t)
				l := randomLayer(t, "big", 3*mib)
				_, id := reg.push("app", "1", l)
				reg.breakAt(l, 2*mib)
				s := slow(open(t, t.TempDir(), nil, reg.registry))
				if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("app:1")}); !errors.Is(err, ErrNotFound) {
					t.Fatalf("got %v", err)
				}
				if asked := reg.mend(l); !slices.Equal(asked, []string{"", fmt.Sprintf("bytes=%d-", 2*mib)}) {
					t.Errorf("asked for %q", asked)
				}
				if len(beginnings(t, s)) != 1 {
					t.Errorf("kept: %q", beginnings(t, s))
				}
				equalsDu(t, s)
				want := []string{fmt.Sprintf("bytes=%d-", 2*mib)}
				if restart {
					o, d := *s.options(), *s.disk
					if err := s.Close(); err != nil {
						t.Fatal(err)
					}
					if power {
						d.boot, want = "another", []string{""}
					}
					var err error
					if s, err = openOn(t.Context(), o, &d); err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { s.Close() })
					slow(s)
					equalsDu(t, s)
				}
				if got := mustPull(t, s, reg.ref("app:1")); got != id {
					t.Errorf("id %s, want %s", got, id)
				}
				if asked := reg.mend(l); !slices.Equal(asked, want) {
					t.Errorf("the second pull asked for %q, want %q", asked, want)
				}
				if left := beginnings(t, s); len(left) != 0 {
					t.Errorf("left: %q", left)
				}
				equalsDu(t, s)
				if err := s.Remove(t.Context(), id); err != nil {
					t.Error(err)
				}
				empty(t, s)
			})
		}
	}
}

// What is left may be wrong, whatever the reason: then the layer comes from the
// registry, once.
func TestASpoiledBeginningIsFetchedAnew(t *testing.T) {
	leakcheck.Start(t)
	reg := newBreaking(t)
	l := randomLayer(t, "big", 3*mib)
	reg.push("app", "1", l)
	reg.breakAt(l, 2*mib)
	s := slow(open(t, t.TempDir(), nil, reg.registry))
	if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("app:1")}); err == nil {
		t.Fatal("the pull did not break")
	}
	reg.mend(l)
	f, err := os.OpenFile(beginnings(t, s)[0], os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.WriteAt(make([]byte, 100), mib)
	f.Close()
	mustPull(t, s, reg.ref("app:1"))
	asked := reg.mend(l)
	if asked[len(asked)-1] != "" || len(asked) > 2 {
		t.Errorf("asked for %q, want the whole in the end", asked)
	}
	// One that is wrong at the registry is refused, and nothing of it stays.
	bad := randomLayer(t, "worse", 3*mib)
	d := digest.FromBytes(bad.data)
	reg.push("app", "2", bad)
	reg.breakAt(bad, 2*mib)
	if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("app:2")}); err == nil {
		t.Fatal("the pull did not break")
	}
	reg.mend(bad)
	reg.mu.Lock()
	reg.blobs[d] = append(slices.Clone(bad.data[:len(bad.data)-10]), make([]byte, 10)...)
	reg.mu.Unlock()
	if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("app:2")}); !errors.Is(err, ErrInvalidImage) {
		t.Errorf("got %v", err)
	}
	if asked := reg.mend(bad); !slices.Equal(asked, []string{fmt.Sprintf("bytes=%d-", 2*mib), ""}) {
		t.Errorf("asked for %q", asked)
	}
	if left := beginnings(t, s); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

// Layers that had come whole before the pull broke off are not fetched again.
func TestWholeLayersStayForTheNextPull(t *testing.T) {
	leakcheck.Start(t)
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart %v", restart), func(t *testing.T) {
			reg := newBreaking(t)
			good, bad := randomLayer(t, "good", 3*mib), randomLayer(t, "bad", 3*mib)
			_, id := reg.push("app", "1", good, bad)
			reg.breakAt(bad, 100)
			s := open(t, t.TempDir(), func(o *Options) { o.MaxConcurrentDownloads = 1 }, reg.registry)
			if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("app:1")}); !errors.Is(err, ErrNotFound) {
				t.Fatalf("got %v", err)
			}
			equalsDu(t, s)
			if restart {
				s = reopen(t, s)
			}
			reg.mend(bad)
			reg.mend(good)
			mustPull(t, s, reg.ref("app:1"))
			if again := reg.mend(good); len(again) != 0 {
				t.Errorf("the whole layer was fetched again: %q", again)
			}
			// It is the image's now.
			if err := s.Remove(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			empty(t, s)
		})
	}
}

func TestLeftoversAreBounded(t *testing.T) {
	leakcheck.Start(t)
	for name, c := range map[string]struct {
		edit func(*Options)
		want int // beginnings that stay, of three of 2 MiB
	}{
		"by age":   {func(o *Options) { o.PartialAge = 50 * time.Millisecond }, 0},
		"by size":  {func(o *Options) { o.PartialBytes = 5 * mib }, 2},
		"to none":  {func(o *Options) { o.PartialBytes = -1 }, 0},
		"by large": {func(o *Options) { o.PartialBytes = 2 * mib }, 0}, // the blob is larger
		"not":      {nil, 3},
	} {
		t.Run(name, func(t *testing.T) {
			reg := newBreaking(t)
			s := slow(open(t, t.TempDir(), c.edit, reg.registry))
			var newest string
			for _, n := range []string{"a", "b", "c"} {
				l := randomLayer(t, n, 3*mib)
				reg.push(n, "1", l)
				reg.breakAt(l, 2*mib)
				if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref(n + ":1")}); !errors.Is(err, ErrNotFound) {
					t.Fatalf("got %v", err)
				}
				newest = digest.FromBytes(l.data).Encoded()
			}
			limit := time.Now().Add(leakcheck.Patience(5 * time.Second))
			for len(beginnings(t, s)) != c.want && time.Now().Before(limit) {
				time.Sleep(20 * time.Millisecond)
			}
			left := beginnings(t, s)
			if len(left) != c.want || c.want > 0 && !slices.ContainsFunc(left, func(p string) bool { return filepath.Base(p) == newest }) {
				t.Errorf("left: %q, want %d with the newest", left, c.want)
			}
			equalsDu(t, s)
		})
	}
}

// A disk that fills up takes the leftovers first, and the writing down of a
// beginning is never what a pull fails by.
func TestB37LeftoversMakeRoom(t *testing.T) {
	leakcheck.Start(t)
	reg := newBreaking(t)
	first, second := randomLayer(t, "first", 3*mib), randomLayer(t, "second", 3*mib)
	reg.push("first", "1", first)
	reg.push("second", "1", second)
	reg.breakAt(first, 2*mib)
	var full atomic.Pointer[string] // what has no room
	disk := &disk{boot: bootID(), check: func(_, path string) error {
		if what := full.Load(); what != nil && strings.Contains(path, *what) {
			return syscall.ENOSPC
		}
		return nil
	}}
	s, err := openOn(t.Context(), options(t, t.TempDir(), nil, reg.registry), disk)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	slow(s)
	if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("first:1")}); !errors.Is(err, ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	if len(beginnings(t, s)) != 1 {
		t.Fatal("nothing is left of the first")
	}
	full.Store(new("/partial/"))
	mustPull(t, s, reg.ref("second:1"))
	full.Store(new("/layers/"))
	reg.mend(first)
	if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("first:1")}); !errors.Is(err, ErrNoSpace) {
		t.Fatalf("got %v", err)
	}
	if left := beginnings(t, s); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
	full.Store(nil)
	equalsDu(t, s)
	mustPull(t, s, reg.ref("first:1"))
}

// Who removes an image wants room.
func TestLeftoversGoWithARemoval(t *testing.T) {
	leakcheck.Start(t)
	reg := newBreaking(t)
	whole, begun := randomLayer(t, "whole", 3*mib), randomLayer(t, "begun", 3*mib)
	_, id := reg.push("small", "1", gzipLayer(tarOf(t, file{name: "f"})))
	reg.push("app", "1", whole, begun)
	reg.breakAt(begun, 2*mib)
	s := slow(open(t, t.TempDir(), func(o *Options) { o.MaxConcurrentDownloads = 1 }, reg.registry))
	mustPull(t, s, reg.ref("small:1"))
	if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("app:1")}); !errors.Is(err, ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	if len(beginnings(t, s)) != 1 {
		t.Fatal("nothing is left")
	}
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	empty(t, s)
	if left := beginnings(t, s); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
	equalsDu(t, s)
}

// What comes quickly is not written down: it would be the slower way.
func TestAQuickLayerIsNotWrittenDown(t *testing.T) {
	leakcheck.Start(t)
	reg := newBreaking(t)
	l := randomLayer(t, "big", 12*mib)
	reg.push("app", "1", l)
	reg.breakAt(l, 10*mib)
	s := open(t, t.TempDir(), nil, reg.registry)
	if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("app:1")}); !errors.Is(err, ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	if left := beginnings(t, s); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}
