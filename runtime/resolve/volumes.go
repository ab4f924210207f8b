package resolve

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	securejoin "github.com/cyphar/filepath-securejoin"
	"github.com/cyphar/filepath-securejoin/pathrs-lite"

	"berth/oci/spec"
)

// imageSource is where a path in a mounted image lies on the host. Symlinks are
// followed as if the image were the root. The result has none, and as nobody can
// write to the image, none can come.
func imageSource(field, root, sub string) (source, error) {
	if root == "" {
		return source{}, fmt.Errorf("resolve %s: its image is not mounted", field)
	}
	f, err := inRoot(root, "/"+sub)
	if reason := blame(err); reason != "" {
		return source{}, spec.Invalid(field, sub, reason)
	}
	if err != nil {
		return source{}, fmt.Errorf("resolve %s %q: %w", field, sub, err)
	}
	if !f.mode.IsDir() && !f.mode.IsRegular() {
		return source{}, spec.Invalid(field, sub, "is neither a file nor a directory in the image")
	}
	return source{path: f.host, dir: f.mode.IsDir()}, nil
}

// blame puts into words what is wrong with a path in an image; empty for an
// error that is not the path's.
func blame(err error) string {
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "does not exist in the image"
	case errors.Is(err, syscall.ENOTDIR):
		return "a part of it is no directory in the image"
	case errors.Is(err, syscall.ELOOP):
		return "leads in a circle in the image"
	case errors.Is(err, syscall.ENAMETOOLONG):
		return "a part of it is too long a name"
	}
	return ""
}

// makeVolumes makes those of an image's volumes that its layers do not have as
// directories, owned by the pod's root, in the container's writable layer.
func makeVolumes(rootfs string, volumes []string, ids *spec.IDMap) ([]spec.Volume, error) {
	const field = "image: config.Volumes"
	var list []spec.Volume
	for _, v := range volumes {
		f, err := inRoot(rootfs, v)
		if errors.Is(err, os.ErrNotExist) {
			if err = makeInRoot(rootfs, v, ids); err == nil {
				f, err = inRoot(rootfs, v)
			}
		}
		if reason := blame(err); reason != "" {
			return nil, spec.Invalid(field, v, reason)
		}
		if err != nil {
			return nil, fmt.Errorf("make %s %q: %w", field, v, err)
		}
		if !f.mode.IsDir() && !f.mode.IsRegular() {
			return nil, spec.Invalid(field, v, "is neither a file nor a directory in the image")
		}
		list = append(list, spec.Volume{Path: v, Source: f.host})
	}
	return list, nil
}

// makeInRoot makes a directory with root as "/", also where a symlink leads to
// nothing yet. Nothing runs in the rootfs at this time.
func makeInRoot(root, path string, ids *spec.IDMap) error {
	real, err := securejoin.SecureJoin(root, path)
	if err != nil {
		return err
	}
	var made []string
	for dir := real; len(dir) > len(root); dir = filepath.Dir(dir) {
		if _, err := os.Lstat(dir); err == nil {
			break
		}
		made = append(made, dir)
	}
	if err := pathrs.MkdirAll(root, strings.TrimPrefix(real, root), 0o755); err != nil {
		return err
	}
	for _, dir := range made {
		if err := os.Lchown(dir, int(ids.HostUID(0)), int(ids.HostGID(0))); err != nil {
			return err
		}
	}
	return nil
}

// found is what a path in a tree leads to.
type found struct {
	host   string      // where it is on the host, without symlinks
	inside string      // the same within the tree, from "/"
	mode   fs.FileMode // what it is
}

// inRoot resolves a path with root as "/". The kernel resolves it: there is no
// moment in which a part of it could be exchanged for a symlink that leads out.
func inRoot(root, path string) (found, error) {
	root, err := filepath.EvalSymlinks(root) // the state directory may be reached by one
	if err != nil {
		return found{}, err
	}
	handle, err := pathrs.OpenInRoot(root, path)
	if err != nil {
		return found{}, err
	}
	defer handle.Close()
	info, err := handle.Stat()
	if err != nil {
		return found{}, err
	}
	host, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", handle.Fd()))
	if err != nil {
		return found{}, err
	}
	again, err := os.Lstat(host)
	if err != nil {
		return found{}, err
	}
	inside, below := strings.CutPrefix(host, root)
	if !below || inside != "" && inside[0] != '/' || !os.SameFile(info, again) {
		return found{}, fmt.Errorf("%s is not below %s", host, root)
	}
	return found{host: host, inside: "/" + strings.TrimPrefix(inside, "/"), mode: info.Mode()}, nil
}
