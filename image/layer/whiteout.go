package layer

import (
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	whiteoutPrefix = ".wh."
	aufsPrefix     = ".wh..wh."
	opaqueMarker   = ".wh..wh..opq"
)

// marker handles entries that stand for something else than themselves: a
// deletion, an opaque directory, or aufs's own bookkeeping, which is skipped.
func (u *unpacker) marker(name string) (bool, error) {
	if !strings.Contains(name, whiteoutPrefix) {
		return false, nil
	}
	dir, base := split(name)
	for part := range strings.SplitSeq(dir, "/") {
		if strings.HasPrefix(part, aufsPrefix) {
			return true, nil
		}
		if strings.HasPrefix(part, whiteoutPrefix) {
			return false, invalid(name, "below a whiteout")
		}
	}
	switch {
	case base == opaqueMarker:
		return true, u.makeOpaque(dir)
	case strings.HasPrefix(base, aufsPrefix):
		return true, nil
	case strings.HasPrefix(base, whiteoutPrefix):
		return true, u.whiteout(name, strings.TrimPrefix(base, whiteoutPrefix))
	}
	return false, nil
}

func (u *unpacker) makeOpaque(dir string) error {
	n, err := u.dir(dir)
	if err != nil {
		return err
	}
	if n.path == "" {
		u.opaque = true
		return nil
	}
	if err := setOpaque(n.fd); err != nil {
		return failed("mark opaque", dir, err)
	}
	return nil
}

// whiteout hides what lower layers have under a name. What this layer itself
// has there, written before or after, stays: a directory becomes opaque.
func (u *unpacker) whiteout(name, hidden string) error {
	if hidden == "" || hidden == "." || hidden == ".." {
		return invalid(name, "a whiteout of nothing")
	}
	n, _, err := u.parent(name)
	if err != nil {
		return err
	}
	where := join(n.path, hidden)
	if _, pending := u.links[where]; pending {
		return nil
	}
	if err := u.remember(where); err != nil {
		return err
	}
	u.whiteouts[where] = true
	err = unix.Mknodat(n.fd, hidden, unix.S_IFCHR, 0)
	if err == nil {
		return nil
	}
	if err != unix.EEXIST {
		return failed("create", name, err)
	}
	fd, err := unix.Openat(n.fd, hidden, openDir, 0)
	switch err {
	case nil:
	case unix.ENOTDIR, unix.ELOOP:
		return nil
	default:
		return failed("open", where, err)
	}
	defer unix.Close(fd)
	if err := setOpaque(fd); err != nil {
		return failed("mark opaque", where, err)
	}
	u.fresh[where] = true
	return nil
}

// pruneWhiteouts removes whiteouts where nothing can be hidden, below opaque
// directories: overlay lists a directory that has nothing to merge with as it
// is, whiteouts included. It returns the directories that hold the others.
func (u *unpacker) pruneWhiteouts() ([]string, error) {
	parents := map[string]bool{}
	for name := range u.whiteouts {
		dir, _ := split(name)
		parents[dir] = true
	}
	delete(parents, "") // a container's root is always merged
	var left []string
	for _, dir := range slices.Sorted(maps.Keys(parents)) {
		hidden, err := hides(u.root.fd, dir)
		if err != nil {
			return nil, err
		}
		count := 0
		if hidden {
			err = dropWhiteouts(u.root.fd, dir)
		} else {
			count, err = countWhiteouts(u.root.fd, dir)
		}
		if err != nil {
			return nil, err
		}
		if count > 0 {
			left = append(left, dir)
		}
	}
	return left, nil
}

// countWhiteouts counts those of one directory.
func countWhiteouts(root int, dir string) (count int, err error) {
	err = eachWhiteout(root, dir, func(int, string) error {
		count++
		return nil
	})
	return count, err
}

// dropWhiteouts removes those of one directory.
func dropWhiteouts(root int, dir string) error {
	return eachWhiteout(root, dir, func(fd int, name string) error {
		return unix.Unlinkat(fd, name, 0)
	})
}

func eachWhiteout(root int, dir string, f func(fd int, name string) error) error {
	fd, err := openBeneath(root, dir)
	if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP {
		return nil // replaced since
	}
	if err != nil {
		return failed("open", dir, err)
	}
	defer unix.Close(fd)
	err = eachName(fd, func(name string) error {
		st, err := lstatAt(fd, name)
		if err == nil && isWhiteout(st) {
			err = f(fd, name)
		}
		return err
	})
	if err != nil {
		return failed("prune", dir, err)
	}
	return nil
}
