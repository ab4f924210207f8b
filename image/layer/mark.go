package layer

import (
	"golang.org/x/sys/unix"
)

// xattrNoRoot marks a diff directory whose own looks mean nothing, because
// the tar had no entry for "/".
const xattrNoRoot = "trusted.berth.noroot"

// markRoot notes on disk whether the tar had an entry for the root. Most
// layers have none; were it settled like other implied directories, hardly
// any layer could be shared.
func (u *unpacker) markRoot() error {
	if !u.implied[""] {
		return nil
	}
	delete(u.implied, "")
	if err := unix.Fsetxattr(u.root.fd, xattrNoRoot, []byte("y"), 0); err != nil {
		return failed("mark", "/", err)
	}
	return setTimes(u.root.fd, times{})
}

// RootLooks gives dir, a container's upper directory, the looks (owner, mode,
// attributes, times) of the image's root directory: those of the topmost
// layer, bottom first, that has an entry for it, else 0755 and uid:gid.
func RootLooks(dir string, layers []string, uid, gid int) error {
	to, err := openRoot(dir)
	if err != nil {
		return err
	}
	defer unix.Close(to)
	for i := len(layers) - 1; i >= 0; i-- {
		_, err := unix.Lgetxattr(layers[i], xattrNoRoot, nil)
		if err == nil {
			continue
		}
		if err != unix.ENODATA && err != unix.ENOTSUP {
			return failed("read mark of", layers[i], err)
		}
		from, err := openRoot(layers[i])
		if err != nil {
			return err
		}
		defer unix.Close(from)
		return copyAttributes(from, to)
	}
	if err := unix.Fchown(to, uid, gid); err != nil {
		return err
	}
	return unix.Fchmod(to, 0o755)
}
