package runtime

import "path/filepath"

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
