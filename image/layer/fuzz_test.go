package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"berth/image/layer"
)

// FuzzUnpack feeds any bytes, within bounds of memory and time. A directory beside the layer's root, which
// planted symlinks can name, must stay as it is, and whatever was unpacked can
// be planned, settled, measured and removed.
func FuzzUnpack(f *testing.F) {
	if os.Getuid() != 0 {
		f.Skip("needs root")
	}
	f.Add(pack(f, tar.FormatPAX, symlink("a", "../victim"), reg("a/x", "evil"), hardlink("b", "a/secret"), reg("a/.wh.secret", "")))
	f.Add(pack(f, tar.FormatGNU, dir("d", 0o755, 0), reg("d/f", "x"), symlink("d/l", "/"), reg("d/l/y", "z"), reg("d/.wh..wh..opq", "")))
	f.Add(pack(f, tar.FormatPAX, reg("f", "x"), hardlink("g", "f"), dir("f", 0o700, 3), symlink("h", "f"), reg("h/i", "")))
	f.Add(pack(f, tar.FormatPAX, symlink("a", "/"), symlink("b", "a/.."), hardlink("c", "b"), reg("b/c", ""), reg("c/d", ""), reg(".wh.a", ""), dir("a", 0, 0)))
	f.Add(pack(f, tar.FormatPAX, hardlink("a", "b"), hardlink("b", "a"), symlink("b", "c"), hardlink("c/x", "a"), reg("a/.wh..wh..opq", "")))
	xattrs := dir("d", 0o755, 1<<31)
	xattrs.xattrs = map[string]string{"user.a": "b", "trusted.overlay.opaque": "y", "trusted.overlay.redirect": "/../victim", "security.capability": "x"}
	f.Add(pack(f, tar.FormatPAX, xattrs, symlink("d/l", strings.Repeat("x/", 500)), reg("d/l/"+strings.Repeat("y/", 400)+"z", ""), reg("./d//.wh.l", "")))
	f.Add([]byte("not a tar"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 64<<10 {
			return
		}
		base := t.TempDir()
		victim, root := filepath.Join(base, "victim"), filepath.Join(base, "root")
		for _, d := range []string{victim, root} {
			if err := os.Mkdir(d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(victim+"/secret", []byte("secret"), 0o600); err != nil {
			t.Fatal(err)
		}
		before := describe(t, victim, true)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		limits := layer.Defaults
		limits.SparseBytes = 1 << 20
		var stats, after runtime.MemStats
		runtime.ReadMemStats(&stats)
		r, err := layer.Unpack(ctx, root, bytes.NewReader(data), limits)
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - stats.TotalAlloc; n > 64<<20 {
			t.Errorf("%d bytes of memory for %d of a layer", n, len(data))
		}
		if ctx.Err() != nil {
			t.Errorf("%d bytes of a layer take more than ten seconds", len(data))
		}
		if list, err := os.ReadDir(base); err != nil || len(list) != 2 {
			t.Errorf("beside the root are %v (%v)", list, err)
		}
		same(t, describe(t, victim, true), before)
		if err != nil {
			return
		}
		lower := layer.Lower{Dir: victim, ID: "victim"}
		if plan, err := r.Needs.Plan(root, []layer.Lower{lower}); err == nil {
			if err := plan.Apply(root); err != nil {
				t.Errorf("apply: %v", err)
			}
		}
		same(t, describe(t, victim, true), before)
		if _, err := layer.Measure(root); err != nil {
			t.Error(err)
		}
	})
}
