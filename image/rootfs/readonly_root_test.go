package rootfs

import (
	"archive/tar"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
)

// readOnly makes a Mount for reading with the call of new or of old kernels.
func readOnly(t *testing.T, mount func(Mount) error, layers ...string) Mount {
	t.Helper()
	m := at(t.TempDir())
	m.Layers, m.ReadOnly = layers, true
	if err := mount(m); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Unmount(m.Target); err != nil {
			t.Error(err)
		}
	})
	return m
}

// Any number of layers, none included, shows merged and hides whiteouts, also
// those of a layer that lies on nothing.
func TestReadOnlyLayers(t *testing.T) {
	leakcheck.Start(t)
	bottom := fill(t, t.TempDir(), map[string]string{"f": "bottom", "gone": "x", "d/b": "x"})
	top := fill(t, t.TempDir(), map[string]string{"f": "top", "d/t": "x"})
	if err := unix.Mknod(top+"/gone", unix.S_IFCHR, 0); err != nil {
		t.Fatal(err)
	}
	both(t, func(t *testing.T, mount func(Mount) error) {
		for want, layers := range map[string][]string{
			"":                        {},
			"f=top d d/t":             {top},
			"f=top d d/b d/t":         {bottom, top},
			"gone f=bottom d d/b d/t": {top, bottom, bottom},
		} {
			m := readOnly(t, mount, layers...)
			if got := seen(t, m.Target); got != want {
				t.Errorf("%d layers: %q, want %q", len(layers), got, want)
			}
		}
	})
}

func seen(t *testing.T, dir string) string {
	t.Helper()
	var all []string
	for _, p := range []string{"gone", "f", "d", "d/b", "d/t"} {
		if _, err := os.Lstat(filepath.Join(dir, p)); err != nil {
			continue
		}
		if body, err := os.ReadFile(filepath.Join(dir, p)); err == nil && p == "f" {
			p += "=" + string(body)
		}
		all = append(all, p)
	}
	return strings.Join(all, " ")
}

// Not even the node's root can write, also after asking for a writable mount,
// and the layers never change.
func TestReadOnlyForGood(t *testing.T) {
	leakcheck.Start(t)
	layer := fill(t, t.TempDir(), map[string]string{"f": "x"})
	both(t, func(t *testing.T, mount func(Mount) error) {
		m := readOnly(t, mount, layer)
		var fs unix.Statfs_t
		if err := unix.Statfs(m.Target, &fs); err != nil || fs.Flags&unix.ST_RDONLY == 0 || fs.Flags&unix.ST_NOEXEC != 0 {
			t.Errorf("flags %#x, %v", fs.Flags, err)
		}
		write := func(when string) {
			for what, err := range map[string]error{
				"create": os.WriteFile(m.Target+"/new", nil, 0o600), "append": os.WriteFile(m.Target+"/f", nil, 0o600),
				"remove": os.Remove(m.Target + "/f"), "chmod": os.Chmod(m.Target, 0o777),
			} {
				if !errors.Is(err, unix.EROFS) {
					t.Errorf("%s: %s: %v", when, what, err)
				}
			}
		}
		write("at first")
		if err := unix.Mount("", m.Target, "", unix.MS_REMOUNT, ""); !errors.Is(err, unix.EROFS) {
			t.Errorf("remount writable: %v", err)
		}
		if err := unix.Mount("", m.Target, "", unix.MS_REMOUNT|unix.MS_BIND, ""); err != nil {
			t.Errorf("remount the mount alone: %v", err)
		}
		write("after remounting")
	})
	if list, err := os.ReadDir(layer); err != nil || len(list) != 1 {
		t.Errorf("the layer holds %v, %v", list, err)
	}
}

// The root directory looks as the topmost layer that has one says.
func TestReadOnlyRootLooks(t *testing.T) {
	leakcheck.Start(t)
	low, top := t.TempDir(), t.TempDir()
	unpack(t, low, tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o710, Uid: 7})
	unpack(t, top, tar.Header{Name: "f", Typeflag: tar.TypeReg})
	m := readOnly(t, Create, low, top)
	st, err := os.Stat(m.Target)
	if err != nil || st.Mode().Perm() != 0o710 || st.Sys().(*syscall.Stat_t).Uid != 7 {
		t.Errorf("the root is %v, %v", st, err)
	}
}

func TestReadOnlyMostLayers(t *testing.T) {
	leakcheck.Start(t)
	base := t.TempDir()
	var layers []string
	for i := range MaxLayers {
		layers = append(layers, fill(t, filepath.Join(base, fmt.Sprint(i)), map[string]string{"f": fmt.Sprint(i)}))
	}
	both(t, func(t *testing.T, mount func(Mount) error) {
		m := readOnly(t, mount, layers[1:]...)
		if body, err := os.ReadFile(m.Target + "/f"); err != nil || string(body) != fmt.Sprint(MaxLayers-1) {
			t.Errorf("%q, %v", body, err)
		}
	})
	m := at(t.TempDir())
	m.Layers, m.ReadOnly = layers, true
	if err := Create(m); !errors.Is(err, ErrTooManyLayers) {
		t.Errorf("one more: %v", err)
	}
}
