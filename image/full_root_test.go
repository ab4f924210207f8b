package image

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/layer"
	"berth/sandbox/leakcheck"
)

// room leaves about so many bytes on the filesystem of dir.
func room(t *testing.T, dir, filler string, bytes int64) {
	t.Helper()
	settle(t, dir)
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

// settle writes a filesystem to its disk: what was deleted is free only then, on ext4.
func settle(t *testing.T, dir string) {
	t.Helper()
	if err := layer.SyncFS(dir); err != nil {
		t.Fatal(err)
	}
}

// inodes leaves so many inodes on the filesystem of dir.
func inodes(t *testing.T, dir, filler string, left int64) {
	t.Helper()
	settle(t, dir)
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filler, 0o700); err != nil {
		t.Fatal(err)
	}
	for n := int64(st.Ffree) - 1 - left; n > 0; n-- {
		if err := os.WriteFile(filepath.Join(filler, fmt.Sprint(n)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// scarcity is how a filesystem becomes full.
type scarcity struct {
	filesystems map[string]func(t *testing.T) string
	leave       func(t *testing.T, dir, filler string, left int64)
	most, step  int64 // what is left, from none on
	repair      int64 // what is left to a repair, too little
}

// TestB37FullAtEveryMoment lets a filesystem be full at every stage of a pull, by
// leaving it less and less room: what fails says which filesystem is full and what
// is free, nothing of the image is left, everything else answers, and with room
// the same pull works. So with an import, and with a repair.
func TestB37FullAtEveryMoment(t *testing.T) {
	fullAtEveryMoment(t, scarcity{filesystems: filesystems(t), leave: room, most: 4 << 20, step: 96 << 10, repair: 100 << 10})
}

// TestB37NoInodesAtEveryMoment is the same for a filesystem that has blocks but no
// inodes.
func TestB37NoInodesAtEveryMoment(t *testing.T) {
	small := map[string]func(t *testing.T) string{
		"ext4": func(t *testing.T) string { return loopMount(t, newDisk(t, "-N", "1200")) },
		"tmpfs": func(t *testing.T) string {
			dir := t.TempDir()
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=96m,nr_inodes=1200"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
			return dir
		},
	}
	fullAtEveryMoment(t, scarcity{filesystems: small, leave: inodes, most: 400, step: 9, repair: 2})
}

func fullAtEveryMoment(t *testing.T, of scarcity) {
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
	for name, mount := range of.filesystems {
		t.Run(name, func(t *testing.T) {
			dir := mount(t)
			filler := filepath.Join(dir, "filler")
			s := open(t, filepath.Join(dir, "images"), nil, reg)
			defer s.Close()
			small := mustPull(t, s, reg.ref("small:1"))
			failed := 0
			for left := int64(0); left < of.most; left += of.step {
				calm(t, s)
				of.leave(t, dir, filler, left)
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
					t.Errorf("with %d left: %v", left, err)
				}
				if _, err := s.DiskUsage(t.Context()); err != nil {
					t.Error(err)
				}
				os.RemoveAll(filler)
				sound(t, s)
				for _, r := range s.List() {
					if r.ID != small {
						if err := s.Remove(t.Context(), r.ID); err != nil {
							t.Error(err)
						}
					}
				}
				if t.Failed() {
					t.Fatalf("with %d left; the pull: %s %v", left, id, err)
				}
			}
			if failed < 3 {
				t.Errorf("only %d pulls failed", failed)
			}
			mustPull(t, s, reg.ref("app:1"))
			repairOnAFullDisk(t, s, dir, reg.ref("app:1"), func() { of.leave(t, dir, filler, of.repair) })
			importOnAFullDisk(t, s, dir, archive, func() { of.leave(t, dir, filler, 0) })
		})
	}
}

// importOnAFullDisk: an import without any room fails as a pull does.
func importOnAFullDisk(t *testing.T, s *Store, dir, archive string, fill func()) {
	t.Helper()
	calm(t, s)
	before := len(s.List())
	fill()
	if _, err := s.Import(t.Context(), ImportRequest{File: archive}); err == nil {
		t.Error("an import without room works")
	} else {
		fullAs(t, s, dir, err)
	}
	if n := len(s.List()); n != before {
		t.Errorf("%d images after it, were %d", n, before)
	}
	os.RemoveAll(filepath.Join(dir, "filler"))
	if _, err := s.Import(t.Context(), ImportRequest{File: archive}); err != nil {
		t.Errorf("an import with room: %v", err)
	}
	sound(t, s)
}

// TestB37SecondTryOfAPull: a pull that finds the disk full while something is being
// deleted waits for that and tries again, once; where nothing is deleted it fails at
// the first try.
func TestB37SecondTryOfAPull(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("big", "1", plainLayer(tarOf(t, file{name: "big", body: strings.Repeat("b", 8<<20)})))
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=12m"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	s := open(t, filepath.Join(dir, "images"), nil, reg)
	defer s.Close()
	// Something that is found in the trash only when somebody waits for it to be empty.
	deleting := func() {
		t.Helper()
		s.trash.count(1)
		if err := os.WriteFile(filepath.Join(s.trash.dir, "removed"), make([]byte, 7<<20), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	deleting()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for s.trash.hurry.Load() == 0 && s.trash.busy() {
			time.Sleep(time.Millisecond)
		}
		s.trash.wake()
	}()
	id := mustPull(t, s, reg.ref("big:1"))
	<-done
	if n := reg.got("/manifests/"); n != 2 {
		t.Errorf("%d tries, want 2", n)
	}
	sound(t, s)
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	empty(t, s)
	calm(t, s)
	if err := os.WriteFile(filepath.Join(dir, "filler"), make([]byte, 7<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := s.Pull(t.Context(), PullRequest{Reference: reg.ref("big:1")})
	fullAs(t, s, dir, err)
	if n := reg.got("/manifests/"); n != 3 {
		t.Errorf("with nothing being deleted: %d tries, want one", n-2)
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
func repairOnAFullDisk(t *testing.T, s *Store, dir, ref string, fill func()) {
	t.Helper()
	calm(t, s)
	file := layerWith(t, s, ref, "d/f") + "/d/f"
	if err := os.Truncate(file, 10); err != nil {
		t.Fatal(err)
	}
	fill()
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
	os.RemoveAll(filepath.Join(dir, "filler"))
	settle(t, dir)
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
