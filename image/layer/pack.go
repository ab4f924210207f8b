package layer

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Pack writes an overlay diff directory as the tar stream of an image layer:
// overlay's notation of deletions becomes that of the OCI image specification,
// so that Unpack gives the same directory again. Sockets are left out, a tar
// has none. It blocks on w and on the disk; a done ctx ends it at the next entry.
// What changes root meanwhile makes the result undefined.
func Pack(ctx context.Context, w io.Writer, root string) error {
	return pack(root, packer{ctx: ctx, tar: tar.NewWriter(w)})
}

// PackLayer is Pack for what Unpack has made: equal layers give equal streams.
// opaque is its Result.Opaque, which the directory does not tell.
func PackLayer(ctx context.Context, w io.Writer, root string, opaque bool) error {
	return pack(root, packer{ctx: ctx, tar: tar.NewWriter(w), layer: true, opaque: opaque})
}

func pack(root string, p packer) error {
	fd, err := openRoot(root)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	p.seen = map[inode]string{}
	if err := p.directory(fd, ""); err != nil {
		return fmt.Errorf("pack %s: %w", root, err)
	}
	return p.tar.Close()
}

type packer struct {
	ctx  context.Context
	tar  *tar.Writer
	seen map[inode]string // files with several names: where the first one is
	// layer sorts names, of which a layer has no more than fit into memory.
	layer  bool
	opaque bool // the root is, whatever its attributes say
}

// directory writes an open directory and what is in it.
func (p *packer) directory(fd int, where string) error {
	if p.ctx.Err() != nil {
		return context.Cause(p.ctx)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return failed("stat", where, err)
	}
	h, opaque, err := p.header(procPath(fd, ""), dirName(where), &st)
	if err != nil {
		return err
	}
	if err := p.tar.WriteHeader(h); err != nil {
		return err
	}
	if opaque || p.opaque && where == "" {
		if err := p.tar.WriteHeader(&tar.Header{Name: join(where, opaqueMarker), Typeflag: tar.TypeReg, Format: tar.FormatPAX}); err != nil {
			return err
		}
	}
	child := func(name string) error { return p.child(fd, name, where) }
	if !p.layer {
		return eachName(fd, child)
	}
	list, err := names(fd)
	if err != nil {
		return failed("list", where, err)
	}
	slices.Sort(list)
	for _, name := range list {
		if err := child(name); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) child(dir int, name, above string) error {
	where := join(above, name)
	st, err := lstatAt(dir, name)
	if err != nil {
		return failed("stat", where, err)
	}
	if isDir(st) {
		fd, err := unix.Openat(dir, name, openDir, 0)
		if err != nil {
			return failed("open", where, err)
		}
		defer unix.Close(fd)
		return p.directory(fd, where)
	}
	kind := st.Mode & unix.S_IFMT
	if kind == unix.S_IFSOCK {
		return nil
	}
	if isWhiteout(st) {
		return p.tar.WriteHeader(&tar.Header{Name: join(above, whiteoutPrefix+name), Typeflag: tar.TypeReg, Format: tar.FormatPAX})
	}
	h, _, err := p.header(procPath(dir, name), where, st)
	if err != nil {
		return err
	}
	id := inode{uint64(st.Dev), st.Ino}
	if first, ok := p.seen[id]; ok && st.Nlink > 1 {
		h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
		return p.tar.WriteHeader(h)
	}
	p.seen[id] = where
	switch kind {
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = readlinkAt(dir, name); err != nil {
			return failed("read", where, err)
		}
	case unix.S_IFREG:
		return p.file(dir, name, h)
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	case unix.S_IFCHR, unix.S_IFBLK:
		h.Typeflag = map[uint32]byte{unix.S_IFCHR: tar.TypeChar, unix.S_IFBLK: tar.TypeBlock}[kind]
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	}
	return p.tar.WriteHeader(h)
}

func (p *packer) file(dir int, name string, h *tar.Header) error {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return failed("open", h.Name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if err := p.tar.WriteHeader(h); err != nil {
		return err
	}
	if _, err := io.CopyN(p.tar, f, h.Size); err != nil {
		return failed("read", h.Name, err)
	}
	return nil
}

// header describes a file, but for what its kind adds, and whether overlay has
// it as an opaque directory.
func (p *packer) header(path, name string, st *unix.Stat_t) (h *tar.Header, opaque bool, err error) {
	h = &tar.Header{
		Name: name, Typeflag: tar.TypeReg, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX,
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		h.Typeflag = tar.TypeDir
	case unix.S_IFREG:
		h.Size = st.Size
	}
	attributes, err := listXattrs(path)
	if err != nil {
		return nil, false, failed("list attributes of", name, err)
	}
	for key, value := range attributes {
		if key == xattrOpaque {
			opaque = true
		}
		if dropped(key) {
			continue
		}
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords[paxXattr+key] = string(value)
	}
	return h, opaque, nil
}

// dirName is a directory's name in a tar.
func dirName(where string) string {
	if where == "" {
		return "./"
	}
	return where + "/"
}
