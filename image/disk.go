package image

import (
	"os"
	"path/filepath"
)

// disk is how the store changes its own files. Every step of a pull, a removal
// or a restart that could leave something half done is one call here, and
// tests let the k-th one fail, or be the last one that happens.
type disk struct {
	check func(op, path string) error // nil but in tests
	boot  string                      // the machine's boot id; tests pretend another
}

func (d *disk) may(op, path string) error {
	if d.check == nil {
		return nil
	}
	return d.check(op, path)
}

func (d *disk) rename(from, to string) error {
	if err := d.may("rename", to); err != nil {
		return err
	}
	return os.Rename(from, to)
}

func (d *disk) link(from, to string) error {
	if err := d.may("link", to); err != nil {
		return err
	}
	return os.Link(from, to)
}

func (d *disk) mkdirTemp(dir, pattern string) (string, error) {
	if err := d.may("mkdir", dir); err != nil {
		return "", err
	}
	return os.MkdirTemp(dir, pattern)
}

func (d *disk) mkdir(path string) error {
	if err := d.may("mkdir", path); err != nil {
		return err
	}
	return os.Mkdir(path, 0o755)
}

func (d *disk) removeAll(path string) error {
	if err := d.may("remove", path); err != nil {
		return err
	}
	if os.RemoveAll(path) == nil {
		return nil
	}
	return os.RemoveAll(path) // once more: many ask nothing, and staging is not looked at before the next start
}

// write replaces a file in one step. It is not synced: see the package comment.
func (d *disk) write(path string, data []byte) error {
	if err := d.may("write", path); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), temporary)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = d.rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// temporary is what names of files begin with until they are renamed.
const temporary = ".new-"

// dropTemporary removes what writing left in a directory when the daemon was
// killed. Called at start, when nobody writes.
func dropTemporary(dir string) {
	left, _ := filepath.Glob(filepath.Join(dir, temporary+"*"))
	for _, path := range left {
		os.Remove(path)
	}
}
