package layer

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// clear makes room for an entry: the later one wins.
func (u *unpacker) clear(n *node, base string) error {
	where := join(n.path, base)
	st, err := lstatAt(n.fd, base)
	if err != nil {
		return failed("stat", where, err)
	}
	u.stale = u.stale || isDir(st) || isSymlink(st)
	err = removeAt(n.fd, base, where, func(name string) {
		delete(u.implied, name)
		delete(u.fresh, name)
		delete(u.whiteouts, name)
		delete(u.dirTimes, name)
	})
	if err != nil {
		return failed("replace", where, err)
	}
	if isDir(st) {
		for name := range u.links {
			if within(name, where) {
				delete(u.links, name)
			}
		}
	}
	return nil
}

// parent returns the directory that holds name, and the last component. The
// node is good until the next lookup.
func (u *unpacker) parent(name string) (*node, string, error) {
	dir, base := split(name)
	n, err := u.dir(dir)
	return n, base, err
}

// create runs make, which must fail with EEXIST when base exists, and replaces
// what is in the way.
func (u *unpacker) create(n *node, base string, make func() error) error {
	if len(u.links) > 0 {
		delete(u.links, join(n.path, base))
	}
	err := make()
	if err != unix.EEXIST {
		return err
	}
	if err := u.clear(n, base); err != nil {
		return err
	}
	return make()
}

func (u *unpacker) regular(name string, h *tar.Header, body io.Reader) error {
	n, base, err := u.parent(name)
	if err != nil {
		return err
	}
	fd := -1
	err = u.create(n, base, func() (err error) {
		fd, err = unix.Openat(n.fd, base, openFile, uint32(h.Mode)&0o777)
		return err
	})
	if err != nil {
		return failed("create", name, err)
	}
	defer unix.Close(fd)
	if err := u.copy(fd, h, body); err != nil {
		return err
	}
	if u.inherits || !isPlain(h) {
		if err := own(fd, h); err != nil {
			return err
		}
	} else if err := setXattrs(h, fsetxattr(fd)); err != nil {
		return err
	}
	if err := u.sums.note(fd, u.sum.Sum64()); err != nil {
		return failed("stat", name, err)
	}
	ts := headerTimes(h)
	if err := unix.UtimesNanoAt(n.fd, base, ts[:], unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return failed("set times of", name, err)
	}
	return nil
}

// isPlain: a new file of ours has this owner and mode from the start, which
// most files of most layers have. Setting them again costs as much as writing a
// small file.
func isPlain(h *tar.Header) bool {
	mode := uint32(h.Mode) & 0o7777
	return h.Uid == 0 && h.Gid == 0 && mode&^0o777 == 0 && mode&withheld() == 0
}

// withheld are the bits of a mode that new files of ours do not get: the
// process's umask. It is read, because it can be asked for only by setting it,
// for all threads.
var withheld = sync.OnceValue(func() uint32 {
	status, err := os.ReadFile("/proc/self/status")
	if err == nil && os.Geteuid() == 0 && os.Getegid() == 0 {
		for line := range strings.Lines(string(status)) {
			if text, ok := strings.CutPrefix(line, "Umask:"); ok {
				if mask, err := strconv.ParseUint(strings.TrimSpace(text), 8, 32); err == nil {
					return uint32(mask)
				}
			}
		}
	}
	return 0o777 // then no file is plain
})

// own sets owner, mode and attributes of an open file or directory. The order
// matters: chown clears set-uid bits and file capabilities.
func own(fd int, h *tar.Header) error {
	if err := unix.Fchown(fd, h.Uid, h.Gid); err != nil {
		return failed("chown", h.Name, err)
	}
	if err := unix.Fchmod(fd, uint32(h.Mode)&0o7777); err != nil {
		return failed("chmod", h.Name, err)
	}
	return setXattrs(h, fsetxattr(fd))
}

func fsetxattr(fd int) func(key string, value []byte) error {
	return func(key string, value []byte) error { return unix.Fsetxattr(fd, key, value, 0) }
}

// copy writes a file's content. Sparse files are written without their holes.
func (u *unpacker) copy(fd int, h *tar.Header, body io.Reader) error {
	sparse := isSparse(h)
	if !sparse && h.Size >= largeFile {
		if err := u.fitsDisk(h.Size); err != nil {
			return failed("write", h.Name, err)
		}
	}
	if sparse {
		if u.sparse += h.Size; u.sparse > u.lim.SparseBytes || u.sparse < 0 {
			return invalid(h.Name, "sparse files of more than %d bytes", u.lim.SparseBytes)
		}
	}
	var offset int64
	u.sum.Reset()
	for {
		if err := u.ctx.Err(); err != nil {
			return err
		}
		n, err := io.ReadFull(body, u.buf)
		_, _ = u.sum.Write(u.buf[:n])
		if sparse && allZero(u.buf[:n]) {
			offset += int64(n)
		} else if n > 0 {
			if err := writeAt(fd, u.buf[:n], offset, sparse); err != nil {
				return failed("write", h.Name, err)
			}
			offset += int64(n)
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			break
		}
		if err != nil {
			return failed("read", h.Name, err)
		}
	}
	if sparse {
		if err := unix.Ftruncate(fd, offset); err != nil {
			return failed("truncate", h.Name, err)
		}
	}
	return nil
}

// fitsDisk fails as a write would, before a large file has filled the disk.
func (u *unpacker) fitsDisk(size int64) error {
	free, err := Free(procPath(u.root.fd, ""))
	if err == nil && uint64(size) > free {
		err = fmt.Errorf("%d bytes, %d are free: %w", size, free, unix.ENOSPC)
	}
	return err
}

func isSparse(h *tar.Header) bool {
	if h.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

func writeAt(fd int, b []byte, offset int64, seek bool) error {
	if seek {
		if _, err := unix.Seek(fd, offset, 0); err != nil {
			return err
		}
	}
	for len(b) > 0 {
		n, err := unix.Write(fd, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func allZero(b []byte) bool {
	for len(b) >= 8 {
		if b[0]|b[1]|b[2]|b[3]|b[4]|b[5]|b[6]|b[7] != 0 {
			return false
		}
		b = b[8:]
	}
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

func (u *unpacker) directory(name string, h *tar.Header) error {
	n := u.root
	if name != "" {
		made, err := u.makeDir(name)
		if err != nil {
			return err
		}
		n = made
	}
	delete(u.implied, n.path)
	if err := u.remember(n.path); err != nil {
		return err
	}
	u.dirTimes[n.path] = headerTimes(h)
	// What is made in it from now on may have another group or mode than asked for.
	u.inherits = u.inherits || h.Mode&unix.S_ISGID != 0 || h.PAXRecords[paxXattr+"system.posix_acl_default"] != ""
	return own(n.fd, h)
}

// makeDir makes the directory of an entry, or takes the one that is there.
// The node it returns is the one that the entries below will look up.
func (u *unpacker) makeDir(name string) (*node, error) {
	n, base, err := u.parent(name)
	if err != nil {
		return nil, err
	}
	where := join(n.path, base)
	if err := u.lim.fits(where); err != nil {
		return nil, err
	}
	existed := false
	// Where this layer had something else before, or a whiteout, lower layers
	// show nothing through the directory either.
	_, opaque := u.links[where]
	if err := unix.Mkdirat(n.fd, base, 0o700); err == unix.EEXIST {
		st, err := lstatAt(n.fd, base)
		if err != nil {
			return nil, failed("stat", where, err)
		}
		existed = isDir(st)
		if !existed {
			opaque = true
			if err := u.clear(n, base); err != nil {
				return nil, err
			}
			if err := unix.Mkdirat(n.fd, base, 0o700); err != nil {
				return nil, failed("create", where, err)
			}
		}
	} else if err != nil {
		return nil, failed("create", where, err)
	}
	delete(u.links, where)
	made, err := u.dir(name)
	if err != nil {
		return nil, err
	}
	if opaque {
		if err := setOpaque(made.fd); err != nil {
			return nil, failed("mark opaque", where, err)
		}
	}
	if existed {
		if err := clearXattrs(made.fd); err != nil {
			return nil, failed("reset attributes of", where, err)
		}
	}
	return made, nil
}

// hardLink links the inode that the target names, also when that is a symlink.
func (u *unpacker) hardLink(name string, h *tar.Header) error {
	target, err := u.lim.clean(h.Linkname)
	if err != nil {
		return invalid(h.Name, "hard link target: %v", err)
	}
	if target == "" {
		return invalid(h.Name, "hard link to the root directory")
	}
	if strings.HasPrefix(target, whiteoutPrefix) || strings.Contains(target, "/"+whiteoutPrefix) {
		return invalid(h.Name, "hard link to %s, a whiteout", quote(target))
	}
	return u.link(name, target)
}

func (u *unpacker) link(name, target string) error {
	from, oldBase, err := u.parent(target)
	if err != nil {
		return err
	}
	fromPath := join(from.path, oldBase)
	old, err := unix.Dup(from.fd) // the next lookup may close it
	if err != nil {
		return failed("open parent of", target, err)
	}
	defer unix.Close(old)
	n, base, err := u.parent(name)
	if err != nil {
		return err
	}
	where := join(n.path, base)
	if fromPath == where {
		return nil // a link to itself
	}
	st, err := lstatAt(old, oldBase)
	switch {
	case err == unix.ENOENT || err == nil && isWhiteout(st):
		return u.postpone(n, base, fromPath)
	case err != nil:
		return failed("stat", target, err)
	case isDir(st):
		return invalid(name, "hard link to the directory %s", quote(target))
	}
	err = u.create(n, base, func() error {
		return unix.Linkat(old, oldBase, n.fd, base, 0)
	})
	if err != nil {
		return failed("link", name, err)
	}
	return nil
}

// postpone notes a hard link whose target is not here: it may come later in
// this tar, or a lower layer has it.
func (u *unpacker) postpone(n *node, base, target string) error {
	where := join(n.path, base)
	if len(u.links) >= maxCrossLinks {
		return invalid(where, "more than %d hard links to what is not in the layer", maxCrossLinks)
	}
	if _, err := lstatAt(n.fd, base); err == nil {
		if err := u.clear(n, base); err != nil {
			return err
		}
	}
	if _, known := u.links[where]; !known {
		if err := u.remember(where + target); err != nil {
			return err
		}
	}
	u.links[where] = target
	return nil
}

// special makes what has no content of its own.
func (u *unpacker) special(name string, h *tar.Header) error {
	n, base, err := u.parent(name)
	if err != nil {
		return err
	}
	if h.Typeflag == tar.TypeSymlink && len(h.Linkname) > u.lim.PathBytes {
		return invalid(h.Name, "link target longer than %d bytes", u.lim.PathBytes)
	}
	err = u.create(n, base, func() error { return makeSpecial(n.fd, base, h) })
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) && h.Linkname == "" {
		return invalid(h.Name, "cannot be created: %v", err)
	}
	if err != nil {
		return failed("create", name, err)
	}
	if err := unix.Fchownat(n.fd, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return failed("chown", name, err)
	}
	if h.Typeflag != tar.TypeSymlink {
		// Not a symlink, and nobody else writes here: chmod cannot be led away.
		if err := unix.Fchmodat(n.fd, base, uint32(h.Mode)&0o7777, 0); err != nil {
			return failed("chmod", name, err)
		}
	}
	err = setXattrs(h, func(key string, value []byte) error {
		return unix.Lsetxattr(procPath(n.fd, base), key, value, 0)
	})
	if err != nil {
		return err
	}
	ts := headerTimes(h)
	if err := unix.UtimesNanoAt(n.fd, base, ts[:], unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return failed("set times of", name, err)
	}
	return nil
}

func makeSpecial(dir int, base string, h *tar.Header) error {
	dev := int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor)))
	switch h.Typeflag {
	case tar.TypeSymlink:
		return unix.Symlinkat(h.Linkname, dir, base)
	case tar.TypeChar:
		return unix.Mknodat(dir, base, unix.S_IFCHR|0o600, dev)
	case tar.TypeBlock:
		return unix.Mknodat(dir, base, unix.S_IFBLK|0o600, dev)
	}
	return unix.Mkfifoat(dir, base, 0o600)
}
