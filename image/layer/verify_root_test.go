package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/layer"
	"berth/sandbox/leakcheck"
)

// listed unpacks a layer with one of everything and lists it.
func listed(t *testing.T) (root string, list []byte) {
	t.Helper()
	capable := reg("d/caps", "program")
	capable.xattrs = map[string]string{"security.capability": "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"}
	root, r := unpack(t,
		dir("d", 0o2750, 7), reg("d/f", "body"), hardlink("d/g", "d/f"), symlink("d/s", "../../etc"), capable,
		dir("opaque", 0o755, 0), reg("opaque/.wh..wh..opq", ""), reg("opaque/new", "n"),
		reg(".wh.gone", ""), reg("implied/er/x", "x"), dir("empty", 0o700, 0), reg("nothing", ""),
		entry{Header: tar.Header{Name: "null", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 3}},
		reg("big", strings.Repeat("0123456789", 100_000)),
		reg("twice", "first"), reg("twice", "second"), reg("odd \n\xff name", "o"),
	)
	if err := os.Chmod(root, 0o755); err != nil { // as a diff directory has it
		t.Fatal(err)
	}
	var b bytes.Buffer
	usage, err := layer.WriteList(root, &b, r.Sums)
	if err != nil {
		t.Fatal(err)
	}
	if measured, err := layer.Measure(root); err != nil || measured != usage {
		t.Errorf("the list counts %+v, Measure %+v, %v", usage, measured, err)
	}
	return root, b.Bytes()
}

// verify gives what is found, by path.
func verify(t *testing.T, root string, list []byte) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := layer.Verify(t.Context(), root, bytes.NewReader(list), func(d layer.Difference) { found[d.Path] += d.Problem })
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// without takes out the modification times: nearly every damage changes one.
func without(found map[string]string) map[string]string {
	times := regexp.MustCompile(`(; )?modified at [^;]*`)
	left := map[string]string{}
	for path, problem := range found {
		if rest := strings.TrimPrefix(times.ReplaceAllString(problem, ""), "; "); rest != "" {
			left[path] = rest
		}
	}
	return left
}

func TestB39VerifyFindsEveryDamage(t *testing.T) {
	leakcheck.Start(t)
	flip := func(path string, at int64) error {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		b := make([]byte, 1)
		if _, err := f.ReadAt(b, at); err != nil {
			return err
		}
		b[0] ^= 1
		_, err = f.WriteAt(b, at)
		return err
	}
	for name, test := range map[string]struct {
		path   string
		damage func(path string) error
		want   map[string]string
	}{
		"a byte":         {"big", func(p string) error { return flip(p, 777_777) }, map[string]string{"/big": "other content"}},
		"truncated":      {"big", func(p string) error { return os.Truncate(p, 999_999) }, map[string]string{"/big": "999999 bytes, should have 1000000"}},
		"empty":          {"d/caps", func(p string) error { return os.Truncate(p, 0) }, map[string]string{"/d/caps": "other extended attributes; 0 bytes, should have 7"}},
		"longer":         {"nothing", func(p string) error { return os.Truncate(p, 1) }, map[string]string{"/nothing": "1 bytes, should have 0"}},
		"missing file":   {"implied/er/x", os.Remove, map[string]string{"/implied/er/x": "missing"}},
		"missing tree":   {"implied", os.RemoveAll, map[string]string{"/implied": "missing"}},
		"a new file":     {"d/a", func(p string) error { return os.WriteFile(p, nil, 0o600) }, map[string]string{"/d/a": "not in the layer"}},
		"a new tree":     {"z", func(p string) error { return os.MkdirAll(p+"/z", 0o755) }, map[string]string{"/z": "not in the layer"}},
		"in an empty":    {"empty/x", func(p string) error { return os.Mkdir(p, 0o755) }, map[string]string{"/empty/x": "not in the layer"}},
		"mode":           {"big", func(p string) error { return unix.Chmod(p, 0o4755) }, map[string]string{"/big": "mode 4755, should be 0644"}},
		"mode of a dir":  {"d", func(p string) error { return os.Chmod(p, 0o750) }, map[string]string{"/d": "mode 0750, should be 2750"}},
		"owner":          {"big", func(p string) error { return os.Lchown(p, 1, 2) }, map[string]string{"/big": "owner 1:2, should be 0:0"}},
		"capability":     {"d/caps", func(p string) error { return unix.Removexattr(p, "security.capability") }, map[string]string{"/d/caps": "other extended attributes"}},
		"an attribute":   {"big", func(p string) error { return unix.Setxattr(p, "user.x", nil, 0) }, map[string]string{"/big": "other extended attributes"}},
		"opaque mark":    {"opaque", func(p string) error { return unix.Removexattr(p, "trusted.overlay.opaque") }, map[string]string{"/opaque": "other extended attributes"}},
		"a second name":  {"d/f", func(p string) error { return os.Link(p, p+"2") }, map[string]string{"/d/f": "3 names, should have 2", "/d/g": "3 names, should have 2", "/d/f2": "not in the layer"}},
		"the root":       {".", func(p string) error { return os.Chmod(p, 0o711) }, map[string]string{"/": "mode 0711, should be 0755"}},
		"no root at all": {".", os.RemoveAll, map[string]string{"/": "missing"}},
		"link target": {"d/s", func(p string) error {
			return errors.Join(os.Remove(p), os.Symlink("../../tmp", p), os.Lchown(p, 0, 0))
		}, map[string]string{"/d/s": "other content"}},
		"another kind": {"d/s", func(p string) error {
			return errors.Join(os.Remove(p), os.WriteFile(p, []byte("../../etc"), 0o777))
		}, map[string]string{"/d/s": "is a file, should be a symlink"}},
		"a file for a tree": {"implied", func(p string) error {
			return errors.Join(os.RemoveAll(p), os.WriteFile(p, nil, 0o755))
		}, map[string]string{"/implied": "is a file, should be a directory"}},
		"a whiteout lost": {"gone", os.Remove, map[string]string{"/gone": "missing"}},
		"device": {"null", func(p string) error {
			return errors.Join(os.Remove(p), unix.Mknod(p, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))), os.Chmod(p, 0o666))
		}, map[string]string{"/null": "another device"}},
		"an odd name": {"odd \n\xff name", func(p string) error { return flip(p, 0) }, map[string]string{"/odd \n\xff name": "other content"}},
	} {
		t.Run(name, func(t *testing.T) {
			root, list := listed(t)
			if err := test.damage(filepath.Join(root, test.path)); err != nil {
				t.Fatal(err)
			}
			if found := without(verify(t, root, list)); !maps.Equal(found, test.want) {
				t.Errorf("found %q, want %q", found, test.want)
			}
		})
	}
	root, list := listed(t)
	if err := os.Chtimes(root+"/big", time.Unix(1, 5), time.Unix(1, 5)); err != nil {
		t.Fatal(err)
	}
	if found := verify(t, root, list); found["/big"] != "modified at 1.000000005, should be 1600000000.000000000" {
		t.Errorf("another time: %q", found)
	}
}

// What Unpack saw pass is what is on the disk, by reading it again; and a list
// that is not whole never passes for one.
func TestVerifyOfWholeAndOfDamagedLists(t *testing.T) {
	leakcheck.Start(t)
	root, list := listed(t)
	if found := verify(t, root, list); len(found) != 0 {
		t.Errorf("a whole layer: %q", found)
	}
	var again bytes.Buffer
	if _, err := layer.WriteList(root, &again, nil); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(again.Bytes(), list) {
		t.Error("the list by the stream differs from the list by the files")
	}
	for cut := range len(list) {
		err := layer.Verify(t.Context(), root, bytes.NewReader(list[:cut]), func(layer.Difference) {})
		if !errors.Is(err, layer.ErrList) {
			t.Fatalf("a list cut to %d of %d bytes: %v", cut, len(list), err)
		}
	}
	for i := range list {
		bad := slices.Clone(list)
		bad[i] ^= 0x10
		found := 0
		err := layer.Verify(t.Context(), root, bytes.NewReader(bad), func(layer.Difference) { found++ })
		if err == nil && found > 0 {
			t.Fatalf("byte %d of the list changed: %d differences in a whole layer", i, found)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := layer.Verify(ctx, root, bytes.NewReader(list), func(layer.Difference) {}); !errors.Is(err, context.Canceled) {
		t.Errorf("with a done context: %v", err)
	}
}
