package rootfs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/sandbox/leakcheck"
)

// fill makes a layer of files: name → content.
func fill(t *testing.T, dir string, files map[string]string) string {
	t.Helper()
	for name, body := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func at(base string) Mount {
	return Mount{Target: filepath.Join(base, "rootfs"), Upper: filepath.Join(base, "upper"), Work: filepath.Join(base, "work")}
}

// both runs a test with the mount call of new and of old kernels.
func both(t *testing.T, test func(t *testing.T, mount func(Mount) error)) {
	t.Run("lowerdir+", func(t *testing.T) { test(t, Create) })
	t.Run("one string", func(t *testing.T) {
		test(t, func(m Mount) error {
			for _, dir := range []string{m.Target, m.Upper, m.Work} {
				if err := os.MkdirAll(dir, 0o755); err != nil {
					return err
				}
			}
			lowers, err := m.lowers()
			if err != nil {
				return err
			}
			return mountOld(m, lowers)
		})
	})
}

func TestB35ManyLayersUnderALongPath(t *testing.T) {
	leakcheck.Start(t)
	long := filepath.Join(t.TempDir(), strings.Repeat("l", 200))
	for _, count := range []int{1, 127, 200, 500} {
		t.Run(fmt.Sprint(count), func(t *testing.T) {
			var layers []string
			for i := range count {
				dir := filepath.Join(long, fmt.Sprint(count), fmt.Sprint(i+1), "diff")
				layers = append(layers, fill(t, dir, map[string]string{fmt.Sprintf("f%d", i): "x", "top": fmt.Sprint(i)}))
			}
			both(t, func(t *testing.T, mount func(Mount) error) {
				m := at(t.TempDir())
				m.Layers = layers
				if err := mount(m); err != nil {
					t.Fatal(err)
				}
				defer Unmount(m.Target)
				list, err := os.ReadDir(m.Target)
				if err != nil || len(list) != count+1 {
					t.Errorf("%d files, want %d (%v)", len(list), count+1, err)
				}
				if top, _ := os.ReadFile(filepath.Join(m.Target, "top")); string(top) != fmt.Sprint(count-1) {
					t.Errorf("the topmost layer is %q", top)
				}
			})
		})
	}
}
