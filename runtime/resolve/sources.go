package resolve

import (
	"errors"
	"fmt"
	"path"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
	"berth/sandbox/outside"
)

// source is what is mounted, as the host sees it.
type source struct {
	path    string // without symlinks
	dir     bool
	missing bool // to be made as a directory
}

func resolveSources(r Request) ([]source, error) {
	var list []source
	for i, m := range r.Config.GetMounts() {
		field := index("mounts", i)
		if m.GetImage() != nil {
			src, err := imageSource(field+".image_sub_path", r.ImageRoots[i], m.GetImageSubPath())
			if err != nil {
				return nil, spec.ImageVolume(err)
			}
			list = append(list, src)
			continue
		}
		src, err := hostSource(r.host(), field+".host_path", m.GetHostPath())
		if err != nil {
			return nil, err
		}
		if src.missing && r.StrictSources {
			return nil, spec.Invalid(field+".host_path", m.GetHostPath(), "does not exist")
		}
		if err := checkSource(field, src.path, m); err != nil {
			return nil, err
		}
		list = append(list, src)
	}
	return list, nil
}

// makeSources makes the directories that are missing and returns all paths.
func makeSources(host outside.Host, list []source) ([]string, error) {
	var paths []string
	for i, src := range list {
		if src.missing {
			if err := host.MakeDir(src.path); err != nil {
				return nil, fmt.Errorf("make mounts[%d].host_path %q: %w", i, src.path, err)
			}
		}
		paths = append(paths, src.path)
	}
	return paths, nil
}

// hostSource follows symlinks. It makes nothing.
func hostSource(host outside.Host, field, name string) (source, error) {
	f, err := host.Find(name)
	switch {
	case errors.Is(err, syscall.ENOTDIR):
		return source{}, spec.Invalid(field, name, "a part of it is no directory")
	case errors.Is(err, syscall.ENAMETOOLONG):
		return source{}, spec.Invalid(field, name, "a part of it is too long a name")
	case err != nil:
		return source{}, fmt.Errorf("resolve %s %q: %w", field, name, err)
	case f.Broken != "" && f.Missing:
		return source{}, spec.Invalid(field, name, "symbolic link "+f.Broken+" leads to nothing")
	case f.Broken != "":
		return source{}, spec.Invalid(field, name, "symbolic link "+f.Broken+" leads in a circle")
	}
	return source{path: f.Path, dir: f.Missing || f.Mode.IsDir(), missing: f.Missing}, nil
}

// checkSource looks at the mount that holds a source.
func checkSource(field, source string, m *cri.Mount) error {
	overProc := path.Clean(m.GetContainerPath()) == "/proc"
	if m.GetPropagation() == cri.MountPropagation_PROPAGATION_PRIVATE && !overProc {
		return nil
	}
	holder, err := mountOf(source)
	if err != nil {
		return err
	}
	if overProc && holder.FSType != "proc" {
		return spec.Invalid(field+".container_path", m.GetContainerPath(), "takes nothing but a proc filesystem, and "+source+" is on "+holder.FSType)
	}
	return checkPropagation(field+".propagation", source, m.GetPropagation(), holder)
}

// checkPropagation wants a source whose mount can pass events on: the OCI
// runtime would make the bind mount without complaint, and nothing would ever
// arrive through it.
func checkPropagation(field, source string, mode cri.MountPropagation, holder *mountinfo.Info) error {
	shared, slave := propagation(holder.Optional)
	switch {
	case mode == cri.MountPropagation_PROPAGATION_BIDIRECTIONAL && !shared:
		return spec.Invalid(field, mode, fmt.Sprintf("%s lies on the mount %s, which is not shared", source, holder.Mountpoint))
	case mode == cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER && !shared && !slave:
		return spec.Invalid(field, mode, fmt.Sprintf("%s lies on the mount %s, which is neither shared nor a slave", source, holder.Mountpoint))
	}
	return nil
}

// mountOf finds the mount that holds a path.
func mountOf(source string) (*mountinfo.Info, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.ParentsFilter(source))
	if err != nil {
		return nil, fmt.Errorf("read mounts above %q: %w", source, err)
	}
	var nearest *mountinfo.Info
	for _, m := range mounts {
		// Of two mounts on one point the later hides the earlier.
		if nearest == nil || len(m.Mountpoint) >= len(nearest.Mountpoint) {
			nearest = m
		}
	}
	if nearest == nil {
		return nil, fmt.Errorf("find the mount that holds %q: none is listed", source)
	}
	return nearest, nil
}

// propagation reads the optional fields of a line of mountinfo.
func propagation(optional string) (shared, slave bool) {
	for _, f := range strings.Fields(optional) {
		shared = shared || strings.HasPrefix(f, "shared:")
		slave = slave || strings.HasPrefix(f, "master:")
	}
	return shared, slave
}
