package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/critest/registry"
)

// deps is the folder that `make deps` fills.
func deps(t *testing.T) string {
	t.Helper()
	if d := os.Getenv("BERTH_DEPS"); d != "" {
		return d
	}
	return filepath.Join("..", "..", ".deps")
}

func load(t *testing.T) *Parts {
	t.Helper()
	p, err := Load(deps(t))
	if errors.Is(err, ErrParts) {
		t.Skipf("the image parts are not installed: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// members reads a gzip layer back: name to header and content.
func members(t *testing.T, l Layer) (map[string]*tar.Header, map[string][]byte) {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(l.Blob))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	if got := digest.FromBytes(raw); got != l.DiffID {
		t.Fatalf("diffID %s, content is %s", l.DiffID, got)
	}
	headers, data := map[string]*tar.Header{}, map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(raw)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return headers, data
		}
		if err != nil {
			t.Fatal(err)
		}
		if data[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
		headers[h.Name] = h
	}
}

func TestBaseHasAppletsAsHardLinksAndItsLibraries(t *testing.T) {
	headers, data := members(t, load(t).Base)
	for _, name := range strings.Fields("sh top sleep echo ls touch mkdir mount dd id hostname cat grep ping netstat brctl chmod pidof seq sync") {
		h := headers["bin/"+name]
		if h == nil || h.Typeflag != tar.TypeLink || h.Linkname != "bin/busybox" {
			t.Errorf("applet %s: %+v, want a hard link to busybox", name, h)
		}
	}
	for _, name := range []string{"bin/pgrep", "bin/ipcs"} {
		if !bytes.HasPrefix(data[name], []byte("#!/bin/sh\n")) {
			t.Errorf("%s is not a script", name)
		}
	}
	libs := 0
	for name, h := range headers {
		if strings.Contains(name, ".so") && h.Typeflag == tar.TypeReg && h.Size > 0 {
			libs++
		}
	}
	if libs < 2 {
		t.Errorf("%d libraries, want the C library and its loader at least", libs)
	}
	if headers["tmp/"].Mode != 0o1777 || !bytes.Contains(data["etc/passwd"], []byte("nobody:x:65534:")) {
		t.Error("/tmp or /etc/passwd is not as critest needs it")
	}
}

func TestStandardSetIsServedAndStable(t *testing.T) {
	var references []string
	for range 2 {
		r, err := registry.Start()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		ref, err := load(t).Standard(r)
		if err != nil {
			t.Fatal(err)
		}
		references = append(references, ref)
	}
	if references[0] != references[1] || !strings.HasPrefix(references[0], "gcr.io/k8s-staging-cri-tools/test-image-digest@sha256:") {
		t.Errorf("digest references %q, want twice the same", references)
	}
}

func TestImagesOfTheTableDiffer(t *testing.T) {
	r, err := registry.Start()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	p, seen := load(t), map[digest.Digest]string{}
	for _, s := range table() {
		image, err := p.build(s)
		if err != nil {
			t.Fatal(err)
		}
		done, err := image.Publish(r, s.repository, s.tags[0])
		if err != nil {
			t.Fatal(err)
		}
		if other := seen[done.Config]; other != "" {
			t.Errorf("%s:%v has the id of %s", s.repository, s.tags, other)
		}
		seen[done.Config] = s.repository
	}
}

func TestCompressionsAgreeOnTheDiffID(t *testing.T) {
	entries := []Entry{Dir("d", 0o750), File("d/f", 0o4755, "text"), Symlink("l", "d/f"), Hardlink("h", "d/f")}
	var layers []Layer
	for _, c := range []Compression{Gzip, Zstd, Plain} {
		l, err := NewLayer(c, entries...)
		if err != nil {
			t.Fatal(err)
		}
		layers = append(layers, l)
	}
	if layers[0].DiffID != layers[1].DiffID || layers[1].DiffID != layers[2].DiffID {
		t.Errorf("diffIDs differ: %v %v %v", layers[0].DiffID, layers[1].DiffID, layers[2].DiffID)
	}
	if digest.FromBytes(layers[2].Blob) != layers[2].DiffID {
		t.Error("a plain layer is not its own diffID")
	}
	if !bytes.HasPrefix(layers[1].Blob, []byte{0x28, 0xb5, 0x2f, 0xfd}) || layers[1].MediaType != ispec.MediaTypeImageLayerZstd {
		t.Error("the zstd layer is not zstd")
	}
	headers, data := members(t, layers[0])
	if headers["d/f"].Mode != 0o4755 || string(data["d/f"]) != "text" || headers["l"].Linkname != "d/f" {
		t.Errorf("entries came back as %+v", headers)
	}
}

func TestMissingPartsAreNamed(t *testing.T) {
	dir := t.TempDir()
	if _, err := Load(dir); !errors.Is(err, ErrParts) || !strings.Contains(err.Error(), dir) {
		t.Errorf("error %v, want ErrParts with the path", err)
	}
}
