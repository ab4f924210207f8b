package image

import (
	"archive/tar"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"berth/image/rootfs"
	"berth/sandbox/leakcheck"
)

// mounted mounts an image as a container would have it.
func mounted(t *testing.T, s *Store, ref string) string {
	t.Helper()
	r, err := s.Resolve(ref)
	if err != nil {
		t.Fatal(err)
	}
	base := t.TempDir()
	m := rootfs.Mount{Target: base + "/rootfs", Upper: base + "/upper", Work: base + "/work", Layers: r.Layers}
	if err := rootfs.Create(m); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := rootfs.Unmount(m.Target); err != nil {
			t.Error(err)
		}
	})
	return m.Target
}

func ls(t *testing.T, dir string) []string {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

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
	if n := len(ls(t, filepath.Join(s.opt.Root, "layers"))); n != 3 {
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
	ref := manyLayers(t, reg, "app", 2)
	ended := make(chan struct{}, 10)
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") || reg.got("/blobs/") < 2 {
			return false
		}
		w.Header().Set("Content-Length", "100000")
		w.Write([]byte{0x1f, 0x8b})
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		ended <- struct{}{}
		return true
	})
	s := open(t, t.TempDir(), func(o *Options) { o.IdleTimeout = 300 * time.Millisecond }, reg)
	start := time.Now()
	_, err := s.Pull(t.Context(), PullRequest{Reference: ref})
	if !errors.Is(err, ErrRegistryUnavailable) && !errors.Is(err, ErrInvalidImage) || time.Since(start) > 5*time.Second {
		t.Errorf("%v after %v", err, time.Since(start))
	}
	select {
	case <-ended:
	case <-time.After(2 * time.Second):
		t.Error("the connection is still open")
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

func TestB15OneIdentity(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	m, id := reg.push("multi", "", gzipLayer(tarOf(t, file{name: "f"})))
	m.Platform = &ispec.Platform{OS: "linux", Architecture: runtime.GOARCH}
	index := reg.doc("multi", ispec.MediaTypeImageIndex, ispec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageIndex, Manifests: []ispec.Descriptor{m},
	}, "1", "2")
	s := open(t, t.TempDir(), nil, reg)
	byIndex, byManifest := reg.ref("multi@"+index.Digest.String()), reg.ref("multi@"+m.Digest.String())
	for _, ref := range []string{reg.ref("multi:1"), byIndex, byManifest, reg.ref("multi:2"), reg.ref("multi:1@" + index.Digest.String())} {
		if got := mustPull(t, s, ref); got != id {
			t.Errorf("pull %s: id %s, want %s", ref, got, id)
		}
		for _, name := range []string{ref, id, strings.TrimPrefix(id, "sha256:"), id[:20]} {
			if r, err := s.Resolve(name); err != nil || r.ID != id {
				t.Errorf("resolve %s: %v %v", name, r, err)
			}
		}
	}
	if len(s.List()) != 1 {
		t.Fatalf("%d images", len(s.List()))
	}
	r := s.List()[0]
	if !slices.Equal(r.RepoTags, []string{reg.ref("multi:1"), reg.ref("multi:2")}) {
		t.Errorf("tags %q", r.RepoTags)
	}
	if !slices.Equal(r.RepoDigests, []string{byIndex, byManifest}) {
		t.Errorf("digests %q", r.RepoDigests)
	}
	// A tag moves: the old image keeps its id and digests.
	other, otherID := reg.push("multi", "1", gzipLayer(tarOf(t, file{name: "g"})))
	if got := mustPull(t, s, reg.ref("multi:1")); got != otherID {
		t.Errorf("after the tag moved: %s, want %s", got, otherID)
	}
	if old, err := s.Resolve(id); err != nil || !slices.Equal(old.RepoTags, []string{reg.ref("multi:2")}) || len(old.RepoDigests) != 2 {
		t.Errorf("the old image: %+v %v", old, err)
	}
	if r, err := s.Resolve(reg.ref("multi@" + other.Digest.String())); err != nil || r.ID != otherID {
		t.Errorf("the new image by digest: %v %v", r, err)
	}
	// Removing by one name removes all of them.
	if err := s.Remove(t.Context(), reg.ref("multi:2")); err != nil {
		t.Error(err)
	}
	for _, name := range []string{id, byIndex, byManifest, reg.ref("multi:2")} {
		if _, err := s.Resolve(name); !errors.Is(err, ErrNotFound) {
			t.Errorf("resolve %s after removal: %v", name, err)
		}
	}
	if err := s.Remove(t.Context(), id); !errors.Is(err, ErrNotFound) {
		t.Errorf("removing again: %v", err)
	}
}

func TestB13PlatformIsChosenOrNamed(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	attestation := reg.doc("p", ispec.MediaTypeImageManifest, []byte(`{"schemaVersion":2,"config":{},"layers":[]}`))
	attestation.Platform = &ispec.Platform{OS: "unknown", Architecture: "unknown"}
	foreign := attestation
	foreign.Platform = &ispec.Platform{OS: "linux", Architecture: "s390x"}
	m, id := reg.push("p", "", gzipLayer(tarOf(t, file{name: "f"})))
	m.Platform = &ispec.Platform{OS: "linux", Architecture: runtime.GOARCH}
	index := func(tag string, of ...ispec.Descriptor) ispec.Descriptor {
		return reg.doc("p", ispec.MediaTypeImageIndex, ispec.Index{
			Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageIndex, Manifests: of}, tag)
	}
	inner := index("good", attestation, foreign, m)
	index("bad", attestation, foreign)
	index("nested", inner)
	s := open(t, t.TempDir(), nil, reg)
	_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("p:bad")})
	if !errors.Is(err, ErrInvalidImage) || !strings.Contains(err.Error(), "linux/"+runtime.GOARCH) || !strings.Contains(err.Error(), "offers linux/s390x") {
		t.Errorf("nothing for this platform: %v", err)
	}
	for _, tag := range []string{"good", "nested"} {
		if got := mustPull(t, s, reg.ref("p:"+tag)); got != id {
			t.Errorf("%s: %s, want %s", tag, got, id)
		}
	}
	deep := inner
	for range maxNesting + 2 {
		deep = index("deep", deep)
	}
	if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("p:deep")}); !errors.Is(err, ErrInvalidImage) {
		t.Errorf("indexes without end: %v", err)
	}
}

func TestB17TwoThingsAtOnce(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	m, _ := reg.push("x", "1", gzipLayer(tarOf(t, file{name: "f"})))
	image := string(reg.docs["x 1"].data)
	both := strings.TrimSuffix(image, "}") + fmt.Sprintf(`,"manifests":[{"mediaType":%q,"digest":%q,"size":%d}]}`, m.MediaType, m.Digest, m.Size)
	const docker = "application/vnd.docker.distribution.manifest"
	types := []string{ispec.MediaTypeImageManifest, ispec.MediaTypeImageIndex, docker + ".v2+json", docker + ".list.v2+json", "application/json", ""}
	s := open(t, t.TempDir(), nil, reg)
	refused := func(what, contentType, body string) {
		t.Helper()
		reg.doc("x", contentType, []byte(body), "bad")
		_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("x:bad")})
		if !errors.Is(err, ErrInvalidImage) {
			t.Errorf("%s served as %q: %v", what, contentType, err)
		}
	}
	for _, contentType := range types {
		refused("both", contentType, both)
		refused("both without type", contentType, strings.Replace(both, `"mediaType":"`+ispec.MediaTypeImageManifest+`",`, "", 1))
		refused("two configs", contentType, strings.TrimSuffix(image, "}")+`,"Config":{}}`)
	}
	refused("manifest", ispec.MediaTypeImageIndex, image)
	refused("manifest", docker+".v2+json", image)
	refused("index", ispec.MediaTypeImageManifest, `{"schemaVersion":2,"mediaType":"`+ispec.MediaTypeImageIndex+`","manifests":[]}`)
	refused("schema 1", docker+".v1+json", `{"schemaVersion":1,"fsLayers":[],"history":[]}`)
	refused("array", ispec.MediaTypeImageManifest, `[]`)
	refused("nothing", ispec.MediaTypeImageManifest, ``)
	refused("cut", ispec.MediaTypeImageManifest, image[:len(image)/2])
	refused("too long", ispec.MediaTypeImageManifest, `{"x":"`+strings.Repeat("x", 5<<20)+`"}`)
	empty(t, s)
}

func TestB19MediaTypes(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	const (
		docker       = "application/vnd.docker.image.rootfs.diff.tar"
		dockerKind   = "application/vnd.docker.distribution.manifest.v2+json"
		dockerConfig = "application/vnd.docker.container.image.v1+json"
	)
	data := tarOf(t, file{name: "f", body: "content"})
	s := open(t, t.TempDir(), nil, reg)
	as := func(l layerBlob, mediaType string) layerBlob { l.mediaType = mediaType; return l }
	i := 0
	check := func(manifestType, configType string, l layerBlob) {
		t.Helper()
		i++
		repo := fmt.Sprintf("r%d", i)
		reg.pushAs(repo, manifestType, configType, "1", nil, l)
		root := mustPull(t, s, reg.ref(repo+":1"))
		r, err := s.Resolve(root)
		if err != nil {
			t.Fatal(err)
		}
		if body, err := os.ReadFile(filepath.Join(r.Layers[0], "f")); err != nil || string(body) != "content" {
			t.Errorf("%s: %q %v", l.mediaType, body, err)
		}
		if err := s.Remove(t.Context(), root); err != nil { // else the layer is not fetched again
			t.Fatal(err)
		}
	}
	for _, l := range []layerBlob{
		plainLayer(data), gzipLayer(data), zstdLayer(data),
		as(zstdLayer(data), ispec.MediaTypeImageLayerGzip), as(plainLayer(data), ispec.MediaTypeImageLayerZstd),
		as(gzipLayer(data), "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"),
	} {
		check(ispec.MediaTypeImageManifest, ispec.MediaTypeImageConfig, l)
	}
	for _, l := range []layerBlob{
		as(plainLayer(data), docker), as(gzipLayer(data), docker+".gzip"), as(zstdLayer(data), docker+".zstd"),
		as(gzipLayer(data), docker), as(zstdLayer(data), docker+".gzip"),
	} {
		check(dockerKind, dockerConfig, l)
	}
	reg.pushAs("art", ispec.MediaTypeImageManifest, ispec.MediaTypeImageConfig, "1", nil, as(plainLayer(data), "application/vnd.test.blob"))
	reg.pushAs("art", ispec.MediaTypeImageManifest, "application/vnd.test.config", "2", nil, gzipLayer(data))
	before := reg.got("/art/blobs/")
	for tag, name := range map[string]string{"1": "application/vnd.test.blob", "2": "application/vnd.test.config"} {
		_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("art:" + tag)})
		if !errors.Is(err, ErrInvalidImage) || !strings.Contains(err.Error(), name) {
			t.Errorf("artifact: %v, want the type %s named", err, name)
		}
	}
	if reg.got("/art/blobs/") != before {
		t.Error("an artifact's blobs were fetched")
	}
	empty(t, s)
}

func TestB21OrderOfUnpackingDoesNotMatter(t *testing.T) {
	leakcheck.Start(t)
	lower := gzipLayer(tarOf(t, file{name: "gone", body: "x"}, file{name: "d/"}, file{name: "d/a"}, file{name: "d/b"}))
	upper := gzipLayer(tarOf(t, file{name: ".wh.gone"}, file{name: "d/"}, file{name: "d/.wh..wh..opq"}, file{name: "d/c"}))
	for _, parallel := range []int{1, 2, 8} {
		for _, slow := range []layerBlob{lower, upper} {
			reg := newRegistry(t)
			reg.push("app", "1", lower, upper)
			reg.setHook(func(_ http.ResponseWriter, r *http.Request) bool {
				if strings.HasSuffix(r.URL.Path, digest.FromBytes(slow.data).String()) {
					time.Sleep(100 * time.Millisecond)
				}
				return false
			})
			s := open(t, t.TempDir(), func(o *Options) { o.MaxConcurrentDownloads = parallel }, reg)
			mustPull(t, s, reg.ref("app:1"))
			root := mounted(t, s, reg.ref("app:1"))
			if got := ls(t, root); !slices.Equal(got, []string{"d"}) {
				t.Errorf("/ has %q", got)
			}
			if got := ls(t, root+"/d"); !slices.Equal(got, []string{"c"}) {
				t.Errorf("/d has %q", got)
			}
		}
	}
}

func TestB25ImpliedParentsLookAsBelow(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	top := gzipLayer(tarOf(t, file{name: "d/e/f", body: "x"}))
	one := gzipLayer(tarOf(t, file{name: "d/", mode: 0o750, uid: 7, gid: 7}))
	two := gzipLayer(tarOf(t, file{name: "d/", mode: 0o711, uid: 9, gid: 9}))
	reg.push("one", "1", one, top)
	reg.push("two", "1", two, top)
	reg.push("alone", "1", top)
	s := open(t, t.TempDir(), nil, reg)
	// The same layer on three bases, in one store, twice.
	for range 2 {
		for repo, want := range map[string][2]uint32{"one": {0o750, 7}, "two": {0o711, 9}, "alone": {0o755, 0}} {
			mustPull(t, s, reg.ref(repo+":1"))
			root := mounted(t, s, reg.ref(repo+":1"))
			var st unix.Stat_t
			if err := unix.Stat(root+"/d", &st); err != nil {
				t.Fatal(err)
			}
			if st.Mode&0o7777 != want[0] || st.Uid != want[1] {
				t.Errorf("%s: /d is %o of %d, want %o of %d", repo, st.Mode&0o7777, st.Uid, want[0], want[1])
			}
			if err := unix.Stat(root+"/d/e", &st); err != nil || st.Mode&0o7777 != 0o755 || st.Uid != 0 {
				t.Errorf("%s: /d/e is %o of %d (%v)", repo, st.Mode&0o7777, st.Uid, err)
			}
		}
	}
}

func TestB29TheSameLayerTwice(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	a := gzipLayer(tarOf(t, file{name: "f", body: "a"}, file{name: "implied/x"}))
	otherA := zstdLayer(a.tar)
	b := gzipLayer(tarOf(t, file{name: ".wh.f"}, file{name: "b"}))
	for repo, layers := range map[string][]layerBlob{
		"aba": {a, b, a}, "aa": {a, a}, "mixed": {a, b, otherA}, "abab": {a, b, a, b},
	} {
		reg.push(repo, "1", layers...)
		s := open(t, t.TempDir(), nil, reg)
		before := reg.got(digest.FromBytes(a.data).String()) + reg.got(digest.FromBytes(otherA.data).String())
		mustPull(t, s, reg.ref(repo+":1"))
		root := mounted(t, s, reg.ref(repo+":1"))
		_, err := os.Stat(root + "/f")
		if there := err == nil; there != (repo != "abab") {
			t.Errorf("%s: /f is there: %v", repo, there)
		}
		fetched := reg.got(digest.FromBytes(a.data).String()) + reg.got(digest.FromBytes(otherA.data).String()) - before
		if fetched != 1 {
			t.Errorf("%s: the layer was fetched %d times", repo, fetched)
		}
	}
}

func TestB35TooManyLayersAreRefusedAtPull(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	var layers []layerBlob
	for i := range rootfs.MaxLayers + 1 {
		layers = append(layers, plainLayer(tarOf(t, file{name: fmt.Sprint(i)})))
	}
	reg.push("big", "1", layers...)
	s := open(t, t.TempDir(), nil, reg)
	_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("big:1")})
	if !errors.Is(err, ErrInvalidImage) || !strings.Contains(err.Error(), "501 layers") {
		t.Errorf("got %v", err)
	}
	if reg.got("/big/blobs/") != 1 {
		t.Error("layers were fetched before")
	}
}

func TestB37DiskOrInodesFull(t *testing.T) {
	leakcheck.Start(t)
	for name, options := range map[string]string{"blocks": "size=4m", "inodes": "size=64m,nr_inodes=200"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
				t.Fatal(err)
			}
			defer unix.Unmount(dir, unix.MNT_DETACH)
			reg := newRegistry(t)
			small, _ := reg.push("small", "1", gzipLayer(tarOf(t, file{name: "f", body: "small"})))
			big := []file{{name: "big", body: strings.Repeat("b", 8<<20)}}
			if name == "inodes" {
				big = nil
				for i := range 1000 {
					big = append(big, file{name: fmt.Sprint(i)})
				}
			}
			reg.push("big", "1", gzipLayer(tarOf(t, big...)))
			s := open(t, filepath.Join(dir, "images"), nil, reg)
			defer s.Close()
			mustPull(t, s, reg.ref("small:1"))
			for range 2 {
				_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("big:1")})
				if !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), dir) {
					t.Fatalf("got %v, want ErrNoSpace that names %s", err, dir)
				}
			}
			if left := ls(t, filepath.Join(s.opt.Root, "staging")); len(left) != 0 {
				t.Errorf("staging holds %v", left)
			}
			if len(s.List()) != 1 {
				t.Errorf("%d images", len(s.List()))
			}
			// Nothing free at all: what is there can be listed and removed.
			fillUp(t, filepath.Join(dir, "filler"))
			if _, err := s.Resolve(reg.ref("small@" + small.Digest.String())); err != nil {
				t.Error(err)
			}
			if err := s.Remove(t.Context(), reg.ref("small:1")); err != nil {
				t.Errorf("remove on a full disk: %v", err)
			}
			empty(t, s)
			os.RemoveAll(filepath.Join(dir, "filler"))
			if err := unix.Mount("", dir, "tmpfs", unix.MS_REMOUNT, "size=64m,nr_inodes=5000"); err != nil {
				t.Fatal(err)
			}
			mustPull(t, s, reg.ref("big:1"))
		})
	}
}

// fillUp uses up a filesystem's blocks and inodes.
func fillUp(t *testing.T, dir string) {
	t.Helper()
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for i, size := 0, 1<<20; size > 0; i++ {
		err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), make([]byte, size), 0o600)
		if err != nil {
			size /= 16
		}
	}
}

func TestB41Pinned(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("keep", "1", gzipLayer(tarOf(t, file{name: "f"})))
	reg.push("other", "1", gzipLayer(tarOf(t, file{name: "g"})))
	dir := t.TempDir()
	pin := func(o *Options) { o.Pinned = []string{reg.ref("keep:*")} }
	s := open(t, dir, pin, reg)
	id, other := mustPull(t, s, reg.ref("keep:1")), mustPull(t, s, reg.ref("other:1"))
	check := func(s *Store) {
		t.Helper()
		if r, err := s.Resolve(id); err != nil || !r.Pinned {
			t.Errorf("%+v %v", r, err)
		}
		if r, err := s.Resolve(other); err != nil || r.Pinned {
			t.Errorf("%+v %v", r, err)
		}
	}
	check(s)
	s.Close()
	again := open(t, dir, pin, reg)
	check(again)
	if err := again.Remove(t.Context(), id); err != nil { // removal must oblige
		t.Error(err)
	}
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

func TestWrongContent(t *testing.T) {
	leakcheck.Start(t)
	data := tarOf(t, file{name: "f", body: strings.Repeat("content", 1000)})
	other := gzipLayer(tarOf(t, file{name: "evil"}))
	for name, spoil := range map[string]func(reg *registry, l layerBlob) layerBlob{
		"other bytes": func(reg *registry, l layerBlob) layerBlob { return replaceBlob(reg, l, other.data) },
		"cut":         func(reg *registry, l layerBlob) layerBlob { return replaceBlob(reg, l, l.data[:len(l.data)/2]) },
		"longer": func(reg *registry, l layerBlob) layerBlob {
			return replaceBlob(reg, l, append(slices.Clone(l.data), 0))
		},
		"wrong diff_id": func(_ *registry, l layerBlob) layerBlob { l.tar = []byte("else"); return l },
		"no tar": func(_ *registry, l layerBlob) layerBlob {
			return gzipLayer([]byte("no tar, but long enough to be looked at"))
		},
		"half a tar":  func(_ *registry, l layerBlob) layerBlob { return gzipLayer(l.tar[:700]) },
		"half a gzip": func(_ *registry, l layerBlob) layerBlob { l.data = l.data[:len(l.data)-20]; return l },
		"xz":          func(_ *registry, l layerBlob) layerBlob { l.data = []byte("\xfd7zXZ\x00 and so on"); return l },
		"an escape":   func(_ *registry, l layerBlob) layerBlob { return gzipLayer(tarOf(t, file{name: "../x"})) },
		"a lost link": func(_ *registry, l layerBlob) layerBlob {
			return gzipLayer(tarOf(t, file{name: "l", kind: tar.TypeLink, link: "lost"}))
		},
		"empty layer":   func(_ *registry, l layerBlob) layerBlob { l.data = nil; return l },
		"a sparse bomb": func(_ *registry, l layerBlob) layerBlob { return gzipLayer(sparseBomb()) },
		"a bomb of dirs": func(_ *registry, l layerBlob) layerBlob {
			return gzipLayer(tarOf(t, file{name: strings.Repeat("d/", 2000)}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			reg := newRegistry(t)
			l := spoil(reg, gzipLayer(data))
			reg.push("bad", "1", gzipLayer(tarOf(t, file{name: "fine"})), l)
			s := open(t, t.TempDir(), nil, reg)
			_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("bad:1")})
			if !errors.Is(err, ErrInvalidImage) && !(name == "cut" && errors.Is(err, ErrRegistryUnavailable)) {
				t.Errorf("got %v", err)
			}
			s.flights.wait()
			empty(t, s)
		})
	}
}

// replaceBlob makes the registry serve other bytes under the layer's digest.
func replaceBlob(reg *registry, l layerBlob, data []byte) layerBlob {
	d := digest.FromBytes(l.data)
	size := len(l.data)
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, d.String()) {
			return false
		}
		if len(data) >= size {
			w.(http.Flusher).Flush() // no Content-Length
		}
		w.Write(data)
		return true
	})
	return l
}

// sparseBomb is a header that promises 4 TiB.
func sparseBomb() []byte {
	h := make([]byte, 512)
	copy(h, "bomb")
	copy(h[100:], "0000644\x000000000\x000000000\x00")
	copy(h[124:], "00000000000\x00")
	copy(h[136:], "00000000000\x00")
	h[156] = 'S'
	copy(h[257:], "ustar  \x00")
	copy(h[386:], "77777777777\x0000000000000\x00")
	size := []byte{0x80, 0, 0, 0, 0, 0, 0x04, 0, 0, 0, 0, 0} // base-256
	copy(h[386:398], size)
	copy(h[483:495], size)
	copy(h[148:], "        ")
	sum := 0
	for _, b := range h {
		sum += int(b)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	return append(h, make([]byte, 1024)...)
}
