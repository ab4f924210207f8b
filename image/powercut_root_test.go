package image

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
)

// loopMount mounts an image file and gives it back unmounted.
func loopMount(t *testing.T, file string) string {
	t.Helper()
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-o", "loop", file, dir).CombinedOutput(); err != nil {
		t.Skipf("cannot mount a loop device: %s", out)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// TestB39PowerCut copies the disk under a running store at odd moments. On
// every copy, as the next boot finds it, an image is absent or every file of
// it is right, and a pull works.
func TestB39PowerCut(t *testing.T) {
	leakcheck.Start(t)
	for name, edit := range map[string]func(*Options){"": nil, "kept blobs": keepBlobs} {
		t.Run(name, func(t *testing.T) { powerCuts(t, edit) })
	}
}

func powerCuts(t *testing.T, edit func(*Options)) {
	backing := newDisk(t)
	reg := newRegistry(t)
	refs := pushWhole(t, reg)
	dir := loopMount(t, backing)
	s, err := openOn(t.Context(), options(t, filepath.Join(dir, "images"), edit, reg), &disk{boot: "before"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	var cuts []string
	cut := func() {
		t.Helper()
		to := filepath.Join(t.TempDir(), "cut")
		if out, err := exec.Command("cp", "--sparse=always", backing, to).CombinedOutput(); err != nil {
			t.Fatalf("%s", out)
		}
		cuts = append(cuts, to)
	}
	random := rand.New(rand.NewPCG(uint64(cutRounds(t)), 39))
	for range cutRounds(t) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			for _, i := range random.Perm(len(refs)) { // pulls and removals one upon the other
				id, err := s.Pull(t.Context(), PullRequest{Reference: refs[i]})
				if err == nil && i%2 == 0 {
					err = s.Remove(t.Context(), id)
				}
				if err != nil {
					t.Error(err)
				}
			}
		}()
		for _, wait := range []time.Duration{3, 17, 40, 90} {
			time.Sleep(wait * time.Millisecond)
			cut()
		}
		<-done
		cut()
	}
	for _, ref := range refs {
		mustPull(t, s, ref)
	}
	calm(t, s)
	cut()
	for i, file := range cuts {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			found := afterCut(t, options(t, "", edit, reg), file, refs)
			if i == len(cuts)-1 && found != len(refs) {
				t.Errorf("%d of %d images are there after a sync", found, len(refs))
			}
		})
	}
}

// cutRounds is how often five cuts are made of each kind: BERTH_POWERCUT says it for a
// long run.
func cutRounds(t *testing.T) int {
	n, err := strconv.Atoi(os.Getenv("BERTH_POWERCUT"))
	if os.Getenv("BERTH_POWERCUT") == "" {
		return 2
	}
	if err != nil || n < 1 {
		t.Fatalf("BERTH_POWERCUT is no number of rounds: %v", err)
	}
	return n
}

// newDisk is a file with an empty ext4 in it, made with these arguments too.
func newDisk(t *testing.T, arguments ...string) string {
	t.Helper()
	backing := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(backing, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(backing, 96<<20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", append(arguments, "-q", "-F", backing)...).CombinedOutput(); err != nil {
		t.Skipf("no ext4: %s", out)
	}
	return backing
}

// pushWhole pushes images whose files hold their own names, so that any of
// them can be checked.
func pushWhole(t *testing.T, reg *registry) (refs []string) {
	t.Helper()
	for i := range 4 {
		var layers []layerBlob
		for l := range 2 {
			var files []file
			for n := range 150 {
				name := fmt.Sprintf("i%d/l%d/f%d", i, l, n)
				files = append(files, file{name: name, body: strings.Repeat(name, 50)})
			}
			layers = append(layers, gzipLayer(tarOf(t, files...)))
		}
		repo := fmt.Sprintf("app%d", i)
		reg.push(repo, "1", layers...)
		refs = append(refs, reg.ref(repo+":1"))
	}
	return refs
}

func afterCut(t *testing.T, o Options, file string, refs []string) int {
	o.Root = filepath.Join(loopMount(t, file), "images")
	s, err := openOn(t.Context(), o, &disk{boot: "after"})
	if err != nil && strings.Contains(err.Error(), "no copy can be read") {
		// The copy is made while the disk is written: its journal may be newer than
		// the blocks of synced files, which are zeros then. No power cut does that, but
		// a broken disk, and an operator does this:
		for _, name := range []string{refsFile, durableFile, syncedFile} {
			os.Remove(filepath.Join(o.Root, name))
		}
		s, err = openOn(t.Context(), o, &disk{boot: "after"})
	}
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.flights.wait() // for what is unpacked from kept blobs
	found := len(s.List())
	whole := func() {
		t.Helper()
		for _, r := range s.List() {
			wholeImage(t, r)
		}
		sound(t, s)
	}
	whole()
	for _, ref := range refs {
		mustPull(t, s, ref)
	}
	whole()
	return found
}

// wholeImage checks every file of an image of TestB39PowerCut.
func wholeImage(t *testing.T, r *Record) {
	t.Helper()
	for _, dir := range r.Layers {
		files := 0
		err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			files++
			data, err := os.ReadFile(path)
			if want := strings.Repeat(strings.TrimPrefix(path, dir+"/"), 50); err == nil && !bytes.Equal(data, []byte(want)) {
				t.Errorf("%s has %d bytes, not its content", path, len(data))
			}
			return err
		})
		if err != nil || files != 150 {
			t.Errorf("%s: %d files, %v", dir, files, err)
		}
	}
}

// Records that a power cut has torn are written anew at the start that finds them
// so, from those that were surely on the disk.
func TestTornRecordsAreWrittenAnew(t *testing.T) {
	leakcheck.Start(t)
	reg := newRegistry(t)
	reg.push("app", "1", gzipLayer(tarOf(t, file{name: "f", body: "x"})))
	s := open(t, t.TempDir(), nil, reg)
	mustPull(t, s, reg.ref("app:1"))
	calm(t, s)
	s.Close()
	path := filepath.Join(s.root, refsFile)
	if err := os.Remove(path); err != nil { // it may be one file with the durable records
		t.Fatal(err)
	}
	if err := os.WriteFile(path, make([]byte, 500), 0o600); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s)
	if len(s.List()) != 1 || !readable(s.root) {
		t.Errorf("%d images, records readable: %v", len(s.List()), readable(s.root))
	}
	sound(t, s)
}
