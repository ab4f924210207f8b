package sandbox

import (
	"fmt"
	"os"
	"path/filepath"
)

// Store is all records of a node.
type Store struct {
	Sandboxes  *Table[Sandbox, *Sandbox]
	Containers *Table[Container, *Container]
}

// Open makes the directories below root where they are missing, deletes what
// an interrupted removal left in the trash, and loads every record. Records
// that cannot be read are moved to quarantine and reported, never dropped.
func Open(root string) (*Store, []Problem, error) {
	return open(root, osDisk{})
}

func open(root string, d disk) (*Store, []Problem, error) {
	trash := filepath.Join(root, "trash")
	if err := emptyTrash(trash); err != nil {
		return nil, nil, err
	}
	for _, dir := range []string{trash, filepath.Join(root, "sandboxes"), filepath.Join(root, "containers")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, nil, fmt.Errorf("make record directory: %w", err)
		}
		if err := os.Chmod(dir, 0o700); err != nil { // also one of before
			return nil, nil, fmt.Errorf("make record directory: %w", err)
		}
	}
	s := &Store{
		Sandboxes: &Table[Sandbox, *Sandbox]{dir: filepath.Join(root, "sandboxes"), file: "sandbox.json", sync: true,
			disk: d, trash: trash, byID: map[string]*Sandbox{}, names: map[string]string{}},
		Containers: &Table[Container, *Container]{dir: filepath.Join(root, "containers"), file: "container.json",
			disk: d, trash: trash, byID: map[string]*Container{}, names: map[string]string{}},
	}
	quarantine := filepath.Join(root, "quarantine")
	problems, err := s.Sandboxes.load(quarantine)
	if err != nil {
		return nil, nil, err
	}
	more, err := s.Containers.load(quarantine)
	return s, append(problems, more...), err
}

// ContainersOf lists the containers of a sandbox, newest first.
func (s *Store) ContainersOf(sandboxID string) []*Container {
	return s.Containers.Select(func(c *Container) bool { return c.SandboxID == sandboxID })
}
