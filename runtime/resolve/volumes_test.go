package resolve

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
)

// hostileTree is an image with every way out that a symlink can try. Beside it
// lies what must not be reached.
func hostileTree(t *testing.T) (root, outside string) {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	root, outside = filepath.Join(dir, "image"), filepath.Join(dir, "outside")
	write(t, filepath.Join(outside, "secret"), "x")
	write(t, filepath.Join(root, "etc/passwd"), passwd)
	write(t, filepath.Join(root, "srv/data/file"), "x")
	for name, target := range map[string]string{
		"absolute":  "/srv/data",
		"climbs":    "../../../../../../../../srv/data",
		"out":       outside,
		"outfile":   outside + "/secret",
		"up":        "../outside",
		"chain":     "absolute/file",
		"circle":    "circle",
		"dangling":  "/nowhere",
		"viaproc":   "/proc/self/root" + outside,
		"deep/link": "../../outside",
		"rooted":    "/../../",
	} {
		write(t, filepath.Join(root, filepath.Dir(name), ".keep"), "")
		link(t, target, filepath.Join(root, name))
	}
	if err := syscall.Mkfifo(filepath.Join(root, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	return root, outside
}

func TestImageSource(t *testing.T) {
	root, outside := hostileTree(t)
	for sub, want := range map[string]string{
		"": "", ".": "", "./": "", "srv": "srv", "srv//data/": "srv/data", "./etc/passwd": "etc/passwd",
		"absolute": "srv/data", "climbs": "srv/data", "absolute/file": "srv/data/file", "chain": "srv/data/file",
		"rooted": "", "rooted/srv": "srv",
	} {
		got, err := imageSource("f", root, sub)
		info, statErr := os.Stat(filepath.Join(root, want))
		if err != nil || statErr != nil || got != (source{path: filepath.Join(root, want), dir: info.IsDir()}) {
			t.Errorf("%q: %v, %v; want %q in the image", sub, got, err, want)
		}
	}
	for sub, reason := range map[string]string{
		"none": "does not exist", "out": "does not exist", "outfile": "does not exist", "up": "does not exist", "viaproc": "does not exist",
		"deep/link": "does not exist", "deep/link/secret": "does not exist", "rooted/../outside": "does not exist", "dangling": "does not exist",
		"etc/passwd/x": "no directory", "circle": "in a circle", "circle/x": "in a circle", "fifo": "neither a file nor a directory",
		strings.Repeat("n", 256): "too long a name",
	} {
		got, err := imageSource("mounts[0].image_sub_path", root, sub)
		if !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), "mounts[0].image_sub_path ") || !strings.Contains(err.Error(), reason) {
			t.Errorf("%q: %v, %v; want a refusal with %q", sub, got, err, reason)
		}
	}
	if _, err := imageSource("f", "", "srv"); err == nil || errors.Is(err, ErrInvalid) {
		t.Errorf("an image that is not mounted: %v", err)
	}
	// What would have been reached is there once the image itself has it.
	write(t, filepath.Join(root, outside, "secret"), "the image's own")
	if got, err := imageSource("f", root, "outfile"); err != nil || got.path != filepath.Join(root, outside, "secret") {
		t.Errorf("a link to the image's own file: %v, %v", got, err)
	}
}

// The directory of images may itself be reached through a symlink.
func TestImageSourceBelowALink(t *testing.T) {
	root, _ := hostileTree(t)
	linked := filepath.Join(t.TempDir(), "linked")
	link(t, root, linked)
	if got, err := imageSource("f", linked, "absolute"); err != nil || got.path != filepath.Join(root, "srv/data") {
		t.Errorf("%v, %v", got, err)
	}
}

func TestMakeVolumes(t *testing.T) {
	root, outside := hostileTree(t)
	asked := []string{"/absolute/new/er", "/climbs", "/dangling", "/etc/passwd", "/fresh", "/out/x", "/srv/data", "/up"}
	list, err := makeVolumes(root, asked, nil)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for i, v := range list {
		if v.Path != asked[i] {
			t.Errorf("volume %d is %s, want %s", i, v.Path, asked[i])
		}
		got = append(got, strings.TrimPrefix(v.Source, root))
	}
	want := []string{"/srv/data/new/er", "/srv/data", "/nowhere", "/etc/passwd", "/fresh", outside + "/x", "/srv/data", "/outside"}
	if !slices.Equal(got, want) {
		t.Errorf("sources %q, want %q", got, want)
	}
	info, err := os.Stat(filepath.Join(root, "fresh"))
	if err != nil || info.Mode() != os.ModeDir|0o755 {
		t.Errorf("a made volume is %v, %v", info.Mode(), err)
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) != 1 {
		t.Errorf("outside there is %v, %v", left, err)
	}
	again, err := makeVolumes(root, asked, nil)
	if err != nil || !slices.Equal(again, list) {
		t.Errorf("the second time: %v, %v", again, err)
	}
}

func TestBadVolumes(t *testing.T) {
	root, _ := hostileTree(t)
	for _, v := range []string{"/circle", "/circle/x", "/etc/passwd/x", "/etc/passwd/x/y", "/fifo", "/fifo/x", "/" + strings.Repeat("n", 256)} {
		_, err := makeVolumes(root, []string{v}, nil)
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "image: config.Volumes") {
			t.Errorf("%s: %v", v, err)
		}
	}
}

// Image mounts and volumes reach the resolved data, and their errors are marked.
func TestResolveImages(t *testing.T) {
	root, _ := hostileTree(t)
	mounted, _ := hostileTree(t)
	r := userRequest(root, "0", &cri.LinuxContainerSecurityContext{})
	r.Image.Config.Volumes = map[string]struct{}{"/fresh": {}, "/covered": {}}
	r.Config.Mounts = []*cri.Mount{
		{ContainerPath: "/covered", HostPath: t.TempDir()},
		{ContainerPath: "/i", Readonly: true, Image: &cri.ImageSpec{Image: "i"}, ImageSubPath: "absolute"},
	}
	r.ImageRoots = map[int]string{1: mounted}
	out, err := Resolve(r)
	if err != nil {
		t.Fatal(err)
	}
	if want := (spec.Volume{Path: "/fresh", Source: root + "/fresh"}); !slices.Equal(out.Volumes, []spec.Volume{want}) {
		t.Errorf("volumes %v", out.Volumes)
	}
	if len(out.MountSources) != 2 || out.MountSources[1] != mounted+"/srv/data" {
		t.Errorf("sources %q", out.MountSources)
	}
	if _, err := os.Lstat(root + "/covered"); err == nil {
		t.Error("a covered volume was made")
	}
	r.Config.Mounts[1].ImageSubPath = "out"
	if _, err := Resolve(r); !errors.Is(err, spec.ErrImageVolume) || !errors.Is(err, ErrInvalid) {
		t.Errorf("a sub path that leads out: %v", err)
	}
	r.Config.Mounts = nil
	r.Image = &ispec.Image{Config: ispec.ImageConfig{Volumes: map[string]struct{}{"/": {}}}}
	if _, err := Resolve(r); !errors.Is(err, ErrInvalid) || errors.Is(err, spec.ErrImageVolume) {
		t.Errorf("a volume over the root: %v", err)
	}
}

// Only a proc filesystem may lie over /proc: the OCI runtime writes security
// profiles through it.
func TestMountOverProc(t *testing.T) {
	for source, ok := range map[string]bool{"/proc": true, t.TempDir(): false} {
		r := Request{Config: &cri.ContainerConfig{Mounts: []*cri.Mount{{ContainerPath: "/proc/", HostPath: source}}}}
		_, err := resolveSources(r)
		if (err == nil) != ok || err != nil && (!errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), "mounts[0].container_path ")) {
			t.Errorf("%s over /proc: %v", source, err)
		}
	}
}
