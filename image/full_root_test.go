package image

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
)

// room leaves about so many bytes on the filesystem of dir.
func room(t *testing.T, dir, filler string, bytes int64) {
	t.Helper()
	unix.Sync() // what was deleted is free only then, on ext4
	var left unix.Statfs_t
	if err := unix.Statfs(dir, &left); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filler)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	// Root's share too; the filesystem wants some for itself.
	for n := int64(left.Bfree)*left.Bsize - bytes; n > 0; n -= 64 << 10 {
		err := unix.Fallocate(int(f.Fd()), 0, 0, n)
		if err == nil {
			return
		}
		if err != unix.ENOSPC {
			t.Fatal(err)
		}
	}
}

// TestB37FullAtEveryMoment lets a filesystem be full at every stage of a pull, by
// leaving it less and less room: what fails says which filesystem is full and what
// is free, nothing of the image is left, everything else answers, and with room
// the same pull works. So with an import, and with a repair.
func TestB37FullAtEveryMoment(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	base := gzipLayer(tarOf(t, file{name: "d/", mode: 0o700}, file{name: "d/f", body: strings.Repeat("0123456789abcdef", 40_000)}))
	var many []file
	for i := range 300 {
		many = append(many, file{name: fmt.Sprintf("d/%d", i), body: strings.Repeat("x", 3000)})
	}
	reg.push("app", "1", base, gzipLayer(tarOf(t, many...)), gzipLayer(tarOf(t, file{name: "d/settled", body: "x"})))
	reg.push("small", "1", gzipLayer(tarOf(t, file{name: "s", body: "small"})))
	archive, _ := ociArchive(t, plainLayer, "busybox:latest", "docker.io/other/tool:2")
	for name, mount := range filesystems(t) {
		t.Run(name, func(t *testing.T) {
			dir := mount(t)
			filler := filepath.Join(dir, "filler")
			s := open(t, filepath.Join(dir, "images"), nil, reg)
			defer s.Close()
			small := mustPull(t, s, reg.ref("small:1"))
			failed := 0
			for left := int64(0); left < 4<<20; left += 96 << 10 {
				calm(t, s)
				room(t, dir, filler, left)
				id, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("app:1")})
				if err != nil {
					failed++
					fullAs(t, s, dir, err)
				}
				_, imported := s.Import(t.Context(), ImportRequest{File: archive})
				if imported != nil {
					fullAs(t, s, dir, imported)
				}
				if _, err := s.Resolve(small); err != nil || s.Usage().Bytes == 0 {
					t.Errorf("with %d bytes: %v", left, err)
				}
				if _, err := s.DiskUsage(t.Context()); err != nil {
					t.Error(err)
				}
				os.Remove(filler)
				sound(t, s)
				for _, r := range s.List() {
					if r.ID != small {
						if err := s.Remove(t.Context(), r.ID); err != nil {
							t.Error(err)
						}
					}
				}
				if t.Failed() {
					t.Fatalf("with %d bytes left; the pull: %s %v", left, id, err)
				}
			}
			if failed < 3 {
				t.Errorf("only %d pulls failed", failed)
			}
			mustPull(t, s, reg.ref("app:1"))
			repairOnAFullDisk(t, s, dir, reg.ref("app:1"))
		})
	}
}

// fullAs wants an error of a full disk, and nothing of an image left.
func fullAs(t *testing.T, s *Store, dir string, err error) {
	t.Helper()
	if !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), "filesystem "+dir+" is full") || !strings.Contains(err.Error(), "free without the image") {
		t.Errorf("got %v, want ErrNoSpace that names %s", err, dir)
	}
	if left := append(ls(t, filepath.Join(s.root, "staging")), ls(t, filepath.Join(s.root, "trash"))...); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

// repairOnAFullDisk: a repair that has no room fails, the image stays as it is, and
// with room it works.
func repairOnAFullDisk(t *testing.T, s *Store, dir, ref string) {
	t.Helper()
	calm(t, s)
	layer := layerWith(t, s, ref, "d/f")
	if err := os.Truncate(layer+"/d/f", 10); err != nil {
		t.Fatal(err)
	}
	filler := filepath.Join(dir, "filler")
	room(t, dir, filler, 100<<10)
	lines, r := findings(t, s, true, ref)
	for _, did := range r.Repairs {
		if did.Done || !strings.Contains(did.Message, "filesystem "+dir+" is full") {
			t.Errorf("a repair without room: %+v", did)
		}
	}
	if len(lines) == 0 || len(r.Repairs) != 1 {
		t.Errorf("found %q", lines)
	}
	if _, err := s.Resolve(ref); err != nil {
		t.Error(err)
	}
	os.Remove(filler)
	unix.Sync()
	if _, r = findings(t, s, true, ref); len(r.Repairs) != 1 {
		t.Errorf("%+v", r)
	}
	for _, did := range r.Repairs {
		if !did.Done {
			t.Errorf("a repair with room: %+v", did)
		}
	}
	sound(t, s)
}
