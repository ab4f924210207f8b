package image

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
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
	plain := gzipLayer(tarOf(t, file{name: "f", body: "a"}, file{name: "explicit/"}, file{name: "explicit/x"}))
	for repo, layers := range map[string][]layerBlob{
		"aba": {a, b, a}, "aa": {a, a}, "plain": {plain, plain}, "mixed": {a, b, otherA}, "abab": {a, b, a, b},
	} {
		reg.push(repo, "1", layers...)
		dir := t.TempDir()
		s := open(t, dir, nil, reg)
		count := func() int {
			return reg.got(digest.FromBytes(a.data).String()) + reg.got(digest.FromBytes(otherA.data).String()) + reg.got(digest.FromBytes(plain.data).String())
		}
		before := count()
		mustPull(t, s, reg.ref(repo+":1"))
		root := mounted(t, s, reg.ref(repo+":1"))
		_, err := os.Stat(root + "/f")
		if there := err == nil; there != (repo != "abab") {
			t.Errorf("%s: /f is there: %v", repo, there)
		}
		if fetched := count() - before; fetched != 1 {
			t.Errorf("%s: the layer was fetched %d times", repo, fetched)
		}
		if stored := ls(t, filepath.Join(dir, "layers")); repo == "plain" && len(stored) != 1 {
			t.Errorf("%s: the layer is stored as %v", repo, stored)
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

func TestB35AsManyLayersAsTheKernelStacks(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	var layers []layerBlob
	for i := range rootfs.MaxLayers {
		layers = append(layers, plainLayer(tarOf(t, file{name: fmt.Sprintf("f%d", i)}, file{name: "top", body: fmt.Sprint(i)})))
	}
	s := open(t, filepath.Join(inMemory(t), strings.Repeat("l", 200), "images"), nil, reg)
	for _, count := range []int{127, 200, rootfs.MaxLayers} {
		ref := fmt.Sprintf("many:%d", count)
		reg.push("many", fmt.Sprint(count), layers[:count]...)
		mustPull(t, s, reg.ref(ref))
		root := mounted(t, s, reg.ref(ref))
		if got := ls(t, root); len(got) != count+1 {
			t.Errorf("%d layers show %d files", count, len(got))
		}
		if top, err := os.ReadFile(root + "/top"); err != nil || string(top) != fmt.Sprint(count-1) {
			t.Errorf("of %d layers %q is on top (%v)", count, top, err)
		}
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
			if left := ls(t, filepath.Join(s.root, "staging")); len(left) != 0 {
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

// TestALayerBelowALink: bin is a link to usr/bin below, and the layer has
// bin/tool without an entry for bin.
func TestALayerBelowALink(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	base := gzipLayer(tarOf(t, file{name: "usr/"}, file{name: "usr/bin/", mode: 0o711}, file{name: "usr/bin/sh", body: "sh"},
		file{name: "bin", kind: '2', link: "usr/bin"}, file{name: "bin/early", body: "e"}))
	tool := gzipLayer(tarOf(t, file{name: "bin/tool", body: "tool"}, file{name: "bin/sub/x"}, file{name: "bin/link", kind: '1', link: "usr/bin/sh"}))
	reg.push("app", "1", base, tool)
	reg.push("more", "1", base, tool, gzipLayer(tarOf(t, file{name: "more"})))
	reg.push("plain", "1", tool, base)
	s := open(t, t.TempDir(), nil, reg)
	for _, repo := range []string{"app", "more", "app"} {
		mustPull(t, s, reg.ref(repo+":1"))
		root := mounted(t, s, reg.ref(repo+":1"))
		if target, err := os.Readlink(root + "/bin"); err != nil || target != "usr/bin" {
			t.Errorf("%s: bin -> %q %v", repo, target, err)
		}
		if got := ls(t, root+"/usr/bin"); !slices.Equal(got, []string{"early", "link", "sh", "sub", "tool"}) {
			t.Errorf("%s: usr/bin has %q", repo, got)
		}
		var a, b unix.Stat_t
		if unix.Stat(root+"/bin/link", &a) != nil || unix.Stat(root+"/usr/bin/sh", &b) != nil || a.Ino != b.Ino {
			t.Errorf("%s: the link to a file below is not one", repo)
		}
	}
	if n := reg.got(digest.FromBytes(tool.data).String()); n != 1 {
		t.Errorf("the layer was fetched %d times", n)
	}
	if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("plain:1")}); !errors.Is(err, ErrInvalidImage) || !strings.Contains(err.Error(), "usr/bin/sh") {
		t.Errorf("a hard link to nothing: %v", err)
	}
}

func TestAnImageWithoutLayers(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	_, id := reg.push("none", "1")
	s := open(t, t.TempDir(), nil, reg)
	mustPull(t, s, reg.ref("none:1"))
	r, err := s.Resolve(id)
	if err != nil || len(r.Layers) != 0 || r.Size == 0 {
		t.Errorf("%+v %v", r, err)
	}
	if got := ls(t, mounted(t, s, id)); len(got) != 0 {
		t.Errorf("the root has %q", got)
	}
}

// The config can be read as it came, and is not found once the image is gone.
func TestRawConfig(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("app", "1", gzipLayer(tarOf(t, file{name: "f"})))
	s := open(t, t.TempDir(), nil, reg)
	id := mustPull(t, s, reg.ref("app:1"))
	raw, err := s.RawConfig(id)
	if err != nil || digest.FromBytes(raw).String() != id {
		t.Errorf("%s, %v; want the bytes of %s", raw, err, id)
	}
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if _, err := s.RawConfig(id); !errors.Is(err, ErrNotFound) {
		t.Errorf("removed: %v", err)
	}
}

// What random images found: layers that mean something only on those below.
func TestLayersThatDependOnOthers(t *testing.T) {
	leakcheck.Start(t)
	long := strings.Repeat("n", 255)
	reg := newRegistry(t)
	reg.push("app", "1",
		gzipLayer(tarOf(t,
			file{name: "opaque/", mode: 0o750, uid: 7}, file{name: "opaque/gone"}, file{name: long}, file{name: "f", body: "f"},
			file{name: "deleted/", mode: 0o750, uid: 7}, file{name: "var/run", kind: '2', link: "../run"})),
		gzipLayer(tarOf(t,
			file{name: "opaque/.wh..wh..opq"},                                            // without an entry for the directory
			file{name: ".wh." + long},                                                    // longer than a name can be
			file{name: "a", kind: '1', link: "z"}, file{name: "z", kind: '1', link: "f"}, // links to links
			file{name: ".wh.deleted"}, file{name: "deleted/x"}, // new where one is deleted
			file{name: "run/", mode: 0o711}, file{name: "var/run/pid"}, file{name: "b", kind: '1', link: "y"}, // a link below to a directory here
			file{name: "y", kind: '1', link: "x"}, file{name: "x", body: "x"})))
	reg.push("circle", "1", gzipLayer(tarOf(t, file{name: "a", kind: '1', link: "b"}, file{name: "b", kind: '1', link: "a"})))
	reg.push("whiteout", "1", gzipLayer(tarOf(t, file{name: "a", kind: '1', link: ".wh." + long + "/x"})))
	s := open(t, t.TempDir(), nil, reg)
	mustPull(t, s, reg.ref("app:1"))
	root := mounted(t, s, reg.ref("app:1"))
	if got := ls(t, root); !slices.Equal(got, []string{"a", "b", "deleted", "f", "opaque", "run", "var", "x", "y", "z"}) {
		t.Errorf("the root has %q", got)
	}
	if got := ls(t, root+"/run"); !slices.Equal(got, []string{"pid"}) {
		t.Errorf("/run has %q", got)
	}
	for name, want := range map[string][2]uint32{"opaque": {0o750, 7}, "deleted": {0o755, 0}, "run": {0o711, 0}} {
		var st unix.Stat_t
		if err := unix.Lstat(root+"/"+name, &st); err != nil || st.Mode&0o7777 != want[0] || st.Uid != want[1] {
			t.Errorf("/%s is %o of %d (%v), want %o of %d", name, st.Mode&0o7777, st.Uid, err, want[0], want[1])
		}
	}
	for _, group := range [][]string{{"f", "a", "z"}, {"x", "b", "y"}} {
		for _, name := range group {
			a, errA := os.Lstat(root + "/" + name)
			b, errB := os.Lstat(root + "/" + group[0])
			if errA != nil || errB != nil || !os.SameFile(a, b) {
				t.Errorf("%s is not %s (%v %v)", name, group[0], errA, errB)
			}
		}
	}
	for repo, want := range map[string]string{"circle": "lead to one another", "whiteout": "a whiteout"} {
		if _, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref(repo + ":1")}); !errors.Is(err, ErrInvalidImage) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", repo, err)
		}
	}
}
