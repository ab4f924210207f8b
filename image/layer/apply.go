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
	clock := &clock{root: root, was: map[string]times{}}
	mv := mover{root: root, clock: clock, bare: p.bare, dressed: map[string]bool{}}
	for _, m := range p.moves {
		if err := mv.move(m); err != nil {
			return err
		}
	}
	for _, dir := range p.bared {
		clock.note(dir)
		if err := dropWhiteouts(root, dir); err != nil {
			return err
		}
	}
	for _, l := range p.links {
		if err := l.apply(root, clock); err != nil {
			return err
		}
	}
	if err := clock.restore(); err != nil {
		return err
	}
	// Deepest first and last of all, so that nothing changes the times again.
	slices.SortFunc(p.looks, func(a, b look) int { return len(b.name) - len(a.name) })
	for _, l := range p.looks {
		if mv.dressed[l.name] {
			continue
		}
		if err := l.apply(root); err != nil {
			return err
		}
	}
	return nil
}

// clock remembers the times of directories that are about to be changed.
type clock struct {
	root int
	was  map[string]times
}

// note must be called before the first change in a directory. One that is not
// there yet has no times to keep.
func (c *clock) note(dir string) {
	if _, known := c.was[dir]; known {
		return
	}
	if dir == "" {
		dir = "."
	}
	if st, err := lstatAt(c.root, dir); err == nil && isDir(st) {
		c.was[dir] = times{st.Atim, st.Mtim}
	}
}

func (c *clock) restore() error {
	for dir, ts := range c.was {
		fd, err := openBeneath(c.root, dir)
		if err != nil {
			continue // moved away
		}
		err = setTimes(fd, ts)
		unix.Close(fd)
		if err != nil {
			return failed("set times of", dir, err)
		}
	}
	return nil
}

// mover carries out moves.
type mover struct {
	root    int
	clock   *clock
	bare    map[string]bool // directories that are implied, by their first place
	dressed map[string]bool // directories that a move gave the looks of an entry
}

func (v *mover) move(m move) error {
	if err := mkdirAll(v.root, m.to, v.clock); err != nil {
		return err
	}
	above, _ := split(m.from)
	v.clock.note(above)
	if err := v.merge(m.from, m.to); err != nil {
		return err
	}
	if err := unix.Unlinkat(v.root, m.from, unix.AT_REMOVEDIR); err != nil {
		return failed("remove", m.from, err)
	}
	return nil
}

// merge moves everything from one directory into another. Directories that
// both have are merged; else what moves wins.
func (v *mover) merge(from, to string) error {
	v.clock.note(to)
	src, err := openBeneath(v.root, from)
	if err != nil {
		return failed("open", from, err)
	}
	defer unix.Close(src)
	dst, err := openBeneath(v.root, to)
	if err != nil {
		return failed("open", to, err)
	}
	defer unix.Close(dst)
	list, err := names(src)
	if err != nil {
		return failed("list", from, err)
	}
	for _, name := range list {
		err := unix.Renameat2(src, name, dst, name, unix.RENAME_NOREPLACE)
		if err == unix.EEXIST {
			err = v.collide(src, dst, join(from, name), join(to, name))
		}
		if err != nil {
			return failed("move", join(from, name), err)
		}
	}
	return nil
}

// collide moves something to where something is.
func (v *mover) collide(src, dst int, from, to string) error {
	_, name := split(from)
	a, err := lstatAt(src, name)
	if err != nil {
		return err
	}
	b, err := lstatAt(dst, name)
	if err != nil {
		return err
	}
	if !isDir(a) || !isDir(b) {
		if err := removeAt(dst, name, to, nil); err != nil {
			return err
		}
		return unix.Renameat2(src, name, dst, name, unix.RENAME_NOREPLACE)
	}
	if err := v.merge(from, to); err != nil {
		return err
	}
	if !v.bare[from] {
		if err := v.dress(from, to); err != nil {
			return err
		}
	}
	return unix.Unlinkat(src, name, unix.AT_REMOVEDIR)
}

func (v *mover) dress(from, to string) error {
	src, err := openBeneath(v.root, from)
	if err != nil {
		return err
	}
	defer unix.Close(src)
	dst, err := openBeneath(v.root, to)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	v.dressed[to] = true
	delete(v.clock.was, to) // it has other times from now on
	return copyLooks(src, dst)
}

// mkdirAll makes a resolved directory and what is missing above it.
func mkdirAll(root int, name string, c *clock) error {
	if name == "" {
		return nil
	}
	dir, base := split(name)
	if err := mkdirAll(root, dir, c); err != nil {
		return err
	}
	c.note(dir)
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
func (l crossLink) apply(root int, c *clock) error {
	targetDir, targetBase := split(l.target)
	if err := mkdirAll(root, targetDir, c); err != nil {
		return err
	}
	c.note(targetDir)
	to, err := openBeneath(root, targetDir)
	if err != nil {
		return failed("open", targetDir, err)
	}
	defer unix.Close(to)
	st, err := lstatAt(to, targetBase)
	hidden := err == nil && isWhiteout(st)
	if l.lower.Dir != "" && (hidden || err == unix.ENOENT) {
		if err := l.copyUp(to, targetBase); err != nil {
			return err
		}
	}
	nameDir, nameBase := split(l.name)
	if err := mkdirAll(root, nameDir, c); err != nil {
		return err
	}
	c.note(nameDir)
	at, err := openBeneath(root, nameDir)
	if err != nil {
		return failed("open", nameDir, err)
	}
	defer unix.Close(at)
	if err := unix.Linkat(to, targetBase, at, nameBase, 0); err != nil {
		return failed("link", l.name, err)
	}
	if hidden {
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
