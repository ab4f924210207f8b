package resolve

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/cyphar/filepath-securejoin/pathrs-lite"
)

// LogFile makes the directories of a container's log and tells where it really is.
// What lies above the pod's log directory is the node's own, and its symlinks are
// followed; from there on the result has none: a pod that can write to the node's
// logs can put one there at any time, so whoever opens the file is to insist on
// that. Path must be local (filepath.IsLocal); without it or dir there is no log.
func LogFile(dir, path string) (string, error) {
	if dir == "" || path == "" {
		return "", nil
	}
	above := filepath.Dir(filepath.Clean(dir))
	if err := os.MkdirAll(above, 0o755); err != nil {
		return "", fmt.Errorf("make log directory: %w", err)
	}
	above, err := filepath.EvalSymlinks(above)
	if err != nil {
		return "", fmt.Errorf("look at log directory: %w", err)
	}
	below := filepath.Join(filepath.Base(dir), path)
	if err := pathrs.MkdirAll(above, filepath.Dir(below), 0o755); err != nil {
		return "", fmt.Errorf("make log directory: %w", err)
	}
	return filepath.Join(above, below), nil
}
