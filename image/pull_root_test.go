package image

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/sandbox/leakcheck"
)

// manyLayers pushes an image of n layers with a file each.
func manyLayers(t *testing.T, reg *registry, repo string, n int) string {
	t.Helper()
	var layers []layerBlob
	for i := range n {
		layers = append(layers, gzipLayer(tarOf(t,
			file{name: fmt.Sprintf("f%d", i), body: fmt.Sprint(i)},
			file{name: fmt.Sprintf("%s-%d", repo, i), body: strings.Repeat("x", 1000)})))
	}
	reg.push(repo, "1", layers...)
	return reg.ref(repo + ":1")
}

func TestB05OnePullForManyCallers(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	ref := manyLayers(t, reg, "app", 8)
	gate := make(chan struct{})
	reg.setHook(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/blobs/") {
			<-gate
		}
		return false
	})
	s := open(t, t.TempDir(), nil, reg)
	first, leave := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	errs := make([]error, 10)
	for i := range errs {
		ctx := t.Context()
		if i == 0 {
			ctx = first
		}
		wg.Go(func() { _, errs[i] = s.Pull(ctx, PullRequest{Reference: ref}) })
	}
	time.Sleep(100 * time.Millisecond)
	leave()
	time.Sleep(50 * time.Millisecond)
	close(gate)
	wg.Wait()
	if !errors.Is(errs[0], context.Canceled) {
		t.Errorf("the caller who left got %v", errs[0])
	}
	for i, err := range errs[1:] {
		if err != nil {
			t.Errorf("caller %d: %v", i+1, err)
		}
	}
	for path, n := range reg.gets {
		if strings.Contains(path, "/blobs/") && n != 1 {
			t.Errorf("%d GETs of %s", n, path)
		}
	}
}

func TestB05OneFetchOfALayerThatTwoImagesShare(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	shared := gzipLayer(tarOf(t, file{name: "base", body: strings.Repeat("b", 100_000)}))
	reg.push("one", "1", shared, gzipLayer(tarOf(t, file{name: "one"})))
	reg.push("two", "1", shared, gzipLayer(tarOf(t, file{name: "two"})))
	reg.setHook(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/blobs/") {
			time.Sleep(50 * time.Millisecond)
		}
		return false
	})
	s := open(t, t.TempDir(), nil, reg)
	var wg sync.WaitGroup
	for _, repo := range []string{"one", "two"} {
		wg.Go(func() {
			if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref(repo + ":1")}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := reg.got(digest.FromBytes(shared.data).String()); n != 1 {
		t.Errorf("the shared layer was fetched %d times", n)
	}
	if n := len(ls(t, filepath.Join(s.root, "layers"))); n != 3 {
		t.Errorf("%d layers are stored, want 3", n)
	}
}

func TestB07CancelAndRetry(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	ref := manyLayers(t, reg, "app", 12)
	reg.setHook(func(_ http.ResponseWriter, r *http.Request) bool {
		time.Sleep(time.Millisecond)
		return false
	})
	s := open(t, t.TempDir(), nil, reg)
	random := rand.New(rand.NewPCG(7, 7))
	for range 30 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(40))*time.Millisecond)
		s.Pull(ctx, PullRequest{Reference: ref})
		cancel()
		id := mustPull(t, s, ref)
		r, err := s.Resolve(id)
		if err != nil {
			t.Fatal(err)
		}
		for i, dir := range r.Layers {
			if data, err := os.ReadFile(fmt.Sprintf("%s/f%d", dir, i)); err != nil || string(data) != fmt.Sprint(i) {
				t.Fatalf("layer %d: %q %v", i, data, err)
			}
		}
		if err := s.Remove(t.Context(), ref); err != nil {
			t.Fatal(err)
		}
	}
	s.flights.wait()
	empty(t, s)
}

func TestB03AStalledRegistryIsGivenUp(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	l := plainLayer(tarOf(t, file{name: "f", body: strings.Repeat("x", 1<<20)}))
	reg.push("app", "1", l, gzipLayer(tarOf(t, file{name: "g"})))
	ended := make(chan struct{}, 10)
	stall := func(part string, send int) {
		reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, part) {
				return false
			}
			if send > 0 {
				w.Header().Set("Content-Length", fmt.Sprint(len(l.data)))
				w.Write(l.data[:send])
				w.(http.Flusher).Flush()
			}
			<-r.Context().Done()
			ended <- struct{}{}
			return true
		})
	}
	s := open(t, t.TempDir(), func(o *Options) { o.IdleTimeout = 300 * time.Millisecond }, reg)
	blob := digest.FromBytes(l.data).String()
	for name, where := range map[string]struct {
		part string
		send int
	}{"in a layer": {blob, 1000}, "before a layer": {blob, 0}, "manifest": {"/manifests/", 0}, "ping": {"/v2/", 0}} {
		stall(where.part, where.send)
		start := time.Now()
		_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("app:1")})
		if !errors.Is(err, ErrRegistryUnavailable) || !strings.Contains(err.Error(), "no data for 300ms") || time.Since(start) > 5*time.Second {
			t.Errorf("%s: %v after %v", name, err, time.Since(start))
		}
		select {
		case <-ended:
		case <-time.After(2 * time.Second):
			t.Errorf("%s: the connection is still open", name)
		}
	}
	empty(t, s)
}

func TestPullEndsWithItsLastCaller(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	ref := manyLayers(t, reg, "app", 4)
	ended := make(chan struct{}, 10)
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") || reg.got("/blobs/") < 2 {
			return false
		}
		<-r.Context().Done()
		ended <- struct{}{}
		return true
	})
	s := open(t, t.TempDir(), nil, reg)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := s.Pull(ctx, PullRequest{Reference: ref})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	select {
	case <-ended:
	case <-time.After(2 * time.Second):
		t.Error("the pull goes on without a caller")
	}
	s.flights.wait()
	empty(t, s)
}

func TestB09NoSecretsInErrors(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	ref := manyLayers(t, reg, "app", 1)
	s := open(t, t.TempDir(), nil, reg)
	var redirects atomic.Int64
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/blobs/") {
			redirects.Add(1)
			http.Redirect(w, r, "http://127.0.0.1:1/blob?sig=SECRET1", http.StatusTemporaryRedirect)
			return true
		}
		return false
	})
	_, err := s.Pull(t.Context(), PullRequest{Reference: ref})
	if err == nil || strings.Contains(err.Error(), "SECRET1") || !errors.Is(err, ErrRegistryUnavailable) || redirects.Load() == 0 {
		t.Errorf("redirect: %v", err)
	}
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		_, password, _ := r.BasicAuth()
		w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		w.WriteHeader(http.StatusUnauthorized)
		io.WriteString(w, `{"errors":[{"code":"UNAUTHORIZED","message":"wrong: `+password+`"}]}`)
		return true
	})
	_, err = s.Pull(t.Context(), PullRequest{Reference: ref, Credentials: &Credentials{Username: "u", Password: "SECRET2"}})
	if err == nil || strings.Contains(err.Error(), "SECRET2") || !errors.Is(err, ErrUnauthorized) {
		t.Errorf("credentials: %v", err)
	}
}

func TestCredentials(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	ref := manyLayers(t, reg, "app", 1)
	var seen atomic.Value
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		got := r.Header.Get("Authorization")
		if strings.Contains(r.URL.Path, "/manifests/") {
			seen.Store(got)
		}
		if got == "" || got == "Basic "+base64.StdEncoding.EncodeToString([]byte(":")) {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}
		return false
	})
	s := open(t, t.TempDir(), nil, reg)
	basic := func(text string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(text)) }
	for name, test := range map[string]struct {
		give Credentials
		want string
	}{
		"user":        {Credentials{Username: "u", Password: "p"}, basic("u:p")},
		"auth":        {Credentials{Auth: base64.StdEncoding.EncodeToString([]byte("a:b:c"))}, basic("a:b:c")},
		"this server": {Credentials{Username: "u", Password: "p", ServerAddress: "http://" + reg.host + "/v2/"}, basic("u:p")},
		"its host":    {Credentials{Username: "u", Password: "p", ServerAddress: reg.host}, basic("u:p")},
	} {
		if _, err := s.Pull(t.Context(), PullRequest{Reference: ref, Credentials: &test.give}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := seen.Load(); got != test.want {
			t.Errorf("%s: sent %q, want %q", name, got, test.want)
		}
	}
	for name, give := range map[string]*Credentials{
		"none": nil, "another server": {Username: "u", Password: "p", ServerAddress: "example.org"},
	} {
		_, err := s.Pull(t.Context(), PullRequest{Reference: ref, Credentials: give})
		if !errors.Is(err, ErrUnauthorized) {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := s.Pull(t.Context(), PullRequest{Reference: ref, Credentials: &Credentials{Auth: "%"}})
	if err == nil || strings.Contains(err.Error(), "%%") {
		t.Errorf("auth that is not base64: %v", err)
	}
}

func TestB01TheNextMirrorIsAsked(t *testing.T) {
	leakcheck.Start(t)
	bad, good := newRegistry(t), newRegistry(t)
	_, id := good.push("x/y", "1", gzipLayer(tarOf(t, file{name: "f"})))
	closed := newRegistry(t)
	closed.host = "127.0.0.1:1"
	for name, first := range map[string]struct {
		reg  *registry
		code int
	}{"503": {bad, 503}, "404": {bad, 404}, "closed port": {closed, 0}} {
		first.reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
			w.WriteHeader(first.code)
			return true
		})
		conf := filepath.Join(t.TempDir(), "registries.conf")
		text := fmt.Sprintf("[[registry]]\nprefix = \"docker.io\"\nlocation = \"docker.io\"\n"+
			"[[registry.mirror]]\nlocation = %q\ninsecure = true\n[[registry.mirror]]\nlocation = %q\ninsecure = true\n",
			first.reg.host, good.host)
		if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s := open(t, t.TempDir(), func(o *Options) { o.RegistriesConf = conf })
		if got := mustPull(t, s, "x/y:1"); got != id {
			t.Errorf("%s: got %s", name, got)
		}
		if r, err := s.Resolve("docker.io/x/y:1"); err != nil || r.ID != id {
			t.Errorf("%s: the image does not have the name that was asked for: %v", name, err)
		}
	}
}

func TestACutLayerIsResumed(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	random := rand.New(rand.NewPCG(3, 3))
	body := make([]byte, 6<<20)
	for i := range body {
		body[i] = byte(random.Uint32())
	}
	l := plainLayer(tarOf(t, file{name: "f", body: string(body)}))
	reg.push("app", "1", l)
	var ranges atomic.Int64
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, digest.FromBytes(l.data).String()) {
			return false
		}
		if r.Header.Get("Range") != "" {
			ranges.Add(1)
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(l.data)))
		w.Write(l.data[:3<<20])
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	s := open(t, t.TempDir(), nil, reg)
	mustPull(t, s, reg.ref("app:1"))
	if ranges.Load() != 1 {
		t.Errorf("resumed %d times", ranges.Load())
	}
}
