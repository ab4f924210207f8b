package layer_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"iter"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/layer"
	"berth/image/rootfs"
	"berth/sandbox/leakcheck"
)

// maker makes random layers: few names, so that they meet again and again.
type maker struct {
	*rand.Rand
	n int
}

var words = []string{"a", "b", "c", "lib", "\xff\xfe", "a\"b\\c\n", "ü", strings.Repeat("w", 150)}

func (m *maker) path(most int) string {
	parts := make([]string, 1+m.IntN(most))
	for i := range parts {
		parts[i] = words[m.IntN(len(words))]
	}
	return strings.Join(parts, "/")
}

func (m *maker) dress(e entry) entry {
	m.n++
	e.Mode = int64([]int{0o644, 0o755, 0o4755, 0o2750, 0o1777, 0o600, 0}[m.IntN(7)])
	if e.Typeflag == tar.TypeDir {
		e.Mode = e.Mode&^0o2000 | 0o500 // set-gid directories hand their group on in the oracle
	}
	e.Uid, e.Gid = m.IntN(3)*1000, m.IntN(3)*7
	e.ModTime = time.Unix(1_500_000_000+int64(m.n), 0)
	if m.IntN(4) == 0 && (e.Typeflag == tar.TypeReg || e.Typeflag == tar.TypeDir) {
		e.xattrs = map[string]string{"user.n": fmt.Sprint(m.n), "security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"}
		if e.Typeflag == tar.TypeDir {
			delete(e.xattrs, "security.capability")
		}
	}
	return e
}

// member makes one entry at a path.
func (m *maker) member(path string, links bool) entry {
	switch m.IntN(10) {
	case 0, 1, 2:
		return m.dress(dir(path, 0, 0))
	case 3:
		return m.dress(symlink(path, []string{"a", "lib/b", "./c", "nowhere", "lib"}[m.IntN(5)]))
	case 4:
		return m.dress(entry{Header: tar.Header{Name: path, Typeflag: tar.TypeFifo}})
	case 5:
		return m.dress(entry{Header: tar.Header{Name: path, Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 1 + int64(m.IntN(5))}})
	case 6:
		if links {
			return hardlink(path, m.path(3))
		}
	}
	return m.dress(reg(path, strings.Repeat(fmt.Sprint("body ", m.n, " "), m.IntN(400))))
}

// seeds are sixty, or as many as fit into a minute on a machine so slow that
// they would take longer (an emulated one), but at least ten.
func seeds() iter.Seq[uint64] {
	return func(yield func(uint64) bool) {
		end := time.Now().Add(time.Minute)
		for seed := range uint64(60) {
			if seed >= 10 && time.Now().After(end) || !yield(seed) {
				return
			}
		}
	}
}

// gnuTar extracts entries below root with GNU tar, in one go.
func gnuTar(t *testing.T, root string, entries ...entry) error {
	t.Helper()
	cmd := exec.Command("tar", "--extract", "--preserve-permissions", "--numeric-owner", "--same-owner",
		"--xattrs", "--xattrs-include=*", "--delay-directory-restore", "--directory", root)
	cmd.Stdin = bytes.NewReader(pack(t, tar.FormatPAX, entries...))
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// TestUnpackEqualsGNUTar unpacks layers without collisions with both and
// compares everything, times of directories too.
func TestUnpackEqualsGNUTar(t *testing.T) {
	leakcheck.Start(t)
	for seed := range seeds() {
		m := &maker{Rand: rand.New(rand.NewPCG(seed, 1))}
		var entries []entry
		kinds := map[string]byte{"": tar.TypeDir}
		for range 40 {
			path := m.path(4)
			if kinds[path] != 0 || underFile(kinds, path) {
				continue
			}
			e := m.member(path, false)
			if files := regular(kinds); m.IntN(6) == 0 && len(files) > 0 {
				e = hardlink(path, files[m.IntN(len(files))])
			}
			kinds[path] = e.Typeflag
			for at := filepath.Dir(path); at != "."; at = filepath.Dir(at) {
				if kinds[at] == 0 {
					kinds[at] = tar.TypeDir
					entries = append(entries, m.dress(dir(at, 0, 0)))
				}
			}
			entries = append(entries, e)
		}
		got, _ := unpack(t, entries...)
		want := t.TempDir()
		if err := gnuTar(t, want, entries...); err != nil {
			t.Fatal(err)
		}
		same(t, describe(t, got, true), describe(t, want, true))
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func underFile(kinds map[string]byte, path string) bool {
	for at := filepath.Dir(path); at != "."; at = filepath.Dir(at) {
		if k := kinds[at]; k != 0 && k != tar.TypeDir {
			return true
		}
	}
	return false
}

func regular(kinds map[string]byte) []string {
	var files []string
	for _, w := range words { // in a fixed order: the seed must decide
		if kinds[w] == tar.TypeReg {
			files = append(files, w)
		}
	}
	return files
}

// oracle applies a layer to a tree the plain way: first what it deletes, then
// entry by entry with GNU tar, later ones replacing earlier ones. It leaves
// out of entries what cannot be applied.
type oracle struct {
	t    *testing.T
	root string
	// through are the symlinks that this layer wrote through.
	through map[string]bool
}

// apply returns the entries that make sense on what is there.
func (o *oracle) apply(m *maker, deletions, entries []entry) []entry {
	var used []entry
	o.through = map[string]bool{}
	for _, d := range deletions {
		if o.delete(d) {
			used = append(used, d)
		}
	}
	for _, e := range entries {
		if o.add(e) {
			used = append(used, e)
		}
	}
	return used
}

// delete removes what a whiteout or opaque marker hides. Only names whose
// parents are there as directories, none of them a link, are used: what a
// marker below a link deletes differs between unpackers.
func (o *oracle) delete(e entry) bool {
	parent, base := filepath.Split(e.Name)
	at := o.root
	for _, part := range strings.Split(strings.Trim(parent, "/"), "/") {
		at = filepath.Join(at, part)
		if st, err := os.Lstat(at); err != nil || !st.IsDir() {
			return false
		}
	}
	if base != ".wh..wh..opq" {
		target := filepath.Join(at, strings.TrimPrefix(base, ".wh."))
		if _, err := os.Lstat(target); err != nil {
			return false
		}
		return os.RemoveAll(target) == nil
	}
	list, err := os.ReadDir(at)
	if err != nil || at == o.root {
		return false
	}
	for _, item := range list {
		if err := os.RemoveAll(filepath.Join(at, item.Name())); err != nil {
			o.t.Fatal(err)
		}
	}
	return true
}

// add applies one entry. It refuses those whose parent is no directory, and
// hard links to anything but a file with a single name.
func (o *oracle) add(e entry) bool {
	name := strings.TrimSuffix(e.Name, "/")
	// A layer that writes through a link of a lower layer and then replaces
	// that link cannot be unpacked by itself: the link is not there to see.
	there, err := os.Lstat(filepath.Join(o.root, name))
	merges := err == nil && there.IsDir() && e.Typeflag == tar.TypeDir
	for link := range o.through {
		if !merges && (link == name || strings.HasPrefix(link, name+"/")) {
			return false
		}
	}
	if !o.usable(filepath.Dir(name)) {
		return false
	}
	if e.Typeflag == tar.TypeLink && !o.linkable(e, name) {
		return false
	}
	if st, err := os.Lstat(filepath.Join(o.root, name)); err == nil && (st.IsDir() != (e.Typeflag == tar.TypeDir) || st.Mode()&os.ModeSymlink != 0) {
		if err := os.RemoveAll(filepath.Join(o.root, name)); err != nil {
			o.t.Fatal(err)
		}
	}
	if e.Typeflag == tar.TypeDir {
		// An entry says all of a directory's attributes; tar only adds.
		unix.Lremovexattr(filepath.Join(o.root, name), "user.n")
	}
	if err := gnuTar(o.t, o.root, e); err != nil {
		o.t.Fatalf("the oracle fails on %q: %v", e.Name, err)
	}
	return true
}

// usable says whether every component is a directory, or leads to one, or is
// missing.
func (o *oracle) usable(name string) bool {
	at := o.root
	for _, part := range strings.Split(name, "/") {
		at = filepath.Join(at, part)
		there, err := os.Lstat(at)
		if os.IsNotExist(err) {
			return true
		}
		if err == nil && there.Mode()&os.ModeSymlink != 0 {
			o.through[strings.TrimPrefix(at, o.root+"/")] = true
			if real, err := filepath.EvalSymlinks(at); err == nil {
				o.through[strings.TrimPrefix(real, o.root+"/")] = true
			}
		}
		if st, err := os.Stat(at); err != nil || !st.IsDir() {
			return false
		}
	}
	return true
}

func (o *oracle) linkable(e entry, name string) bool {
	var st unix.Stat_t
	target := filepath.Join(o.root, e.Linkname)
	if unix.Lstat(target, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 1 {
		return false
	}
	var there unix.Stat_t
	if unix.Lstat(filepath.Join(o.root, name), &there) == nil {
		return false
	}
	return !strings.HasPrefix(e.Linkname+"/", name+"/")
}

// TestStackEqualsGNUTar is the whole way of an image: random layers are
// unpacked each on its own, settled, mounted as overlay, and compared with
// what GNU tar makes of them one after another.
func TestStackEqualsGNUTar(t *testing.T) {
	leakcheck.Start(t)
	for seed := range seeds() {
		if !t.Run(fmt.Sprint(seed), func(t *testing.T) { stackOnce(t, seed) }) {
			return
		}
	}
}

func stackOnce(t *testing.T, seed uint64) {
	m := &maker{Rand: rand.New(rand.NewPCG(seed, 2))}
	o := &oracle{t: t, root: t.TempDir()}
	var lowers []layer.Lower
	var dirs []string
	for i := range 2 + m.IntN(4) {
		var deletions, entries []entry
		for range m.IntN(6) {
			p := m.path(3)
			if m.IntN(4) == 0 {
				deletions = append(deletions, reg(p+"/.wh..wh..opq", ""))
			} else {
				parent, base := filepath.Split(p)
				deletions = append(deletions, reg(parent+".wh."+base, ""))
			}
		}
		for range 4 + m.IntN(14) {
			entries = append(entries, m.member(m.path(4), true))
		}
		used := o.apply(m, deletions, entries)
		root, r := unpack(t, used...)
		plan, err := r.Needs.Plan(root, lowers)
		if err != nil {
			t.Fatal(err)
		}
		if err := plan.Apply(root); err != nil {
			t.Fatal(err)
		}
		lowers = append(lowers, layer.Lower{Dir: root, ID: fmt.Sprint(i)})
		dirs = append(dirs, root)
	}
	base := t.TempDir()
	mount := rootfs.Mount{Target: base + "/rootfs", Upper: base + "/upper", Work: base + "/work", Layers: dirs}
	if err := rootfs.Create(mount); err != nil {
		t.Fatal(err)
	}
	defer rootfs.Unmount(mount.Target)
	if err := os.Chmod(o.root, 0o755); err != nil {
		t.Fatal(err)
	}
	same(t, describe(t, mount.Target, false), describe(t, o.root, false))
}
