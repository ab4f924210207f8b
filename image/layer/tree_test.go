package layer_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/layer"
)

// entry is one member of a test's tar.
type entry struct {
	tar.Header
	body   string
	xattrs map[string]string
}

func dir(name string, mode int64, uid int) entry {
	return entry{Header: tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: mode, Uid: uid, Gid: uid}}
}

func reg(name, body string) entry {
	return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, body: body}
}

func symlink(name, target string) entry {
	return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeSymlink, Mode: 0o777, Linkname: target}}
}

func hardlink(name, target string) entry {
	return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeLink, Mode: 0o644, Linkname: target}}
}

func pack(t testing.TB, format tar.Format, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := e.Header
		h.Size, h.Format = int64(len(e.body)), format
		if h.ModTime.IsZero() {
			h.ModTime = time.Unix(1_600_000_000, 0)
		}
		for k, v := range e.xattrs {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatalf("%q: %v", h.Name, err)
		}
		if _, err := w.Write([]byte(e.body)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// unpack makes a layer of the entries in a directory of its own.
func unpack(t testing.TB, entries ...entry) (string, *layer.Result) {
	t.Helper()
	root := t.TempDir()
	r, err := layer.Unpack(t.Context(), root, bytes.NewReader(pack(t, tar.FormatPAX, entries...)), layer.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	return root, r
}

// refuse expects ErrInvalid that names what is wrong.
func refuse(t *testing.T, names string, entries ...entry) {
	t.Helper()
	_, err := layer.Unpack(t.Context(), t.TempDir(), bytes.NewReader(pack(t, tar.FormatPAX, entries...)), layer.Limits{})
	if !isInvalid(err) || !strings.Contains(err.Error(), names) {
		t.Errorf("got %v, want a refusal that names %q", err, names)
	}
}

func lstat(t testing.TB, path string) *unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return &st
}

func isWhiteout(t testing.TB, path string) bool {
	t.Helper()
	st := lstat(t, path)
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

func xattr(path, key string) string {
	buf := make([]byte, 4096)
	n, err := unix.Lgetxattr(path, key, buf)
	if err != nil {
		return "<" + err.Error() + ">"
	}
	return string(buf[:n])
}

// describe lists a tree in a form that can be compared line by line: names,
// types, modes, owners, times, contents, attributes, and which names share an
// inode. dirTimes says whether times of directories count.
func describe(t testing.TB, root string, dirTimes bool) []string {
	t.Helper()
	var lines []string
	groups := map[uint64][]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path[len(root):], "/")
		st := lstat(t, path)
		line := fmt.Sprintf("%q %o %d:%d", name, st.Mode, st.Uid, st.Gid)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %q", data)
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" -> %q", target)
		case unix.S_IFCHR, unix.S_IFBLK:
			line += fmt.Sprintf(" dev %d", st.Rdev)
		}
		if !d.IsDir() {
			groups[st.Ino] = append(groups[st.Ino], name)
		}
		if (!d.IsDir() || dirTimes) && name != "" {
			line += fmt.Sprintf(" @%d.%09d", st.Mtim.Sec, st.Mtim.Nsec)
		}
		lines = append(lines, line+xattrs(t, path))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range groups {
		if len(group) > 1 {
			slices.Sort(group)
			lines = append(lines, fmt.Sprintf("one inode: %q", group))
		}
	}
	slices.Sort(lines)
	return lines
}

// xattrs lists the attributes that describe a file; overlay's and ours do not.
func xattrs(t testing.TB, path string) string {
	t.Helper()
	buf := make([]byte, 4096)
	n, err := unix.Llistxattr(path, buf)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, key := range strings.Split(string(buf[:n]), "\x00") {
		if key != "" && !strings.HasPrefix(key, "trusted.overlay.") && !strings.HasPrefix(key, "trusted.berth.") {
			all = append(all, fmt.Sprintf("%s=%q", key, xattr(path, key)))
		}
	}
	slices.Sort(all)
	return fmt.Sprint(" ", all)
}

// same compares two descriptions.
func same(t testing.TB, got, want []string) {
	t.Helper()
	if slices.Equal(got, want) {
		return
	}
	for _, l := range got {
		if !slices.Contains(want, l) {
			t.Errorf("got  %s", l)
		}
	}
	for _, l := range want {
		if !slices.Contains(got, l) {
			t.Errorf("want %s", l)
		}
	}
}
