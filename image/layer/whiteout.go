package layer

import (
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
	return nil
}
