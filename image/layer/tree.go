package layer

import (
	"strings"

	"golang.org/x/sys/unix"
)

// node is an open directory of the layer. path is where it really is below
// root, which differs from the name it was reached by when symlinks were
// followed.
type node struct {
	fd   int
	path string
}

// tree resolves names below a layer's root and keeps the directories it has
// opened: tar lists a directory's entries together, so nearly every lookup is
// a hit.
type tree struct {
	lim     Limits
	root    *node
	open    map[string]*node // by cleaned name as entries spell it
	implied map[string]bool  // directories made without an entry
	fresh   map[string]bool  // those of them that stand where the layer deletes something
	stale   bool             // something that cached names may lead through was replaced
	names   int              // bytes of names kept in memory
}

const (
	maxOpen    = 128
	maxSymlink = 40 // as the kernel
)

func newTree(root string, lim Limits) (*tree, error) {
	fd, err := openRoot(root)
	if err != nil {
		return nil, err
	}
	return &tree{
		lim:     lim,
		root:    &node{fd: fd},
		open:    map[string]*node{},
		implied: map[string]bool{"": true},
		fresh:   map[string]bool{},
	}, nil
}

func (t *tree) close() {
	t.forget()
	unix.Close(t.root.fd)
}

// forget drops every cached directory.
func (t *tree) forget() {
	for name, n := range t.open {
		unix.Close(n.fd)
		delete(t.open, name)
	}
}

func (t *tree) keep(name string, n *node) {
	if len(t.open) >= maxOpen {
		t.forget()
	}
	t.open[name] = n
}

// dir returns the directory of a cleaned name, following symlinks inside root
// and making what is missing. The node stays open until the next call of dir.
func (t *tree) dir(name string) (*node, error) {
	if t.stale {
		t.forget()
		t.stale = false
	}
	budget := maxSymlink
	return t.resolve(name, &budget)
}

// resolve walks name from the root. It keeps no descriptor but the last one:
// a name may be hundreds of components long.
func (t *tree) resolve(name string, budget *int) (*node, error) {
	if name == "" {
		return t.root, nil
	}
	if n := t.open[name]; n != nil {
		return n, nil
	}
	parentName, base := split(name)
	parent, err := t.resolve(parentName, budget)
	if err != nil {
		return nil, err
	}
	n, err := t.step(parent, base, budget)
	if err != nil {
		return nil, err
	}
	if n != t.root && t.open[name] == nil {
		if cached := t.open[n.path]; cached == n {
			return n, nil // reached through a symlink; cached under its real name
		}
		t.keep(name, n)
	}
	return n, nil
}

// step enters one component.
func (t *tree) step(parent *node, base string, budget *int) (*node, error) {
	where := join(parent.path, base)
	fd, err := unix.Openat(parent.fd, base, openDir, 0)
	switch err {
	case nil:
		return &node{fd, where}, nil
	case unix.ENOENT:
		return t.imply(parent, base)
	case unix.ENOTDIR, unix.ELOOP:
	default:
		return nil, failed("open", where, err)
	}
	st, err := lstatAt(parent.fd, base)
	if err != nil {
		return nil, failed("stat", where, err)
	}
	switch {
	case isSymlink(st):
		return t.follow(parent, base, budget)
	case isWhiteout(st):
		return t.reviveWhiteout(parent, base)
	}
	return nil, invalid(where, "used as a directory, but is not one")
}

// remember counts a name that is kept in memory.
func (t *tree) remember(name string) error {
	if t.names += len(name); t.names > t.lim.NameBytes {
		return invalid(name, "more than %d bytes of names of directories, whiteouts and links to lower layers", t.lim.NameBytes)
	}
	return nil
}

// imply makes a directory that has no entry (yet).
func (t *tree) imply(parent *node, base string) (*node, error) {
	where := join(parent.path, base)
	if len(t.implied) >= maxImplied {
		return nil, invalid(where, "more than %d directories without an entry", maxImplied)
	}
	if err := t.lim.fits(where); err != nil {
		return nil, err
	}
	if err := t.remember(where); err != nil {
		return nil, err
	}
	if err := unix.Mkdirat(parent.fd, base, 0o755); err != nil {
		return nil, failed("create", where, err)
	}
	fd, err := unix.Openat(parent.fd, base, openDir, 0)
	if err != nil {
		return nil, failed("open", where, err)
	}
	// The daemon's umask and a set-gid parent must not show.
	if err := unix.Fchmod(fd, 0o755); err != nil {
		unix.Close(fd)
		return nil, failed("chmod", where, err)
	}
	if err := unix.Fchown(fd, 0, 0); err != nil {
		unix.Close(fd)
		return nil, failed("chown", where, err)
	}
	t.implied[where] = true
	return &node{fd, where}, nil
}

// reviveWhiteout puts a directory where the layer has a whiteout: what is
// below it in lower layers stays deleted, so it is opaque.
func (t *tree) reviveWhiteout(parent *node, base string) (*node, error) {
	where := join(parent.path, base)
	if err := unix.Unlinkat(parent.fd, base, 0); err != nil {
		return nil, failed("replace", where, err)
	}
	n, err := t.imply(parent, base)
	if err != nil {
		return nil, err
	}
	if err := setOpaque(n.fd); err != nil {
		unix.Close(n.fd)
		return nil, failed("mark opaque", where, err)
	}
	t.fresh[where] = true
	return n, nil
}

// follow resolves a symlink that stands for a directory, with the layer's
// root as "/".
func (t *tree) follow(parent *node, base string, budget *int) (*node, error) {
	where := join(parent.path, base)
	if *budget--; *budget < 0 {
		return nil, invalid(where, "too many symlinks on the way")
	}
	target, err := readlinkAt(parent.fd, base)
	if err != nil {
		return nil, failed("read link", where, err)
	}
	at := parent.path
	if strings.HasPrefix(target, "/") {
		at = ""
	}
	for part := range strings.SplitSeq(target, "/") {
		switch part {
		case "", ".":
			continue
		case "..":
			at, _ = split(at)
			continue
		}
		if len(part) > maxComponent {
			return nil, invalid(where, "link target with a component longer than %d bytes", maxComponent)
		}
		n, err := t.resolve(join(at, part), budget)
		if err != nil {
			return nil, err
		}
		at = n.path
	}
	return t.resolve(at, budget)
}

func setOpaque(fd int) error {
	return unix.Fsetxattr(fd, xattrOpaque, []byte("y"), 0)
}
