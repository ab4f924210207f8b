package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// liftDepth is how far below its top a too deep tree is cut: paths of so many
// names of the longest kind still fit the kernel's bound on a path.
const liftDepth = 12

// removeTree deletes a directory tree of any depth. os.RemoveAll holds one
// descriptor for each level, and a container can nest its directories deeper
// than the daemon's limit; such a tree is cut into shallow ones first, which
// are moved beside it.
func removeTree(dir string) error {
	todo := []string{dir}
	for n := 0; len(todo) > 0; {
		top := todo[len(todo)-1]
		err := os.RemoveAll(top)
		if err == nil {
			todo = todo[:len(todo)-1]
			continue
		}
		if !errors.Is(err, syscall.EMFILE) && !errors.Is(err, syscall.ENFILE) {
			return err
		}
		deep, derr := below(top, liftDepth)
		if derr != nil || len(deep) == 0 {
			return errors.Join(err, derr)
		}
		for _, d := range deep {
			n++
			lifted := fmt.Sprintf("%s.%d", dir, n)
			if err := os.Rename(d, lifted); err != nil {
				return err
			}
			todo = append(todo, lifted)
		}
	}
	return nil
}

// below lists the directories that lie depth levels below top.
func below(top string, depth int) ([]string, error) {
	var found []string
	base := strings.Count(top, string(filepath.Separator))
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.Count(path, string(filepath.Separator))-base == depth {
			found = append(found, path)
			return fs.SkipDir
		}
		return nil
	})
	return found, err
}

// emptyTrash deletes what interrupted removals left. What cannot be deleted is
// told, and stays for the next start.
func emptyTrash(trash string, tell func(Problem)) {
	entries, err := os.ReadDir(trash)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		tell(Problem{Path: trash, Err: fmt.Errorf("empty trash: %w", err)})
	}
	for _, e := range entries {
		path := filepath.Join(trash, e.Name())
		if err := removeTree(path); err != nil {
			tell(Problem{Path: path, Err: fmt.Errorf("empty trash: %w", err)})
		}
	}
}
