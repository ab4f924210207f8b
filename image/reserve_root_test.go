package image

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
)

// On a disk where no block is free any image can be removed, also one whose
// layers stay: those that another image needs, and those that a container holds.
// A restart does not bring it back.
func TestB37RemovalOnAFullDisk(t *testing.T) {
	leakcheck.Start(t)
	for name, mount := range map[string]func() string{
		"tmpfs": func() string {
			dir := t.TempDir()
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=6m"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
			return dir
		},
		"ext4": func() string { return loopMount(t, newDisk(t)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := mount()
			reg := newRegistry(t)
			base := gzipLayer(tarOf(t, file{name: "base", body: "base"}))
			var refs []string
			for i := range 40 { // so many that their records take several blocks
				reg.push("app", fmt.Sprint(i), base, gzipLayer(tarOf(t, file{name: fmt.Sprint(i)})))
				refs = append(refs, reg.ref(fmt.Sprintf("app:%d", i)))
			}
			s := open(t, filepath.Join(dir, "images"), nil, reg)
			for _, ref := range refs {
				mustPull(t, s, ref)
			}
			held, err := s.Resolve(refs[0])
			if err != nil || s.Hold(held.ID, "container") == nil {
				t.Fatal(err)
			}
			calm(t, s)
			filler := filepath.Join(dir, "filler")
			fillUp(t, filler)
			refill := func() {
				os.RemoveAll(filler)
				fillUp(t, filler)
			}
			for i, ref := range refs[:8] {
				if err := s.Remove(t.Context(), ref); err != nil {
					t.Fatalf("removal %d on a full disk: %v", i, err)
				}
				if i == 4 {
					s = reopen(t, s) // on the full disk
					refill()
				}
			}
			os.RemoveAll(filler)
			if s = reopen(t, s); len(s.List()) != len(refs)-8 {
				t.Errorf("%d images after a restart, want %d", len(s.List()), len(refs)-8)
			}
			s.Close()
		})
	}
}
