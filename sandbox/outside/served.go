package outside

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"berth/sandbox/regular"
)

// ownFilesystems are those that answer for as long as the node's disks do: they are
// on one, or in memory. All others may be served by somebody.
var ownFilesystems = map[int64]bool{
	unix.EXT4_SUPER_MAGIC: true, unix.XFS_SUPER_MAGIC: true, unix.BTRFS_SUPER_MAGIC: true, unix.F2FS_SUPER_MAGIC: true,
	unix.TMPFS_MAGIC: true, unix.RAMFS_MAGIC: true, unix.OVERLAYFS_SUPER_MAGIC: true, unix.SQUASHFS_MAGIC: true,
	unix.EROFS_SUPER_MAGIC_V1: true, unix.ISOFS_SUPER_MAGIC: true, unix.MSDOS_SUPER_MAGIC: true,
	unix.PROC_SUPER_MAGIC: true, unix.SYSFS_MAGIC: true, zfs: true, bcachefs: true,
}

// Magic numbers that x/sys does not have.
const (
	zfs      = 0x2fc12fc1
	bcachefs = 0xca451a4e
)

func served(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) != nil || !ownFilesystems[int64(st.Type)]
}

// Bounds of a touch.
const (
	touchDepth = 2 // directories below each other
	touchMost  = 10_000
)

// touch opens and begins to read what is at a path.
func touch(path string) {
	left := touchMost
	touchBelow(path, touchDepth, &left)
}

func touchBelow(path string, depth int, left *int) {
	if *left--; *left < 0 {
		return
	}
	info, err := os.Stat(path)
	switch {
	case err != nil:
	case info.IsDir() && depth > 0:
		list, _ := os.ReadDir(path)
		for _, item := range list {
			touchBelow(filepath.Join(path, item.Name()), depth-1, left)
		}
	case info.Mode().IsRegular():
		f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return
		}
		_, _ = f.Read(make([]byte, 1))
		_ = f.Close()
	}
}

// fetch copies a file of somebody's to a new one of the daemon's, or a directory's
// regular files. It follows a symlink to the top, and none below.
func fetch(path, own string, alive func()) error {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	return filepath.WalkDir(path, func(at string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		to := own + strings.TrimPrefix(at, path)
		switch {
		case entry.IsDir():
			return os.Mkdir(to, 0o700)
		case at != path && !entry.Type().IsRegular():
			return nil
		}
		in, err := regular.Open(at)
		if err != nil {
			return err
		}
		defer in.Close()
		return copyNew(in, to, false, alive)
	})
}

// deliver copies a file of the daemon's to where nothing is, under another name until
// it is whole, or the content of a directory into an empty one, in the order of names.
func deliver(r request, alive func()) error {
	if info, err := os.Stat(r.Own); err != nil || info.IsDir() {
		return errors.Join(err, filepath.WalkDir(r.Own, func(at string, entry fs.DirEntry, err error) error {
			to := r.Path + strings.TrimPrefix(at, r.Own)
			switch {
			case err != nil || at == r.Own:
				return err
			case entry.IsDir():
				return os.Mkdir(to, 0o700)
			}
			return deliverFile(at, to, alive)
		}))
	}
	if _, err := os.Lstat(r.Path); err == nil {
		return &fs.PathError{Op: "write", Path: r.Path, Err: unix.EEXIST}
	}
	defer os.Remove(r.Partial)
	if err := deliverFile(r.Own, r.Partial, alive); err != nil {
		return err
	}
	// A rename would replace what has come meanwhile.
	err := unix.Renameat2(unix.AT_FDCWD, r.Partial, unix.AT_FDCWD, r.Path, unix.RENAME_NOREPLACE)
	if err == unix.EINVAL || err == unix.ENOSYS { // not every filesystem can
		err = unix.Link(r.Partial, r.Path)
	}
	if err != nil {
		return &fs.PathError{Op: "write", Path: r.Path, Err: err}
	}
	return nil
}

func deliverFile(own, path string, alive func()) error {
	in, err := os.Open(own)
	if err != nil {
		return err
	}
	defer in.Close()
	return copyNew(in, path, true, alive)
}

// copyNew writes a new file; a durable one is on the disk then, or whatever it is on.
func copyNew(in io.Reader, path string, durable bool, alive func()) error {
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(lively{out, alive}, in)
	if err == nil && durable {
		err = out.Sync()
	}
	return errors.Join(err, out.Close())
}

// lively tells of each write.
type lively struct {
	w     io.Writer
	alive func()
}

func (l lively) Write(b []byte) (int, error) {
	n, err := l.w.Write(b)
	l.alive()
	return n, err
}

// relabel labels a tree, the top last: whoever is asked twice does it all again then.
func relabel(top, label string, alive func()) error {
	set := func(path string) error {
		err := unix.Lsetxattr(path, "security.selinux", []byte(label), 0)
		if err == unix.ENOENT && path != top || err == unix.ENOTSUP {
			return nil
		}
		if err != nil {
			return fmt.Errorf("label %s: %w", path, err)
		}
		return nil
	}
	err := filepath.WalkDir(top, func(path string, _ fs.DirEntry, err error) error {
		alive()
		if errors.Is(err, fs.ErrNotExist) && path != top {
			return nil
		}
		if err != nil || path == top {
			return err
		}
		return set(path)
	})
	if err != nil {
		return err
	}
	return set(top)
}
