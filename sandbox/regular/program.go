package regular

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Program finds a program in PATH as exec.LookPath does. Who looks, or runs what is
// found, would hang at a filesystem that does not answer; so each path is asked about
// before, and the first error ends the search. exec.ErrNotFound.
func Program(name string, answer func(path string) error) (string, error) {
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		path := filepath.Join(dir, name)
		if !filepath.IsAbs(path) || filepath.Base(name) != name {
			continue
		}
		if err := answer(path); err != nil {
			return "", err
		}
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("find %s: %w", name, exec.ErrNotFound)
}
