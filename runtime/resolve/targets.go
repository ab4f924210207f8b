package resolve

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"syscall"

	"berth/oci/spec"
)

// targets are the places of a request's mounts, by their cleaned path. Of two
// mounts on one place the later counts.
type targets map[string]int

// checkTargets looks at the places where mounts will be put, as far as those are
// in the image or in a mounted image: the OCI runtime would fail there with an
// error of the kernel's that names no field. What lies in other mounts is left to
// it, as whoever else uses them may change it at any time.
func checkTargets(r Request, sources []source) error {
	mounts, all := r.Config.GetMounts(), targetsOf(r)
	for i, m := range mounts {
		reason, err := all.conflict(r, sources, path.Clean(m.GetContainerPath()), sources[i].dir)
		if err != nil {
			return fmt.Errorf("look at mounts[%d].container_path %q: %w", i, m.GetContainerPath(), err)
		}
		if reason == "" {
			continue
		}
		err = spec.Invalid(index("mounts", i)+".container_path", m.GetContainerPath(), reason)
		if m.GetImage() != nil {
			err = spec.ImageVolume(err)
		}
		return err
	}
	return nil
}

func targetsOf(r Request) targets {
	all := targets{}
	for i, m := range r.Config.GetMounts() {
		all[path.Clean(m.GetContainerPath())] = i
	}
	return all
}

// checkWorkingDir wants a directory, or nothing, where the program is to begin; what
// only the OCI runtime can see is left to it.
func checkWorkingDir(r Request, sources []source) error {
	field, dir := "config.working_dir", r.Config.GetWorkingDir()
	if dir == "" && r.Image != nil {
		field, dir = "image: config.WorkingDir", r.Image.Config.WorkingDir
	}
	at := path.Clean("/" + dir)
	if at == "/" {
		return nil
	}
	all := targetsOf(r)
	if i, ok := all[at]; ok {
		if !sources[i].dir {
			return spec.Invalid(field, dir, index("mounts", i)+" there is no directory")
		}
		return nil
	}
	if all.above(at) != "" || system(at) {
		return nil
	}
	f, err := inRoot(r.Rootfs, at)
	switch {
	case errors.Is(err, os.ErrNotExist): // it will be made
		return nil
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.ENAMETOOLONG):
		return spec.Invalid(field, dir, blame(err))
	case err != nil:
		return fmt.Errorf("look at %s %q: %w", field, dir, err)
	}
	if f.mode.IsDir() || f.inside != at && all.covers(f.inside) {
		return nil
	}
	return spec.Invalid(field, dir, "is no directory in the image")
}

// conflict says why a directory, or something else, cannot be mounted at a
// place; empty when it can, or when only the OCI runtime can tell.
func (t targets) conflict(r Request, sources []source, at string, dir bool) (string, error) {
	root, holder := r.Rootfs, t.above(at)
	if holder != "" {
		if r.Config.GetMounts()[t[holder]].GetImage() == nil {
			return "", nil
		}
		root = sources[t[holder]].path
	} else if system(at) {
		return "", nil
	}
	inside := strings.TrimPrefix(at, holder)
	f, err := inRoot(root, inside)
	switch {
	case errors.Is(err, os.ErrNotExist) && holder == "": // it will be made
		return "", nil
	case errors.Is(err, os.ErrNotExist):
		return "does not exist in the image mounted at " + holder + ", and cannot be made there", nil
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.ENAMETOOLONG):
		return blame(err), nil
	case err != nil:
		return "", err
	}
	if f.inside != inside && (holder != "" || t.covers(f.inside)) {
		return "", nil // by a symlink, perhaps into another mount
	}
	if dir == f.mode.IsDir() {
		return "", nil
	}
	if dir {
		return "is no directory in the image, but the source is one", nil
	}
	return "is a directory in the image, but the source is none", nil
}

// covers tells whether a place is not seen in the container for a mount.
func (t targets) covers(at string) bool {
	_, there := t[at]
	return there || t.above(at) != "" || system(at)
}

// above finds the nearest mount above a place, empty when there is none.
func (t targets) above(at string) string {
	for dir := path.Dir(at); dir != "/" && dir != "."; dir = path.Dir(dir) {
		if _, ok := t[dir]; ok {
			return dir
		}
	}
	return ""
}

// system tells whether a place is in one of the kernel's filesystems that every
// container gets.
func system(at string) bool {
	for _, dir := range []string{"/proc", "/sys", "/dev"} {
		if at == dir || strings.HasPrefix(at, dir+"/") {
			return true
		}
	}
	return false
}
