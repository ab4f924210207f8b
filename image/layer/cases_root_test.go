package layer_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/layer"
	"berth/sandbox/leakcheck"
)

func isInvalid(err error) bool { return errors.Is(err, layer.ErrInvalid) }

func TestWhiteouts(t *testing.T) {
	leakcheck.Start(t)
	root, r := unpack(t,
		dir("d", 0o755, 0), reg("d/.wh.shows", ""), reg("d/.wh..wh..opq", ""),
		reg(".wh.gone", ""), reg("e/.wh.x", ""),
		reg("before", "b"), reg(".wh.before", ""), // a whiteout hides lower layers only
		reg(".wh.after", ""), reg("after", "a"),
		dir("was", 0o750, 3), reg("was/f", "f"), reg(".wh.was", ""),
		reg(".wh.will", ""), dir("will", 0o755, 0), reg("will/f", "f"),
		reg(".wh.implied", ""), reg("implied/f", "f"),
		reg(".wh..wh.plnk/1", "skipped"), reg(".wh..wh.aufs", "skipped"),
	)
	for _, name := range []string{"gone", "e/x"} {
		if !isWhiteout(t, filepath.Join(root, name)) {
			t.Errorf("%s is no whiteout", name)
		}
	}
	for _, name := range []string{"d", "was", "will", "implied"} {
		if v := xattr(filepath.Join(root, name), "trusted.overlay.opaque"); v != "y" {
			t.Errorf("%s: opaque is %q", name, v)
		}
	}
	for name, body := range map[string]string{"before": "b", "after": "a", "was/f": "f", "will/f": "f", "implied/f": "f"} {
		if data, err := os.ReadFile(filepath.Join(root, name)); err != nil || string(data) != body {
			t.Errorf("%s: %q %v", name, data, err)
		}
	}
	if list, _ := os.ReadDir(root + "/d"); len(list) != 0 {
		t.Errorf("an opaque directory has nothing to hide, it holds %v", list)
	}
	list, err := os.ReadDir(root)
	if err != nil || len(list) != 8 {
		t.Errorf("%d entries (%v), want 8: aufs's own must not show", len(list), err)
	}
	if r.Opaque {
		t.Error("the root is not opaque")
	}
	if _, r := unpack(t, reg(".wh..wh..opq", "")); !r.Opaque {
		t.Error("an opaque root is not noticed")
	}
	for _, name := range []string{".wh.", ".wh..", "d/.wh...", ".wh.a/b"} {
		refuse(t, name, reg(name, ""))
	}
}

func TestB23HardLinkToASymlink(t *testing.T) {
	leakcheck.Start(t)
	root, _ := unpack(t,
		dir("t", 0o755, 0), reg("t/z", "z"), symlink("t/x", "/t/z"), hardlink("t/y", "t/x"),
		symlink("t/nowhere", "/does/not/exist"), hardlink("t/also", "/t/nowhere"),
	)
	for link, other := range map[string]string{"t/y": "t/x", "t/also": "t/nowhere"} {
		a, b := lstat(t, filepath.Join(root, link)), lstat(t, filepath.Join(root, other))
		if a.Ino != b.Ino || a.Mode&unix.S_IFMT != unix.S_IFLNK {
			t.Errorf("%s is not the symlink %s itself", link, other)
		}
	}
	if target, _ := os.Readlink(filepath.Join(root, "t/y")); target != "/t/z" {
		t.Errorf("t/y -> %q", target)
	}
}

func TestHardLinkBeforeItsTarget(t *testing.T) {
	leakcheck.Start(t)
	root, r := unpack(t, hardlink("a/link", "b/file"), reg("b/file", "x"))
	if lstat(t, root+"/a/link").Ino != lstat(t, root+"/b/file").Ino {
		t.Error("not one inode")
	}
	if len(r.Needs.Links) != 0 {
		t.Errorf("%q is taken for a cross link", r.Needs.Links)
	}
	refuse(t, "link", dir("d", 0o755, 0), hardlink("link", "d"))
	refuse(t, "link", hardlink("link", "/"))
	refuse(t, "link", hardlink("link", "../x"))
}

func TestB27ModesCapabilitiesAndAttributes(t *testing.T) {
	leakcheck.Start(t)
	capability := "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" // cap_net_raw+ep
	suid := reg("suid", "x")
	suid.Mode, suid.Uid, suid.Gid = 0o4755, 1000, 1000
	ping := reg("ping", "x")
	ping.Mode, ping.Uid = 0o755, 1000
	ping.xattrs = map[string]string{
		"security.capability": capability, "user.note": "a\x00b",
		"trusted.overlay.opaque": "y", "trusted.overlay.redirect": "/etc", "user.overlay.opaque": "y",
	}
	sticky := dir("sticky", 0o1777, 0)
	setgid := dir("setgid", 0o2755, 0)
	setgid.Gid = 50
	setgid.xattrs = map[string]string{"user.dir": "d", "trusted.overlay.opaque": "y"}
	link := symlink("link", "ping")
	link.Uid, link.Gid = 12, 34
	root, _ := unpack(t, suid, ping, sticky, setgid, reg("setgid/child", ""), reg("setgid/sub/child", ""), link)

	modes := map[string]uint32{
		"suid": 0o4755, "ping": 0o755, "sticky": 0o1777, "setgid": 0o2755,
		"setgid/child": 0o644, "setgid/sub": 0o755,
	}
	for name, mode := range modes {
		if st := lstat(t, filepath.Join(root, name)); st.Mode&0o7777 != mode {
			t.Errorf("%s: mode %o, want %o", name, st.Mode&0o7777, mode)
		}
	}
	if st := lstat(t, root+"/setgid/child"); st.Gid != 0 {
		t.Errorf("the set-gid directory's group %d got into a file that has its own", st.Gid)
	}
	if st := lstat(t, root+"/setgid/sub"); st.Gid != 0 {
		t.Errorf("an implied directory has the group %d", st.Gid)
	}
	if st := lstat(t, root+"/link"); st.Uid != 12 || st.Gid != 34 {
		t.Errorf("the symlink belongs to %d:%d", st.Uid, st.Gid)
	}
	for key, want := range map[string]string{
		"security.capability": capability, "user.note": "a\x00b",
		"trusted.overlay.opaque": "<no data available>", "trusted.overlay.redirect": "<no data available>",
		"user.overlay.opaque": "<no data available>",
	} {
		if got := xattr(root+"/ping", key); got != want {
			t.Errorf("ping: %s = %q, want %q", key, got, want)
		}
	}
	if got := xattr(root+"/setgid", "user.dir"); got != "d" {
		t.Errorf("setgid: user.dir = %q", got)
	}
	if got := xattr(root+"/setgid", "trusted.overlay.opaque"); !strings.HasPrefix(got, "<") {
		t.Errorf("an image made a directory opaque by attribute: %q", got)
	}
}

func TestTimes(t *testing.T) {
	leakcheck.Start(t)
	when := time.Unix(1_234_567_890, 123456789)
	d, f, l := dir("d", 0o755, 0), reg("d/f", "x"), symlink("d/l", "f")
	d.ModTime, f.ModTime, l.ModTime = when, when.Add(time.Second), when.Add(2*time.Second)
	root, _ := unpack(t, d, f, l, reg("implied/f", ""))
	for name, want := range map[string]time.Time{"d": when, "d/f": f.ModTime, "d/l": l.ModTime, "implied": time.Unix(0, 0)} {
		if st := lstat(t, filepath.Join(root, name)); st.Mtim.Sec != want.Unix() || st.Mtim.Nsec != int64(want.Nanosecond()) {
			t.Errorf("%s: %d.%09d, want %v", name, st.Mtim.Sec, st.Mtim.Nsec, want)
		}
	}
}

func TestB33OddNames(t *testing.T) {
	leakcheck.Start(t)
	long := strings.Repeat("a", 255)
	deep := strings.Repeat(strings.Repeat("d", 200)+"/", 12) + "f"
	names := []string{"\xff\xfe", "a\"b\\c\n", long, deep, "ü €", " ", "...", "-rf", "a\tb\x7f\x01"}
	for _, format := range []tar.Format{tar.FormatGNU, tar.FormatPAX} {
		for _, name := range names {
			if format == tar.FormatPAX && name == "\xff\xfe" {
				continue // the writer cannot; the GNU form covers the reader
			}
			root := t.TempDir()
			link := symlink("link", name)
			data := pack(t, format, reg(name, "body"), link)
			if _, err := layer.Unpack(t.Context(), root, bytes.NewReader(data), layer.Limits{}); err != nil {
				t.Errorf("%q: %v", name, err)
				continue
			}
			if body, err := os.ReadFile(filepath.Join(root, name)); err != nil || string(body) != "body" {
				t.Errorf("%q: %q %v", name, body, err)
			}
			if target, err := os.Readlink(filepath.Join(root, "link")); err != nil || target != name {
				t.Errorf("link to %q: %q %v", name, target, err)
			}
		}
	}
	tooLong := strings.Repeat("b", 256)
	refuse(t, tooLong, reg("x/"+tooLong, ""))
	refuse(t, "longer than 4095", reg(strings.Repeat("c/", 2100)+"f", ""))
	refuse(t, "directories deep", reg(strings.Repeat("c/", 600)+"f", ""))
	refuse(t, "longer than 4095", symlink("l", strings.Repeat("c/", 2100)))
	refuse(t, tooLong, hardlink("l", tooLong))
}

// TestB31NothingOutsideTheRoot plants symlinks and writes through them.
func TestB31NothingOutsideTheRoot(t *testing.T) {
	leakcheck.Start(t)
	base := t.TempDir()
	victim := filepath.Join(base, "victim")
	if err := os.MkdirAll(filepath.Join(victim, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(victim, "secret"), []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	before := describe(t, victim, true)
	root := filepath.Join(base, "root")
	up := "../victim"
	evilDir := dir("a", 0o777, 66)
	evilDir.xattrs = map[string]string{"user.evil": "1"}
	through := dir("a/sub", 0o777, 66)
	through.xattrs = map[string]string{"user.evil": "1"}
	for name, entries := range map[string][]entry{
		"file":            {symlink("a", victim), reg("a/x", "evil")},
		"file by ..":      {symlink("a", up), reg("a/x", "evil"), reg("a/secret", "evil")},
		"dir":             {symlink("a", up), through},
		"dir over link":   {symlink("a", up), evilDir, reg("a/secret", "evil")},
		"whiteout":        {symlink("a", up), reg("a/.wh.secret", ""), reg("a/.wh..wh..opq", "")},
		"hard link from":  {symlink("a", up), hardlink("got", "a/secret"), reg("got", "evil")},
		"hard link to":    {symlink("a", up), reg("f", "evil"), hardlink("a/secret", "f")},
		"over a link":     {symlink("a", victim+"/secret"), reg("a", "evil")},
		"link of link":    {symlink("a", "b"), symlink("b", up), reg("a/secret", "evil")},
		"link late":       {dir("a", 0o755, 0), reg("a/f", ""), symlink("a", up), reg("a/secret", "evil")},
		"link in between": {reg("a/b/f", ""), symlink("a/b", "../"+up), reg("a/b/secret", "evil")},
		"root as link":    {symlink("r", "/"), reg("r/x", "evil"), reg("r/r/r/y", "evil")},
		"absolute":        {reg(victim+"/secret", "evil")},
		"slashes":         {reg("//a//./x", "fine"), reg("/./b/./c", "")},
		"device":          {symlink("a", up), {Header: tar.Header{Name: "a/dev", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3, Mode: 0o666}}},
		"fifo and chmod":  {symlink("a", up), {Header: tar.Header{Name: "a/secret", Typeflag: tar.TypeFifo, Mode: 0o777, Uid: 66}}},
	} {
		if err := os.Mkdir(root, 0o755); err != nil {
			t.Fatal(err)
		}
		if _, err := layer.Unpack(t.Context(), root, bytes.NewReader(pack(t, tar.FormatPAX, entries...)), layer.Limits{}); err != nil && !isInvalid(err) {
			t.Logf("%s: %v", name, err) // refusing is fine; what counts comes now
		}
		same(t, describe(t, victim, true), before)
		if t.Failed() {
			t.Fatalf("%s reached the victim", name)
		}
		if err := os.RemoveAll(root); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"..", "../x", "a/../../x", "a/../b"} {
		refuse(t, name, reg(name, ""))
	}
	refuse(t, "symlinks", symlink("a", "b"), symlink("b", "a"), reg("a/x", ""))
	refuse(t, "not a directory", reg("./.", "root"))
}

func TestNumbersOutOfRange(t *testing.T) {
	leakcheck.Start(t)
	for name, edit := range map[string]func(*tar.Header){
		"uid": func(h *tar.Header) { h.Uid = 1<<32 - 1 },
		"gid": func(h *tar.Header) { h.Gid = 1 << 33 },
		"device": func(h *tar.Header) {
			h.Typeflag, h.Devmajor = tar.TypeChar, 1<<20
		},
		"0:0": func(h *tar.Header) { h.Typeflag = tar.TypeChar }, // overlay would hide what is below
	} {
		e := reg("f", "")
		edit(&e.Header)
		refuse(t, name, e)
	}
	root, _ := unpack(t, entry{Header: tar.Header{Name: "f", Typeflag: tar.TypeReg, Uid: 1<<32 - 2, Gid: 4_000_000_000}})
	if st := lstat(t, root+"/f"); st.Uid != 1<<32-2 || st.Gid != 4_000_000_000 {
		t.Errorf("owner %d:%d", st.Uid, st.Gid)
	}
}

func TestAttributesThatDoNotFit(t *testing.T) {
	leakcheck.Start(t)
	f := reg("f", "")
	f.xattrs = map[string]string{"user.big": strings.Repeat("x", 70_000)}
	refuse(t, "user.big", f)
}

func TestLaterEntryWins(t *testing.T) {
	leakcheck.Start(t)
	root, r := unpack(t,
		dir("a", 0o755, 0), reg("a/b/c", "x"), reg("a", "file now"),
		reg("f", "x"), hardlink("g", "f"), reg("f", "other"), // must not write into g
		symlink("s", "f"), dir("s", 0o700, 5), reg("s/x", "y"),
		reg("h", "x"), dir("h", 0o755, 0), dir("h", 0o711, 7),
		hardlink("cross", "lower"), reg("cross", "here"),
		dir("x", 0o755, 0), hardlink("x/cross", "lower"), reg("x", "file"),
	)
	for name, body := range map[string]string{"a": "file now", "f": "other", "g": "x", "s/x": "y", "cross": "here", "x": "file"} {
		if data, err := os.ReadFile(filepath.Join(root, name)); err != nil || string(data) != body {
			t.Errorf("%s: %q %v", name, data, err)
		}
	}
	if st := lstat(t, root+"/h"); st.Mode != unix.S_IFDIR|0o711 || st.Uid != 7 {
		t.Errorf("h: %o %d", st.Mode, st.Uid)
	}
	if !r.Needs.None() {
		t.Errorf("needs %q %q of what was replaced", r.Needs.Implied, r.Needs.Links)
	}
	refuse(t, "used as a directory", reg("f", ""), reg("f/x", ""))
}
