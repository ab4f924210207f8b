package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// registry is a static registry over HTTP that counts and can misbehave.
type registry struct {
	t    testing.TB
	host string

	mu    sync.Mutex
	blobs map[digest.Digest][]byte
	docs  map[string]document // repo + " " + tag or digest
	gets  map[string]int      // path → GETs answered or not
	// hook may answer a request itself (true) before the registry does.
	hook func(w http.ResponseWriter, r *http.Request) bool
}

func newRegistry(t testing.TB) *registry {
	r := &registry{t: t, blobs: map[digest.Digest][]byte{}, docs: map[string]document{}, gets: map[string]int{}}
	server := httptest.NewServer(r)
	t.Cleanup(server.Close)
	r.host = strings.TrimPrefix(server.URL, "http://")
	return r
}

func (r *registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	if req.Method == http.MethodGet {
		r.gets[req.URL.Path]++
	}
	hook := r.hook
	r.mu.Unlock()
	if hook != nil && hook(w, req) {
		return
	}
	path := strings.TrimPrefix(req.URL.Path, "/v2/")
	if path == "" {
		w.WriteHeader(http.StatusOK)
		return
	}
	if repo, ref, ok := strings.Cut(path, "/manifests/"); ok {
		r.mu.Lock()
		doc, found := r.docs[repo+" "+ref]
		r.mu.Unlock()
		if found {
			w.Header().Set("Content-Type", doc.mediaType)
			w.Header().Set("Docker-Content-Digest", doc.digest.String())
			w.Write(doc.data)
			return
		}
	}
	if _, d, ok := strings.Cut(path, "/blobs/"); ok {
		r.mu.Lock()
		data, found := r.blobs[digest.Digest(d)]
		r.mu.Unlock()
		if found {
			http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(data))
			return
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusNotFound)
	io.WriteString(w, `{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}`)
}

func (r *registry) setHook(h func(http.ResponseWriter, *http.Request) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hook = h
}

// got counts the GETs of paths that contain part.
func (r *registry) got(part string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for path, count := range r.gets {
		if strings.Contains(path, part) {
			n += count
		}
	}
	return n
}

func (r *registry) blob(data []byte) digest.Digest {
	d := digest.FromBytes(data)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.blobs[d] = data
	return d
}

// doc stores a manifest under its digest and the tags.
func (r *registry) doc(repo, mediaType string, v any, tags ...string) ispec.Descriptor {
	data, ok := v.([]byte)
	if !ok {
		var err error
		if data, err = json.Marshal(v); err != nil {
			r.t.Fatal(err)
		}
	}
	d := document{data: data, mediaType: mediaType, digest: digest.FromBytes(data)}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, ref := range append(tags, d.digest.String()) {
		r.docs[repo+" "+ref] = d
	}
	return ispec.Descriptor{MediaType: mediaType, Digest: d.digest, Size: int64(len(data))}
}

func (r *registry) ref(repoTag string) string { return r.host + "/" + repoTag }

// layerBlob is a layer as pushed.
type layerBlob struct {
	tar       []byte
	data      []byte
	mediaType string
}

func plainLayer(tarData []byte) layerBlob {
	return layerBlob{tarData, tarData, ispec.MediaTypeImageLayer}
}

func gzipLayer(tarData []byte) layerBlob {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Write(tarData)
	w.Close()
	return layerBlob{tarData, b.Bytes(), ispec.MediaTypeImageLayerGzip}
}

func zstdLayer(tarData []byte) layerBlob {
	w, _ := zstd.NewWriter(nil)
	return layerBlob{tarData, w.EncodeAll(tarData, nil), ispec.MediaTypeImageLayerZstd}
}

// push stores an image of these layers and returns its manifest and id.
func (r *registry) push(repo, tag string, layers ...layerBlob) (ispec.Descriptor, string) {
	return r.pushAs(kinds{ispec.MediaTypeImageManifest, ispec.MediaTypeImageConfig}, repo, tag, layers...)
}

// kinds are the media types of an image's manifest and config.
type kinds struct{ manifest, config string }

func (r *registry) pushAs(as kinds, repo, tag string, layers ...layerBlob) (ispec.Descriptor, string) {
	config := ispec.Image{
		Platform: ispec.Platform{Architecture: "amd64", OS: "linux"},
		Config:   ispec.ImageConfig{Cmd: []string{"/" + repo}},
		RootFS:   ispec.RootFS{Type: "layers"},
	}
	m := ispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: as.manifest}
	for _, l := range layers {
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, digest.FromBytes(l.tar))
		m.Layers = append(m.Layers, ispec.Descriptor{MediaType: l.mediaType, Digest: r.blob(l.data), Size: int64(len(l.data))})
	}
	data, err := json.Marshal(config)
	if err != nil {
		r.t.Fatal(err)
	}
	m.Config = ispec.Descriptor{MediaType: as.config, Digest: r.blob(data), Size: int64(len(data))}
	var tags []string
	if tag != "" {
		tags = []string{tag}
	}
	return r.doc(repo, as.manifest, m, tags...), m.Config.Digest.String()
}

// file and the like build tars.
type file struct {
	name, body, link string
	kind             byte
	mode             int64
	uid, gid         int
	xattrs           map[string]string
	major, minor     int64
}

func tarOf(t testing.TB, files ...file) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{
			Name: f.name, Linkname: f.link, Typeflag: f.kind, Mode: f.mode, Uid: f.uid, Gid: f.gid,
			Size: int64(len(f.body)), ModTime: time.Unix(1_700_000_000, 0), Format: tar.FormatPAX,
			Devmajor: f.major, Devminor: f.minor,
		}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
			if strings.HasSuffix(f.name, "/") {
				h.Typeflag = tar.TypeDir
			}
		}
		if h.Mode == 0 {
			h.Mode = 0o644
			if h.Typeflag == tar.TypeDir {
				h.Mode = 0o755
			}
		}
		for k, v := range f.xattrs {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		io.WriteString(w, f.body)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// options are those of a store in dir that talks plain HTTP with the registries.
func options(t testing.TB, dir string, edit func(*Options), registries ...*registry) Options {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: layers have owners and device nodes")
	}
	conf := ""
	for _, r := range registries {
		conf += fmt.Sprintf("[[registry]]\nlocation = %q\ninsecure = true\n", r.host)
	}
	path := filepath.Join(t.TempDir(), "registries.conf")
	if err := os.WriteFile(path, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	o := Options{Root: dir, RegistriesConf: path}
	if edit != nil {
		edit(&o)
	}
	return o
}

// open makes a store with these options.
func open(t testing.TB, dir string, edit func(*Options), registries ...*registry) *Store {
	t.Helper()
	s, err := Open(context.Background(), options(t, dir, edit, registries...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func mustPull(t testing.TB, s *Store, ref string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	id, err := s.Pull(ctx, PullRequest{Reference: ref})
	if err != nil {
		t.Fatalf("pull %s: %v", ref, err)
	}
	return id
}

// empty fails when anything of a failed or removed image is left.
func empty(t testing.TB, s *Store) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	s.trash.wait(ctx)
	for _, dir := range []string{"layers", "staging", "trash", "blobs/sha256"} {
		list, err := os.ReadDir(filepath.Join(s.root, dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, item := range list {
			t.Errorf("%s/%s is left", dir, item.Name())
		}
	}
}

// refuseAll is a registry that is out of order.
func refuseAll(w http.ResponseWriter, _ *http.Request) bool {
	w.WriteHeader(http.StatusServiceUnavailable)
	return true
}
