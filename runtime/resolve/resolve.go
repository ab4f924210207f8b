// Package resolve gathers what a container's specification needs from the
// machine: users and groups in its rootfs, real paths of mount sources, device
// numbers, the bytes of a seccomp profile, and once per daemon the facts about
// the host.
//
// It owns those looks outside and nothing else; it returns data in the types of
// oci/spec, which decides what becomes of them. Its only effect on the machine
// is that it makes directories: of a mount source that does not exist, which is
// the host's from then on, and nobody removes it; and of a volume of the image,
// in the container's writable layer.
//
// The rootfs is hostile, and so is an image that is mounted. Every file in them
// is opened with the kernel's help so that no symlink leads out, must be regular
// before it is read, and is bounded in size. Mount sources, devices and profiles
// are the node's own and are followed through symlinks.
//
// Terms: a "source" is the host path of a requested mount.
//
// Decisions that the CRI leaves open:
//
//   - A user given by the request replaces the image's whole USER, group
//     included; its group is then the one in the image's passwd, else 0.
//   - What looks like a number is never looked up as a name (spec.ParseID).
//   - With policy Merge the groups of the user in the image's group file are
//     added, also when the primary group was chosen by the request.
//   - A mount source that does not exist is made as a directory, mode 0755,
//     unless Request.StrictSources is set. A dangling symlink is refused.
package resolve

import (
	"fmt"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
	"berth/sandbox/outside"
)

// Sentinels of the package; test with errors.Is.
var (
	// ErrInvalid is spec.ErrInvalid: the request or the image is wrong.
	ErrInvalid = spec.ErrInvalid
	// ErrUnsupported is spec.ErrUnsupported.
	ErrUnsupported = spec.ErrUnsupported
)

// Request is a container to resolve.
type Request struct {
	Config  *cri.ContainerConfig
	Sandbox *cri.PodSandboxConfig
	Image   *ispec.Image
	Rootfs  string // absolute, mounted
	Host    spec.Host
	// ImageRoots are where the images of the config's image mounts are mounted,
	// by the index of the mount.
	ImageRoots map[int]string
	// StrictSources refuses a mount source that does not exist, as the CRI's
	// text has it, instead of making a directory.
	StrictSources bool
	// Outside looks at what the request names of the node; nil: the caller itself does.
	Outside outside.Host
}

func (r Request) host() outside.Host {
	if r.Outside == nil {
		return outside.Here{}
	}
	return r.Outside
}

// Resolve checks the request (spec.CheckContainer) and gathers its data. It
// blocks on the filesystems that the request names, for as long as Outside lets it.
// Directories are made last,
// when nothing else can be wrong. Idempotent. ErrInvalid, ErrUnsupported, or an
// error of the operating system.
func Resolve(r Request) (spec.Resolved, error) {
	var out spec.Resolved
	if err := spec.CheckContainer(r.Config, r.Sandbox); err != nil {
		return out, err
	}
	var err error
	if out.User, err = resolveUser(r); err != nil {
		return spec.Resolved{}, err
	}
	sc := r.Config.GetLinux().GetSecurityContext()
	if out.Devices, out.DeviceRules, err = resolveDevices(r.host(), r.Config.GetDevices()); err != nil {
		return spec.Resolved{}, err
	}
	if sc.GetPrivileged() {
		if out.HostDevices, err = hostDevices(r.host(), "/dev"); err != nil {
			return spec.Resolved{}, err
		}
	}
	path, err := spec.LocalhostSeccomp(sc)
	if err != nil {
		return spec.Resolved{}, err
	}
	if out.SeccompProfile, err = readProfile(r.host(), path); err != nil {
		return spec.Resolved{}, err
	}
	if err := appArmor(sc, r.Host, "/"); err != nil {
		return spec.Resolved{}, err
	}
	volumes, err := spec.DeclaredVolumes(r.Image, r.Config.GetMounts())
	if err != nil {
		return spec.Resolved{}, err
	}
	sources, err := resolveSources(r)
	if err != nil {
		return spec.Resolved{}, err
	}
	if err := checkTargets(r, sources); err != nil {
		return spec.Resolved{}, err
	}
	if err := checkWorkingDir(r, sources); err != nil {
		return spec.Resolved{}, err
	}
	ids, err := spec.SandboxIDMap(r.Sandbox)
	if err != nil {
		return spec.Resolved{}, err
	}
	if out.Volumes, err = makeVolumes(r.Rootfs, volumes, ids); err != nil {
		return spec.Resolved{}, err
	}
	if out.MountSources, err = makeSources(r.host(), sources); err != nil {
		return spec.Resolved{}, err
	}
	return out, nil
}

// SandboxSeccomp reads the profile of a sandbox's own process; nil when it asks
// for none of type Localhost. ErrInvalid.
func SandboxSeccomp(host outside.Host, sandbox *cri.PodSandboxConfig) ([]byte, error) {
	path, err := spec.SandboxLocalhostSeccomp(sandbox.GetLinux().GetSecurityContext())
	if err != nil {
		return nil, err
	}
	return readProfile(host, path)
}

func index(name string, i int) string { return fmt.Sprintf("%s[%d]", name, i) }
