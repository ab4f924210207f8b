package image

import (
	"archive/tar"
	"bytes"
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

	"berth/sandbox/leakcheck"
)

// tree describes all that a mounted image would show of each of its layers.
func tree(t *testing.T, r *Record) string {
	t.Helper()
	var b strings.Builder
	for i, dir := range r.Layers {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			st := info.Sys().(*syscall.Stat_t)
			fmt.Fprintf(&b, "%d %s %v %d:%d %d", i, strings.TrimPrefix(path, dir), info.Mode(), st.Uid, st.Gid, st.Rdev)
			if st.Rdev != 0 || info.Mode()&fs.ModeCharDevice == 0 { // a whiteout's time says nothing
				fmt.Fprintf(&b, " %v", info.ModTime().UnixNano())
			}
			if info.Mode().IsRegular() {
				data, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				fmt.Fprintf(&b, " %d %x", st.Nlink, data)
			}
			b.WriteByte('\n')
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

// oddImage has what is hard to carry: a hard link to a lower layer's file, a
// whiteout, an opaque directory, a root that hides all below, a layer twice.
func oddImage(t *testing.T, reg *registry) (ref, id string) {
	hidden := gzipLayer(tarOf(t, file{name: "hidden", body: "h"}))
	base := gzipLayer(tarOf(t, file{name: ".wh..wh..opq"}, file{name: "d/", mode: 0o2750, uid: 7}, file{name: "d/f", body: "body", mode: 0o4755}, file{name: "x/"}, file{name: "x/y", body: "y"}))
	upper := zstdLayer(tarOf(t, file{name: "link", link: "d/f", kind: tar.TypeLink}, file{name: "d/.wh.gone"}, file{name: "x/.wh..wh..opq"}, file{name: "x/z", body: "z"}))
	again := plainLayer(tarOf(t, file{name: "again", body: "a", xattrs: map[string]string{"user.note": "n"}}))
	_, id = reg.push("odd", "1", hidden, base, upper, again, plainLayer(tarOf(t, file{name: ".wh.again"})), again)
	return reg.ref("odd:1"), id
}

// An exported image is imported elsewhere with the same files and name, and
// exported again has the same digests, unless it was exact.
func TestExport(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	ref, id := oddImage(t, reg)
	for _, kept := range []bool{false, true} {
		for _, name := range []string{"a.tar", "a.tar.gz", "a.tgz", "a.tar.zst"} {
			from := open(t, t.TempDir(), func(o *Options) { o.KeepLayerBlobs = kept }, reg)
			mustPull(t, from, ref)
			out := filepath.Join(t.TempDir(), name)
			e, err := from.Export(t.Context(), ref, out)
			if err != nil {
				t.Fatal(err)
			}
			info, err := os.Stat(out)
			if err != nil || info.Size() != e.Bytes || info.Mode().Perm() != 0o600 {
				t.Errorf("%s: %v, %v; export says %+v", name, info, err, e)
			}
			if e.Exact != kept || (e.ID == id) != kept || !slices.Equal(e.Names, []string{ref}) {
				t.Errorf("%s, kept %v: %+v", name, kept, e)
			}
			to := open(t, t.TempDir(), nil, reg)
			names, err := to.Import(t.Context(), ImportRequest{File: out})
			if err != nil || !slices.Equal(names, []string{ref}) {
				t.Fatalf("%s: import %v, %v", name, names, err)
			}
			before, _ := from.Resolve(ref)
			after, err := to.Resolve(ref)
			if err != nil || after.ID != e.ID {
				t.Fatalf("%s: %v, %v", name, after, err)
			}
			if a, b := tree(t, before), tree(t, after); a != b {
				t.Errorf("%s, kept %v: exported\n%s\nimported\n%s", name, kept, a, b)
			}
			if after.Config.Config.Cmd[0] != "/odd" || len(after.Config.RootFS.DiffIDs) != 6 {
				t.Errorf("%s: config %+v", name, after.Config)
			}
			if again, err := to.Export(t.Context(), e.ID, filepath.Join(t.TempDir(), "b.tar")); err != nil || (again.ID == e.ID) == kept {
				t.Errorf("%s: exported again: %+v, %v", name, again, err)
			}
			from.Close()
			to.Close()
		}
	}
}

// The name that was asked for, or all of them; and an image without any.
func TestExportedNames(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	l := gzipLayer(tarOf(t, file{name: "a", body: "a"}))
	d, id := reg.push("app", "1", l)
	reg.push("app", "2", l)
	reg.push("bare", "1", gzipLayer(tarOf(t, file{name: "b", body: "b"})))
	s := open(t, t.TempDir(), nil, reg)
	mustPull(t, s, reg.ref("app:1"))
	mustPull(t, s, reg.ref("app:2"))
	for ref, want := range map[string][]string{
		reg.ref("app:2"):                   {reg.ref("app:2")},
		id:                                 {reg.ref("app:1"), reg.ref("app:2")},
		id[7:20]:                           {reg.ref("app:1"), reg.ref("app:2")},
		reg.ref("app@" + string(d.Digest)): {reg.ref("app:1"), reg.ref("app:2")},
	} {
		e, err := s.Export(t.Context(), ref, filepath.Join(t.TempDir(), "x"))
		if err != nil || !slices.Equal(e.Names, want) {
			t.Errorf("%s: %+v, %v; want %v", ref, e, err, want)
		}
	}
	bare, _ := reg.push("bare", "", gzipLayer(tarOf(t, file{name: "b", body: "b"})))
	byDigest := reg.ref("bare@" + string(bare.Digest))
	mustPull(t, s, byDigest)
	out := filepath.Join(t.TempDir(), "x")
	e, err := s.Export(t.Context(), byDigest, out)
	if err != nil || len(e.Names) != 0 {
		t.Fatalf("without a tag: %+v, %v", e, err)
	}
	to := open(t, t.TempDir(), nil)
	if names, err := to.Import(t.Context(), ImportRequest{File: out}); err != nil || !slices.Equal(names, []string{e.ID}) {
		t.Errorf("without a tag: %v, %v", names, err)
	}
}

// A refused or broken export leaves no file, and never touches one.
func TestExportThatFails(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("app", "1", gzipLayer(tarOf(t, file{name: "a", body: noise(1 << 20)})))
	ref := reg.ref("app:1")
	s := open(t, t.TempDir(), nil, reg)
	mustPull(t, s, ref)
	dir := t.TempDir()
	there := filepath.Join(dir, "there")
	if err := os.WriteFile(there, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	small := filepath.Join(dir, "small")
	if err := errors.Join(os.Mkdir(small, 0o700), syscall.Mount("tmpfs", small, "tmpfs", 0, "size=100k")); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Unmount(small, 0); err != nil {
			t.Error(err)
		}
	}()
	for what, c := range map[string]struct {
		ctx       context.Context
		ref, file string
		want      error
	}{
		"a file that is there":    {t.Context(), ref, there, ErrFileExists},
		"no such image":           {t.Context(), "nothing", filepath.Join(dir, "x"), ErrNotFound},
		"no such directory":       {t.Context(), ref, filepath.Join(dir, "none", "x"), fs.ErrNotExist},
		"a caller who has left":   {ended, ref, filepath.Join(dir, "x"), context.Canceled},
		"a filesystem too small":  {t.Context(), ref, filepath.Join(small, "x"), syscall.ENOSPC},
		"too small for gzip even": {t.Context(), ref, filepath.Join(small, "x.gz"), syscall.ENOSPC},
	} {
		if _, err := s.Export(c.ctx, c.ref, c.file); !errors.Is(err, c.want) || !strings.Contains(err.Error(), "export image") {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
	for _, at := range []string{dir, small} {
		list, err := os.ReadDir(at)
		if err != nil {
			t.Fatal(err)
		}
		for _, item := range list {
			if item.Name() != "there" && item.Name() != "small" {
				t.Errorf("%s is left", item.Name())
			}
		}
	}
	if data, err := os.ReadFile(there); err != nil || !bytes.Equal(data, []byte("mine")) {
		t.Errorf("the file that was there: %q, %v", data, err)
	}
	if err := s.Remove(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	empty(t, s) // no export holds it any more
}

// A layer that does not match what its blob was is noticed, not exported.
func TestExportOfAlteredBlobs(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("app", "1", gzipLayer(tarOf(t, file{name: "a", body: "a"})))
	s := open(t, t.TempDir(), func(o *Options) { o.KeepLayerBlobs = true }, reg)
	mustPull(t, s, reg.ref("app:1"))
	d, err := s.Inspect(reg.ref("app:1"))
	if err != nil {
		t.Fatal(err)
	}
	path, err := s.blobs.Path(d.Layers[0].Blob)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)-1]++
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "x")
	if _, err := s.Export(t.Context(), reg.ref("app:1"), out); err == nil || !strings.Contains(err.Error(), "does not have this digest") {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(out); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file: %v", err)
	}
}
