package image

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
)

// TestBoundsOfManifests: documents that are too much are refused with what and
// how much, and no layer is fetched.
func TestBoundsOfManifests(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	s := open(t, t.TempDir(), nil, reg)
	l := gzipLayer(tarOf(t, file{name: "f"}))
	m, id := reg.push("fine", "1", l)
	var manifest ispec.Manifest
	if err := json.Unmarshal(reg.docs["fine 1"].data, &manifest); err != nil {
		t.Fatal(err)
	}
	m.Platform = &ispec.Platform{OS: "linux", Architecture: runtime.GOARCH}
	of := func(manifests ...ispec.Descriptor) ispec.Index {
		return ispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageIndex, Manifests: manifests}
	}
	other := m
	other.Platform = &ispec.Platform{OS: "linux", Architecture: "s390x"}
	entries := make([]ispec.Descriptor, maxEntries)
	for i := range entries {
		entries[i] = other
	}
	entries[maxEntries-1] = m
	reg.doc("fine", ispec.MediaTypeImageIndex, of(entries...), "index")
	nested := m
	for range maxNesting {
		nested = reg.doc("fine", ispec.MediaTypeImageIndex, of(nested), "nested")
	}
	for _, tag := range []string{"index", "nested"} {
		if got := mustPull(t, s, reg.ref("fine:"+tag)); got != id {
			t.Errorf("at the limit, %s: %s", tag, got)
		}
	}
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	layers := manifest
	layers.Layers = make([]ispec.Descriptor, maxUses+1)
	for i := range layers.Layers {
		layers.Layers[i] = manifest.Layers[0]
	}
	config := manifest
	config.Config.Size = maxConfig + 1
	long := manifest
	padded := append(bytes.Clone(reg.blobs[manifest.Config.Digest]), bytes.Repeat([]byte{' '}, maxConfig)...)
	long.Config.Digest = reg.blob(padded)
	room := manifest
	room.Layers = []ispec.Descriptor{{MediaType: ispec.MediaTypeImageLayerGzip, Digest: manifest.Layers[0].Digest, Size: 1 << 60}}
	huge := []byte(`{"schemaVersion":2,"x":"` + strings.Repeat("x", maxManifest) + `"}`)
	before := reg.got(manifest.Layers[0].Digest.String())
	for name, c := range map[string]struct {
		mediaType string
		doc       any
		kind      error
		want      string
	}{
		"entries":         {ispec.MediaTypeImageIndex, of(append(entries, m)...), ErrInvalidImage, "index of 1001 entries, at most 1000"},
		"nesting":         {ispec.MediaTypeImageIndex, of(nested), ErrInvalidImage, "nested more than 4 deep"},
		"manifest":        {ispec.MediaTypeImageManifest, huge, ErrInvalidImage, fmt.Sprint(maxManifest)},
		"layers":          {ispec.MediaTypeImageManifest, layers, ErrInvalidImage, "manifest of 1001 layers, at most 1000"},
		"config":          {ispec.MediaTypeImageManifest, config, ErrInvalidImage, "config of 4194305 bytes, at most 4194304"},
		"config, unsaid":  {ispec.MediaTypeImageManifest, long, ErrInvalidImage, "config of more than 4194304 bytes"},
		"larger than all": {ispec.MediaTypeImageManifest, room, ErrInvalidImage, "of 1152921504606846976 bytes, the whole filesystem"},
	} {
		reg.doc("bad", c.mediaType, c.doc, "1")
		for ref, doc := range maps.Clone(reg.docs) { // an index's members are in its own repository
			if digest, ok := strings.CutPrefix(ref, "fine sha256:"); ok {
				reg.docs["bad sha256:"+digest] = doc
			}
		}
		_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("bad:1")})
		if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %.500v, want %q", name, err, c.want)
		}
	}
	if reg.got(manifest.Layers[0].Digest.String()) != before {
		t.Error("a layer was fetched")
	}
	empty(t, s)
}

// TestB17NamesThatGoTakesForOthers: Go's decoder finds "manifests" under names
// that are written otherwise.
func TestB17NamesThatGoTakesForOthers(t *testing.T) {
	for _, name := range []string{"manifests", "Manifests", "MANIFEſTS", "manifeſts"} {
		body := fmt.Sprintf(`{"schemaVersion":2,"layers":[],"config":{},%q:[{"digest":"x"}]}`, name)
		var index ispec.Index
		if err := json.Unmarshal([]byte(body), &index); err != nil || len(index.Manifests) != 1 {
			t.Fatalf("%s: the decoder has changed: %v", name, err)
		}
		if d, err := newDocument([]byte(body), ispec.MediaTypeImageManifest); !errors.Is(err, ErrInvalidImage) {
			t.Errorf("%s is not seen: taken for %s", name, d.mediaType)
		}
	}
}

// TestExpansion: what compresses extremely well is refused beyond the allowance,
// in an archive too, long before it has filled the disk.
func TestExpansion(t *testing.T) {
	leakcheck.Start(t)
	// A gzip stream may hold many members: each of these is 100 MB of zeros. They
	// stand behind the tar's end, where they spare the test's disk.
	var part bytes.Buffer
	z, _ := gzip.NewWriterLevel(&part, gzip.BestCompression)
	z.Write(make([]byte, 100<<20))
	z.Close()
	zeros := bytes.Repeat(part.Bytes(), 30)
	bomb := append(gzipLayer(tarOf(t, file{name: "f"})).data, zeros...)
	reg := newRegistry(t)
	reg.push("bomb", "1", layerBlob{[]byte("never seen"), bomb, ispec.MediaTypeImageLayerGzip})
	s := open(t, t.TempDir(), nil, reg)
	_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("bomb:1")})
	if !errors.Is(err, ErrInvalidImage) || !strings.Contains(err.Error(), "the limit is 100 times as much and 1073741824 bytes beside") {
		t.Errorf("got %v", err)
	}
	empty(t, s)
	archive := filepath.Join(t.TempDir(), "archive")
	if err := os.WriteFile(archive, append(gzipLayer(encodeTar(gnuForm, promise(3<<30))[:512]).data, zeros...), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Import(t.Context(), ImportRequest{File: archive}); !errors.Is(err, ErrInvalidImage) || !strings.Contains(err.Error(), "100 times") {
		t.Errorf("as an archive: %v", err)
	}
	// A layer that is all but empty, but not large, is fine.
	var body bytes.Buffer
	w := gzip.NewWriter(&body)
	plain := encodeTar(gnuForm, member{name: "zeros", kind: '0', mode: 0o644, body: strings.Repeat("\x00", 200<<20)})
	w.Write(plain)
	w.Close()
	reg.push("zeros", "1", layerBlob{plain, body.Bytes(), ispec.MediaTypeImageLayerGzip})
	mustPull(t, s, reg.ref("zeros:1"))
}

// promise is a file of which only the header is there.
func promise(size int64) member { return member{name: "zeros", kind: '0', mode: 0o644, promised: size} }

func statfs(t *testing.T, dir string) uint64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return st.Bavail * uint64(st.Bsize)
}

// TestAFileLargerThanTheDisk is refused before it has filled the disk.
func TestAFileLargerThanTheDisk(t *testing.T) {
	leakcheck.Start(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64m"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	reg := newRegistry(t)
	data := gzipLayer(append(encodeTar(gnuForm, promise(1<<30))[:512], make([]byte, 32<<20)...))
	reg.push("large", "1", data)
	s := open(t, filepath.Join(dir, "images"), nil, reg)
	defer s.Close()
	before := statfs(t, dir)
	_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("large:1")})
	if !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), `"zeros": 1073741824 bytes`) || !strings.Contains(err.Error(), dir) {
		t.Errorf("got %v", err)
	}
	if after := statfs(t, dir); after+1<<20 < before {
		t.Errorf("%d bytes are left in use", before-after)
	}
}
