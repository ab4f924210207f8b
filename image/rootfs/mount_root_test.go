package rootfs

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"berth/image/layer"
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
			if m.ReadOnly {
				lowers = append(lowers, m.Upper)
			}
			return mountOld(m, lowers, inDir)
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

// TestLayersThatRepeat proves what lowers claims: leaving out all but the
// topmost occurrence of a layer shows the same as copies of it would.
func TestLayersThatRepeat(t *testing.T) {
	leakcheck.Start(t)
	base := t.TempDir()
	make3 := func(name string, files map[string]string, whiteouts ...string) [3]string {
		var copies [3]string
		for i := range copies {
			copies[i] = fill(t, fmt.Sprintf("%s/%s%d", base, name, i), files)
			for _, w := range whiteouts {
				p := filepath.Join(copies[i], w)
				if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := unix.Mknod(p, unix.S_IFCHR, 0); err != nil {
					t.Fatal(err)
				}
			}
		}
		return copies
	}
	layers := map[rune][3]string{
		'A': make3("A", map[string]string{"f": "A", "d/a": "A", "d/both": "A", "opaque/a": "A", "x/y": "A"}, "gone"),
		'B': make3("B", map[string]string{"gone": "B", "d/b": "B", "d/both": "B", "opaque/b": "B", "x": "B"}, "f"),
		'C': make3("C", map[string]string{"d": "C", "c": "C", "opaque/c": "C"}, "opaque/a"),
	}
	for _, dir := range layers['A'] {
		if err := unix.Setxattr(dir+"/opaque", "trusted.overlay.opaque", []byte("y"), 0); err != nil {
			t.Fatal(err)
		}
	}
	for _, order := range []string{"AA", "ABA", "ABAB", "BAAB", "CABA", "ACABC", "ABCABC", "BCBCACB"} {
		var same, copies []string
		used := map[rune]int{}
		for _, l := range order {
			same = append(same, layers[l][0])
			copies = append(copies, layers[l][used[l]])
			used[l]++
		}
		if got, want := view(t, same), view(t, copies); got != want {
			t.Errorf("%s:\n%s\nwith copies:\n%s", order, got, want)
		}
	}
}

// view mounts layers and lists what shows.
func view(t *testing.T, layers []string) string {
	t.Helper()
	m := at(t.TempDir())
	m.Layers = layers
	if err := Create(m); err != nil {
		t.Fatal(err)
	}
	defer Unmount(m.Target)
	var b strings.Builder
	err := filepath.WalkDir(m.Target, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		body := []byte("/")
		if !d.IsDir() {
			if body, err = os.ReadFile(p); err != nil {
				return err
			}
		}
		fmt.Fprintf(&b, "%s %s\n", strings.TrimPrefix(p, m.Target), body)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestImageWithoutLayers(t *testing.T) {
	leakcheck.Start(t)
	both(t, func(t *testing.T, mount func(Mount) error) {
		m := at(t.TempDir())
		if err := mount(m); err != nil {
			t.Fatal(err)
		}
		defer Unmount(m.Target)
		if err := os.WriteFile(m.Target+"/f", []byte("x"), 0o644); err != nil {
			t.Error(err)
		}
		if data, err := os.ReadFile(m.Upper + "/f"); err != nil || string(data) != "x" {
			t.Errorf("upper: %q %v", data, err)
		}
	})
}

func TestRootLooksLikeTheImages(t *testing.T) {
	leakcheck.Start(t)
	for name, test := range map[string]struct {
		entries []tar.Header
		mode    os.FileMode
		uid     uint32
	}{
		"no entry":     {nil, 0o755, 0},
		"lower has it": {[]tar.Header{{Name: "./", Typeflag: tar.TypeDir, Mode: 0o700, Uid: 7}}, 0o700, 7},
	} {
		low, top := t.TempDir(), t.TempDir()
		unpack(t, low, test.entries...)
		unpack(t, top, tar.Header{Name: "f", Typeflag: tar.TypeReg})
		m := at(t.TempDir())
		m.Layers = []string{low, top}
		if err := Create(m); err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(m.Target)
		if err != nil || st.Mode().Perm() != test.mode || st.Sys().(*syscall.Stat_t).Uid != test.uid {
			t.Errorf("%s: the root is %v (%v)", name, st.Mode(), err)
		}
		if err := Unmount(m.Target); err != nil {
			t.Error(err)
		}
	}
}

func unpack(t *testing.T, dir string, headers ...tar.Header) {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	if _, err := layer.Unpack(t.Context(), dir, &b, layer.Limits{}); err != nil {
		t.Fatal(err)
	}
}

func TestUnmountIsIdempotent(t *testing.T) {
	leakcheck.Start(t)
	m := at(t.TempDir())
	m.Layers = []string{fill(t, t.TempDir(), map[string]string{"f": "x"})}
	for range 2 { // mounts stack
		if err := Create(m); err != nil {
			t.Fatal(err)
		}
		m.Upper, m.Work = m.Upper+"2", m.Work+"2"
	}
	busy, err := os.Open(m.Target + "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	for range 2 {
		if err := Unmount(m.Target); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(m.Target); !os.IsNotExist(err) {
			t.Errorf("the target is there: %v", err)
		}
	}
}

func TestMountingAgainKeepsTheUpperLayer(t *testing.T) {
	leakcheck.Start(t)
	m := at(t.TempDir())
	m.Layers = []string{fill(t, t.TempDir(), map[string]string{"f": "x"})}
	for i := range 3 {
		if err := Create(m); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(fmt.Sprintf("%s/n%d", m.Target, i), nil, 0o600); err != nil {
			t.Error(err)
		}
		if list, err := os.ReadDir(m.Target); err != nil || len(list) != i+2 {
			t.Errorf("round %d: %v %v", i, list, err)
		}
		if err := Unmount(m.Target); err != nil {
			t.Fatal(err)
		}
	}
}

func TestErrorsNameWhatIsWrong(t *testing.T) {
	leakcheck.Start(t)
	m := at(t.TempDir())
	m.Layers = []string{"/nonexistent/layer"}
	if err := Create(m); err == nil || !strings.Contains(err.Error(), "/nonexistent/layer") {
		t.Errorf("missing layer: %v", err)
	}
	for i := range MaxLayers + 1 {
		m.Layers = append(m.Layers, fmt.Sprint("/l", i))
	}
	if err := Create(m); !errors.Is(err, ErrTooManyLayers) {
		t.Errorf("too many layers: %v", err)
	}
	if err := Unmount(m.Target); err != nil {
		t.Error(err)
	}
}

func TestUsageIsDu(t *testing.T) {
	leakcheck.Start(t)
	dir := fill(t, t.TempDir(), map[string]string{"a": strings.Repeat("x", 10_000), "d/e/f": "y", "empty": ""})
	if err := os.Link(dir+"/a", dir+"/d/again"); err != nil {
		t.Fatal(err)
	}
	bytes, inodes, err := Usage(dir)
	if err != nil {
		t.Fatal(err)
	}
	for flag, got := range map[string]uint64{"--block-size=1": bytes, "--inodes": inodes} {
		out, err := exec.Command("du", "-s", flag, dir).Output()
		if err != nil || strings.Fields(string(out))[0] != fmt.Sprint(got) {
			t.Errorf("du %s: %s (%v), Usage %d", flag, out, err, got)
		}
	}
	if _, _, err := Usage(dir + "/none"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing directory: %v", err)
	}
}

// A context reaches the kernel; one without SELinux knows no such option and
// must refuse the mount, which then has left nothing.
func TestContextRoot(t *testing.T) {
	leakcheck.Start(t)
	if _, err := os.Stat("/sys/fs/selinux/enforce"); err == nil {
		t.Skip("skipped: shows what a kernel without SELinux refuses, and this one has it (/sys/fs/selinux)")
	}
	both(t, func(t *testing.T, mount func(Mount) error) {
		dir := t.TempDir()
		m := at(dir)
		m.Layers = []string{fill(t, filepath.Join(dir, "layer"), map[string]string{"f": "x"})}
		m.Context = "system_u:object_r:container_file_t:s0:c1,c2"
		if err := mount(m); !errors.Is(err, unix.EINVAL) {
			t.Errorf("got %v, want invalid argument", err)
		}
		m.Context = ""
		if err := mount(m); err != nil {
			t.Fatal(err)
		}
		if err := Unmount(m.Target); err != nil {
			t.Error(err)
		}
	})
}
