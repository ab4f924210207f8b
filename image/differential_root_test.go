package image

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"berth/image/rootfs"
	"berth/sandbox/leakcheck"
)

// TestImagesEqualGNUTar is the whole way of an image, some hundred times: random
// stacks of layers are pulled or imported, mounted as a container has them, and
// compared with what GNU tar makes of the layers one after another: names,
// types, modes, owners, times, attributes, contents, which names are one file
// and how many names it has.
//
// BERTH_IMAGES says how many (200, or as many as fit into some minutes on a
// machine so slow that they would take longer), BERTH_SEED which is the first (0).
func TestImagesEqualGNUTar(t *testing.T) {
	leakcheck.Start(t)
	count, first := fromEnv(t, "BERTH_IMAGES", 200), fromEnv(t, "BERTH_SEED", 0)
	reg := newRegistry(t)
	dir := inMemory(t)
	s := open(t, filepath.Join(dir, "images"), nil, reg)
	c := comparison{t: t, reg: reg, store: s, dir: dir}
	end := time.Now().Add(4 * time.Minute)
	for seed := first; seed < first+count; seed++ {
		if os.Getenv("BERTH_IMAGES") == "" && time.Now().After(end) {
			count = seed - first
			break
		}
		c.once(seed)
		if t.Failed() {
			return
		}
	}
	t.Logf("%d images, %d layers, %d entries, %d with exact link counts", count, c.layers, c.entries, c.counted)
}

// inMemory gives a directory without a disk, whose syncs and deletions would
// take most of the time. Before Linux 6.6 memory cannot hold user attributes;
// then it is an ordinary one.
func inMemory(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=2g,mode=755"); err != nil {
		t.Fatal(err)
	}
	detach := func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}
	if err := unix.Setxattr(dir, "user.probe", []byte("x"), 0); err != nil {
		detach()
		return dir
	}
	if err := unix.Removexattr(dir, "user.probe"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(detach)
	return dir
}

func fromEnv(t *testing.T, name string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

type comparison struct {
	t     *testing.T
	reg   *registry
	store *Store
	dir   string // for everything

	layers, entries, counted int
}

// once makes, pulls and compares the image of a seed. With the image comes a
// sibling that shares its beginning, for layers are settled for what is below.
func (c *comparison) once(seed uint64) {
	m := &maker{Rand: rand.New(rand.NewPCG(seed, 3))}
	dir, err := os.MkdirTemp(c.dir, "")
	if err != nil {
		c.t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	o := &oracle{t: c.t, root: filepath.Join(dir, "oracle"), counts: true}
	if err := os.Mkdir(o.root, 0o755); err != nil {
		c.t.Fatal(err)
	}
	defer func() {
		if c.t.Failed() {
			c.t.Logf("the image of BERTH_SEED=%d:\n%s", seed, m.log.String())
		}
	}()
	var stack []layerBlob
	for n := range 1 + m.IntN(5) {
		form := tarForm(m.IntN(2))
		used := o.apply(form, m.layer(form))
		m.record(n, used)
		c.entries += len(used)
		stack = append(stack, m.compress(encodeTar(form, used...)))
		if m.IntN(4) == 0 {
			c.check(m, o, dir, fmt.Sprintf("i%d-%d", seed, len(stack)), stack)
		}
	}
	c.layers += len(stack)
	c.check(m, o, dir, fmt.Sprintf("i%d", seed), stack)
	if m.IntN(2) == 0 {
		for _, r := range c.store.List() {
			if err := c.store.Remove(c.t.Context(), r.ID); err != nil {
				c.t.Error(err)
			}
		}
	}
}

func (c *comparison) check(m *maker, o *oracle, dir, repo string, stack []layerBlob) {
	id := c.fetch(m, dir, repo, stack)
	r, err := c.store.Resolve(id)
	if err != nil {
		c.t.Fatal(err)
	}
	at := filepath.Join(dir, repo)
	mount := rootfs.Mount{Target: at + "/rootfs", Upper: at + "/upper", Work: at + "/work", Layers: r.Layers}
	if err := rootfs.Create(mount); err != nil {
		c.t.Fatal(err)
	}
	defer func() {
		if err := rootfs.Unmount(mount.Target); err != nil {
			c.t.Error(err)
		}
	}()
	if o.counts {
		c.counted++
	}
	got, want := listing(c.t, mount.Target, o.counts), listing(c.t, o.root, o.counts)
	for _, line := range got {
		if !slices.Contains(want, line) {
			c.t.Errorf("got  %s", line)
		}
	}
	for _, line := range want {
		if !slices.Contains(got, line) {
			c.t.Errorf("want %s", line)
		}
	}
}

// fetch gets the image into the store, by a registry or by an archive.
func (c *comparison) fetch(m *maker, dir, repo string, stack []layerBlob) string {
	c.reg.mu.Lock()
	c.reg.docs, c.reg.blobs = map[string]document{}, map[digest.Digest][]byte{} // else all stay in memory
	c.reg.mu.Unlock()
	manifest, id := c.reg.push(repo, "1", stack...)
	if m.IntN(4) > 0 {
		return mustPull(c.t, c.store, c.reg.ref(repo+":1"))
	}
	index := ispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, Manifests: []ispec.Descriptor{manifest}}
	data, err := json.Marshal(index)
	if err != nil {
		c.t.Fatal(err)
	}
	files := []file{{name: "oci-layout", body: `{"imageLayoutVersion":"1.0.0"}`}, {name: "index.json", body: string(data)}}
	blobs := map[digest.Digest][]byte{manifest.Digest: c.reg.docs[repo+" 1"].data}
	for d, data := range c.reg.blobs {
		blobs[d] = data
	}
	for d, data := range blobs {
		files = append(files, file{name: "blobs/sha256/" + d.Encoded(), body: string(data)})
	}
	path := filepath.Join(dir, repo+".tar")
	if err := os.WriteFile(path, tarOf(c.t, files...), 0o600); err != nil {
		c.t.Fatal(err)
	}
	names, err := c.store.Import(c.t.Context(), ImportRequest{File: path})
	if err != nil || len(names) != 1 {
		c.t.Fatalf("import gives %q: %v", names, err)
	}
	return id
}

// maker makes random layers: few names, so that they meet again and again.
type maker struct {
	*rand.Rand
	n   int
	log strings.Builder // what was made, to be read when a comparison fails
}

func (m *maker) record(n int, entries []member) {
	for _, e := range entries {
		fmt.Fprintf(&m.log, "layer %d: %c %.300q", n, e.kind, e.name)
		if e.link != "" {
			fmt.Fprintf(&m.log, " -> %.300q", e.link)
		}
		fmt.Fprintf(&m.log, " %o %d:%d %d bytes, attributes: %v\n", e.mode, e.uid, e.gid, len(e.body), e.xattrs != nil)
	}
}

var nameParts = []string{"a", "b", "c", "lib", "d", "\xff\xfe", "a\"b\\c\n", "ü", strings.Repeat("w", 255), "-rf", "...", ".wh", " "}

func (m *maker) path(most int) string {
	parts := make([]string, 1+m.IntN(most))
	for i := range parts {
		parts[i] = nameParts[min(m.IntN(len(nameParts)), m.IntN(len(nameParts)))]
	}
	return strings.Join(parts, "/")
}

// spell is a path as careless builders write it.
func (m *maker) spell(path string) string {
	switch m.IntN(8) {
	case 0:
		return "./" + path
	case 1:
		return "/" + path
	case 2:
		return strings.ReplaceAll(path, "/", "//")
	case 3:
		return strings.ReplaceAll(path, "/", "/./")
	}
	return path
}

// layer makes entries in random order; markers stand anywhere among them.
func (m *maker) layer(form tarForm) []member {
	var list []member
	for range m.IntN(6) {
		dir, base := filepath.Split(m.path(3))
		name := dir + ".wh." + base
		if m.IntN(4) == 0 {
			name = dir + base + "/.wh..wh..opq"
		}
		list = append(list, member{name: m.spell(name), kind: '0', mode: 0o600})
	}
	for range 2 + m.IntN(20) {
		list = append(list, m.entry(m.path(4)))
	}
	if m.IntN(4) == 0 {
		list = append(list, m.dress(member{name: "./", kind: '5'}))
	}
	m.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	if form == gnuForm {
		for i := range list {
			list[i].xattrs, list[i].when = nil, time.Unix(list[i].when.Unix(), 0)
		}
	}
	return list
}

func (m *maker) entry(path string) member {
	e := member{name: m.spell(path)}
	switch m.IntN(12) {
	case 0, 1, 2:
		e.kind, e.name = '5', e.name+strings.Repeat("/", m.IntN(2))
	case 3:
		e.kind = '2'
		e.link = []string{"a", "lib/b", "./c", "../a", "nowhere", "/lib", "../../../../etc", strings.Repeat("x/", 300)}[m.IntN(8)]
	case 4:
		e.kind = '6'
	case 5:
		e.kind, e.major, e.minor = "34"[m.IntN(2)], int64(1+m.IntN(300)), int64(m.IntN(70_000))
	case 6, 7:
		e.kind, e.link = '1', m.spell(m.path(3))
	case 8:
		e.kind, e.hole = '0', int64(1+m.IntN(1<<10))<<10
		e.body = strings.Repeat(fmt.Sprint("behind a hole ", m.n, " "), m.IntN(200))
	default:
		e.kind, e.body = '0', strings.Repeat(fmt.Sprint("body ", m.n, " "), m.IntN(400))
	}
	return m.dress(e)
}

func (m *maker) dress(e member) member {
	m.n++
	e.mode = []int64{0o644, 0o755, 0o4755, 0o2750, 0o1777, 0o600, 0}[m.IntN(7)]
	ids := []int64{0, 0, 1, 7, 1000, 65534, 3_000_000_000}
	e.uid, e.gid = ids[m.IntN(len(ids))], ids[m.IntN(len(ids))]
	e.when = time.Unix(1_500_000_000+int64(m.n), 0)
	switch m.IntN(6) {
	case 0:
		e.when = e.when.Add(time.Duration(m.IntN(1_000_000_000)))
	case 1:
		e.when = time.Unix(-int64(m.IntN(1_000_000_000)), int64(m.IntN(2))*500)
	case 2:
		e.when = time.Unix(1<<32+int64(m.n), 0)
	}
	if m.IntN(3) > 0 {
		return e
	}
	e.xattrs = map[string]string{"trusted.n": fmt.Sprint(m.n)}
	if e.kind == '0' || e.kind == '5' {
		e.xattrs["user.n"] = "a\x00\xff\n" + fmt.Sprint(m.n)
		e.xattrs["user.empty"] = ""
	}
	if e.kind == '0' {
		e.xattrs["security.capability"] = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	}
	if e.kind == '1' {
		e.xattrs = nil // a link has none of its own
	}
	return e
}

func (m *maker) compress(data []byte) layerBlob {
	return []func([]byte) layerBlob{plainLayer, gzipLayer, zstdLayer}[m.IntN(3)](data)
}

// listing describes a tree in lines that can be compared.
func listing(t *testing.T, root string, counts bool) []string {
	t.Helper()
	var lines []string
	groups := map[uint64][]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path[len(root):], "/")
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		line := fmt.Sprintf("%q %o %d:%d", name, st.Mode, st.Uid, st.Gid)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %d bytes %x", len(data), sha256.Sum256(data))
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" -> %q", target)
		case unix.S_IFCHR, unix.S_IFBLK:
			line += fmt.Sprintf(" device %d:%d", unix.Major(uint64(st.Rdev)), unix.Minor(uint64(st.Rdev)))
		}
		if name != "" {
			line += fmt.Sprintf(" @%d.%09d", st.Mtim.Sec, st.Mtim.Nsec)
		}
		if !d.IsDir() {
			groups[st.Ino] = append(groups[st.Ino], name)
			if counts {
				line += fmt.Sprintf(" %d names", st.Nlink)
			}
		}
		lines = append(lines, line+" "+attributes(t, path))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range groups {
		if len(group) > 1 {
			slices.Sort(group)
			lines = append(lines, fmt.Sprintf("one file: %q", group))
		}
	}
	return lines
}

// attributes lists those that describe a file; overlay's and ours do not.
func attributes(t *testing.T, path string) string {
	t.Helper()
	buf, value := make([]byte, 4096), make([]byte, 4096)
	n, err := unix.Llistxattr(path, buf)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for key := range strings.SplitSeq(string(buf[:n]), "\x00") {
		if key != "" && !strings.HasPrefix(key, "trusted.overlay.") && !strings.HasPrefix(key, "trusted.berth.") {
			n, err := unix.Lgetxattr(path, key, value)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, fmt.Sprintf("%s=%q", key, value[:n]))
		}
	}
	slices.Sort(all)
	return fmt.Sprint(all)
}
