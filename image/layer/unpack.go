package layer

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"
)

// Result says what a layer turned out to be.
type Result struct {
	Needs Needs
	Sums  Sums // of all regular files, for WriteList
	// Opaque: the layer's own root is opaque, which overlay cannot express.
	// The layers below it must be left out of the mount.
	Opaque bool
}

// Needs is what the layers below decide, see Plan. Names are resolved names
// below the layer's root and may hold any byte, hence []byte for JSON's sake.
type Needs struct {
	Implied [][]byte `json:"implied,omitempty"` // directories without an entry, parents first
	Links   []Link   `json:"links,omitempty"`   // cross links
	// Whiteouts are the directories, below the root, that hold whiteouts.
	Whiteouts [][]byte `json:"whiteouts,omitempty"`
}

// None says that the layer looks the same on whatever layers it is put.
func (n Needs) None() bool {
	return len(n.Implied) == 0 && len(n.Links) == 0 && len(n.Whiteouts) == 0
}

// Link is a hard link to something that this layer does not hold.
type Link struct {
	Name   []byte `json:"name"`
	Target []byte `json:"target"`
}

// times of a directory, set when everything in it has been written.
type times [2]unix.Timespec

type unpacker struct {
	*tree
	ctx context.Context

	dirTimes  map[string]times  // explicit directories
	whiteouts map[string]bool   // made by whiteout entries; may have been replaced since
	links     map[string]string // hard links whose target was not there
	opaque    bool
	inherits  bool  // a directory gives what is made in it something of its own
	sparse    int64 // logical size of sparse files so far
	sums      Sums
	sum       xxhash.Digest // of the file being written
	buf       []byte
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// Unpack writes the tar stream r below the existing, empty directory root.
// It reads r up to the tar's end mark, not to its end. It blocks on r and on
// the disk; a done ctx ends it at the next entry or block. On error the
// directory is left as it is, for the caller to remove. Content that is
// refused gives ErrInvalid, a full disk an error that is ENOSPC or EDQUOT.
func Unpack(ctx context.Context, root string, r io.Reader, lim Limits) (*Result, error) {
	if lim == (Limits{}) {
		lim = Defaults
	}
	t, err := newTree(root, lim)
	if err != nil {
		return nil, err
	}
	defer t.close()
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	u := &unpacker{
		tree: t, ctx: ctx, buf: *buf,
		dirTimes: map[string]times{}, whiteouts: map[string]bool{}, links: map[string]string{}, sums: Sums{},
	}
	if err := u.entries(tar.NewReader(r)); err != nil {
		return nil, err
	}
	if err := u.retryLinks(); err != nil {
		return nil, err
	}
	holders, err := u.pruneWhiteouts()
	if err != nil {
		return nil, err
	}
	if err := u.markRoot(); err != nil {
		return nil, err
	}
	if err := u.finishDirs(); err != nil {
		return nil, err
	}
	return &Result{Needs: u.needs(holders), Sums: u.sums, Opaque: u.opaque}, nil
}

func (u *unpacker) entries(tr *tar.Reader) error {
	for n := 0; ; n++ {
		if err := u.ctx.Err(); err != nil {
			return context.Cause(u.ctx)
		}
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if errors.Is(err, tar.ErrHeader) || errors.Is(err, tar.ErrFieldTooLong) {
			return fmt.Errorf("%w: entry %d: %w", ErrInvalid, n, err)
		}
		if err != nil {
			return fmt.Errorf("read entry %d: %w", n, err)
		}
		if n >= u.lim.Entries {
			return fmt.Errorf("%w: more than %d entries", ErrInvalid, u.lim.Entries)
		}
		if err := u.entry(h, tr); err != nil {
			return err
		}
	}
}

func (u *unpacker) entry(h *tar.Header, body io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader || h.Typeflag == 'V' {
		return nil // comments and volume labels
	}
	name, err := u.lim.clean(h.Name)
	if err != nil {
		return err
	}
	if err := checkHeader(h); err != nil {
		return err
	}
	if skip, err := u.marker(name); skip || err != nil {
		return err
	}
	if h.Typeflag == tar.TypeDir {
		return u.directory(name, h)
	}
	if name == "" {
		return invalid(h.Name, "the root is not a directory")
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		return u.regular(name, h, body)
	case tar.TypeLink:
		return u.hardLink(name, h)
	case tar.TypeSymlink, tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		return u.special(name, h)
	}
	return invalid(h.Name, "unknown entry type %q", h.Typeflag)
}

// checkHeader refuses numbers that the kernel would cut or understand as
// "leave it": 2^32-1 is chown's word for that.
func checkHeader(h *tar.Header) error {
	const noID = 1<<32 - 1
	if h.Uid < 0 || h.Uid >= noID {
		return invalid(h.Name, "uid %d out of range", h.Uid)
	}
	if h.Gid < 0 || h.Gid >= noID {
		return invalid(h.Name, "gid %d out of range", h.Gid)
	}
	if h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock {
		if h.Devmajor < 0 || h.Devmajor >= 1<<12 || h.Devminor < 0 || h.Devminor >= 1<<20 {
			return invalid(h.Name, "device %d:%d out of range", h.Devmajor, h.Devminor)
		}
		if h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0 {
			return invalid(h.Name, "the character device 0:0, which overlay takes for a whiteout")
		}
	}
	return nil
}

// retryLinks makes the hard links whose target came later in the same tar.
// What remains are cross links, each to a name of a lower layer.
func (u *unpacker) retryLinks() error {
	for _, name := range slices.Sorted(maps.Keys(u.links)) {
		if fd, err := openBeneath(u.root.fd, name); err == nil {
			unix.Close(fd) // a directory came later, for an entry below it
			delete(u.links, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(u.links)) {
		// A link may lead to another one that waits: that one goes first.
		chain := []string{name}
		for {
			next := u.links[chain[len(chain)-1]]
			if _, waits := u.links[next]; !waits {
				break
			}
			if slices.Contains(chain, next) || len(chain) > maxSymlink {
				return invalid(name, "hard links that lead to one another")
			}
			chain = append(chain, next)
		}
		for _, link := range slices.Backward(chain) {
			target, waits := u.links[link]
			if !waits {
				continue // made by an earlier chain
			}
			if end, waits := u.links[target]; waits {
				u.links[link] = end
			} else if err := u.link(link, target); err != nil {
				return err
			}
		}
	}
	return nil
}

// finishDirs sets the times of directories last: making an entry in a
// directory changes them. An implied directory without a lower one to copy
// from gets a fixed time, so that the same layer gives the same tree.
func (u *unpacker) finishDirs() error {
	set := func(name string, ts times) error {
		fd, err := openBeneath(u.root.fd, name)
		if err != nil {
			return failed("open", name, err)
		}
		defer unix.Close(fd)
		if err := setTimes(fd, ts); err != nil {
			return failed("set times of", name, err)
		}
		return nil
	}
	for name, ts := range u.dirTimes {
		if err := set(name, ts); err != nil {
			return err
		}
	}
	for name := range u.implied {
		if err := set(name, times{}); err != nil {
			return err
		}
	}
	return nil
}

func (u *unpacker) needs(whiteouts []string) Needs {
	var n Needs
	for _, name := range slices.Sorted(maps.Keys(u.implied)) {
		if !u.fresh[name] { // what was there below is deleted and gives it no looks
			n.Implied = append(n.Implied, []byte(name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(u.links)) {
		n.Links = append(n.Links, Link{Name: []byte(name), Target: []byte(u.links[name])})
	}
	for _, name := range whiteouts {
		n.Whiteouts = append(n.Whiteouts, []byte(name))
	}
	return n
}

// headerTimes are access and modification time of an entry.
func headerTimes(h *tar.Header) times {
	m := h.ModTime
	a := h.AccessTime
	if a.IsZero() {
		a = m
	}
	return times{timespec(a), timespec(m)}
}

func timespec(t time.Time) unix.Timespec {
	if t.IsZero() {
		return unix.Timespec{}
	}
	return unix.Timespec{Sec: t.Unix(), Nsec: int64(t.Nanosecond())}
}

// setTimes is futimens.
func setTimes(fd int, ts times) error {
	return unix.UtimesNanoAt(fd, ".", ts[:], 0)
}
