package layer

import (
	"slices"

	"golang.org/x/sys/unix"
)

// Apply changes a layer that was unpacked at own as planned. It must run once
// only: the caller settles a layer before it is put into place, or a copy.
func (p *Plan) Apply(own string) error {
	root, err := openRoot(own)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	for _, m := range p.moves {
		if err := m.apply(root); err != nil {
			return err
		}
	}
	for _, l := range p.links {
		if err := l.apply(root); err != nil {
			return err
		}
	}
	// Deepest first and last of all, so that nothing changes the times again.
	slices.SortFunc(p.looks, func(a, b look) int { return len(b.name) - len(a.name) })
	for _, l := range p.looks {
		if err := l.apply(root); err != nil {
			return err
		}
	}
	return nil
}

func (m move) apply(root int) error {
	if err := mkdirAll(root, m.to); err != nil {
		return err
	}
	from, err := openBeneath(root, m.from)
	if err != nil {
		return failed("open", m.from, err)
	}
	defer unix.Close(from)
	to, err := openBeneath(root, m.to)
	if err != nil {
		return failed("open", m.to, err)
	}
	defer unix.Close(to)
	if err := merge(from, to, m.from); err != nil {
		return err
	}
	if err := unix.Unlinkat(root, m.from, unix.AT_REMOVEDIR); err != nil {
		return failed("remove", m.from, err)
	}
	return nil
}

// merge moves everything from one directory into another. Directories that
// both have are merged; else what moves wins.
func merge(from, to int, where string) error {
	list, err := names(from)
	if err != nil {
		return failed("list", where, err)
	}
	for _, name := range list {
		if err := mergeOne(from, to, name, join(where, name)); err != nil {
			return err
		}
	}
	return nil
}

func mergeOne(from, to int, name, where string) error {
	err := unix.Renameat2(from, name, to, name, unix.RENAME_NOREPLACE)
	if err == nil {
		return nil
	}
	if err != unix.EEXIST {
		return failed("move", where, err)
	}
	src, err := unix.Openat(from, name, openDir, 0)
	if err == nil {
		defer unix.Close(src)
		dst, err := unix.Openat(to, name, openDir, 0)
		if err == nil {
			defer unix.Close(dst)
			if err := merge(src, dst, where); err != nil {
				return err
			}
			return unix.Unlinkat(from, name, unix.AT_REMOVEDIR)
		}
	}
	if err := removeAt(to, name); err != nil {
		return failed("replace", where, err)
	}
	if err := unix.Renameat2(from, name, to, name, unix.RENAME_NOREPLACE); err != nil {
		return failed("move", where, err)
	}
	return nil
}

// mkdirAll makes a resolved directory and what is missing above it.
func mkdirAll(root int, name string) error {
	if name == "" {
		return nil
	}
	dir, base := split(name)
	if err := mkdirAll(root, dir); err != nil {
		return err
	}
	parent, err := openBeneath(root, dir)
	if err != nil {
		return failed("open", dir, err)
	}
	defer unix.Close(parent)
	if err := unix.Mkdirat(parent, base, 0o755); err != nil && err != unix.EEXIST {
		return failed("create", name, err)
	}
	return nil
}

// apply copies the target into the layer, as overlay would when it is linked
// in a container, and links it.
func (l crossLink) apply(root int) error {
	targetDir, targetBase := split(l.target)
	if err := mkdirAll(root, targetDir); err != nil {
		return err
	}
	to, err := openBeneath(root, targetDir)
	if err != nil {
		return failed("open", targetDir, err)
	}
	defer unix.Close(to)
	st, err := lstatAt(to, targetBase)
	if l.lower.Dir != "" && (err == unix.ENOENT || err == nil && isWhiteout(st)) {
		if err := l.copyUp(to, targetBase); err != nil {
			return err
		}
	}
	nameDir, nameBase := split(l.name)
	if err := mkdirAll(root, nameDir); err != nil {
		return err
	}
	at, err := openBeneath(root, nameDir)
	if err != nil {
		return failed("open", nameDir, err)
	}
	defer unix.Close(at)
	if err := unix.Linkat(to, targetBase, at, nameBase, 0); err != nil {
		return failed("link", l.name, err)
	}
	if err == nil && isWhiteout(st) {
		return l.hideAgain(to, targetBase)
	}
	return nil
}

func (l crossLink) copyUp(to int, base string) error {
	lower, err := openRoot(l.lower.Dir)
	if err != nil {
		return err
	}
	defer unix.Close(lower)
	dir, name := split(l.source)
	from, err := openBeneath(lower, dir)
	if err != nil {
		return failed("open", dir, err)
	}
	defer unix.Close(from)
	st, err := lstatAt(from, name)
	if err != nil {
		return failed("stat", l.source, err)
	}
	if err := unix.Unlinkat(to, base, 0); err != nil && err != unix.ENOENT {
		return failed("replace", l.target, err)
	}
	return copyFile(from, to, name, st)
}

// hideAgain: the layer deletes the target's own name and keeps it under the
// link's.
func (l crossLink) hideAgain(to int, base string) error {
	if err := unix.Unlinkat(to, base, 0); err != nil {
		return failed("remove", l.target, err)
	}
	if err := unix.Mknodat(to, base, unix.S_IFCHR, 0); err != nil {
		return failed("hide", l.target, err)
	}
	return nil
}

func (l look) apply(root int) error {
	lower, err := openRoot(l.lower.Dir)
	if err != nil {
		return err
	}
	defer unix.Close(lower)
	from, err := openBeneath(lower, l.source)
	if err != nil {
		return failed("open", l.source, err)
	}
	defer unix.Close(from)
	to, err := openBeneath(root, l.name)
	if err != nil {
		return failed("open", l.name, err)
	}
	defer unix.Close(to)
	if err := copyLooks(from, to); err != nil {
		return failed("settle", l.name, err)
	}
	return nil
}

// copyLooks is copyAttributes without overlay's marks: whether a directory is
// opaque is each layer's own business.
func copyLooks(from, to int) error {
	opaque, err := isOpaque(to, ".")
	if err != nil {
		return err
	}
	if err := copyAttributes(from, to); err != nil {
		return err
	}
	if opaque {
		return setOpaque(to)
	}
	err = unix.Fremovexattr(to, xattrOpaque)
	if err == unix.ENODATA || err == unix.ENOTSUP {
		return nil
	}
	return err
}
