package layer

import (
	"fmt"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

const (
	openDir  = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	openFile = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC

	xattrOpaque  = "trusted.overlay.opaque"
	overlayXattr = "trusted.overlay."
)

// isWhiteout says whether st is overlay's mark for "deleted".
func isWhiteout(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

func isDir(st *unix.Stat_t) bool     { return st.Mode&unix.S_IFMT == unix.S_IFDIR }
func isSymlink(st *unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFLNK }

// lstatAt is fstatat without following a symlink.
func lstatAt(dir int, name string) (*unix.Stat_t, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, err
	}
	return &st, nil
}

func readlinkAt(dir int, name string) (string, error) {
	buf := make([]byte, 4096)
	n, err := unix.Readlinkat(dir, name, buf)
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// procPath names dir/name for calls that have no *at form (extended
// attributes of things that cannot be opened). The last component is not
// followed by the l* calls, and dir is an open directory, so the path is safe.
func procPath(dir int, name string) string {
	return "/proc/self/fd/" + strconv.Itoa(dir) + "/" + name
}

// eachName calls f for what the directory behind fd holds, unsorted. f may
// remove what it is called for. A directory may hold more names than fit into
// memory.
func eachName(fd int, f func(name string) error) error {
	if _, err := unix.Seek(fd, 0, 0); err != nil {
		return err
	}
	buf := make([]byte, 32<<10)
	var list []string
	for {
		n, err := unix.ReadDirent(fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return err
		}
		_, _, list = unix.ParseDirent(buf[:n], -1, list[:0])
		for _, name := range list {
			if err := f(name); err != nil {
				return err
			}
		}
	}
}

// eachSorted is eachName in order: it keeps all names.
func eachSorted(fd int, f func(name string) error) error {
	list, err := names(fd)
	if err != nil {
		return err
	}
	slices.Sort(list)
	for _, name := range list {
		if err := f(name); err != nil {
			return err
		}
	}
	return nil
}

// names lists the directory behind fd, unsorted.
func names(fd int) (list []string, err error) {
	err = eachName(fd, func(name string) error {
		list = append(list, name)
		return nil
	})
	return list, err
}

// removeAt removes name below the open directory dir, whatever it is. gone,
// when it is given, is told every name that went, as names below where.
func removeAt(dir int, name, where string, gone func(string)) error {
	err := unix.Unlinkat(dir, name, 0)
	if err != unix.EISDIR && err != unix.EPERM {
		if err == nil && gone != nil {
			gone(where)
		}
		return err
	}
	fd, err := unix.Openat(dir, name, openDir, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	err = eachName(fd, func(n string) error { return removeAt(fd, n, join(where, n), gone) })
	if err != nil {
		return err
	}
	if gone != nil {
		gone(where)
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
}

// openRoot opens the directory that everything else is resolved from.
func openRoot(dir string) (int, error) {
	fd, err := unix.Open(dir, openDir, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return fd, nil
}

// openBeneath opens a directory by its resolved name. Resolved names hold no
// symlinks; the kernel is told to insist on it.
func openBeneath(root int, name string) (int, error) {
	if name == "" {
		name = "."
	}
	return unix.Openat2(root, name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
}

// Free is how many bytes the filesystem that holds dir has left for users.
func Free(dir string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return st.Bavail * uint64(st.Bsize), nil
}

// SyncFS writes back the filesystem that holds dir. It blocks until the disk
// has everything that was written before the call.
func SyncFS(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return fmt.Errorf("syncfs %s: %w", dir, err)
	}
	return nil
}
