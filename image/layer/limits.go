package layer

import (
	"path"
	"strings"
)

// Limits bounds what one layer may ask for. The zero value means Defaults.
type Limits struct {
	Entries     int   // tar entries
	PathBytes   int   // length of a whole name, also where symlinks lead to, and of a link target
	Depth       int   // components in a name, also where symlinks lead to
	NameBytes   int   // of the names that are kept in memory: directories, whiteouts, cross links
	SparseBytes int64 // logical size of all sparse files together
}

// Defaults are far above what real images need and far below what could hurt.
// An entry costs time in proportion to its own size on the wire, but its name
// and a sparse file's holes compress to nothing, hence bounds of their own.
var Defaults = Limits{
	Entries:     2_000_000,
	PathBytes:   4095,
	Depth:       512,
	NameBytes:   64 << 20,
	SparseBytes: 64 << 30,
}

const (
	maxComponent = 255
	// Looked through at each replacement of a directory, so not many.
	maxCrossLinks = 10_000
	// Each is looked up in the layers below.
	maxImplied = 200_000
	// The kernel's own for one attribute and for the list of a file's.
	maxXattrName  = 255
	maxXattrValue = 64 << 10
	maxXattrList  = 64 << 10
	maxXattrs     = 512 << 10 // names and values of one entry
	// Files from this size on are compared with what the disk has free.
	largeFile = 64 << 20
)

// clean returns an entry's name as components joined by "/", "" for the root
// itself. It refuses names that the kernel could not hold and names with "..".
func (l Limits) clean(name string) (string, error) {
	if len(name) > l.PathBytes {
		return "", invalid(name, "name longer than %d bytes", l.PathBytes)
	}
	if strings.IndexByte(name, 0) >= 0 {
		return "", invalid(name, "NUL in name")
	}
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "..":
			return "", invalid(name, `".." in name`)
		case len(strings.TrimPrefix(part, whiteoutPrefix)) > maxComponent:
			return "", invalid(name, "a component is longer than %d bytes", maxComponent)
		}
	}
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	return name, l.fits(name)
}

// fits checks a cleaned name, which may also be what symlinks have led to: those
// of a layer could otherwise make a tree deeper and deeper.
func (l Limits) fits(name string) error {
	if len(name) > l.PathBytes {
		return invalid(name, "name longer than %d bytes", l.PathBytes)
	}
	if strings.Count(name, "/") >= l.Depth {
		return invalid(name, "more than %d directories deep", l.Depth)
	}
	return nil
}

// split returns the parent's name and the last component of a cleaned name.
func split(name string) (dir, base string) {
	dir, base = path.Split(name)
	return strings.TrimSuffix(dir, "/"), base
}

// join is path.Join for cleaned names.
func join(dir, base string) string {
	if dir == "" {
		return base
	}
	return dir + "/" + base
}

// within says whether name is dir or lies below it.
func within(name, dir string) bool {
	return dir == "" || name == dir || strings.HasPrefix(name, dir+"/")
}
