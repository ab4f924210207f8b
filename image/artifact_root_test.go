package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/rootfs"
	"berth/sandbox/leakcheck"
)

// part is a blob of an artifact; no title means none.
type part struct{ title, body, mediaType string }

const modelType = "application/vnd.example.model"

// artifactManifest stores the blobs and makes a manifest as oras does.
func (r *registry) artifactManifest(parts ...part) ispec.Manifest {
	m := ispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageManifest, ArtifactType: modelType}
	m.Config = ispec.Descriptor{MediaType: ispec.MediaTypeEmptyJSON, Digest: r.blob([]byte("{}")), Size: 2}
	for _, p := range parts {
		d := ispec.Descriptor{MediaType: p.mediaType, Digest: r.blob([]byte(p.body)), Size: int64(len(p.body))}
		if d.MediaType == "" {
			d.MediaType = "application/octet-stream"
		}
		if p.title != "" {
			d.Annotations = map[string]string{ispec.AnnotationTitle: p.title}
		}
		m.Layers = append(m.Layers, d)
	}
	return m
}

func (r *registry) pushArtifact(repo string, parts ...part) (id string) {
	return r.doc(repo, ispec.MediaTypeImageManifest, r.artifactManifest(parts...), "1").Digest.String()
}

// shown mounts an image as a volume and lists it: names, modes, owners, content.
func shown(t *testing.T, r *Record) []string {
	t.Helper()
	dir := t.TempDir()
	at := filepath.Join(dir, "volume")
	if err := rootfs.Create(rootfs.Mount{Target: at, Upper: filepath.Join(dir, "u"), Work: filepath.Join(dir, "w"), Layers: r.Layers, ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := rootfs.Unmount(at); err != nil {
			t.Error(err)
		}
	}()
	var list []string
	err := filepath.WalkDir(at, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		line := fmt.Sprintf("%s %v %d:%d", strings.TrimPrefix(path, at), info.Mode(), st.Uid, st.Gid)
		if info.Mode().IsRegular() {
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += " " + string(data)
		}
		list = append(list, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestArtifactsAreDirectoriesOfFiles(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	s := open(t, t.TempDir(), nil, reg)
	old := syscall.Umask(0o077) // modes are not the daemon's affair
	defer syscall.Umask(old)
	for name, tc := range map[string]struct {
		parts []part
		want  []string
	}{
		"one file":    {[]part{{"model.bin", "weights", ""}}, []string{" drwxr-xr-x 0:0", "/model.bin -rw-r--r-- 0:0 weights"}},
		"several":     {[]part{{"b", "2", ""}, {"a", "1", ""}, {".wh.a", "3", ""}}, []string{" drwxr-xr-x 0:0", "/.wh.a -rw-r--r-- 0:0 3", "/a -rw-r--r-- 0:0 1", "/b -rw-r--r-- 0:0 2"}},
		"directories": {[]part{{"x/y/a", "1", ""}, {"x/b", "2", ""}}, []string{" drwxr-xr-x 0:0", "/x drwxr-xr-x 0:0", "/x/b -rw-r--r-- 0:0 2", "/x/y drwxr-xr-x 0:0", "/x/y/a -rw-r--r-- 0:0 1"}},
		"same bytes":  {[]part{{"a", "", ""}, {"d/b", "", ""}, {"c", "", ""}}, []string{" drwxr-xr-x 0:0", "/a -rw-r--r-- 0:0 ", "/c -rw-r--r-- 0:0 ", "/d drwxr-xr-x 0:0", "/d/b -rw-r--r-- 0:0 "}},
		"no title": {[]part{{"", "raw", ""}}, []string{" drwxr-xr-x 0:0",
			"/" + strings.Replace(digest.FromString("raw").String(), ":", "-", 1) + " -rw-r--r-- 0:0 raw"}},
		"no file":         {[]part{{"", "{}", ispec.MediaTypeEmptyJSON}}, []string{" drwxr-xr-x 0:0"}},
		"layers as files": {[]part{{"chart.tgz", "packed", ispec.MediaTypeImageLayerGzip}}, []string{" drwxr-xr-x 0:0", "/chart.tgz -rw-r--r-- 0:0 packed"}},
	} {
		t.Run(name, func(t *testing.T) {
			repo := strings.ReplaceAll(name, " ", "-")
			id := reg.pushArtifact(repo, tc.parts...)
			if got := mustPull(t, s, reg.ref(repo+":1")); got != id {
				t.Errorf("id %s, want that of the manifest, %s", got, id)
			}
			r, err := s.Resolve(reg.ref(repo + ":1"))
			if err != nil {
				t.Fatal(err)
			}
			if r.Artifact != modelType || r.Size == 0 || r.RepoDigests[0] != reg.ref(repo)+"@"+id {
				t.Errorf("record %+v", r)
			}
			if got := shown(t, r); !slices.Equal(got, tc.want) {
				t.Errorf("mounted:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(tc.want, "\n"))
			}
		})
	}
}

// Artifacts are counted, kept and removed as images are.
func TestArtifactsInTheStore(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	s := open(t, t.TempDir(), nil, reg)
	big := strings.Repeat("weights ", 100_000)
	a := reg.pushArtifact("a", part{"model.bin", big, ""}, part{"license", "free", ""})
	b := reg.pushArtifact("b", part{"model.bin", big, ""}, part{"license", "not free", ""})
	mustPull(t, s, reg.ref("a:1"))
	mustPull(t, s, reg.ref("b:1"))
	if n := reg.got("/blobs/" + reg.blob([]byte(big)).String()); n != 1 {
		t.Errorf("the file that both have was fetched %d times", n)
	}
	config, err := s.RawConfig(a)
	if err != nil || string(config) != "{}" {
		t.Errorf("config %q %v", config, err)
	}
	check := func() {
		t.Helper()
		for _, id := range []string{a, b} {
			r, err := s.Resolve(id)
			if err != nil {
				t.Fatal(err)
			}
			if r.Artifact != modelType || r.Size < uint64(len(big)) || len(shown(t, r)) != 3 {
				t.Errorf("%+v", r)
			}
		}
	}
	check()
	s = reopen(t, s)
	check()
	if s.Hold(a, "container") == nil {
		t.Fatal("cannot hold it")
	}
	for _, id := range []string{a, b} {
		if err := s.Remove(context.Background(), id); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.List()) != 0 || len(s.layers.byN) != 2 {
		t.Errorf("%d images, %d layers; want none and those that are held", len(s.List()), len(s.layers.byN))
	}
	s.Release("container")
	empty(t, s)
}

func TestArtifactRefusals(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	s := open(t, t.TempDir(), nil, reg)
	many := func(n int) (list []part) {
		for i := range n {
			list = append(list, part{fmt.Sprint(i), "x", ""})
		}
		return list
	}
	titled := func(titles ...string) (list []part) {
		for i, title := range titles {
			list = append(list, part{title, fmt.Sprint(i), ""})
		}
		return list
	}
	n := 0
	refused := func(what string, m any, mediaType string, words ...string) {
		t.Helper()
		n++
		repo := fmt.Sprintf("r%d", n)
		reg.doc(repo, mediaType, m, "1")
		_, err := s.Pull(context.Background(), PullRequest{Reference: reg.ref(repo + ":1")})
		for _, w := range words {
			if !errors.Is(err, ErrInvalidImage) || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v, want a refusal with %q", what, err, w)
			}
		}
		if got := reg.got("/" + repo + "/blobs/"); got != 0 {
			t.Errorf("%s: %d blobs were asked for", what, got)
		}
		empty(t, s)
	}
	for what, tc := range map[string]struct {
		parts []part
		words string
	}{
		"a title twice":           {titled("a", "a"), `"a"`},
		"a title twice, spelled":  {titled("a", "./a"), `"a"`},
		"a file and a directory":  {titled("a", "a/b"), `"a"`},
		"a directory and a file":  {titled("a/b", "a"), `"a"`},
		"climbing":                {titled("../a"), `"../a"`},
		"climbing in the middle":  {titled("a/../../b"), `"a/../../b"`},
		"absolute":                {titled("/etc/passwd"), `"/etc/passwd"`},
		"the directory":           {titled("."), `"."`},
		"a directory":             {titled("a/"), `"a/"`},
		"a line break":            {titled("a\nb"), `"a\nb"`},
		"a NUL":                   {titled("a\x00b"), `"a\x00b"`},
		"long":                    {titled(strings.Repeat("a/", 512) + "a"), "longer than 1024"},
		"a long part":             {titled(strings.Repeat("a", 256)), "more than 255"},
		"too many":                {many(rootfs.MaxLayers), "at most 499"},
		"the digest of another's": {append(titled(strings.Replace(digest.FromString("raw").String(), ":", "-", 1)), part{"", "raw", ""}), "twice"},
	} {
		refused(what, reg.artifactManifest(tc.parts...), ispec.MediaTypeImageManifest, tc.words)
	}
	m := reg.artifactManifest(part{"", "layer", ispec.MediaTypeImageLayerGzip})
	m.ArtifactType, m.Config.MediaType = "", "application/vnd.test.config"
	refused("layers under an unknown config", m, ispec.MediaTypeImageManifest, "application/vnd.test.config", "neither")
	m = reg.artifactManifest(part{"a", "b", ""})
	m.ArtifactType, m.Config.MediaType = "", ""
	refused("no type at all", m, ispec.MediaTypeImageManifest, "neither")
	m = reg.artifactManifest(part{"", "layer", "application/vnd.oci.image.layer.v1.tar+gzip+encrypted"})
	m.ArtifactType, m.Config.MediaType = "", ispec.MediaTypeImageConfig
	refused("an encrypted layer", m, ispec.MediaTypeImageManifest, "application/vnd.oci.image.layer.v1.tar+gzip+encrypted")
	m = reg.artifactManifest(part{"a", "b", ""})
	m.MediaType, m.ArtifactType, m.Config.MediaType = kindDocker, "", "application/vnd.docker.plugin.v1+json"
	refused("a plugin of docker", m, kindDocker, "application/vnd.docker.plugin.v1+json")
}

const kindDocker = "application/vnd.docker.distribution.manifest.v2+json"

// What arrives has to be what the manifest promises.
func TestArtifactContent(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	s := open(t, t.TempDir(), nil, reg)
	for what, change := range map[string]func(d *ispec.Descriptor){
		"other bytes": func(d *ispec.Descriptor) {
			reg.mu.Lock()
			defer reg.mu.Unlock()
			reg.blobs[d.Digest] = []byte("weighty")
		},
		"fewer bytes than promised": func(d *ispec.Descriptor) { d.Size++ },
		"more bytes than promised":  func(d *ispec.Descriptor) { d.Size-- },
	} {
		m := reg.artifactManifest(part{"model", "weights", ""})
		change(&m.Layers[0])
		repo := strings.ReplaceAll(what, " ", "-")
		reg.doc(repo, ispec.MediaTypeImageManifest, m, "1")
		if _, err := s.Pull(context.Background(), PullRequest{Reference: reg.ref(repo + ":1")}); !errors.Is(err, ErrInvalidImage) && !errors.Is(err, ErrRegistryUnavailable) {
			t.Errorf("%s: %v", what, err)
		}
		empty(t, s)
	}
}

// A manifest with an artifact's type whose layers are an image's is an image.
func TestImagesWithAnArtifactType(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	s := open(t, t.TempDir(), nil, reg)
	desc, id := reg.push("image", "1", gzipLayer(tarOf(t, file{name: "f", body: "content"})))
	data := reg.docs["image "+desc.Digest.String()].data
	reg.doc("image", ispec.MediaTypeImageManifest, []byte(strings.Replace(string(data), "{", `{"artifactType":"`+modelType+`",`, 1)), "2")
	if got := mustPull(t, s, reg.ref("image:2")); got != id {
		t.Errorf("id %s, want %s", got, id)
	}
	if r, err := s.Resolve(id); err != nil || r.Artifact != "" {
		t.Errorf("%+v %v", r, err)
	}
}

// An artifact is shown like an image, and exported and imported as it came.
func TestArtifactsAreExported(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	s := open(t, t.TempDir(), nil, reg)
	m := reg.artifactManifest(part{"a", "same", ""}, part{"d/b", "same", ""}, part{"c", "other", ""}, part{"", "{}", ispec.MediaTypeEmptyJSON})
	m.Config = ispec.Descriptor{MediaType: "application/vnd.example.config", Digest: reg.blob([]byte{0, 255}), Size: 2}
	id := reg.doc("model", ispec.MediaTypeImageManifest, m, "1").Digest.String()
	ref := reg.ref("model:1")
	mustPull(t, s, ref)
	d, err := s.Inspect(ref)
	if err != nil {
		t.Fatal(err)
	}
	if d.ID != id || d.Artifact != modelType || len(d.Layers) != 4 || string(d.Config) != `"AP8="` || d.Manifest.Digest.String() != id || len(d.Others) != 0 {
		t.Errorf("details %+v", d)
	}
	out := filepath.Join(t.TempDir(), "model.tar.zst")
	e, err := s.Export(t.Context(), ref, out)
	if err != nil || !e.Exact || e.ID != id {
		t.Fatalf("export %+v %v", e, err)
	}
	to := open(t, t.TempDir(), nil)
	if names, err := to.Import(t.Context(), ImportRequest{File: out}); err != nil || !slices.Equal(names, []string{ref}) {
		t.Fatalf("import %v %v", names, err)
	}
	before, err := s.Resolve(id)
	if err != nil {
		t.Fatal(err)
	}
	after, err := to.Resolve(id)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := shown(t, before), shown(t, after); after.Artifact != modelType || !slices.Equal(a, b) {
		t.Errorf("exported %v, imported %v", a, b)
	}
}

// A damaged file of an artifact is found and fetched again; so is a damaged
// signature.
func TestArtifactsAreChecked(t *testing.T) {
	leakcheck.Start(t)
	e := newSigning(t)
	id := e.reg.pushArtifact("app", part{"a", "same", ""}, part{"d/b", "same", ""}, part{"c", "other", ""})
	e.manifest = digest.Digest(id)
	e.rule(sigstoreRule(e.key, nil))
	e.sign(e.key, e.ref)
	e.wants("pull", e.pull(e.ref, ""), "")
	e.wants("use", e.use(id, e.ref, ""), "")
	sound(t, e.store)
	r, err := e.store.Resolve(id)
	if err != nil {
		t.Fatal(err)
	}
	signature, err := e.store.blobs.Path(r.saved.proof()[0])
	if err != nil {
		t.Fatal(err)
	}
	for what, damage := range map[string]func() error{
		"a file": func() error {
			return os.WriteFile(filepath.Join(layerWith(t, e.store, id, "c"), "c"), []byte("OTHER"), 0o644)
		},
		"a signature": func() error { return os.Truncate(signature, 5) },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		if lines, _ := findings(t, e.store, true); len(lines) == 0 {
			t.Errorf("%s: nothing is found", what)
		}
		sound(t, e.store)
		e.wants("use", e.use(id, e.ref, ""), "")
	}
}
