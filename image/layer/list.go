package layer

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"github.com/cespare/xxhash/v2"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// A list says what a layer's directory holds, so that it can be told later
// whether it still does: nothing else can, as a directory cannot be packed
// again into the tar whose digest is known. It finds damage, not forgery: who
// can change a layer can change its list, hence a fast checksum (xxHash, 64
// bits), which costs a pull next to nothing while bytes pass through anyway.
//
// A list is one zstd stream: listMagic, the root as an entry without a name,
// then records until recordEnd. A directory's record is followed by those of
// all that is in it, sorted by name. Numbers are varints.
const (
	listMagic = "berth layer list 1\n"

	recordDirectory = 'D'
	recordEntry     = 'E'
	recordEnd       = '.'
)

// Sums are regular files by inode number, as Unpack wrote them.
type Sums map[uint64]Sum

// Sum is one file of Sums.
type Sum struct {
	Content    uint64 // checksum
	Attributes bool   // the file has extended attributes
}

// Note adds an open file by the checksum (xxHash, 64 bits) of its content.
func (s Sums) Note(f *os.File, content uint64) error {
	return s.note(int(f.Fd()), content)
}

// note looks up what WriteList would have to, at a greater cost. A file may have
// attributes that nobody gave it: from a default ACL.
func (s Sums) note(fd int, content uint64) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	n, err := unix.Flistxattr(fd, nil)
	if err != nil && err != unix.ENOTSUP {
		return err
	}
	s[st.Ino] = Sum{Content: content, Attributes: n > 0}
	return nil
}

// item is what a list says of one name.
type item struct {
	name   string
	mode   uint64 // type and permissions
	uid    uint64
	gid    uint64
	mtime  unix.Timespec
	nlink  uint64 // 0 for a directory: filesystems count those differently
	size   uint64 // of a regular file or symlink; a device's number
	sum    uint64 // of a regular file's content or a symlink's target
	xattrs uint64 // of all extended attributes but the host's; 0 for none
}

// WriteList writes the list of the tree dir to w and counts what the tree takes.
// known saves reading files; others are read. It blocks on the disk.
func WriteList(dir string, w io.Writer, known Sums) (Usage, error) {
	z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(1<<18))
	if err != nil {
		return Usage{}, err
	}
	l := &lister{out: bufio.NewWriterSize(z, 64<<10), known: known, linked: map[inode]uint64{}}
	usage, err := l.list(dir)
	if err == nil {
		err = l.out.Flush()
	}
	if closeErr := z.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return Usage{}, fmt.Errorf("list %s: %w", dir, err)
	}
	return usage, nil
}

type lister struct {
	out    *bufio.Writer
	known  Sums
	linked map[inode]uint64 // sums of files with several names
	buf    []byte
}

func (l *lister) list(dir string) (Usage, error) {
	if _, err := l.out.WriteString(listMagic); err != nil {
		return Usage{}, err
	}
	root, err := openRoot(dir)
	if err != nil {
		return Usage{}, err
	}
	defer unix.Close(root)
	st, err := lstatAt(root, ".")
	if err != nil {
		return Usage{}, failed("stat", "/", err)
	}
	it, err := l.describe(root, "", st)
	if err != nil {
		return Usage{}, err
	}
	if err := l.write(it); err != nil {
		return Usage{}, err
	}
	usage, err := walkTree(dir, l)
	if err != nil {
		return Usage{}, err
	}
	return usage, l.out.WriteByte(recordEnd)
}

func (l *lister) directory(name string) error {
	l.buf = appendText(append(l.buf[:0], recordDirectory), name)
	_, err := l.out.Write(l.buf)
	return err
}

func (l *lister) entry(dir int, name string, st *unix.Stat_t) error {
	it, err := l.describe(dir, name, st)
	if err != nil {
		return err
	}
	return l.write(it)
}

func (l *lister) write(it item) error {
	b := appendText(append(l.buf[:0], recordEntry), it.name)
	for _, n := range []uint64{it.mode, it.uid, it.gid} {
		b = binary.AppendUvarint(b, n)
	}
	b = binary.AppendVarint(b, it.mtime.Sec)
	for _, n := range []uint64{uint64(it.mtime.Nsec), it.nlink, it.size} {
		b = binary.AppendUvarint(b, n)
	}
	b = binary.LittleEndian.AppendUint64(b, it.sum)
	b = binary.LittleEndian.AppendUint64(b, it.xattrs)
	l.buf = b
	_, err := l.out.Write(b)
	return err
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// describe looks at one name. "" is the directory itself.
func (l *lister) describe(dir int, name string, st *unix.Stat_t) (item, error) {
	it := looksOf(name, st)
	if known, ok := l.known[st.Ino]; ok && !known.Attributes && st.Mode&unix.S_IFMT == unix.S_IFREG {
		it.sum = known.Content
		return it, nil
	}
	var err error
	if it.xattrs, err = xattrSum(procPath(dir, name)); err != nil {
		return it, failed("read attributes of", name, err)
	}
	it.sum, err = l.sum(dir, name, st)
	return it, err
}

// looksOf is what a list says of a file without looking into it.
func looksOf(name string, st *unix.Stat_t) item {
	it := item{name: name, mode: uint64(st.Mode), uid: uint64(st.Uid), gid: uint64(st.Gid), mtime: st.Mtim}
	if !isDir(st) {
		it.nlink = st.Nlink
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG, unix.S_IFLNK:
		it.size = uint64(st.Size)
	case unix.S_IFCHR, unix.S_IFBLK:
		it.size = st.Rdev
	}
	return it
}

func (l *lister) sum(dir int, name string, st *unix.Stat_t) (uint64, error) {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		target, err := readlinkAt(dir, name)
		if err != nil {
			return 0, failed("read link", name, err)
		}
		return xxhash.Sum64String(target), nil
	case unix.S_IFREG:
	default:
		return 0, nil
	}
	if known, ok := l.known[st.Ino]; ok {
		return known.Content, nil
	}
	if st.Nlink > 1 {
		if sum, ok := l.linked[inodeOf(st)]; ok {
			return sum, nil
		}
	}
	sum, err := contentSum(dir, name)
	if err == nil && st.Nlink > 1 {
		l.linked[inodeOf(st)] = sum
	}
	return sum, err
}

func contentSum(dir int, name string) (uint64, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, failed("open", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	sum := xxhash.New()
	for {
		n, err := f.Read(*buf)
		_, _ = sum.Write((*buf)[:n])
		if err == io.EOF {
			return sum.Sum64(), nil
		}
		if err != nil {
			return 0, failed("read", name, err)
		}
	}
}

// xattrSum is 0 for a file without attributes. What the host labels files
// with on its own is no part of a layer.
func xattrSum(path string) (uint64, error) {
	list, err := listXattrs(path)
	if err != nil {
		return 0, err
	}
	sum, any := xxhash.New(), false
	var b []byte
	for _, key := range slices.Sorted(maps.Keys(list)) {
		if isHostLabel(key) {
			continue
		}
		any = true
		b = appendText(appendText(b[:0], key), string(list[key]))
		_, _ = sum.Write(b)
	}
	if !any {
		return 0, nil
	}
	return sum.Sum64(), nil
}
