package resolve

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"berth/sandbox/outside"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// resolveSource resolves and makes one source.
func resolveSource(path string, strict bool) (string, error) {
	list, err := resolveSources(Request{StrictSources: strict, Config: &cri.ContainerConfig{Mounts: []*cri.Mount{{ContainerPath: "/c", HostPath: path}}}})
	if err != nil {
		return "", err
	}
	paths, err := makeSources(outside.Here{}, list)
	if err != nil {
		return "", err
	}
	return paths[0], nil
}

func TestSources(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "real/file"), "x")
	link(t, "real", filepath.Join(dir, "link"))
	link(t, filepath.Join(dir, "link"), filepath.Join(dir, "second"))
	for at, want := range map[string]string{
		"real": "real", "real/file": "real/file", "link": "real", "second/file": "real/file", "new": "new", "deep/er/new": "deep/er/new",
		"link/made": "real/made", "real/../real": "real",
	} {
		got, err := resolveSource(filepath.Join(dir, at), false)
		if err != nil || got != filepath.Join(dir, want) {
			t.Errorf("%s: %s, %v", at, got, err)
		}
		if _, err := os.Stat(got); err != nil {
			t.Errorf("%s: %v", at, err)
		}
	}
	info, err := os.Stat(filepath.Join(dir, "deep/er/new"))
	if err != nil || info.Mode().Perm()&0o022 != 0 || !info.IsDir() {
		t.Errorf("a made directory is %v, %v", info.Mode(), err)
	}
}

func TestBadSources(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "file"), "x")
	link(t, "nowhere", filepath.Join(dir, "dangling"))
	link(t, "circle", filepath.Join(dir, "circle"))
	for at, reason := range map[string]string{
		"dangling":               "symbolic link " + dir + "/dangling leads to nothing",
		"dangling/below":         "symbolic link " + dir + "/dangling leads to nothing",
		"circle":                 "symbolic link " + dir + "/circle leads in a circle",
		"circle/x":               "symbolic link " + dir + "/circle leads in a circle",
		"file/below":             "a part of it is no directory",
		strings.Repeat("n", 300): "a part of it is too long a name",
	} {
		path := filepath.Join(dir, at)
		_, err := resolveSource(path, false)
		if !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), "mounts[0].host_path ") || !strings.HasSuffix(err.Error(), reason) {
			t.Errorf("%s: %v", at, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, "nowhere")); err == nil {
		t.Error("the target of a dangling link was made")
	}
	if _, err := resolveSource(filepath.Join(dir, "absent"), true); !errors.Is(err, ErrInvalid) {
		t.Errorf("strict: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "absent")); err == nil {
		t.Error("strict made a directory")
	}
}

// TestNothingIsMadeForABadRequest: directories come last.
func TestNothingIsMadeForABadRequest(t *testing.T) {
	root, dir := rootfs(t), t.TempDir()
	absent := filepath.Join(dir, "absent")
	r := userRequest(root, "ghost", &cri.LinuxContainerSecurityContext{})
	r.Config.Mounts = []*cri.Mount{{ContainerPath: "/c", HostPath: absent}}
	if _, err := Resolve(r); !errors.Is(err, ErrInvalid) {
		t.Errorf("a ghost: %v", err)
	}
	r.Image.Config.User = "app"
	r.Config.Linux.SecurityContext.Capabilities = &cri.Capability{AddCapabilities: []string{"FLY"}}
	if _, err := Resolve(r); !errors.Is(err, ErrInvalid) {
		t.Errorf("a capability: %v", err)
	}
	if _, err := os.Lstat(absent); err == nil {
		t.Fatal("a directory was made for a refused request")
	}
	r.Config.Linux.SecurityContext.Capabilities = nil
	out, err := Resolve(r)
	if err != nil || !slices.Equal(out.MountSources, []string{absent}) || out.User.UID != 1000 {
		t.Errorf("%+v, %v", out, err)
	}
	if _, err := os.Lstat(absent); err != nil {
		t.Error(err)
	}
	again, err := Resolve(r)
	if err != nil || !slices.Equal(again.MountSources, out.MountSources) {
		t.Errorf("the second time: %+v, %v", again, err)
	}
}

func TestPropagationFields(t *testing.T) {
	for optional, want := range map[string][2]bool{
		"": {}, "shared:1": {true, false}, "master:2": {false, true}, "shared:1 master:2": {true, true}, "unbindable": {}, "propagate_from:3": {},
	} {
		shared, slave := propagation(optional)
		if [2]bool{shared, slave} != want {
			t.Errorf("%q: %v %v", optional, shared, slave)
		}
	}
}
