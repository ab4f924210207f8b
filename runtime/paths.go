package runtime

import (
	"fmt"
	"os"
	"path/filepath"

	"berth/sandbox"
)

// Where an object's files are; see design §3. Root survives a reboot, state
// does not.

func (s *Service) namespaceDir(sandboxID string) string {
	return filepath.Join(s.Config().State, "namespaces", sandboxID)
}

func (s *Service) shmPath(sandboxID string) string {
	return filepath.Join(s.Config().State, "sandboxes", sandboxID, "shm")
}

func (s *Service) podFile(sandboxID, name string) string {
	return filepath.Join(s.Records.Sandboxes.Dir(sandboxID), name)
}

// bundleDir is the bundle of a container, or of a sandbox's pause container.
func (s *Service) bundleDir(id string) string {
	return filepath.Join(s.Config().State, "containers", id)
}

func (s *Service) rootfsDir(containerID string) string {
	return filepath.Join(s.bundleDir(containerID), "rootfs")
}

// makeBundle makes the directory of a container's bundle. A user of the node must
// not reach the root filesystem in it: a setuid program of a container would make
// him root of the node. Root of a pod's user namespace, who is such a user, passes
// through by his group. Idempotent.
func (s *Service) makeBundle(sb *sandbox.Sandbox, id string) error {
	dir := s.bundleDir(id)
	if err := os.MkdirAll(filepath.Dir(dir), 0o711); err != nil {
		return fmt.Errorf("make directory of bundles: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make bundle directory: %w", err)
	}
	ids := podIDs(sb)
	if ids == nil {
		return nil
	}
	if err := os.Lchown(dir, 0, int(ids.HostGID(0))); err != nil {
		return fmt.Errorf("make bundle directory: %w", err)
	}
	if err := os.Chmod(dir, 0o710); err != nil {
		return fmt.Errorf("make bundle directory: %w", err)
	}
	return nil
}
