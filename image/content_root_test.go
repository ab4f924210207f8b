package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/types"

	"berth/sandbox/leakcheck"
)

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
	// Of several for this architecture the plain one is right for every machine.
	special, specialID := reg.push("p", "", gzipLayer(tarOf(t, file{name: "g"})))
	special.Platform = &ispec.Platform{OS: "linux", Architecture: runtime.GOARCH, Variant: "v9"}
	index("variants", special, m)
	if got := mustPull(t, s, reg.ref("p:variants")); got != id || got == specialID {
		t.Errorf("of two variants: %s, want %s", got, id)
	}
	// Of several variants that would do the best is taken, wherever it stands.
	arm := func(variant string) ispec.Descriptor {
		d := reg.doc("p", ispec.MediaTypeImageManifest, []byte(fmt.Sprintf(`{"schemaVersion":2,"x":%q}`, variant)))
		d.Platform = &ispec.Platform{OS: "linux", Architecture: "arm", Variant: variant}
		return d
	}
	want := arm("v7")
	index("arms", attestation, arm("v5"), arm("v8"), want, arm("v6"))
	of := &types.SystemContext{OSChoice: "linux", ArchitectureChoice: "arm", VariantChoice: "v7"}
	if got, err := reg.docs["p arms"].choose(of); err != nil || got != want.Digest {
		t.Errorf("arms: %s %v, want %s", got, err, want.Digest)
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
	served := []string{ispec.MediaTypeImageManifest, ispec.MediaTypeImageIndex, docker + ".v2+json", docker + ".list.v2+json", "application/json", ""}
	s := open(t, t.TempDir(), nil, reg)
	refused := func(what, contentType, body string) {
		t.Helper()
		reg.doc("x", contentType, []byte(body), "bad")
		_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("x:bad")})
		if !errors.Is(err, ErrInvalidImage) {
			t.Errorf("%s served as %q: %v", what, contentType, err)
		}
	}
	for _, contentType := range served {
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
	oci := kinds{ispec.MediaTypeImageManifest, ispec.MediaTypeImageConfig}
	data := tarOf(t, file{name: "f", body: "content"})
	s := open(t, t.TempDir(), nil, reg)
	as := func(l layerBlob, mediaType string) layerBlob { l.mediaType = mediaType; return l }
	i := 0
	check := func(of kinds, l layerBlob) {
		t.Helper()
		i++
		repo := fmt.Sprintf("r%d", i)
		reg.pushAs(of, repo, "1", l)
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
		check(oci, l)
	}
	for _, l := range []layerBlob{
		as(plainLayer(data), docker), as(gzipLayer(data), docker+".gzip"), as(zstdLayer(data), docker+".zstd"),
		as(gzipLayer(data), docker), as(zstdLayer(data), docker+".gzip"),
	} {
		check(kinds{dockerKind, dockerConfig}, l)
	}
	for _, config := range []string{"application/octet-stream", "application/json", "text/html", ""} { // of registries of old
		check(kinds{dockerKind, config}, as(gzipLayer(data), docker+".gzip"))
	}
	reg.pushAs(oci, "art", "1", as(plainLayer(data), "application/vnd.test.blob"))
	reg.pushAs(kinds{ispec.MediaTypeImageManifest, "application/vnd.test.config"}, "art", "2", gzipLayer(data))
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
