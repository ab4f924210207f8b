package sandbox

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const lostID = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

// strange are things in the place of a record that berth does not make, by what
// becomes of them.
var strange = map[string]struct {
	id      string // of the record that is there before
	make    func(dir string) error
	becomes string // moved, stays or gone
	why     string
}{
	"a directory as record": {lostID, func(dir string) error {
		return errors.Join(os.Remove(dir+"/sandbox.json"), os.Mkdir(dir+"/sandbox.json", 0o700))
	}, "moved", "no regular file"},
	"a FIFO as record": {lostID, func(dir string) error {
		return errors.Join(os.Remove(dir+"/sandbox.json"), unix.Mkfifo(dir+"/sandbox.json", 0o600))
	}, "moved", "no regular file"},
	"a symlink to a device": {lostID, func(dir string) error {
		return errors.Join(os.Remove(dir+"/sandbox.json"), os.Symlink("/dev/zero", dir+"/sandbox.json"))
	}, "moved", "no regular file"},
	"a huge record": {lostID, func(dir string) error { return os.Truncate(dir+"/sandbox.json", 1<<40) }, "moved", "larger than"},
	"another object's record": {lostID, func(dir string) error {
		b, err := seal(testSandbox("aaa1"))
		return errors.Join(err, os.WriteFile(dir+"/sandbox.json", b, 0o600))
	}, "moved", `says id "aaa1"`},
	"a lost record": {lostID, func(dir string) error {
		return errors.Join(os.Rename(dir+"/sandbox.json", dir+"/resolv.conf"))
	}, "moved", "record is missing"},
	"a record that was not written": {lostID, func(dir string) error {
		return os.Rename(dir+"/sandbox.json", dir+"/sandbox.json.tmp")
	}, "gone", ""},
	"a foreign directory": {"", func(dir string) error {
		return errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(dir+"/precious", nil, 0o600))
	}, "stays", "nothing of berth's"},
	"a foreign file":    {"", func(dir string) error { return os.WriteFile(dir, nil, 0o600) }, "stays", "nothing of berth's"},
	"a foreign FIFO":    {"", func(dir string) error { return unix.Mkfifo(dir, 0o600) }, "stays", "nothing of berth's"},
	"a foreign symlink": {"", func(dir string) error { return os.Symlink("/dev/zero", dir) }, "stays", "nothing of berth's"},
}

func TestStrangeThingsInThePlaceOfRecords(t *testing.T) {
	for name, c := range strange {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			s := mustOpen(t, root)
			for _, id := range []string{"kept", c.id} {
				if id == "" {
					continue
				}
				if err := s.Sandboxes.Create(testSandbox(id)); err != nil {
					t.Fatal(err)
				}
			}
			dir := s.Sandboxes.Dir(c.id)
			if c.id == "" {
				dir = s.Sandboxes.Dir("foreign")
			}
			if err := c.make(dir); err != nil {
				t.Fatal(err)
			}
			s, problems := opened(t, root)
			if list := s.Sandboxes.List(); len(list) != 1 || list[0].ID != "kept" {
				t.Errorf("records %v", list)
			}
			_, err := os.Lstat(dir)
			if stays := err == nil; stays != (c.becomes == "stays") {
				t.Errorf("it is there: %v; it should be %s", stays, c.becomes)
			}
			moved, err := Quarantined(root)
			if err != nil || len(moved) == 1 != (c.becomes == "moved") {
				t.Errorf("quarantine has %q, %v", moved, err)
			}
			if c.becomes == "gone" {
				if len(problems) != 0 {
					t.Errorf("told %v", problems)
				}
				return
			}
			if len(problems) != 1 || problems[0].Path != dir || !strings.Contains(problems[0].Err.Error(), c.why) {
				t.Fatalf("told %v, want %q", problems, c.why)
			}
			if len(moved) == 1 && (problems[0].Moved != moved[0] || QuarantinedID(moved[0]) != c.id) {
				t.Errorf("told that it is moved to %q, and it is in %q", problems[0].Moved, moved[0])
			}
		})
	}
}

// What cannot be moved or deleted is told and passed over.
func TestAQuarantineThatCannotBeMade(t *testing.T) {
	root := t.TempDir()
	s := mustOpen(t, root)
	for _, id := range []string{"kept", lostID} {
		if err := s.Sandboxes.Create(testSandbox(id)); err != nil {
			t.Fatal(err)
		}
	}
	dir := s.Sandboxes.Dir(lostID)
	if err := errors.Join(os.WriteFile(dir+"/sandbox.json", nil, 0o600), os.WriteFile(root+"/quarantine", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	s, problems := opened(t, root)
	if len(s.Sandboxes.List()) != 1 || len(problems) != 2 || problems[0].Moved == "" || problems[1].Moved != "" || problems[1].Move == nil {
		t.Errorf("records %v, told %v", s.Sandboxes.List(), problems)
	}
	if err := os.Remove(root + "/quarantine"); err != nil {
		t.Fatal(err)
	}
	for n, want := range []string{lostID, lostID + ".1"} { // what is there already stays
		if n == 1 {
			if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(dir+"/sandbox.json", nil, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		opened(t, root)
		if _, err := os.Stat(filepath.Join(root, "quarantine", "sandboxes-"+want, "sandbox.json")); err != nil {
			t.Error(err)
		}
	}
}

// Two records of one name are both there, and the removal of one leaves the name
// to the other.
func TestTwoRecordsOfOneName(t *testing.T) {
	for _, first := range []string{"aaa1", "bbb2"} { // the newer one is read first, or last
		root := t.TempDir()
		s := mustOpen(t, root)
		for _, id := range []string{"aaa1", "bbb2"} {
			sb := testSandbox(id)
			if id == first {
				sb.CreatedAt++
			}
			if err := s.Sandboxes.Create(sb); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Sandboxes.Update(id, func(sb *Sandbox) { sb.Name = "one" }); err != nil {
				t.Fatal(err)
			}
		}
		s = mustOpen(t, root)
		if got, err := s.Sandboxes.Named("one"); err != nil || got.ID != first || len(s.Sandboxes.List()) != 2 {
			t.Errorf("the name is of %v, %v, want %s; records %v", got, err, first, s.Sandboxes.List())
		}
		for _, id := range []string{"aaa1", "bbb2"} {
			if id == first {
				continue
			}
			if err := s.Sandboxes.Remove(id); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := s.Sandboxes.Named("one"); err != nil || got.ID != first {
			t.Errorf("after the other's removal the name is of %v, %v", got, err)
		}
	}
}
