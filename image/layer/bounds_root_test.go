package layer_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"berth/image/layer"
	"berth/sandbox/leakcheck"
)

// TestBounds: what is too much is refused with the entry, what it is and the
// limit; just as much as the limit is taken.
func TestBounds(t *testing.T) {
	leakcheck.Start(t)
	limits := layer.Limits{Entries: 6, PathBytes: 400, Depth: 100, NameBytes: 1000, SparseBytes: 1 << 20}
	dirs := func(n, length int) []entry {
		var list []entry
		for i := range n {
			list = append(list, dir(fmt.Sprintf("%d%s", i, strings.Repeat("n", length-1)), 0o755, 0))
		}
		return list
	}
	each := func(n, length int, make func(name string) entry) []entry {
		var list []entry
		for _, d := range dirs(n, length) {
			list = append(list, make(strings.TrimSuffix(d.Name, "/")))
		}
		return list
	}
	with := func(xattrs map[string]string) entry {
		e := reg("f", "")
		e.xattrs = xattrs
		return e
	}
	long := map[string]string{}
	for i := range 300 {
		long[fmt.Sprintf("user.%d.%s", i, strings.Repeat("x", 240))] = ""
	}
	deep := strings.Repeat("d/", 60)
	for name, c := range map[string]struct {
		fits, much []entry
		want       string
	}{
		"entries":     {dirs(6, 1), dirs(7, 1), "more than 6 entries"},
		"path":        {each(1, 200, func(n string) entry { return reg(n+"/"+n[:199], "") }), each(1, 200, func(n string) entry { return reg(n+"/"+n, "") }), "name longer than 400 bytes"},
		"depth":       {[]entry{reg(strings.Repeat("d/", 99)+"f", "")}, []entry{reg(strings.Repeat("d/", 100)+"f", "")}, "more than 100 directories deep"},
		"links":       {[]entry{symlink("l", deep), reg("l/"+strings.Repeat("e/", 30)+"f", "")}, []entry{symlink("l", deep), reg("l/"+deep+"f", "")}, "more than 100 directories deep"},
		"links, long": {nil, []entry{symlink("l", strings.Repeat("n", 201)), reg("l/"+strings.Repeat("m", 201)+"/f", "")}, "name longer than 400 bytes"},
		"directories": {dirs(5, 200), dirs(6, 200), "more than 1000 bytes of names"},
		"implied":     {each(5, 200, func(n string) entry { return reg(n+"/f", "") }), each(6, 200, func(n string) entry { return reg(n+"/f", "") }), "more than 1000 bytes of names"},
		"whiteouts":   {each(5, 200, func(n string) entry { return reg(".wh."+n, "") }), each(6, 200, func(n string) entry { return reg(".wh."+n, "") }), "more than 1000 bytes of names"},
		"cross links": {each(5, 100, func(n string) entry { return hardlink(n, "l"+n[1:]) }), each(6, 100, func(n string) entry { return hardlink(n, "l"+n[1:]) }), "more than 1000 bytes of names"},
		"target":      {[]entry{symlink("l", strings.Repeat("t", 400))}, []entry{symlink("l", strings.Repeat("t", 401))}, "target longer than 400 bytes"},
		"attribute":   {[]entry{with(map[string]string{"user." + strings.Repeat("x", 250): "v"})}, []entry{with(map[string]string{"user." + strings.Repeat("x", 251): "v"})}, "name of 256 bytes, at most 255"},
		"value":       {[]entry{with(map[string]string{"user.x": strings.Repeat("v", 1000)})}, []entry{with(map[string]string{"user.x": strings.Repeat("v", 65537)})}, "65537 bytes, at most 65536"},
		"list":        {nil, []entry{with(long)}, "names of extended attributes of more than 65536 bytes"},
		"values":      {nil, []entry{with(map[string]string{"user.a": strings.Repeat("v", 60_000), "user.b": "w", "user.c": strings.Repeat("v", 600_000)})}, "bytes"},
	} {
		limits := limits
		if strings.Contains(c.want, "deep") {
			limits.NameBytes = 1 << 20 // each directory on the way counts
		}
		if _, err := layer.Unpack(t.Context(), t.TempDir(), bytes.NewReader(pack(t, tar.FormatPAX, c.fits...)), limits); err != nil {
			t.Errorf("%s, at the limit: %.300v", name, err)
		}
		_, err := layer.Unpack(t.Context(), t.TempDir(), bytes.NewReader(pack(t, tar.FormatPAX, c.much...)), limits)
		if !isInvalid(err) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %.300v, want %q", name, err, c.want)
		}
	}
}

// TestHeadersWithoutEnd: what precedes an entry is bounded by the tar reader.
func TestHeadersWithoutEnd(t *testing.T) {
	leakcheck.Start(t)
	for what, kind := range map[string]byte{"records": 'x', "global records": 'g', "name": 'L', "link": 'K'} {
		data := pack(t, tar.FormatGNU, reg("long", strings.Repeat("c", 2<<20)), reg("f", ""))
		data[156] += kind - '0' // of the first header, whose sum grows with it
		sum := 0
		for i, c := range data[:512] {
			if i >= 148 && i < 156 {
				c = ' '
			}
			sum += int(c)
		}
		copy(data[148:], fmt.Sprintf("%06o\x00 ", sum))
		_, err := layer.Unpack(t.Context(), t.TempDir(), bytes.NewReader(data), layer.Limits{})
		if !isInvalid(err) || !strings.Contains(err.Error(), "too long") {
			t.Errorf("%s: %.300v", what, err)
		}
	}
}

// TestMemoryOfLongNames: directories with long names, which compress to next to
// nothing, and one directory with many files, do not fill the memory.
func TestMemoryOfLongNames(t *testing.T) {
	leakcheck.Start(t)
	var tarred bytes.Buffer
	w := tar.NewWriter(&tarred)
	above := strings.Repeat(strings.Repeat("a", 250)+"/", 12)
	for i := range 3000 {
		h := reg(fmt.Sprintf("%s%d", above, i), "").Header
		if i%2 == 0 {
			h = dir(fmt.Sprintf("%s%d", above, i), 0o755, 0).Header
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	limits := layer.Defaults
	limits.NameBytes = 3 << 20
	root := t.TempDir()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	_, err := layer.Unpack(t.Context(), root, &tarred, limits)
	runtime.ReadMemStats(&after)
	if !isInvalid(err) || !strings.Contains(err.Error(), "3145728 bytes of names") {
		t.Errorf("got %.300v", err)
	}
	if held := int64(after.HeapInuse) - int64(before.HeapInuse); held > 64<<20 {
		t.Errorf("%d bytes of memory in use", held)
	}
	if _, err := os.Stat(filepath.Join(root, above)); err != nil {
		t.Errorf("what came before the limit is not there: %v", err)
	}
}
