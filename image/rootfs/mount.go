package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"berth/image/layer"
)

// MaxLayers is the number of different layers that the kernel can stack.
const MaxLayers = 500

// ErrTooManyLayers means that an image has more layers than MaxLayers.
var ErrTooManyLayers = errors.New("too many layers")

// Mount says what to mount where. All paths are absolute.
type Mount struct {
	Target string   // made by Create, removed by Unmount
	Upper  string   // made when missing; removed by the caller
	Work   string   // likewise; on the filesystem of Upper
	Layers []string // diff directories, bottom first; may repeat, may be none
	// ReadOnly mounts the layers for reading only. Nobody can make the mount
	// writable later on, as overlay has nowhere to write to. Upper then lies on
	// the layers as one more, empty but for the looks of the root directory.
	ReadOnly bool
	IDs      *IDs // nil: files belong to whom the layers say
	// Context is the SELinux context that all files have, whatever is stored
	// with them; empty: what is stored counts.
	Context string
}

// IDs shift the owners of files in the layers, which stay as they are on disk
// and may be in use with other ids or none at the same time.
type IDs struct {
	// UserNS is the file of a user namespace: the ids of a layer are taken as
	// ids inside of it. What it does not map belongs to nobody there.
	UserNS string
	// UID and GID are its root, as the node counts.
	UID, GID int
}

// Create makes the directories and mounts. On error nothing is mounted;
// directories may have been made. It is not idempotent: mounting twice stacks.
// An upper directory may be mounted again when it is not mounted any more.
// Errors: ErrTooManyLayers, ErrNoIDMap.
func Create(m Mount) error {
	for _, dir := range []string{m.Target, m.Upper, m.Work} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("create rootfs directory: %w", err)
		}
	}
	// What an earlier mount left of its scratch space forbids another one.
	if err := os.RemoveAll(filepath.Join(m.Work, "work")); err != nil {
		return fmt.Errorf("clear work directory: %w", err)
	}
	lowers, err := m.lowers()
	if err != nil {
		return err
	}
	if m.IDs != nil {
		return wrap(m, createMapped(m, lowers))
	}
	if lowers, err = m.withRoot(lowers, 0, 0); err != nil {
		return wrap(m, err)
	}
	mount, err := build(m, lowers)
	if errors.Is(err, errUnsupported) {
		return wrap(m, mountOld(m, lowers, inDir))
	}
	if err != nil {
		return wrap(m, err)
	}
	defer unix.Close(mount)
	return wrap(m, attach(mount, m.Target))
}

func wrap(m Mount, err error) error {
	if err != nil {
		return fmt.Errorf("mount rootfs %s of %d layers: %w", m.Target, len(m.Layers), err)
	}
	return nil
}

// lowers are the layers to stack, bottom first. Overlay refuses the same
// directory twice, and need not be given it: whatever a layer holds or hides
// is decided by its topmost occurrence, so occurrences below it show nothing.
func (m Mount) lowers() ([]string, error) {
	seen := map[string]bool{}
	var reversed []string
	for i := len(m.Layers) - 1; i >= 0; i-- {
		if dir := m.Layers[i]; !seen[dir] {
			seen[dir] = true
			reversed = append(reversed, dir)
		}
	}
	most := MaxLayers
	if m.ReadOnly {
		most-- // one is for the root directory's looks
	}
	if len(reversed) > most {
		return nil, fmt.Errorf("%w: %d, at most %d can be stacked here", ErrTooManyLayers, len(reversed), most)
	}
	if len(reversed) == 0 {
		// An image without layers: overlay still wants a lower directory.
		empty := filepath.Join(filepath.Dir(m.Work), "empty")
		if err := os.MkdirAll(empty, 0o755); err != nil {
			return nil, fmt.Errorf("create rootfs directory: %w", err)
		}
		reversed = append(reversed, empty)
	}
	lowers := make([]string, 0, len(reversed))
	for i := len(reversed) - 1; i >= 0; i-- {
		lowers = append(lowers, reversed[i])
	}
	return lowers, nil
}

// withRoot gives the upper directory the looks of the image's root directory, of
// uid and gid when the image says nothing of it, and returns all that lies under
// what is written.
func (m Mount) withRoot(lowers []string, uid, gid int) ([]string, error) {
	if err := layer.RootLooks(m.Upper, lowers, uid, gid); err != nil {
		return nil, fmt.Errorf("set looks of root directory %s: %w", m.Upper, err)
	}
	if m.ReadOnly {
		lowers = append(lowers, m.Upper)
	}
	return lowers, nil
}

// errUnsupported: the kernel lacks "lowerdir+" (before 6.7).
var errUnsupported = errors.New("overlay without lowerdir+")

// legacyOverlay tells whether overlay knows the mount API by name only, as before
// Linux 6.5: the kernel then gathers whatever options it is given and refuses them
// when mounting, where "lowerdir+" can no longer be told from another mistake.
var legacyOverlay = sync.OnceValue(func() bool {
	fd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return unix.FsconfigSetFlag(fd, "no-option-of-overlay") == nil
})

// build makes the mount without attaching it anywhere, and returns its
// descriptor. It gives the layers one by one through the mount API, which has
// no limit on their total length. errUnsupported on kernels without that.
func build(m Mount, lowers []string) (int, error) {
	if legacyOverlay() {
		return -1, errUnsupported
	}
	fd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err == unix.ENOSYS {
		return -1, errUnsupported
	}
	if err != nil {
		return -1, fmt.Errorf("open overlay: %w", err)
	}
	defer unix.Close(fd)
	if err := configure(fd, m, lowers); err != nil {
		return -1, err
	}
	if err := unix.FsconfigCreate(fd); err != nil {
		return -1, fmt.Errorf("create overlay: %w", explain(fd, err))
	}
	attributes := 0
	if m.ReadOnly {
		attributes = unix.MOUNT_ATTR_RDONLY
	}
	mount, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, attributes)
	if err != nil {
		return -1, fmt.Errorf("create overlay: %w", explain(fd, err))
	}
	return mount, nil
}

// configure sets the options of an overlay that is being made.
func configure(fd int, m Mount, lowers []string) error {
	names := shortNames{}
	defer names.close()
	for i := len(lowers) - 1; i >= 0; i-- {
		err := names.set(fd, "lowerdir+", lowers[i])
		if err == unix.EINVAL && i == len(lowers)-1 {
			return errUnsupported
		}
		if err != nil {
			return fmt.Errorf("add layer %s: %w", lowers[i], explain(fd, err))
		}
	}
	if !m.ReadOnly {
		if err := setUpper(fd, &names, m); err != nil {
			return err
		}
	}
	options := []struct{ key, value string }{{"source", "overlay"}, {"index", "off"}}
	if m.Context != "" {
		options = append(options, struct{ key, value string }{"context", m.Context})
	}
	for _, option := range options {
		if err := unix.FsconfigSetString(fd, option.key, option.value); err != nil {
			return fmt.Errorf("set %s=%s: %w", option.key, option.value, explain(fd, err))
		}
	}
	return nil
}

// attach puts a mount that is nowhere yet at a place.
func attach(mount int, target string) error {
	if err := unix.MoveMount(mount, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach mount to %s: %w", target, err)
	}
	return nil
}

// setUpper makes the overlay writable.
func setUpper(fd int, names *shortNames, m Mount) error {
	if err := names.set(fd, "upperdir", m.Upper); err != nil {
		return fmt.Errorf("set upper directory %s: %w", m.Upper, explain(fd, err))
	}
	if err := names.set(fd, "workdir", m.Work); err != nil {
		return fmt.Errorf("set work directory %s: %w", m.Work, explain(fd, err))
	}
	if err := unix.FsconfigSetFlag(fd, "volatile"); err != nil {
		return fmt.Errorf("set volatile: %w", explain(fd, err))
	}
	return nil
}

// maxValue is the longest string that fsconfig takes.
const maxValue = 255

// shortNames sets path options whatever the paths' length: a long one is
// opened and named by its descriptor.
type shortNames struct{ fds []int }

func (s *shortNames) set(fd int, key, path string) error {
	if len(path) > maxValue {
		dir, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		s.fds = append(s.fds, dir)
		path = "/proc/self/fd/" + strconv.Itoa(dir)
	}
	return unix.FsconfigSetString(fd, key, path)
}

func (s *shortNames) close() {
	for _, fd := range s.fds {
		unix.Close(fd)
	}
}

// explain adds what the kernel said to the mount's log.
func explain(fd int, err error) error {
	buf := make([]byte, 1024)
	n, readErr := unix.Read(fd, buf)
	if readErr != nil || n < 3 {
		return err
	}
	return fmt.Errorf("%w (%s)", err, buf[2:n]) // "e " or "w " stand before the text
}
