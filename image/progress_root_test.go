package image

import (
	"bytes"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"berth/sandbox/leakcheck"
)

// noise is what does not compress.
func noise(size int) string {
	b := make([]byte, size)
	source := rand.NewChaCha8([32]byte{1})
	_, _ = source.Read(b)
	return string(b)
}

// wait looks at the store's one pull until it is as wanted.
func wait(t *testing.T, s *Store, what string, want func(Progress) bool) Progress {
	t.Helper()
	for limit := time.Now().Add(leakcheck.Patience(10 * time.Second)); ; time.Sleep(time.Millisecond) {
		list := s.Progress()
		if len(list) == 1 && want(list[0]) {
			return list[0]
		}
		if time.Now().After(limit) {
			t.Fatalf("no pull %s: %+v", what, list)
		}
	}
}

// A pull can be seen from its beginning to some seconds after its end: what it
// waits for, which bytes are here, what was here before, and how it ended.
func TestAPullIsWatched(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	shared, big := gzipLayer(tarOf(t, file{name: "a", body: "a"})), gzipLayer(tarOf(t, file{name: "b", body: noise(1 << 20)}))
	reg.push("base", "1", shared)
	_, id := reg.push("app", "1", shared, big)
	s := open(t, t.TempDir(), nil, reg)
	mustPull(t, s, reg.ref("base:1"))
	ended := make(chan Progress, 10)
	s.WatchPulls(func(p Progress) { ended <- p })
	s.board.all = nil // the first pull is of no interest here

	manifest, half, rest := make(chan struct{}), make(chan struct{}), make(chan struct{})
	path := "/blobs/" + string(reg.blob(big.data))
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/manifests/") {
			<-manifest
		}
		if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, path) {
			return false
		}
		<-half
		w.Header().Set("Content-Length", strconv.Itoa(len(big.data)))
		_, _ = w.Write(big.data[:len(big.data)/2])
		w.(http.Flusher).Flush()
		<-rest
		_, _ = w.Write(big.data[len(big.data)/2:])
		return true
	})
	done := make(chan error, 1)
	go func() {
		_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("app:1")})
		done <- err
	}()
	p := wait(t, s, "that resolves", func(p Progress) bool { return p.Stage == StageResolving })
	if p.Image != reg.ref("app:1") || p.Op != "pull" || p.Began.IsZero() {
		t.Errorf("at first: %+v", p)
	}
	close(manifest)
	wait(t, s, "that fetches", func(p Progress) bool {
		return p.Stage == StageFetching && p.Layers[1].Stage == StageFetching && p.Layers[0].Stage == StageReused
	})
	close(half)
	p = wait(t, s, "with half its bytes", func(p Progress) bool { return p.Bytes == int64(len(big.data)/2) })
	if p.Total != int64(len(big.data)) || p.Layers[1].Bytes != p.Bytes || p.Layers[1].Stage != StageFetching {
		t.Errorf("in the middle: %+v", p)
	}
	wait(t, s, "with a rate", func(p Progress) bool {
		eta, ok := p.Left()
		return p.Rate > 0 && p.Layers[1].Rate > 0 && ok && eta > 0
	})
	close(rest)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	p = <-ended
	if p.Stage != StageDone || p.ID != id || p.Err != nil || p.Bytes != int64(len(big.data)) || p.Layers[1].Stage != StageDone || p.Rate != 0 {
		t.Errorf("at the end: %+v", p)
	}
	if list := s.Progress(); len(list) != 1 || list[0].Ended.IsZero() {
		t.Errorf("after the end: %+v", list)
	}
}

// A pull that fails says why, and so does an import.
func TestAFailureIsWatched(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	l := gzipLayer(tarOf(t, file{name: "a", body: noise(1000)}))
	reg.push("app", "1", l)
	reg.mu.Lock()
	for d, data := range reg.blobs {
		if bytes.Equal(data, l.data) {
			reg.blobs[d] = bytes.Repeat([]byte{0}, len(l.data))
		}
	}
	reg.mu.Unlock()
	s := open(t, t.TempDir(), nil, reg)
	ended := make(chan Progress, 10)
	s.WatchPulls(func(p Progress) { ended <- p })
	for reason, ref := range map[string]string{"invalid_image": reg.ref("app:1"), "not_found": reg.ref("none:1")} {
		_, err := s.Pull(t.Context(), PullRequest{Reference: ref})
		p := <-ended
		if err == nil || p.Stage != StageFailed || p.Err == nil || p.Err.Error() != err.Error() || p.Reason() != reason {
			t.Errorf("%s: %v; %+v", ref, err, p)
		}
	}
	archive, _ := ociArchive(t, plainLayer, "example.org/a:1")
	if _, err := s.Import(t.Context(), ImportRequest{File: archive}); err != nil {
		t.Fatal(err)
	}
	if p := <-ended; p.Op != "import" || p.Image != "example.org/a:1" || p.Stage != StageDone {
		t.Errorf("an import: %+v", p)
	}
}
