package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// Store is all records of a node.
type Store struct {
	Sandboxes  *Table[Sandbox, *Sandbox]
	Containers *Table[Container, *Container]
}

// Open makes the directories below root where they are missing, deletes what
// an interrupted removal left in the trash, and loads every record. A record
// that cannot be read is moved to quarantine, never dropped; tell hears of it
// before, and of whatever else is wrong with one object. Those keep nothing else
// from being loaded; an error is about all records.
func Open(root string, tell func(Problem)) (*Store, error) {
	return open(root, osDisk{}, tell)
}

func open(root string, d disk, tell func(Problem)) (*Store, error) {
	trash := filepath.Join(root, "trash")
	emptyTrash(trash, tell)
	s := &Store{
		Sandboxes: &Table[Sandbox, *Sandbox]{dir: filepath.Join(root, "sandboxes"), file: "sandbox.json", sync: true,
			disk: d, trash: trash, byID: map[string]*Sandbox{}, names: map[string]string{}, unsaved: map[string]bool{}},
		Containers: &Table[Container, *Container]{dir: filepath.Join(root, "containers"), file: "container.json",
			disk: d, trash: trash, byID: map[string]*Container{}, names: map[string]string{}, unsaved: map[string]bool{}},
	}
	for _, dir := range []string{trash, s.Sandboxes.dir, s.Containers.dir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make record directory: %w", err)
		}
		if info, err := os.Stat(dir); err == nil && info.Mode().Perm() == 0o700 {
			continue
		}
		if err := os.Chmod(dir, 0o700); err != nil { // one of before
			return nil, fmt.Errorf("make record directory: %w", err)
		}
	}
	s.Sandboxes.across, s.Containers.across = apart(s.Sandboxes.dir, trash), apart(s.Containers.dir, trash)
	if err := s.Sandboxes.load(root, tell); err != nil {
		return nil, err
	}
	return s, s.Containers.load(root, tell)
}

// apart tells whether two directories are on different filesystems.
func apart(a, b string) bool {
	var of [2]syscall.Stat_t
	return syscall.Stat(a, &of[0]) == nil && syscall.Stat(b, &of[1]) == nil && of[0].Dev != of[1].Dev
}

// Save writes the records that the disk refused before, as far as it takes them now.
func (s *Store) Save() error { return errors.Join(s.Sandboxes.Save(), s.Containers.Save()) }

// ContainersOf lists the containers of a sandbox, newest first.
func (s *Store) ContainersOf(sandboxID string) []*Container {
	return s.Containers.Select(func(c *Container) bool { return c.SandboxID == sandboxID })
}
