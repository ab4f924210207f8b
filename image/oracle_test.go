package image

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// oracle says what an image's root filesystem is, in the plainest way: layers
// are applied to one directory one after another. First goes what a layer
// deletes, then its entries are extracted by GNU tar, which knows nothing of
// layers. What the image specification leaves open is decided here as in
// package layer: implied directories look as they do below or are new, 0755
// root of the epoch; making or removing a file does not change its directory's
// times; linking a file of a lower layer copies it first.
//
// It declines what has no plain answer, so that it serves to choose sensible
// entries among random ones.
type oracle struct {
	t    testing.TB
	root string
	form tarForm

	batch []member        // to be extracted together
	held  map[string]bool // names of the batch; true: no directory

	// Of the current layer.
	own     map[string]bool      // what it made
	through map[string]bool      // symlinks of lower layers that it wrote through
	linked  map[string]bool      // files of lower layers that it linked
	spelled map[string]bool      // what it made; true: by a name that leads through a link
	clocks  map[string]time.Time // times that directories are to have
	// Whether link counts can be told: overlay counts the names that an inode
	// has in its layer, also those that a higher layer hides.
	counts bool
}

// apply adds a layer and returns the entries that it could use, in its order.
func (o *oracle) apply(form tarForm, entries []member) []member {
	o.form, o.own, o.held = form, map[string]bool{}, map[string]bool{}
	o.through, o.linked, o.spelled = map[string]bool{}, map[string]bool{}, map[string]bool{}
	o.clocks = o.dirTimes()
	use := make([]bool, len(entries))
	for i, e := range entries {
		use[i] = isMarker(e.name) && o.delete(e.name)
	}
	var used []member
	for i, e := range entries {
		if !isMarker(e.name) {
			use[i] = o.add(e)
		} else if use[i] {
			use[i] = o.hold(e.name)
		}
		if use[i] {
			used = append(used, e)
		}
	}
	o.flush()
	for name, when := range o.clocks {
		ts := []unix.Timespec{unix.NsecToTimespec(when.UnixNano()), unix.NsecToTimespec(when.UnixNano())}
		err := unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Join(o.root, name), ts, unix.AT_SYMLINK_NOFOLLOW)
		if err != nil && err != unix.ENOENT {
			o.t.Fatal(err)
		}
	}
	return used
}

func isMarker(name string) bool { return strings.HasPrefix(path.Base(name), ".wh.") }

// tidy is an entry's name without what makes no difference.
func tidy(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }

func (o *oracle) dirTimes() map[string]time.Time {
	times := map[string]time.Time{}
	err := filepath.WalkDir(o.root, func(p string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && p != o.root {
			var info os.FileInfo
			if info, err = d.Info(); err == nil {
				times[p[len(o.root)+1:]] = info.ModTime()
			}
		}
		return err
	})
	if err != nil {
		o.t.Fatal(err)
	}
	return times
}

// delete does what a whiteout or an opaque marker says, which is about lower
// layers only. Markers below a link are declined: what they delete differs
// between unpackers.
func (o *oracle) delete(name string) bool {
	dir, base := path.Split(tidy(name))
	dir = strings.TrimSuffix(dir, "/")
	for at := dir; at != "" && at != "."; at = path.Dir(at) {
		if st := o.lstat(at); st != nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return false
		}
	}
	if base == ".wh..wh..opq" && (dir == "" || o.lstat(dir) == nil) {
		return false
	}
	if base != ".wh..wh..opq" {
		o.remove(path.Join(dir, strings.TrimPrefix(base, ".wh.")))
		return true
	}
	list, err := os.ReadDir(filepath.Join(o.root, dir))
	if err != nil {
		o.t.Fatal(err)
	}
	for _, item := range list {
		o.remove(path.Join(dir, item.Name()))
	}
	return true
}

// hold makes the directory that a marker implies.
func (o *oracle) hold(name string) bool {
	dir := path.Dir(tidy(name))
	if o.interferes(dir) || o.interferes(path.Join(dir, "x")) {
		o.flush()
	}
	for at := dir; at != "."; at = path.Dir(at) {
		if st := o.lstat(at); st != nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return false
		}
	}
	o.imply(dir)
	return true
}

// remove takes away a name and all below it.
func (o *oracle) remove(name string) {
	full := filepath.Join(o.root, name)
	err := filepath.WalkDir(full, func(p string, d os.DirEntry, err error) error {
		if err == nil {
			rel := p[len(o.root)+1:]
			delete(o.clocks, rel)
			delete(o.own, rel)
			if st := o.lstat(rel); !d.IsDir() && st.Nlink > 1 {
				o.counts = false
			}
		}
		return err
	})
	if err != nil && !os.IsNotExist(err) {
		o.t.Fatal(err)
	}
	if err := os.RemoveAll(full); err != nil {
		o.t.Fatal(err)
	}
}

func (o *oracle) lstat(name string) *unix.Stat_t {
	var st unix.Stat_t
	if unix.Lstat(filepath.Join(o.root, name), &st) != nil {
		return nil
	}
	return &st
}

// imply makes the directories that are missing on the way to name.
func (o *oracle) imply(name string) {
	if _, pending := o.held[name]; pending || name == "" || name == "." || o.lstat(name) != nil {
		return
	}
	o.imply(path.Dir(name))
	if _, pending := o.held[path.Dir(name)]; pending {
		o.flush()
	}
	full := filepath.Join(o.root, name)
	for _, err := range []error{os.Mkdir(full, 0o755), os.Chown(full, 0, 0), os.Chmod(full, 0o755)} {
		if err != nil {
			o.t.Fatal(err)
		}
	}
	o.clocks[name] = time.Unix(0, 0)
	o.own[name] = true
}

// add takes one entry into the batch, or declines it.
func (o *oracle) add(e member) bool {
	name := tidy(e.name)
	if o.interferes(name) || e.kind == '1' && o.interferes(tidy(e.link)) {
		o.flush()
	}
	dir, ok := o.resolve(path.Dir("/" + name)[1:])
	if !ok {
		return false
	}
	real := path.Join(dir, path.Base(name))
	if name == "" {
		real = ""
	}
	if real != name && o.interferes(real) {
		o.flush()
		if dir, ok = o.resolve(dir); !ok {
			return false
		}
	}
	there := o.lstat(real)
	merges := there != nil && there.Mode&unix.S_IFMT == unix.S_IFDIR && e.kind == '5'
	for _, used := range []map[string]bool{o.through, o.linked} {
		for link := range used {
			// A layer that writes through a link of a lower layer and then replaces
			// that link cannot be unpacked by itself: the link is not there to see.
			if !merges && (link == real || strings.HasPrefix(link, real+"/")) {
				return false
			}
		}
	}
	for made, led := range o.spelled {
		// Of two entries for one name by two ways, which came first is not known.
		if led != (real != name) && (made == real || !merges && strings.HasPrefix(made, real+"/")) {
			return false
		}
	}
	if e.kind == '1' && !o.linkable(tidy(e.link), real) {
		return false
	}
	o.imply(dir)
	switch {
	case merges:
		o.undress(real) // an entry says all of a directory's attributes; tar only adds
	case there != nil:
		o.remove(real)
	}
	if e.kind == '5' {
		o.imply(real) // tar leaves a new directory the set-gid bit that it inherits
		o.clocks[real] = e.when
		if o.form == gnuForm {
			o.clocks[real] = e.when.Truncate(time.Second)
		}
	}
	for at := real; at != "." && at != ""; at = path.Dir(at) {
		if _, known := o.spelled[at]; !known && (at == real || o.own[at]) {
			o.spelled[at] = real != name
		}
	}
	o.own[real], o.held[real] = true, e.kind != '5'
	o.held[name] = o.held[real]
	if e.kind == '1' {
		o.held[tidy(e.link)] = true
	}
	o.batch = append(o.batch, e)
	return true
}

// interferes says whether the batch has to be on disk before name is looked at.
func (o *oracle) interferes(name string) bool {
	if _, same := o.held[name]; same {
		return true
	}
	for at := path.Dir(name); at != "."; at = path.Dir(at) {
		if o.held[at] {
			return true
		}
	}
	for held := range o.held {
		if strings.HasPrefix(held, name+"/") {
			return true
		}
	}
	return false
}

// resolve follows the links on the way to a directory, which may be missing. It
// declines what leads out of the root, nowhere or to no directory: such links
// have tests of their own.
func (o *oracle) resolve(name string) (string, bool) {
	at := ""
	for _, part := range strings.Split(name, "/") {
		next := path.Join(at, part)
		st := o.lstat(next)
		if st != nil && st.Mode&unix.S_IFMT == unix.S_IFLNK {
			real, err := filepath.EvalSymlinks(filepath.Join(o.root, next))
			if err != nil || !strings.HasPrefix(real+"/", o.root+"/") || o.linked[next] {
				return "", false
			}
			led := strings.Trim(real[len(o.root):], "/")
			o.through[next], o.through[led] = true, true
			next = led
			st = o.lstat(next)
		}
		if st != nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return "", false
		}
		at = next
	}
	return at, true
}

// linkable prepares the target of a hard link. Directories are declined, and
// what lies behind links.
func (o *oracle) linkable(target, name string) bool {
	for at := path.Dir(target); at != "."; at = path.Dir(at) {
		if st := o.lstat(at); st == nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return false
		}
	}
	st := o.lstat(target)
	if st == nil || st.Mode&unix.S_IFMT == unix.S_IFDIR || strings.HasPrefix(target+"/", name+"/") || name == target {
		return false
	}
	if o.through[target] {
		return false // to the link itself, or to the directory that it stands for here?
	}
	if !o.own[target] {
		if st.Nlink > 1 {
			o.counts = false
			o.separate(target)
		}
		// Were it replaced later on in this layer, the link could mean either;
		// were the link, the copy would have been for nothing.
		o.linked[target], o.linked[name] = true, true
	}
	o.own[target] = true
	return true
}

// separate gives a name an inode of its own, as overlay does when it takes a
// file up from a lower layer.
func (o *oracle) separate(name string) {
	o.flush()
	full := filepath.Join(o.root, name)
	if out, err := exec.Command("cp", "--archive", "--no-dereference", full, full+".copy").CombinedOutput(); err != nil {
		o.t.Fatalf("%v %s", err, out)
	}
	if err := os.Rename(full+".copy", full); err != nil {
		o.t.Fatal(err)
	}
}

// undress removes a directory's attributes.
func (o *oracle) undress(name string) {
	full := filepath.Join(o.root, name)
	buf := make([]byte, 4096)
	n, err := unix.Llistxattr(full, buf)
	if err != nil {
		o.t.Fatal(err)
	}
	for _, key := range strings.Split(strings.Trim(string(buf[:n]), "\x00"), "\x00") {
		if key != "" {
			if err := unix.Lremovexattr(full, key); err != nil {
				o.t.Fatal(err)
			}
		}
	}
}

// flush extracts the batch.
func (o *oracle) flush() {
	if len(o.batch) == 0 {
		return
	}
	cmd := exec.Command("tar", "--extract", "--preserve-permissions", "--numeric-owner", "--same-owner",
		"--xattrs", "--xattrs-include=*", "--delay-directory-restore", "--directory", o.root)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Stdin = bytes.NewReader(encodeTar(o.form, o.batch...))
	if out, err := cmd.CombinedOutput(); err != nil {
		var names []string
		for _, m := range o.batch {
			names = append(names, fmt.Sprintf("%c %.200q %.200q", m.kind, m.name, m.link))
		}
		o.t.Fatalf("the oracle fails: %v: %s\n%s", err, out, strings.Join(names, "\n"))
	}
	o.batch, o.held = nil, map[string]bool{}
}
