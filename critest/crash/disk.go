package main

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// fill takes all that is free below a directory that is a filesystem of its own.
// empty gives it back.
func fill(dir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("look how much is free in %s: %w", dir, err)
	}
	f, err := os.Create(filler(dir))
	if err != nil {
		return err
	}
	defer f.Close()
	for left := int64(fs.Bfree); left > 0; left /= 2 { // others may take some meanwhile
		at, err := f.Seek(0, 2)
		if err != nil {
			return err
		}
		if err := unix.Fallocate(int(f.Fd()), 0, at, left*fs.Bsize); err != nil && err != unix.ENOSPC {
			return fmt.Errorf("fill %s: %w", dir, err)
		} else if err == nil {
			break
		}
	}
	return nil
}

func filler(dir string) string { return filepath.Join(dir, "crash-filler") }

func empty(dir string) error { return os.Remove(filler(dir)) }
