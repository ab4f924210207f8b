package image

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// archiveOf writes files as a tar, compressed by pack.
func archiveOf(t *testing.T, pack func([]byte) layerBlob, files ...file) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "archive")
	if err := os.WriteFile(path, pack(tarOf(t, files...)).data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func toJSON(t *testing.T, v any) string {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// ociArchive holds one image for each name; "" has none.
func ociArchive(t *testing.T, pack func([]byte) layerBlob, names ...string) (string, []string) {
	t.Helper()
	files := []file{{name: "oci-layout", body: `{"imageLayoutVersion":"1.0.0"}`}, {name: "blobs/sha256/", kind: tar.TypeDir}}
	blob := func(data []byte) (digest.Digest, int64) {
		d := digest.FromBytes(data)
		files = append(files, file{name: "blobs/sha256/" + d.Encoded(), body: string(data)})
		return d, int64(len(data))
	}
	index := ispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}}
	var ids []string
	for _, n := range names {
		l := gzipLayer(tarOf(t, file{name: "name", body: "I am " + n}))
		config := []byte(toJSON(t, ispec.Image{
			Platform: ispec.Platform{Architecture: "amd64", OS: "linux"},
			RootFS:   ispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromBytes(l.tar)}},
		}))
		m := ispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageManifest}
		m.Config.MediaType = ispec.MediaTypeImageConfig
		m.Config.Digest, m.Config.Size = blob(config)
		layer := ispec.Descriptor{MediaType: l.mediaType}
		layer.Digest, layer.Size = blob(l.data)
		m.Layers = []ispec.Descriptor{layer}
		d := ispec.Descriptor{MediaType: ispec.MediaTypeImageManifest}
		d.Digest, d.Size = blob([]byte(toJSON(t, m)))
		if n != "" {
			d.Annotations = map[string]string{ispec.AnnotationRefName: n}
		}
		index.Manifests = append(index.Manifests, d)
		ids = append(ids, m.Config.Digest.String())
	}
	files = append(files, file{name: "index.json", body: toJSON(t, index)})
	return archiveOf(t, pack, files...), ids
}

func TestImportOCIArchives(t *testing.T) {
	for kind, pack := range map[string]func([]byte) layerBlob{"plain": plainLayer, "gzip": gzipLayer, "zstd": zstdLayer} {
		t.Run(kind, func(t *testing.T) {
			s := open(t, t.TempDir(), nil)
			path, ids := ociArchive(t, pack, "example.org/a:1", "", "b:2")
			got, err := s.Import(t.Context(), ImportRequest{File: path})
			if err != nil {
				t.Fatal(err)
			}
			want := []string{"example.org/a:1", ids[1], "docker.io/library/b:2"}
			if !slices.Equal(got, want) {
				t.Fatalf("imported %q, want %q", got, want)
			}
			r, err := s.Resolve("b:2")
			if err != nil || r.ID != ids[2] {
				t.Fatalf("%+v %v", r, err)
			}
			data, err := os.ReadFile(filepath.Join(r.Layers[0], "name"))
			if err != nil || string(data) != "I am b:2" {
				t.Fatalf("%q %v", data, err)
			}
			if left, _ := os.ReadDir(s.staging()); len(left) != 0 {
				t.Errorf("staging holds %v", left)
			}
		})
	}
}

// dockerArchive holds one image with these names.
func dockerArchive(t *testing.T, pack func([]byte) layerBlob, names ...string) (path, id string) {
	t.Helper()
	layerTar := tarOf(t, file{name: "hello", body: "docker"})
	config := toJSON(t, ispec.Image{
		Platform: ispec.Platform{Architecture: "amd64", OS: "linux"},
		RootFS:   ispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromBytes(layerTar)}},
	})
	d := digest.FromString(config)
	return archiveOf(t, pack,
		file{name: d.Encoded() + ".json", body: config},
		file{name: "one/layer.tar", body: string(layerTar)},
		file{name: "manifest.json", body: toJSON(t, []map[string]any{{
			"Config": d.Encoded() + ".json", "Layers": []string{"one/layer.tar"}, "RepoTags": names,
		}})}), d.String()
}

func TestImportDockerArchives(t *testing.T) {
	for kind, pack := range map[string]func([]byte) layerBlob{"plain": plainLayer, "gzip": gzipLayer, "zstd": zstdLayer} {
		t.Run(kind, func(t *testing.T) {
			s := open(t, t.TempDir(), nil)
			path, id := dockerArchive(t, pack, "x:1", "y.example/z:2")
			got, err := s.Import(t.Context(), ImportRequest{File: path})
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, []string{"docker.io/library/x:1"}) {
				t.Fatalf("imported %q", got)
			}
			for _, n := range []string{"x:1", "y.example/z:2", id} {
				if r, err := s.Resolve(n); err != nil || r.ID != id {
					t.Errorf("resolve %s: %v %v", n, r, err)
				}
			}
		})
	}
}

func TestImportRefusesWhatIsNoArchive(t *testing.T) {
	s := open(t, t.TempDir(), nil)
	whole, _ := ociArchive(t, gzipLayer, "a:1")
	data, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"empty": nil, "text": bytes.Repeat([]byte("no tar "), 1000), "cut": data[:len(data)/2],
		"other tar": tarOf(t, file{name: "x", body: "y"}),
	} {
		path := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := s.Import(t.Context(), ImportRequest{File: path})
		if err == nil || classify(err) != ErrInvalidImage {
			t.Errorf("%s: %v", name, err)
		}
	}
	empty(t, s)
}

// What is wrong with an archive is said by name, with the code of a bad image.
func TestImportNamesWhatIsWrong(t *testing.T) {
	s := open(t, t.TempDir(), nil)
	list := func(config string, layers ...string) file {
		return file{name: "manifest.json", body: toJSON(t, []dockerItem{{Config: config, Layers: layers}})}
	}
	config := file{name: "c.json", body: toJSON(t, ispec.Image{RootFS: ispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromString("x")}}})}
	layout := file{name: "oci-layout", body: `{"imageLayoutVersion":"1.0.0"}`}
	gone := ispec.Index{Manifests: []ispec.Descriptor{{MediaType: ispec.MediaTypeImageManifest, Digest: digest.FromString("gone"), Size: 4}}}
	cut := func(file string) []byte {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return data[:len(data)*3/5]
	}
	docker, _ := dockerArchive(t, plainLayer, "a:1")
	oci, _ := ociArchive(t, plainLayer, "a:1")
	packed, _ := ociArchive(t, zstdLayer, "a:1")
	for name, c := range map[string]struct {
		content []byte
		want    string
	}{
		"cut, of docker":           {cut(docker), "the archive is cut off"},
		"cut, a layout":            {cut(oci), "the archive is cut off"},
		"cut, a compressed layout": {cut(packed), "the archive is cut off"},
		"an empty list":            {tarOf(t, file{name: "manifest.json", body: "[]"}), "the archive has no image"},
		"null for a list":          {tarOf(t, file{name: "manifest.json", body: "null"}), "the archive has no image"},
		"a list that is none":      {tarOf(t, file{name: "manifest.json", body: "{"}), "manifest.json: unexpected end"},
		"a list too long":          {tarOf(t, file{name: "manifest.json", body: strings.Repeat(" ", maxDockerList+1)}), "manifest.json has more than 1048576 bytes"},
		"a layer not there":        {tarOf(t, config, list("c.json", "x/layer.tar")), `names "x/layer.tar", which is not in the archive`},
		"a layer outside":          {tarOf(t, config, list("c.json", "../../etc/passwd")), `names "../../etc/passwd", which is not in the archive`},
		"a config not there":       {tarOf(t, config, list("d.json")), `names "d.json", which is not in the archive`},
		"a link to nowhere": {tarOf(t, config, list("c.json", "x/layer.tar"), file{name: "x/layer.tar", kind: tar.TypeSymlink, link: "../y"}),
			`x/layer.tar is a link to "y", which is not in the archive`},
		"a manifest not there": {tarOf(t, layout, file{name: "index.json", body: toJSON(t, gone)}), "a file that it names is not in the archive"},
	} {
		path := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(path, c.content, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Import(t.Context(), ImportRequest{File: path}); !errors.Is(err, ErrInvalidImage) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	empty(t, s)
}

// An old docker saves a layer of two images once, and links to it.
func TestImportOfLinkedLayers(t *testing.T) {
	for kind, pack := range map[string]func([]byte) layerBlob{"plain": plainLayer, "gzip": gzipLayer} {
		for link, l := range map[string]file{
			"symlink": {name: "x/layer.tar", kind: tar.TypeSymlink, link: "../layer0.tar"},
			"hard":    {name: "x/layer.tar", kind: tar.TypeLink, link: "layer0.tar"},
		} {
			s := open(t, t.TempDir(), nil)
			layer := pack(tarOf(t, file{name: "hello", body: "linked"}))
			config := toJSON(t, ispec.Image{Platform: ispec.Platform{Architecture: "amd64", OS: "linux"},
				RootFS: ispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromBytes(layer.tar)}}})
			path := archiveOf(t, plainLayer, file{name: "c.json", body: config}, file{name: "layer0.tar", body: string(layer.data)}, l,
				file{name: "manifest.json", body: toJSON(t, []dockerItem{
					{Config: "c.json", RepoTags: []string{"linked:1"}, Layers: []string{"x/layer.tar"}}})})
			names, err := s.Import(t.Context(), ImportRequest{File: path})
			if err != nil || !slices.Equal(names, []string{"docker.io/library/linked:1"}) {
				t.Fatalf("%s, %s: %v, %v", kind, link, names, err)
			}
			r, err := s.Resolve("linked:1")
			if err != nil || r.ID != digest.FromString(config).String() {
				t.Fatalf("%s, %s: %+v, %v", kind, link, r, err)
			}
			if data, err := os.ReadFile(filepath.Join(r.Layers[0], "hello")); err != nil || string(data) != "linked" {
				t.Errorf("%s, %s: %q, %v", kind, link, data, err)
			}
			if left, _ := os.ReadDir(s.staging()); len(left) != 0 {
				t.Errorf("staging holds %v", left)
			}
		}
	}
}
