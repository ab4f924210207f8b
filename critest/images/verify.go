package images

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// Verify compares a mounted root filesystem with the image's layers, file by
// file: names, types, modes, owners, times, contents, links. The layers must
// delete nothing, and have dev, proc and sys. It reads everything and returns how many files there are.
func (m Image) Verify(root string) (files int, err error) {
	want := map[string]string{}
	links := map[string]string{}
	for i, l := range m.Layers {
		if err := l.read(want, links); err != nil {
			return 0, fmt.Errorf("read layer %d: %w", i, err)
		}
	}
	for name, target := range links {
		want[name] = want[target]
		a, err := os.Lstat(filepath.Join(root, name))
		if err != nil {
			return 0, err
		}
		b, err := os.Lstat(filepath.Join(root, target))
		if err != nil {
			return 0, err
		}
		if !os.SameFile(a, b) {
			return 0, fmt.Errorf("%q is not the same file as %q", name, target)
		}
	}
	found := 0
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		name := path[len(root)+1:]
		line, listed := want[name]
		switch {
		case name == "dev", name == "proc", name == "sys":
			found++
			return fs.SkipDir // of the container's own
		case listed:
			found++
		case d.IsDir(), filepath.Dir(name) == "etc": // implied, or of the container's own
			return nil
		default:
			return fmt.Errorf("%q is not of the image", name)
		}
		got, err := describe(path)
		if err == nil && got != line {
			err = fmt.Errorf("%q is %s, want %s", name, got, line)
		}
		return err
	})
	if err == nil && found != len(want) {
		err = fmt.Errorf("%d of %d entries are there", found, len(want))
	}
	return found, err
}

// read notes what a layer's entries are.
func (l Layer) read(want, links map[string]string) error {
	body, err := l.open()
	if err != nil {
		return err
	}
	defer body.Close()
	for tr := tar.NewReader(body); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		name := strings.TrimSuffix(h.Name, "/")
		delete(links, name)
		switch h.Typeflag {
		case tar.TypeLink:
			links[name] = h.Linkname
			continue
		case tar.TypeDir:
			want[name] = fmt.Sprintf("d %o %d:%d", h.Mode&0o7777, h.Uid, h.Gid)
		case tar.TypeSymlink:
			want[name] = fmt.Sprintf("l %d:%d -> %s", h.Uid, h.Gid, h.Linkname)
		default:
			sum := sha256.New()
			n, err := io.Copy(sum, tr)
			if err != nil {
				return err
			}
			want[name] = fmt.Sprintf("f %o %d:%d @%d %d bytes %x", h.Mode&0o7777, h.Uid, h.Gid, h.ModTime.Unix(), n, sum.Sum(nil))
		}
	}
}

// open decompresses a layer.
func (l Layer) open() (io.ReadCloser, error) {
	if bytes.HasPrefix(l.Blob, []byte{0x1f, 0x8b}) {
		return gzip.NewReader(bytes.NewReader(l.Blob))
	}
	z, err := zstd.NewReader(bytes.NewReader(l.Blob))
	if err != nil {
		return nil, err
	}
	return z.IOReadCloser(), nil
}

func describe(path string) (string, error) {
	var st syscall.Stat_t
	if err := syscall.Lstat(path, &st); err != nil {
		return "", &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFDIR:
		return fmt.Sprintf("d %o %d:%d", st.Mode&0o7777, st.Uid, st.Gid), nil
	case syscall.S_IFLNK:
		target, err := os.Readlink(path)
		return fmt.Sprintf("l %d:%d -> %s", st.Uid, st.Gid, target), err
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	n, err := io.Copy(sum, f)
	return fmt.Sprintf("f %o %d:%d @%d %d bytes %x", st.Mode&0o7777, st.Uid, st.Gid, st.Mtim.Sec, n, sum.Sum(nil)), err
}
