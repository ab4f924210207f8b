package layer

import (
	"archive/tar"
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const paxXattr = "SCHILY.xattr."

// setXattrs gives every extended attribute of an entry to set, sorted.
func setXattrs(h *tar.Header, set func(key string, value []byte) error) error {
	var keys []string
	total, list := 0, 0
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, paxXattr)
		if !ok {
			continue
		}
		total += len(name) + len(value)
		list += len(name) + 1
		switch {
		case len(name) > maxXattrName:
			return invalid(h.Name, "an extended attribute's name of %d bytes, at most %d are allowed", len(name), maxXattrName)
		case len(value) > maxXattrValue:
			return invalid(h.Name, "extended attribute %q of %d bytes, at most %d are allowed", name, len(value), maxXattrValue)
		case list > maxXattrList:
			return invalid(h.Name, "names of extended attributes of more than %d bytes", maxXattrList)
		case total > maxXattrs:
			return invalid(h.Name, "extended attributes of more than %d bytes", maxXattrs)
		}
		if !dropped(name) {
			keys = append(keys, name)
		}
	}
	slices.Sort(keys)
	for _, key := range keys {
		err := set(key, []byte(h.PAXRecords[paxXattr+key]))
		if err != nil && !bearable(h, key, err) {
			return xattrError(h, key, err)
		}
	}
	return nil
}

// dropped are attributes that steer the host instead of describing the file:
// overlay's own notation (an image could fake deletions, redirects and
// metadata-only copies with it) and labels of the machine the image was built on.
func dropped(key string) bool {
	return strings.HasPrefix(key, overlayXattr) || strings.HasPrefix(key, "user.overlay.") || isHostLabel(key)
}

// isHostLabel knows the attributes that a machine puts on files by itself.
func isHostLabel(key string) bool {
	return key == "security.selinux" || key == "security.ima" || key == "security.evm"
}

// bearable: an attribute that this filesystem or kind of file cannot carry.
// File capabilities are never given up in silence, the program would fail.
func bearable(h *tar.Header, key string, err error) bool {
	if key == "security.capability" {
		return false
	}
	if errors.Is(err, unix.ENOTSUP) {
		return true
	}
	// user.* exists on files and directories only.
	return errors.Is(err, unix.EPERM) && strings.HasPrefix(key, "user.") && h.Typeflag != tar.TypeReg
}

// xattrError keeps "the attributes do not fit into the inode", which ext4
// reports as ENOSPC, apart from a full disk.
func xattrError(h *tar.Header, key string, err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.E2BIG), errors.Is(err, unix.ERANGE), errors.Is(err, unix.EINVAL):
		return invalid(h.Name, "extended attribute %q of %d bytes cannot be stored: %v",
			key, len(h.PAXRecords[paxXattr+key]), err)
	}
	return failed("set attribute "+key+" of", h.Name, err)
}

// clearXattrs removes what an earlier entry of the same directory set. Whether
// the directory is opaque is not an attribute of the entry.
func clearXattrs(fd int) error {
	list, err := listXattrs(procPath(fd, ""))
	if err != nil {
		return err
	}
	for key := range list {
		if strings.HasPrefix(key, overlayXattr) {
			continue
		}
		if err := unix.Fremovexattr(fd, key); err != nil && err != unix.ENODATA {
			return err
		}
	}
	return nil
}
