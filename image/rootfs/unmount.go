package rootfs

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"berth/image/layer"
)

// Unmount takes the mount away and removes the target directory. It is
// idempotent: nothing mounted, or no directory, is success. A mount that is
// busy is detached: it goes when its last user does.
func Unmount(target string) error {
	for {
		err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
		if err == unix.EBUSY {
			err = unix.Unmount(target, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		switch err {
		case nil:
			continue // mounts stack
		case unix.ENOENT:
			return nil
		case unix.EINVAL:
			if err := os.Remove(target); err != nil && !os.IsNotExist(err) {
				return fmt.Errorf("remove rootfs directory: %w", err)
			}
			return nil
		}
		return fmt.Errorf("unmount rootfs %s: %w", target, err)
	}
}

// Usage says what a directory, usually an upper one, takes: bytes as allocated
// and inodes, as du counts them. It reads the whole tree.
func Usage(dir string) (bytes, inodes uint64, err error) {
	u, err := layer.Measure(dir)
	return u.Bytes, u.Inodes, err
}
