package image

import (
	"archive/tar"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/image/layer"
	"berth/sandbox/leakcheck"
)

// duOf is what du says of a directory, without some of what is in it.
func duOf(t *testing.T, dir string, exclude ...string) layer.Usage {
	t.Helper()
	count := func(flag string) (n uint64) {
		args := []string{"-s", flag, dir}
		for _, e := range exclude {
			args = append(args, "--exclude="+e)
		}
		out, err := exec.Command("du", args...).Output()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Sscan(string(out), &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	return layer.Usage{Bytes: count("--block-size=1"), Inodes: count("--inodes")}
}

// filesystems to keep a store on.
func filesystems(t *testing.T) map[string]func(t *testing.T) string {
	return map[string]func(t *testing.T) string{
		"ext4": func(t *testing.T) string { return loopMount(t, newDisk(t)) },
		"tmpfs": func(t *testing.T) string {
			dir := t.TempDir()
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=96m"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
			return dir
		},
	}
}

// TestDiskUsageIsWhatDuCounts: on two filesystems, at every moment of a store's
// life, the kinds add up to du's sum, ImageFsInfo's figure is du's without what
// it does not claim, and removing an image frees what was said.
func TestDiskUsageIsWhatDuCounts(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	var files []file
	for i := range 300 {
		files = append(files, file{name: fmt.Sprintf("d%d/f%d", i%7, i), body: strings.Repeat("x", i*97)})
	}
	files = append(files, file{name: "hard", kind: tar.TypeLink, link: "d1/f1"}, file{name: "long", kind: tar.TypeSymlink, link: strings.Repeat("s", 200)},
		file{name: "attr", xattrs: map[string]string{"user.long": strings.Repeat("v", 900)}}, file{name: ".wh.gone"})
	base := gzipLayer(tarOf(t, files...))
	sparse := gzipLayer(gnuSparse(t))
	reg.push("a", "1", base, sparse, gzipLayer(tarOf(t, file{name: "d1/settled", body: "x"})))
	reg.push("b", "1", base, gzipLayer(tarOf(t, file{name: "b", body: strings.Repeat("b", 1<<20)})))
	reg.push("c", "1", gzipLayer(tarOf(t, file{name: "c", body: strings.Repeat("c", 5000)})))
	for name, mount := range filesystems(t) {
		for _, keep := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, blobs kept: %v", name, keep), func(t *testing.T) {
				s := open(t, filepath.Join(mount(t), "images"), func(o *Options) { o.KeepLayerBlobs = keep }, reg)
				defer s.Close()
				check := func(s *Store, when string) *DiskUsage {
					t.Helper()
					calm(t, s)
					unix.Sync() // a filesystem may count blocks only when it writes them
					if err := s.durable.sync(); err != nil {
						t.Fatal(err)
					}
					d, err := s.DiskUsage(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					if want := duOf(t, s.root); d.Total != want {
						t.Errorf("%s: %+v, du says %+v", when, d, want)
					}
					claims := duOf(t, s.root, "*/trash/*", "*/staging/*", "*/stray*")
					if u := s.Usage(); (layer.Usage{Bytes: u.Bytes, Inodes: u.Inodes}) != claims {
						t.Errorf("%s: ImageFsInfo would say %+v, du %+v", when, u, claims)
					}
					return d
				}
				check(s, "empty")
				a := mustPull(t, s, reg.ref("a:1"))
				check(s, "one image")
				b, c := mustPull(t, s, reg.ref("b:1")), mustPull(t, s, reg.ref("c:1"))
				check(s, "three images")
				for _, name := range []string{"trash/dir/x", "staging/layer-1/diff/x", "layers/stray/x", "stray"} {
					path := filepath.Join(s.root, name)
					if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
						t.Fatal(err)
					}
					if err := os.WriteFile(path, make([]byte, 9000), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				s.durable.sync()
				d, _ := s.DiskUsage(t.Context())
				if want := duOf(t, s.root); d.Total != want || d.Trash.Inodes != 3 || d.Staging.Inodes != 4 || d.Unknown.Inodes != 3 {
					t.Errorf("with trash, staging, strays: %+v, du says %+v", d, want)
				}
				os.RemoveAll(filepath.Join(s.root, "stray"))
				s = reopen(t, s)
				if d := check(s, "after a restart"); d.Unknown.Inodes != 0 || d.Trash.Inodes != 1 || d.Staging.Inodes != 1 {
					t.Errorf("strays after a restart: %+v", d)
				}
				shared(t, d, a, b, c)
				for _, id := range []string{b, a, c} {
					removeFrees(t, s, id, check)
				}
				if d, _ := s.DiskUsage(t.Context()); len(d.Images) != 0 || d.Blobs.Inodes != 2 || d.Layers.Inodes != 1 {
					t.Errorf("without images: %+v", d)
				}
			})
		}
	}
}

// shared looks at who shares what: a and b have a layer in common.
func shared(t *testing.T, d *DiskUsage, a, b, c string) {
	t.Helper()
	with := map[string][]string{a: {b}, b: {a}, c: nil}
	for _, i := range d.Images {
		if !slices.Equal(i.SharedWith, with[i.ID]) {
			t.Errorf("%s shares with %q", i.Names, i.SharedWith)
		}
		if alone := i.Unique == i.Total; alone != (i.ID == c) || i.Unique.Bytes > i.Total.Bytes || i.Unique.Bytes == 0 {
			t.Errorf("%s: unique %+v of %+v", i.Names, i.Unique, i.Total)
		}
	}
}

// removeFrees removes an image and compares what that frees with what was said.
func removeFrees(t *testing.T, s *Store, id string, check func(*Store, string) *DiskUsage) {
	t.Helper()
	before, err := s.DiskUsage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	after := check(s, "after a removal")
	at := slices.IndexFunc(before.Images, func(i ImageUsage) bool { return i.ID == id })
	said := before.Images[at].Unique
	kinds := func(d *DiskUsage) layer.Usage { return d.Layers.Add(d.Blobs) }
	freed := layer.Usage{Bytes: kinds(before).Bytes - kinds(after).Bytes, Inodes: kinds(before).Inodes - kinds(after).Inodes}
	if freed != said {
		t.Errorf("removing %s freed %+v, %+v was said", before.Images[at].Names, freed, said)
	}
}

// gnuSparse is a tar with a file of 8 MiB that has two bytes.
func gnuSparse(t *testing.T) []byte {
	t.Helper()
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "sparse"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, at := range []int64{5 << 20, 8<<20 - 1} {
		if _, err := f.WriteAt([]byte("x"), at); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.Command("tar", "--sparse", "-C", dir, "-c", "sparse").Output()
	if err != nil {
		t.Fatal(err)
	}
	return out
}
