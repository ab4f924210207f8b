package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"berth/image/layer"
)

// FuzzUnpack feeds any bytes. A directory beside the layer's root, which
// planted symlinks can name, must stay as it is, and whatever was unpacked can
// be planned, settled, measured and removed.
func FuzzUnpack(f *testing.F) {
	if os.Getuid() != 0 {
		f.Skip("needs root")
	}
	f.Add(pack(f, tar.FormatPAX, symlink("a", "../victim"), reg("a/x", "evil"), hardlink("b", "a/secret"), reg("a/.wh.secret", "")))
	f.Add(pack(f, tar.FormatGNU, dir("d", 0o755, 0), reg("d/f", "x"), symlink("d/l", "/"), reg("d/l/y", "z"), reg("d/.wh..wh..opq", "")))
	f.Add(pack(f, tar.FormatPAX, reg("f", "x"), hardlink("g", "f"), dir("f", 0o700, 3), symlink("h", "f"), reg("h/i", "")))
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
		r, err := layer.Unpack(ctx, root, bytes.NewReader(data), limits)
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
