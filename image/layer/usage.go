package layer

import (
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Usage is what a tree takes on its filesystem, as du counts it: blocks
// allocated, every inode once however many names it has.
type Usage struct {
	Bytes  uint64 `json:"bytes"`
	Inodes uint64 `json:"inodes"`
}

// Add returns the sum.
func (u Usage) Add(o Usage) Usage {
	return Usage{Bytes: u.Bytes + o.Bytes, Inodes: u.Inodes + o.Inodes}
}

// UsageOf counts path alone, nothing below it; nothing when it is not there.
func UsageOf(path string) Usage {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return Usage{}
	}
	return Usage{Bytes: uint64(st.Blocks) * 512, Inodes: 1}
}

type inode struct{ dev, ino uint64 }

// Measure counts what dir and everything below it take. Other filesystems
// mounted below are counted too; there should be none. It tolerates files
// that vanish while it looks.
func Measure(dir string) (Usage, error) {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return Usage{}, &os.PathError{Op: "lstat", Path: dir, Err: err}
	}
	u := Usage{Bytes: uint64(st.Blocks) * 512, Inodes: 1}
	if !isDir(&st) {
		return u, nil
	}
	fd, err := openRoot(dir)
	if err != nil {
		return Usage{}, err
	}
	defer unix.Close(fd)
	err = u.measure(fd, map[inode]bool{})
	if err != nil {
		err = &fs.PathError{Op: "measure", Path: dir, Err: err}
	}
	return u, err
}

func (u *Usage) measure(fd int, seen map[inode]bool) error {
	list, err := names(fd)
	if err != nil {
		return err
	}
	for _, name := range list {
		st, err := lstatAt(fd, name)
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return err
		}
		if st.Nlink > 1 && !isDir(st) {
			id := inode{uint64(st.Dev), st.Ino}
			if seen[id] {
				continue
			}
			seen[id] = true
		}
		u.Bytes += uint64(st.Blocks) * 512
		u.Inodes++
		if !isDir(st) {
			continue
		}
		sub, err := unix.Openat(fd, name, openDir, 0)
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return err
		}
		err = u.measure(sub, seen)
		unix.Close(sub)
		if err != nil {
			return err
		}
	}
	return nil
}
