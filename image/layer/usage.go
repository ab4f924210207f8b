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
	return usageOf(&st)
}

type inode struct{ dev, ino uint64 }

func inodeOf(st *unix.Stat_t) inode { return inode{uint64(st.Dev), st.Ino} }

// Measure counts what dir and everything below it take. Other filesystems
// mounted below are counted too; there should be none. It tolerates files
// that vanish and directories that move while it looks, and holds two
// descriptors however deep the tree is: a running container, which may be
// hostile, makes the trees that are measured.
func Measure(dir string) (Usage, error) {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return Usage{}, &os.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if !isDir(&st) {
		return usageOf(&st), nil
	}
	return walkTree(dir, nil)
}

// walkTree counts a directory and shows everything in it to visit.
func walkTree(dir string, visit visitor) (Usage, error) {
	root, err := openRoot(dir)
	if err != nil {
		return Usage{}, err
	}
	defer unix.Close(root)
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return Usage{}, &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	m := measurement{usage: usageOf(&st), seen: map[inode]bool{}, visit: visit}
	if err := m.walk(root); err != nil {
		return m.usage, &fs.PathError{Op: "measure", Path: dir, Err: err}
	}
	return m.usage, nil
}

func usageOf(st *unix.Stat_t) Usage { return Usage{Bytes: uint64(st.Blocks) * 512, Inodes: 1} }

// measurement is one walk over a tree. Of the directories from the root to
// the current one only the last is open; the way back up is "..".
type measurement struct {
	usage Usage
	seen  map[inode]bool // files with several names
	path  []level
	visit visitor // told everything, each directory's names sorted; nil when only the sums matter
}

// visitor is told what a walk meets: a directory by its name below the root,
// then everything in it.
type visitor interface {
	directory(name string) error
	entry(dir int, name string, st *unix.Stat_t) error
}

type level struct {
	name string
	self inode
	subs []string // directories still to be walked
}

func (m *measurement) walk(root int) error {
	here, err := unix.Openat(root, ".", openDir, 0)
	if err != nil {
		return err
	}
	defer func() { unix.Close(here) }()
	if err := m.enter(here, ""); err != nil {
		return err
	}
	for len(m.path) > 0 {
		next := -1
		if top := &m.path[len(m.path)-1]; len(top.subs) > 0 {
			name := top.subs[len(top.subs)-1]
			top.subs = top.subs[:len(top.subs)-1]
			next, err = unix.Openat(here, name, openDir, 0)
			if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP { // gone, or replaced
				continue
			}
			if err == nil {
				err = m.enter(next, name)
			}
		} else {
			m.path = m.path[:len(m.path)-1]
			next, err = m.up(root, here)
		}
		if next >= 0 {
			unix.Close(here)
			here = next
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// enter counts what is in a directory and notes the directories among it.
func (m *measurement) enter(fd int, name string) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	l := level{name: name, self: inodeOf(&st)}
	each := eachName
	if m.visit != nil {
		if err := m.visit.directory(m.nameOf(name)); err != nil {
			return err
		}
		each = eachSorted
	}
	err := each(fd, func(name string) error {
		st, err := lstatAt(fd, name)
		if err == unix.ENOENT {
			return nil
		}
		if err != nil {
			return err
		}
		if m.visit != nil {
			if err := m.visit.entry(fd, name, st); err != nil {
				return err
			}
		}
		if st.Nlink > 1 && !isDir(st) {
			if m.seen[inodeOf(st)] {
				return nil
			}
			m.seen[inodeOf(st)] = true
		}
		m.usage.Bytes += uint64(st.Blocks) * 512
		m.usage.Inodes++
		if isDir(st) {
			l.subs = append(l.subs, name)
		}
		return nil
	})
	m.path = append(m.path, l)
	return err
}

// nameOf is the name below the root of what is in the current directory.
func (m *measurement) nameOf(base string) string {
	where := ""
	for _, l := range m.path {
		where = join(where, l.name)
	}
	return join(where, base)
}

// up opens the directory that the path now ends with. Where the one just left
// has been moved away, ".." is another: then the path is walked down again,
// and cut where it does not lead on any more.
func (m *measurement) up(root, here int) (int, error) {
	if len(m.path) == 0 {
		return -1, nil
	}
	parent, err := unix.Openat(here, "..", openDir, 0)
	if err == nil && m.isAt(parent, len(m.path)-1) {
		return parent, nil
	}
	if err == nil {
		unix.Close(parent)
	}
	fd, err := unix.Openat(root, ".", openDir, 0)
	if err != nil {
		return -1, err
	}
	for i := 1; i < len(m.path); i++ {
		next, err := unix.Openat(fd, m.path[i].name, openDir, 0)
		if err != nil || !m.isAt(next, i) {
			if err == nil {
				unix.Close(next)
			}
			m.path = m.path[:i]
			break
		}
		unix.Close(fd)
		fd = next
	}
	return fd, nil
}

// isAt says whether fd is the directory at a level of the path.
func (m *measurement) isAt(fd, i int) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && inodeOf(&st) == m.path[i].self
}
