package namespaces

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// defaultShmSize is what a pod's /dev/shm gets when nothing else is said, bytes.
const defaultShmSize = 64 << 20

// Shm is a pod's /dev/shm.
type Shm struct {
	Size     int64  // bytes; 0 means 64 MiB
	UID, GID uint32 // owner, as the node counts: the pod's root
	Context  string // SELinux context of its files; empty: the kernel's own choice
}

// MountShm makes the directory target and mounts a tmpfs on it, for the pod's
// /dev/shm. It is idempotent: a tmpfs that is there already stays as it is.
// UnmountShm cleans up, also after an error. Errors: ErrInvalid.
func MountShm(target string, s Shm) error {
	if s.Size < 0 {
		return fmt.Errorf("%w: size of shm is %d bytes", ErrInvalid, s.Size)
	}
	if s.Size == 0 {
		s.Size = defaultShmSize
	}
	if err := os.MkdirAll(target, 0o700); err != nil {
		return fmt.Errorf("mount shm: %w", err)
	}
	mounted, err := isMountPoint(target)
	if err != nil {
		return fmt.Errorf("mount shm: %w", err)
	}
	if mounted {
		return nil
	}
	options := fmt.Sprintf("mode=1777,size=%d,uid=%d,gid=%d", s.Size, s.UID, s.GID)
	if s.Context != "" {
		options += fmt.Sprintf(",context=%q", s.Context)
	}
	if err := unix.Mount("shm", target, "tmpfs", unix.MS_NOEXEC|unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount shm on %s: %w", target, err)
	}
	return nil
}

// UnmountShm unmounts what MountShm mounted and removes the directory. It is
// idempotent; content that is not on the tmpfs is an error, never removed.
func UnmountShm(target string) error {
	if err := unmountAll(target); err != nil {
		return fmt.Errorf("unmount shm: %w", err)
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unmount shm: %w", err)
	}
	return nil
}

func isMountPoint(path string) (bool, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, 0, &st); err != nil {
		return false, fmt.Errorf("statx %s: %w", path, err)
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// unmountAll unmounts whatever is mounted on path, however often. A mount that
// somebody has a file open on is detached: it goes when they close it.
func unmountAll(path string) error {
	for {
		err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) {
			err = unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		switch {
		case err == nil:
			continue
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil // not a mount point (any more), or not there
		default:
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}
