package spec

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// maxVolumes bounds what an image can make the node do for each container.
const maxVolumes = 256

// Volume is a place that an image declares for data (VOLUME of a Dockerfile).
type Volume struct {
	Path   string // in the container
	Source string // the same place as the host sees it, below ContainerInput.Rootfs
}

// DeclaredVolumes are the cleaned, sorted paths of an image's volumes, without
// those that a mount of the request, of the pod's files or of the kernel's
// filesystems covers: whoever mounts there says what is there. ErrInvalid.
func DeclaredVolumes(image *ispec.Image, mounts []*cri.Mount) ([]string, error) {
	const field = "image: config.Volumes"
	if image == nil {
		return nil, nil
	}
	if n := len(image.Config.Volumes); n > maxVolumes {
		return nil, Invalid(field, n, fmt.Sprintf("more than %d volumes", maxVolumes))
	}
	covers := []string{"/proc", "/sys", "/dev", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}
	for _, m := range mounts {
		covers = append(covers, path.Clean(m.GetContainerPath()))
	}
	seen := map[string]bool{}
	for p := range image.Config.Volumes {
		if strings.ContainsRune(p, 0) || len(p) > 4095 {
			return nil, Invalid(field, p, "is no path")
		}
		clean := path.Clean("/" + p) // ".." ends at the root, a relative path begins there
		if clean == "/" {
			return nil, Invalid(field, p, "would hide the container's root filesystem")
		}
		if !slices.ContainsFunc(covers, func(c string) bool { return clean == c || strings.HasPrefix(clean, c+"/") }) {
			seen[clean] = true
		}
	}
	return slices.Sorted(maps.Keys(seen)), nil
}

// volumeMounts let an image's volumes be written to where the root filesystem
// is read-only: each is its own place in the writable layer once more. Under a
// writable root they need nothing.
func (b *builder) volumeMounts() []rspec.Mount {
	if !b.security.GetReadonlyRootfs() {
		return nil
	}
	var list []rspec.Mount
	for _, v := range b.in.Resolved.Volumes {
		list = append(list, rspec.Mount{Destination: v.Path, Type: "bind", Source: v.Source, Options: []string{"rbind", "rprivate", "rw"}})
	}
	return list
}
