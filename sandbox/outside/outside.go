// Package outside looks at paths of the node that others serve: volumes, devices,
// log directories, the node's own configuration. Behind any of them may be a
// filesystem that does not answer (NFS, FUSE, a dead disk), and whoever touches
// that then hangs inside the kernel, where at worst not even SIGKILL reaches him.
//
// So a Looker has a small process do it, which is given up when it does not answer
// in time: no goroutine hangs, nobody else waits, and the daemon can end. It owns
// those processes and how they are spoken to. It does not own what the paths mean.
//
// Terms: a look is one question about one path. A look hangs from the end of its
// time until the kernel lets its process go. Of one path there is one look at a
// time, hanging ones included, and of all there are at most maxLooks, so retries do
// not pile up.
//
// Files on disk: none of its own.
package outside

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"berth/sandbox/regular"
)

// Found is what a look has found at a path.
type Found struct {
	Path     string // without symlinks
	Mode     fs.FileMode
	Rdev     uint64 // of a device
	UID, GID uint32
	// Served: it is on a filesystem that somebody serves (NFS, FUSE, …), where a read
	// or write may hang at any time, unlike on a disk of the node or in memory. Also of
	// what is missing, by the directory where it would be.
	Served bool
	// Missing: there is nothing; Path is where it would be, its existing part free of
	// symlinks.
	Missing bool
	// Broken is a symlink on the way that leads to nothing or in a circle; nothing else
	// is set then but Missing, when it leads to nothing.
	Broken string
}

// Entry is one file below a directory.
type Entry struct {
	Found
	Rel string // its path below the directory
}

// Host answers looks. The errors are those of the operating system, and of package
// regular for Read; a Looker's are also context.DeadlineExceeded, with the path and
// where its process hangs.
type Host interface {
	// Find resolves a path.
	Find(path string) (Found, error)
	// MakeDir makes a directory and those above it, mode 0755. Idempotent.
	MakeDir(path string) error
	// MakeLog makes the directories of a container's log and tells where it really is.
	// What lies above dir is the node's own, and its symlinks are followed; from there
	// on there may be none. A log that is there must be a regular file.
	MakeLog(dir, path string) (string, error)
	// Read is regular.Read.
	Read(path string, most int64) ([]byte, error)
	// Devices are the device nodes below a directory, without the entries of the
	// directory itself that skip names.
	Devices(dir string, skip []string) ([]Entry, error)
}

// Here is the Host that looks itself: it blocks for as long as the filesystems do.
type Here struct{}

// Find implements Host.
func (Here) Find(path string) (Found, error) {
	real, err := filepath.EvalSymlinks(path)
	if err == nil {
		info, err := os.Stat(real)
		if err != nil {
			return Found{}, err
		}
		f := found(real, info)
		f.Served = served(real)
		return f, nil
	}
	missing := errors.Is(err, os.ErrNotExist)
	if link := brokenLink(path); link != "" && !errors.Is(err, syscall.ENOTDIR) && !errors.Is(err, syscall.ENAMETOOLONG) {
		return Found{Broken: link, Missing: missing}, nil
	}
	if !missing {
		return Found{}, err
	}
	// From the last part that exists on there can be no symlink.
	for dir, rest := filepath.Clean(path), ""; dir != "/"; {
		dir, rest = filepath.Dir(dir), filepath.Join(filepath.Base(dir), rest)
		if real, err := filepath.EvalSymlinks(dir); err == nil {
			return Found{Path: filepath.Join(real, rest), Missing: true, Served: served(real)}, nil
		}
	}
	return Found{}, err
}

func found(path string, info fs.FileInfo) Found {
	f := Found{Path: path, Mode: info.Mode()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		f.Rdev, f.UID, f.GID = uint64(st.Rdev), st.Uid, st.Gid
	}
	return f
}

// brokenLink is the symlink on the way to path that cannot be followed, or "".
func brokenLink(path string) string {
	for p := filepath.Clean(path); p != "/"; p = filepath.Dir(p) {
		info, err := os.Lstat(p)
		if err != nil {
			continue
		}
		if info.Mode()&os.ModeSymlink != 0 {
			if _, err := os.Stat(p); err != nil {
				return p
			}
		}
		return ""
	}
	return ""
}

// MakeDir implements Host.
func (Here) MakeDir(path string) error { return os.MkdirAll(path, 0o755) }

// MakeLog implements Host.
func (Here) MakeLog(dir, path string) (string, error) {
	above := filepath.Dir(filepath.Clean(dir))
	if err := os.MkdirAll(above, 0o755); err != nil {
		return "", err
	}
	above, err := filepath.EvalSymlinks(above)
	if err != nil {
		return "", err
	}
	below := filepath.Join(filepath.Base(dir), path)
	if err := makeBelow(above, filepath.Dir(below)); err != nil {
		return "", err
	}
	log := filepath.Join(above, below)
	info, err := os.Lstat(log)
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return "", err
	case !info.Mode().IsRegular():
		return "", &notRegular{log}
	}
	return log, nil
}

// makeBelow makes directories below one, through no symlink.
func makeBelow(above, below string) error {
	at, err := unix.Open(above, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	path := above
	for _, name := range strings.FieldsFunc(below, func(r rune) bool { return r == '/' }) {
		if err != nil {
			break
		}
		path = filepath.Join(path, name)
		if err = unix.Mkdirat(at, name, 0o755); err == unix.EEXIST {
			err = nil
		}
		next := -1
		if err == nil {
			next, err = unix.Openat(at, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		}
		_ = unix.Close(at)
		at = next
	}
	if err != nil {
		return &fs.PathError{Op: "make directory", Path: path, Err: err}
	}
	return unix.Close(at)
}

// notRegular is a regular.ErrNot.
type notRegular struct{ path string }

func (e *notRegular) Error() string        { return e.path + " is no regular file" }
func (e *notRegular) Is(target error) bool { return target == regular.ErrNot }

// Read implements Host.
func (Here) Read(path string, most int64) ([]byte, error) { return regular.Read(path, most) }

// Devices implements Host.
func (Here) Devices(dir string, skip []string) (list []Entry, err error) {
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) && path != dir {
			return nil
		}
		if err != nil {
			return err
		}
		if filepath.Dir(path) == dir && slices.Contains(skip, entry.Name()) {
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		info, err := entry.Info()
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if info.Mode()&os.ModeDevice != 0 {
			rel, err := filepath.Rel(dir, path)
			if err != nil {
				return err
			}
			list = append(list, Entry{found(path, info), rel})
		}
		return nil
	})
	return list, err
}
