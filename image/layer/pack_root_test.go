package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"berth/image/layer"
	"berth/sandbox/leakcheck"
)

// TestPackIsUndoneByUnpack packs what containers leave in their upper layers and
// unpacks it again.
func TestPackIsUndoneByUnpack(t *testing.T) {
	leakcheck.Start(t)
	root, _ := unpack(t,
		dir("d", 0o2750, 7), reg("d/f", "body"), hardlink("d/g", "d/f"), hardlink("h", "d/f"), symlink("d/s", "../../etc"),
		dir("opaque", 0o755, 0), reg("opaque/.wh..wh..opq", ""), reg("opaque/new", "n"),
		reg(".wh.gone", ""), reg("e/.wh.x", ""), dir("empty", 0o700, 0),
		reg("big", string(bytes.Repeat([]byte("0123456789"), 100_000))),
	)
	for _, err := range []error{
		unix.Mkfifo(root+"/fifo", 0o640), unix.Mknod(root+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))),
		unix.Mknod(root+"/socket", unix.S_IFSOCK|0o666, 0),
		unix.Setxattr(root+"/d/f", "user.note", []byte("a\x00b"), 0),
		unix.Setxattr(root+"/big", "trusted.overlay.metacopy", nil, 0),
		os.Chmod(root+"/big", 0o4755),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var packed bytes.Buffer
	if err := layer.Pack(t.Context(), &packed, root); err != nil {
		t.Fatal(err)
	}
	again := t.TempDir()
	if _, err := layer.Unpack(t.Context(), again, &packed, layer.Limits{}); err != nil {
		t.Fatal(err)
	}
	// What a layer cannot or must not carry.
	for _, err := range []error{os.Remove(root + "/socket"), unix.Removexattr(root+"/big", "trusted.overlay.metacopy")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(root)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(root, info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
	for _, tree := range []string{root, again} { // a whiteout's time says nothing
		for _, name := range []string{"gone", "e/x"} {
			if err := os.Chtimes(filepath.Join(tree, name), info.ModTime(), info.ModTime()); err != nil {
				t.Fatal(err)
			}
		}
	}
	same(t, describe(t, again, false), describe(t, root, false))
	if lstat(t, again+"/h").Ino != lstat(t, again+"/d/g").Ino {
		t.Error("the names of one file have become files of their own")
	}
	if !isWhiteout(t, filepath.Join(again, "gone")) || xattr(again+"/opaque", "trusted.overlay.opaque") != "y" {
		t.Error("a deletion is lost")
	}
}

// Other tools read what Pack writes: deletions stand there as the image
// specification has them.
func TestPackSpeaksTheImageSpecification(t *testing.T) {
	leakcheck.Start(t)
	root, _ := unpack(t, reg(".wh.gone", ""), dir("o", 0o755, 0), reg("o/.wh..wh..opq", ""))
	var packed bytes.Buffer
	if err := layer.Pack(t.Context(), &packed, root); err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for r := tar.NewReader(&packed); ; {
		h, err := r.Next()
		if err != nil {
			break
		}
		names[h.Name] = true
	}
	for _, name := range []string{"./", ".wh.gone", "o/", "o/.wh..wh..opq"} {
		if !names[name] {
			t.Errorf("no entry %s in %v", name, names)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := layer.Pack(ended, &packed, root); !errors.Is(err, context.Canceled) {
		t.Errorf("after its context's end: %v", err)
	}
}
