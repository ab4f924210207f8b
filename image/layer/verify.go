package layer

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// ErrList means that a list cannot be read: it says nothing about the layer.
var ErrList = errors.New("the list of files is damaged")

// Difference is one name of a layer that is not as its list says.
type Difference struct {
	Path    string // below the layer's root, "/" for the root itself
	Problem string // "missing", "not in the layer", or what is and what should be
}

// Verify compares the tree dir with its list and reads every file. It calls
// found for each difference, in the list's order: what lies below a missing or
// an additional directory is not told apart. It changes nothing and blocks on
// the disk; a done ctx ends it at the next file. ErrList when the list is not
// whole, after the differences that the readable part has shown.
func Verify(ctx context.Context, dir string, list io.Reader, found func(Difference)) error {
	root, err := openRoot(dir)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		found(Difference{"/", "missing"})
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(root)
	z, err := zstd.NewReader(list, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(64<<20))
	if err != nil {
		return err
	}
	defer z.Close()
	v := &verifier{ctx: ctx, root: root, here: -1, in: bufio.NewReaderSize(z, 64<<10), found: found}
	v.look.linked = map[inode]uint64{}
	defer v.leave()
	return v.run()
}

type verifier struct {
	ctx   context.Context
	root  int
	in    *bufio.Reader
	found func(Difference)
	look  lister // describes what is there

	// The directory that is looked at.
	where string
	here  int      // open; -1 when it is not there, which its parent's list has told
	names []string // in it, sorted, that the list has not come to
}

func (v *verifier) run() error {
	magic := make([]byte, len(listMagic))
	if _, err := io.ReadFull(v.in, magic); err != nil || string(magic) != listMagic {
		return ErrList
	}
	for first := true; ; first = false {
		if v.ctx.Err() != nil {
			return context.Cause(v.ctx)
		}
		kind, err := v.in.ReadByte()
		if err != nil {
			return fmt.Errorf("%w: %v", ErrList, err)
		}
		switch {
		case kind == recordEnd:
			v.additional("")
			return nil
		case kind == recordDirectory:
			err = v.enter()
		case kind == recordEntry && first:
			err = v.compareRoot()
		case kind == recordEntry:
			err = v.next()
		default:
			err = fmt.Errorf("%w: unknown record %q", ErrList, kind)
		}
		if err != nil {
			return err
		}
	}
}

func (v *verifier) compareRoot() error {
	want, err := v.read()
	if err != nil {
		return err
	}
	st, err := lstatAt(v.root, ".")
	if err != nil {
		return failed("stat", "/", err)
	}
	v.compare(v.root, want, st, "/")
	return nil
}

func (v *verifier) leave() {
	if v.here >= 0 {
		unix.Close(v.here)
	}
	v.here, v.names = -1, nil
}

// enter begins with the next directory of the list.
func (v *verifier) enter() error {
	v.additional("")
	v.leave()
	name, err := v.text()
	if err != nil {
		return err
	}
	v.where = name
	fd, err := openBeneath(v.root, name)
	switch err {
	case nil:
	case unix.ENOENT, unix.ENOTDIR, unix.ELOOP:
		return nil // told where its name is listed
	default:
		v.found(Difference{"/" + name, "cannot be opened: " + err.Error()})
		return nil
	}
	v.here = fd
	if v.names, err = names(fd); err != nil {
		v.found(Difference{"/" + name, "cannot be listed: " + err.Error()})
		v.leave()
	}
	slices.Sort(v.names)
	return nil
}

// additional tells the names of the directory that come before until, all when
// that is empty: the list does not have them.
func (v *verifier) additional(until string) {
	for len(v.names) > 0 && (until == "" || v.names[0] < until) {
		v.found(Difference{"/" + join(v.where, v.names[0]), "not in the layer"})
		v.names = v.names[1:]
	}
}

// next compares what the list says of one name.
func (v *verifier) next() error {
	want, err := v.read()
	if err != nil || v.here < 0 {
		return err
	}
	v.additional(want.name)
	path := "/" + join(v.where, want.name)
	if len(v.names) == 0 || v.names[0] != want.name {
		v.found(Difference{path, "missing"})
		return nil
	}
	v.names = v.names[1:]
	st, err := lstatAt(v.here, want.name)
	if err != nil {
		v.found(Difference{path, "cannot be looked at: " + err.Error()})
		return nil
	}
	v.compare(v.here, want, st, path)
	return nil
}

func (v *verifier) compare(dir int, want item, st *unix.Stat_t, path string) {
	is := looksOf(want.name, st)
	var wrong []string
	note := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	if a, b := kindOf(is.mode), kindOf(want.mode); a != b {
		v.found(Difference{path, fmt.Sprintf("is a %s, should be a %s", a, b)})
		return
	}
	if is.mode != want.mode {
		note("mode %04o, should be %04o", is.mode&0o7777, want.mode&0o7777)
	}
	if is.uid != want.uid || is.gid != want.gid {
		note("owner %d:%d, should be %d:%d", is.uid, is.gid, want.uid, want.gid)
	}
	if is.nlink != want.nlink {
		note("%d names, should have %d", is.nlink, want.nlink)
	}
	if is.mtime != want.mtime {
		note("modified at %s, should be %s", stamp(is.mtime), stamp(want.mtime))
	}
	switch xattrs, err := xattrSum(procPath(dir, want.name)); {
	case err != nil:
		note("extended attributes cannot be read: %v", err)
	case xattrs != want.xattrs:
		note("other extended attributes")
	}
	switch kind := is.mode & unix.S_IFMT; {
	case is.size != want.size && (kind == unix.S_IFCHR || kind == unix.S_IFBLK):
		note("another device")
	case is.size != want.size:
		note("%d bytes, should have %d", is.size, want.size)
	default:
		if sum, err := v.look.sum(dir, want.name, st); err != nil {
			note("%v", err)
		} else if sum != want.sum {
			note("other content")
		}
	}
	if len(wrong) > 0 {
		v.found(Difference{path, strings.Join(wrong, "; ")})
	}
}

func kindOf(mode uint64) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return "directory"
	case unix.S_IFREG:
		return "file"
	case unix.S_IFLNK:
		return "symlink"
	case unix.S_IFCHR:
		return "character device"
	case unix.S_IFBLK:
		return "block device"
	case unix.S_IFIFO:
		return "FIFO"
	}
	return "socket"
}

func stamp(t unix.Timespec) string { return fmt.Sprintf("%d.%09d", t.Sec, t.Nsec) }

func (v *verifier) text() (string, error) {
	n, err := binary.ReadUvarint(v.in)
	if err != nil || n > 1<<20 {
		return "", fmt.Errorf("%w: %v", ErrList, err)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(v.in, b); err != nil {
		return "", fmt.Errorf("%w: %v", ErrList, err)
	}
	return string(b), nil
}

// read is the reverse of lister.write.
func (v *verifier) read() (it item, err error) {
	if it.name, err = v.text(); err != nil {
		return it, err
	}
	number := func() (n uint64) {
		if err == nil {
			n, err = binary.ReadUvarint(v.in)
		}
		return n
	}
	fixed := func() uint64 {
		var b [8]byte
		if err == nil {
			_, err = io.ReadFull(v.in, b[:])
		}
		return binary.LittleEndian.Uint64(b[:])
	}
	it.mode, it.uid, it.gid = number(), number(), number()
	if err == nil {
		it.mtime.Sec, err = binary.ReadVarint(v.in)
	}
	it.mtime.Nsec = int64(number())
	it.nlink, it.size = number(), number()
	it.sum, it.xattrs = fixed(), fixed()
	if err != nil {
		return it, fmt.Errorf("%w: %v", ErrList, err)
	}
	return it, nil
}
