package resolve

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
)

// TestTargets mounts a directory and a file on everything a rootfs and a mounted
// image can have.
func TestTargets(t *testing.T) {
	root, _ := hostileTree(t)
	image, _ := hostileTree(t)
	host := t.TempDir()
	write(t, filepath.Join(host, "file"), "x")
	link(t, "etc", filepath.Join(root, "run")) // and /run/passwd is a file
	isDir, isNone, either := "is a directory in the image", "is no directory in the image", ""
	for at, want := range map[string][2]string{ // what is said to a directory, and to a file
		"/srv/data":           {either, isDir},
		"/etc/passwd":         {isNone, either},
		"/absolute":           {either, isDir},
		"/chain":              {isNone, either},
		"/run/passwd":         {isNone, either},
		"/new/place":          {either, either},
		"/dangling/x":         {either, either},
		"/etc/passwd/x":       {"a part of it is no directory", "a part of it is no directory"},
		"/circle/x":           {"leads in a circle", "leads in a circle"},
		"/fifo":               {isNone, either},
		"/proc":               {either, either},
		"/dev/null":           {either, either},
		"/host/any/thing":     {either, either},
		"/image/srv":          {either, isDir},
		"/image/etc/passwd":   {isNone, either},
		"/image/new":          {"does not exist in the image mounted at /image", "does not exist in the image mounted at /image"},
		"/image/etc/passwd/x": {"a part of it is no directory", "a part of it is no directory"},
		"/image/absolute/new": {"does not exist", "does not exist"},
		"/image/chain":        {either, either}, // a symlink of the image, seen from the container's root
		"/onefile/x":          {"a part of it is no directory", "a part of it is no directory"},
		"/image/srv/data":     {either, isDir},
	} {
		for i, dir := range []bool{true, false} {
			r := Request{Rootfs: root, Config: &cri.ContainerConfig{Mounts: []*cri.Mount{
				{ContainerPath: at + "/."}, {ContainerPath: "/host"}, {ContainerPath: "/image/", Image: &cri.ImageSpec{}},
				{ContainerPath: "/onefile", Image: &cri.ImageSpec{}},
			}}}
			err := checkTargets(r, []source{{path: host, dir: dir}, {path: host, dir: true}, {path: image, dir: true},
				{path: image + "/etc/passwd"}})
			if want[i] == "" {
				if err != nil {
					t.Errorf("%s, directory %v: %v", at, dir, err)
				}
				continue
			}
			if !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), "mounts[0].container_path ") || !strings.Contains(err.Error(), want[i]) {
				t.Errorf("%s, directory %v: %v, want %q", at, dir, err, want[i])
			}
		}
	}
}

// A symlink that leads below another mount is not judged by what the image has
// there, as that is hidden. An image mount's own place blames the volume.
func TestTargetsBehindMounts(t *testing.T) {
	root, _ := hostileTree(t)
	link(t, "etc", filepath.Join(root, "run"))
	mounts := []*cri.Mount{{ContainerPath: "/run/passwd"}, {ContainerPath: "/etc"}}
	list := []source{{dir: true}, {dir: true}}
	if err := checkTargets(Request{Rootfs: root, Config: &cri.ContainerConfig{Mounts: mounts}}, list); err != nil {
		t.Errorf("behind a mount: %v", err)
	}
	mounts = []*cri.Mount{{ContainerPath: "/run/passwd", Image: &cri.ImageSpec{}}}
	err := checkTargets(Request{Rootfs: root, Config: &cri.ContainerConfig{Mounts: mounts}}, list)
	if !errors.Is(err, spec.ErrImageVolume) {
		t.Errorf("an image on a file: %v", err)
	}
}

// A request that is refused for one mount makes no directory for another.
func TestNothingIsMadeForABadTarget(t *testing.T) {
	root, absent := rootfs(t), filepath.Join(t.TempDir(), "absent")
	r := userRequest(root, "0", &cri.LinuxContainerSecurityContext{})
	r.Config.Mounts = []*cri.Mount{{ContainerPath: "/new", HostPath: absent}, {ContainerPath: "/etc", HostPath: root + "/etc/passwd"}}
	if _, err := Resolve(r); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "mounts[1].container_path") {
		t.Errorf("got %v", err)
	}
	if _, err := os.Lstat(absent); err == nil {
		t.Error("a directory was made")
	}
}
