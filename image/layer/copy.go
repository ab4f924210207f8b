package layer

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Copy makes dst, which must exist and be empty, an exact copy of the tree
// src: whiteouts, opaque marks, hard links, owners, times.
func Copy(src, dst string) error {
	from, err := openRoot(src)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	to, err := openRoot(dst)
	if err != nil {
		return err
	}
	defer unix.Close(to)
	c := copier{root: to, made: map[inode]string{}}
	if err := c.children(from, to, ""); err != nil {
		return fmt.Errorf("copy %s: %w", src, err)
	}
	return copyAttributes(from, to)
}

type copier struct {
	root int              // of the copy
	made map[inode]string // files with several names: where the first copy is
}

func (c *copier) children(from, to int, where string) error {
	return eachName(from, func(name string) error { return c.child(from, to, name, join(where, name)) })
}

func (c *copier) child(from, to int, name, where string) error {
	st, err := lstatAt(from, name)
	if err != nil {
		return failed("stat", where, err)
	}
	if !isDir(st) {
		id := inode{uint64(st.Dev), st.Ino}
		if first, ok := c.made[id]; ok && st.Nlink > 1 {
			return unix.Linkat(c.root, first, to, name, 0)
		}
		c.made[id] = where
		return copyFile(from, to, name, st)
	}
	if err := unix.Mkdirat(to, name, 0o700); err != nil {
		return failed("create", where, err)
	}
	src, err := unix.Openat(from, name, openDir, 0)
	if err != nil {
		return failed("open", where, err)
	}
	defer unix.Close(src)
	dst, err := unix.Openat(to, name, openDir, 0)
	if err != nil {
		return failed("open", where, err)
	}
	defer unix.Close(dst)
	if err := c.children(src, dst, where); err != nil {
		return err
	}
	return copyAttributes(src, dst)
}

// copyFile copies anything but a directory.
func copyFile(from, to int, name string, st *unix.Stat_t) error {
	if err := copyContent(from, to, name, st); err != nil {
		return failed("copy", name, err)
	}
	if err := unix.Fchownat(to, name, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return failed("chown", name, err)
	}
	if !isSymlink(st) {
		if err := unix.Fchmodat(to, name, st.Mode&0o7777, 0); err != nil {
			return failed("chmod", name, err)
		}
	}
	if err := copyXattrs(procPath(from, name), procPath(to, name)); err != nil {
		return failed("copy attributes of", name, err)
	}
	ts := times{st.Atim, st.Mtim}
	if err := unix.UtimesNanoAt(to, name, ts[:], unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return failed("set times of", name, err)
	}
	return nil
}

func copyContent(from, to int, name string, st *unix.Stat_t) error {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		target, err := readlinkAt(from, name)
		if err != nil {
			return err
		}
		return unix.Symlinkat(target, to, name)
	case unix.S_IFREG:
	default:
		return unix.Mknodat(to, name, st.Mode, int(st.Rdev))
	}
	src, err := unix.Openat(from, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	in := os.NewFile(uintptr(src), name)
	defer in.Close()
	dst, err := unix.Openat(to, name, openFile, 0o600)
	if err != nil {
		return err
	}
	out := os.NewFile(uintptr(dst), name)
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}

// copyAttributes makes the directory to look like from.
func copyAttributes(from, to int) error {
	var st unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	if err := unix.Fchown(to, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Fchmod(to, st.Mode&0o7777); err != nil {
		return err
	}
	if err := copyXattrs(procPath(from, ""), procPath(to, "")); err != nil {
		return err
	}
	return setTimes(to, times{st.Atim, st.Mtim})
}

// copyXattrs copies all extended attributes from one path to another; neither
// is followed when it is a symlink.
func copyXattrs(from, to string) error {
	list, err := listXattrs(from)
	if err != nil {
		return err
	}
	for key, value := range list {
		if err := unix.Lsetxattr(to, key, value, 0); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil
}

func listXattrs(path string) (map[string][]byte, error) {
	size, err := unix.Llistxattr(path, nil)
	if err == unix.ENOTSUP || err == nil && size == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	buf := make([]byte, size)
	if size, err = unix.Llistxattr(path, buf); err != nil {
		return nil, err
	}
	all := map[string][]byte{}
	for key := range strings.SplitSeq(strings.TrimSuffix(string(buf[:size]), "\x00"), "\x00") {
		n, err := unix.Lgetxattr(path, key, nil)
		if err == unix.ENODATA {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		value := make([]byte, n)
		if n > 0 {
			if n, err = unix.Lgetxattr(path, key, value); err != nil {
				return nil, fmt.Errorf("%s: %w", key, err)
			}
		}
		all[key] = value[:n]
	}
	return all, nil
}
