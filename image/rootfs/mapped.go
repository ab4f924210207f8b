package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// ErrNoIDMap means that the kernel cannot shift the owners of the files of some
// filesystem. The error names the directory.
var ErrNoIDMap = errors.New("no id-mapped mounts on this filesystem with this kernel")

// createMapped is Create for layers whose files belong to other ids than the
// disk says. Overlay takes layers from mounts of the caller's mount namespace
// only (until 6.15), so the id-mapped ones must be attached somewhere: in a
// mount namespace of a thread's own, with which they vanish, also when the
// daemon is killed. The overlay holds on to what it needs of them.
func createMapped(m Mount, lowers []string) error {
	return onOwnThread(unix.CLONE_FS, func() error {
		home, err := unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open mount namespace: %w", err)
		}
		defer unix.Close(home)
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("unshare mount namespace: %w", err)
		}
		mount, err := buildMapped(m, lowers)
		if err != nil {
			return err
		}
		defer unix.Close(mount)
		if err := unix.Setns(home, unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("return to mount namespace: %w", err)
		}
		return attach(mount, m.Target)
	})
}

// buildMapped runs in a mount namespace that ends with the calling thread.
func buildMapped(m Mount, lowers []string) (int, error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return -1, fmt.Errorf("detach mount namespace: %w", err)
	}
	shifted, err := stage(m, lowers)
	if err != nil {
		return -1, err
	}
	if shifted, err = m.withRoot(shifted, m.IDs.UID, m.IDs.GID); err != nil {
		return -1, err
	}
	mount, err := build(m, shifted)
	if !errors.Is(err, errUnsupported) {
		return mount, err
	}
	if err := mountOld(m, shifted, changeDir); err != nil {
		return -1, err
	}
	mount, err = unix.OpenTree(unix.AT_FDCWD, m.Target, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("take overlay from %s: %w", m.Target, err)
	}
	return mount, nil
}

// stage attaches each lower directory, its owners shifted, on a tmpfs over the
// target, which hides nothing that is needed here, and returns their places.
func stage(m Mount, lowers []string) ([]string, error) {
	userNS, err := os.Open(m.IDs.UserNS)
	if err != nil {
		return nil, fmt.Errorf("open user namespace: %w", err)
	}
	defer userNS.Close()
	if err := unix.Mount("stage", m.Target, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=700"); err != nil {
		return nil, fmt.Errorf("mount stage on %s: %w", m.Target, err)
	}
	var shifted []string
	for i, dir := range lowers {
		place := filepath.Join(m.Target, strconv.Itoa(i))
		if err := os.Mkdir(place, 0o700); err != nil {
			return nil, fmt.Errorf("make stage: %w", err)
		}
		tree, err := shift(dir, userNS)
		if err != nil {
			return nil, err
		}
		err = attach(tree, place)
		unix.Close(tree)
		if err != nil {
			return nil, err
		}
		shifted = append(shifted, place)
	}
	return shifted, nil
}

// shift clones the mount that holds a path, from there down, with the owners of
// its files shifted. The clone is attached nowhere.
func shift(path string, userNS *os.File) (int, error) {
	tree, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err == unix.ENOSYS {
		return -1, fmt.Errorf("id-map %s: %w: %w", path, ErrNoIDMap, err)
	}
	if err != nil {
		return -1, fmt.Errorf("clone mount of %s: %w", path, err)
	}
	err = unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userNS.Fd())})
	if err == nil {
		return tree, nil
	}
	unix.Close(tree)
	if err == unix.EINVAL || err == unix.ENOSYS {
		err = fmt.Errorf("%w: %w", ErrNoIDMap, err)
	}
	return -1, fmt.Errorf("id-map %s: %w", path, err)
}

// CheckIDMap tells whether what is mounted at a path can be mounted again with
// shifted owners, by doing so, attached nowhere. ErrNoIDMap when the kernel
// cannot.
func CheckIDMap(path string, userNS *os.File) error {
	tree, err := shift(path, userNS)
	if err != nil {
		return err
	}
	return unix.Close(tree)
}

// CheckIDMapTmpfs does the same for a new tmpfs.
func CheckIDMapTmpfs(userNS *os.File) error {
	fd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("id-map tmpfs: %w: %w", ErrNoIDMap, err)
	}
	defer unix.Close(fd)
	if err := unix.FsconfigCreate(fd); err != nil {
		return fmt.Errorf("create tmpfs: %w", err)
	}
	mount, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("create tmpfs: %w", err)
	}
	defer unix.Close(mount)
	err = unix.MountSetattr(mount, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userNS.Fd())})
	if err == unix.EINVAL || err == unix.ENOSYS {
		err = fmt.Errorf("%w: %w", ErrNoIDMap, err)
	}
	if err != nil {
		return fmt.Errorf("id-map tmpfs: %w", err)
	}
	return nil
}
