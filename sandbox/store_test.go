package sandbox

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// failingDisk refuses every write from the k-th on, as a full disk does; with
// torn it leaves half of the k-th file, as a crash does.
type failingDisk struct {
	osDisk
	left int
	torn bool
}

func (d *failingDisk) spend() error {
	d.left--
	if d.left < 0 {
		return syscall.ENOSPC
	}
	return nil
}

func (d *failingDisk) WriteFile(name string, data []byte, sync bool) error {
	if err := d.spend(); err != nil {
		if d.torn {
			_ = d.osDisk.WriteFile(name, data[:len(data)/2], false)
		}
		return err
	}
	return d.osDisk.WriteFile(name, data, sync)
}

func (d *failingDisk) Rename(from, to string) error {
	if err := d.spend(); err != nil {
		return err
	}
	return d.osDisk.Rename(from, to)
}

func (d *failingDisk) Mkdir(name string) error {
	if err := d.spend(); err != nil {
		return err
	}
	return d.osDisk.Mkdir(name)
}

func (d *failingDisk) SyncDir(name string) error {
	if err := d.spend(); err != nil {
		return err
	}
	return d.osDisk.SyncDir(name)
}

func testSandbox(id string) *Sandbox {
	m := &cri.PodSandboxMetadata{Name: "n" + id, Namespace: "ns", Uid: "u", Attempt: 1}
	return &Sandbox{
		ID: id, Name: SandboxName(m), CreatedAt: 7, BootID: "boot", CgroupParent: "/berth/" + id,
		Config: Config[*cri.PodSandboxConfig]{Message: &cri.PodSandboxConfig{Metadata: m, Hostname: "h", Labels: map[string]string{"a": "b"}}},
	}
}

func unheard(Problem) {}

func mustOpen(t *testing.T, root string) *Store {
	t.Helper()
	s, problems := opened(t, root)
	if len(problems) != 0 {
		t.Fatalf("open: %v", problems)
	}
	return s
}

// opened is a store and what it told.
func opened(t *testing.T, root string) (*Store, []Problem) {
	t.Helper()
	var problems []Problem
	s, err := Open(root, func(p Problem) { problems = append(problems, p) })
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	return s, problems
}

func TestRecordsSurviveReopening(t *testing.T) {
	root := t.TempDir()
	s := mustOpen(t, root)
	sb := testSandbox("aaa1")
	if err := s.Sandboxes.Create(sb); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sandboxes.Update("aaa1", func(sb *Sandbox) { sb.ReadyAt, sb.IPs = 9, []string{"10.0.0.2", "fd00::2"} }); err != nil {
		t.Fatal(err)
	}
	env := []byte{0xff, 0xfe, 0}
	c := &Container{ID: "ccc1", Name: "c", SandboxID: "aaa1", BootID: "boot", CreatedAt: 8, MadeAt: 9, Config: Config[*cri.ContainerConfig]{
		Message: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "c"}, Envs: []*cri.KeyValue{{Key: "K", Value: env}}}}}
	if err := s.Containers.Create(c); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, root)
	got, err := s.Sandboxes.Get("aaa1")
	if err != nil || !got.Ready("boot") || got.Ready("next boot") || got.IPs[1] != "fd00::2" || got.Config.Message.GetLabels()["a"] != "b" {
		t.Errorf("sandbox came back as %+v, %v", got, err)
	}
	cs := s.ContainersOf("aaa1")
	if len(cs) != 1 || !bytes.Equal(cs[0].Config.Message.GetEnvs()[0].GetValue(), env) {
		t.Errorf("containers came back as %v", cs)
	}
	if cs[0].State("boot") != cri.ContainerState_CONTAINER_CREATED || cs[0].State("next boot") != cri.ContainerState_CONTAINER_EXITED {
		t.Error("derived state")
	}
}

func TestNamesAndIDs(t *testing.T) {
	s := mustOpen(t, t.TempDir())
	for _, id := range []string{"ab12", "ab34"} {
		if err := s.Sandboxes.Create(testSandbox(id)); err != nil {
			t.Fatal(err)
		}
	}
	twin := testSandbox("ab12")
	twin.ID = "ff00"
	if err := s.Sandboxes.Create(twin); !errors.Is(err, ErrNameInUse) {
		t.Errorf("second of a name: %v", err)
	}
	for id, want := range map[string]error{"ab12": nil, "ab1": nil, "ab": ErrAmbiguous, "x": ErrNotFound, "": ErrNotFound, "../ab12": ErrNotFound} {
		if _, err := s.Sandboxes.Find(id); !errors.Is(err, want) {
			t.Errorf("find %q: %v, want %v", id, err, want)
		}
	}
	if err := s.Sandboxes.Remove("ab12"); err != nil {
		t.Fatal(err)
	}
	if err := s.Sandboxes.Remove("ab12"); err != nil {
		t.Errorf("second remove: %v", err)
	}
	if err := s.Sandboxes.Create(twin); err != nil {
		t.Errorf("a removed name is not free: %v", err)
	}
	if _, err := s.Sandboxes.Update("ab12", func(*Sandbox) {}); !errors.Is(err, ErrNotFound) {
		t.Errorf("update of a removed record: %v", err)
	}
}

// Whatever write fails, and whether or not it leaves half a file: a record that
// was created is there whole after reopening, one that was refused is not, and
// its name is free.
func TestFailingDisk(t *testing.T) {
	for _, torn := range []bool{false, true} {
		for k := range 16 {
			t.Run(fmt.Sprintf("write %d torn %v", k, torn), func(t *testing.T) {
				root := t.TempDir()
				d := &failingDisk{left: k, torn: torn}
				s, err := open(root, d, unheard)
				if err != nil {
					t.Fatal(err)
				}
				created := s.Sandboxes.Create(testSandbox("aaa1")) == nil
				updated := false
				if created {
					_, err := s.Sandboxes.Update("aaa1", func(sb *Sandbox) { sb.ReadyAt = 5 })
					updated = err == nil
					if r, _ := s.Sandboxes.Get("aaa1"); r.ReadyAt != 5 {
						t.Error("memory does not tell a change that the disk refused")
					}
				}
				d.left = 1 << 20
				if !created {
					if err := s.Sandboxes.Create(testSandbox("aaa1")); err != nil {
						t.Errorf("the name of a refused record is not free: %v", err)
					}
				}
				s = mustOpen(t, root)
				r, err := s.Sandboxes.Get("aaa1")
				if err != nil {
					t.Fatalf("created record is gone: %v", err)
				}
				if created && (r.ReadyAt == 5) != updated {
					t.Errorf("update reported %v, ready at %d", updated, r.ReadyAt)
				}
			})
		}
	}
}

// A wish that the disk refuses changes nothing, in memory or on the disk.
func TestTryUpdate(t *testing.T) {
	for k := range 2 { // the write, the rename
		root := t.TempDir()
		d := &failingDisk{left: 1 << 20}
		s, err := open(root, d, unheard)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Sandboxes.Create(testSandbox("aaa1")); err != nil {
			t.Fatal(err)
		}
		d.left = k
		if _, err := s.Sandboxes.TryUpdate("aaa1", func(sb *Sandbox) { sb.ReadyAt = 5 }); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("refused at %d: %v", k, err)
		}
		for when, s := range map[string]*Store{"in memory": s, "on the disk": mustOpen(t, root)} {
			if r, err := s.Sandboxes.Get("aaa1"); err != nil || r.ReadyAt == 5 {
				t.Errorf("refused at %d, %s: %+v, %v", k, when, r, err)
			}
		}
		d.left = 1 << 20
		if r, err := s.Sandboxes.TryUpdate("aaa1", func(sb *Sandbox) { sb.ReadyAt = 5 }); err != nil || r.ReadyAt != 5 {
			t.Errorf("with room: %+v, %v", r, err)
		}
	}
}

// A fact that the disk refused is written by the next write that it takes, of
// whatever record, or by Save.
func TestFactsAreWrittenLater(t *testing.T) {
	later := map[string]func(*Store) error{
		"a record made":      func(s *Store) error { return s.Sandboxes.Create(testSandbox("ccc3")) },
		"another's change":   func(s *Store) error { _, err := s.Sandboxes.Update("bbb2", func(*Sandbox) {}); return err },
		"everything at hand": (*Store).Save,
	}
	for what, write := range later {
		root := t.TempDir()
		d := &failingDisk{left: 1 << 20}
		s, err := open(root, d, unheard)
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{"aaa1", "bbb2", "gone"} {
			if err := s.Sandboxes.Create(testSandbox(id)); err != nil {
				t.Fatal(err)
			}
		}
		d.left = 0
		for _, id := range []string{"aaa1", "gone"} {
			if _, err := s.Sandboxes.Update(id, func(sb *Sandbox) { sb.ReadyAt = 5 }); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("%s: a full disk: %v", what, err)
			}
		}
		if err := s.Save(); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("%s: Save on a full disk: %v", what, err)
		}
		if r, err := mustOpen(t, root).Sandboxes.Get("aaa1"); err != nil || r.ReadyAt == 5 {
			t.Errorf("%s: before, the disk has %+v, %v", what, r, err)
		}
		d.left = 1 << 20
		if err := errors.Join(s.Sandboxes.Remove("gone"), write(s)); err != nil {
			t.Errorf("%s: with room: %v", what, err)
		}
		again := mustOpen(t, root)
		if r, err := again.Sandboxes.Get("aaa1"); err != nil || r.ReadyAt != 5 {
			t.Errorf("%s: the disk has %+v, %v", what, r, err)
		}
		if _, err := again.Sandboxes.Get("gone"); !errors.Is(err, ErrNotFound) {
			t.Errorf("%s: a removed record is there again: %v", what, err)
		}
	}
}

func TestUnreadableRecordIsQuarantined(t *testing.T) {
	for name, spoil := range map[string]func([]byte) []byte{
		"empty":          func([]byte) []byte { return nil },
		"cut":            func(b []byte) []byte { return b[:len(b)/2] },
		"altered":        func(b []byte) []byte { return bytes.Replace(b, []byte(`"h"`), []byte(`"g"`), 1) },
		"future version": func(b []byte) []byte { return bytes.Replace(b, []byte(`"version":1`), []byte(`"version":2`), 1) },
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			s := mustOpen(t, root)
			for _, id := range []string{"aaa1", "bbb2"} {
				if err := s.Sandboxes.Create(testSandbox(id)); err != nil {
					t.Fatal(err)
				}
			}
			path := filepath.Join(root, "sandboxes/aaa1/sandbox.json")
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, spoil(b), 0o600); err != nil {
				t.Fatal(err)
			}
			s, problems := opened(t, root)
			if len(problems) != 1 {
				t.Fatalf("problems %v", problems)
			}
			if _, err := os.Stat(filepath.Join(problems[0].Moved, "sandbox.json")); err != nil {
				t.Errorf("the record was not kept: %v", err)
			}
			if len(s.Sandboxes.List()) != 1 {
				t.Error("the other record is not there")
			}
		})
	}
}

func TestLeftoversOfACrash(t *testing.T) {
	root := t.TempDir()
	mustOpen(t, root)
	for _, dir := range []string{"sandboxes/never", "trash/half"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	mustOpen(t, root)
	for _, dir := range []string{"sandboxes/never", "trash/half"} {
		if _, err := os.Stat(filepath.Join(root, dir)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", dir, err)
		}
	}
}

// A record is flushed exactly where a power cut could make it lie: the first
// write of a sandbox, with its directory and that directory's name.
func TestSyncs(t *testing.T) {
	d := &countingDisk{}
	s, err := open(t.TempDir(), d, unheard)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Sandboxes.Create(testSandbox("aaa1")); err != nil {
		t.Fatal(err)
	}
	if d.syncs != 3 {
		t.Errorf("creating a sandbox record made %d syncs, want 3", d.syncs)
	}
	if _, err := s.Sandboxes.Update("aaa1", func(sb *Sandbox) { sb.ReadyAt = 1 }); err != nil {
		t.Fatal(err)
	}
	if err := s.Containers.Create(&Container{ID: "c", Name: "c", Config: Config[*cri.ContainerConfig]{Message: &cri.ContainerConfig{}}}); err != nil {
		t.Fatal(err)
	}
	if d.syncs != 3 {
		t.Errorf("further records made %d syncs", d.syncs-3)
	}
}

type countingDisk struct {
	osDisk
	syncs int
}

func (d *countingDisk) WriteFile(name string, data []byte, sync bool) error {
	if sync {
		d.syncs++
	}
	return d.osDisk.WriteFile(name, data, sync)
}

func (d *countingDisk) SyncDir(name string) error {
	d.syncs++
	return d.osDisk.SyncDir(name)
}

// Whoever watches a table is told each change with what was before, in order,
// also when the disk refuses it, and finds it in the table already.
func TestWatch(t *testing.T) {
	d := &failingDisk{left: 100}
	s, err := open(t.TempDir(), d, unheard)
	if err != nil {
		t.Fatal(err)
	}
	var told []string
	s.Sandboxes.Watch(func(old, now *Sandbox) {
		got, err := s.Sandboxes.Get(old.ID)
		if now == nil {
			told = append(told, fmt.Sprintf("%d gone, there %v", old.ReadyAt, err == nil))
			return
		}
		told = append(told, fmt.Sprintf("%d to %d, there %v", old.ReadyAt, now.ReadyAt, got == now))
	})
	if err := s.Sandboxes.Create(testSandbox("a")); err != nil {
		t.Fatal(err)
	}
	ready := func(at int64) error {
		_, err := s.Sandboxes.Update("a", func(sb *Sandbox) { sb.ReadyAt = at })
		return err
	}
	if err := ready(1); err != nil {
		t.Fatal(err)
	}
	d.left = 0
	if err := ready(2); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("a full disk: %v", err)
	}
	if err := s.Sandboxes.Remove("a"); err == nil {
		t.Error("a full disk: removed")
	}
	d.left = 100
	for range 2 {
		if err := s.Sandboxes.Remove("a"); err != nil {
			t.Error(err)
		}
	}
	want := []string{"0 to 1, there true", "1 to 2, there true", "2 gone, there false"}
	if fmt.Sprint(told) != fmt.Sprint(want) {
		t.Errorf("told %q, want %q", told, want)
	}
}

// Select keeps what List would, in its order.
func TestSelect(t *testing.T) {
	s := mustOpen(t, t.TempDir())
	for i, id := range []string{"a", "b", "c", "d"} {
		sb := testSandbox(id)
		sb.CreatedAt = int64(i)
		if err := s.Sandboxes.Create(sb); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for _, sb := range s.Sandboxes.Select(func(sb *Sandbox) bool { return sb.ID != "b" }) {
		got = append(got, sb.ID)
	}
	if fmt.Sprint(got) != "[d c a]" {
		t.Errorf("got %q, want d, c, a", got)
	}
}

// JSON makes six bytes of some: a request that fits makes a record that can be
// read again.
func TestLargeRecordsSurviveReopening(t *testing.T) {
	root := t.TempDir()
	s := mustOpen(t, root)
	sb := testSandbox("a")
	sb.Config.Message.Annotations = map[string]string{"fat": strings.Repeat("\x01", 4<<20)}
	if err := s.Sandboxes.Create(sb); err != nil {
		t.Fatal(err)
	}
	got, err := mustOpen(t, root).Sandboxes.Get("a")
	if err != nil || got.Config.Message.GetAnnotations()["fat"] != sb.Config.Message.GetAnnotations()["fat"] {
		t.Errorf("not what was written: %v", err)
	}
}
