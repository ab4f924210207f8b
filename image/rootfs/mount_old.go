package rootfs

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// mountOld is for kernels that take all layers in one option string of less
// than a page: every directory gets a link of one or two characters in a
// scratch directory, which is the working directory of the thread that mounts:
// in runs the mount call there.
func mountOld(m Mount, lowers []string, in func(dir string, f func() error) error) error {
	scratch, err := os.MkdirTemp(filepath.Dir(m.Work), "links-")
	if err != nil {
		return fmt.Errorf("create scratch directory: %w", err)
	}
	defer os.RemoveAll(scratch)
	link := func(name, path string) error {
		if err := os.Symlink(path, filepath.Join(scratch, name)); err != nil {
			return fmt.Errorf("shorten %s: %w", path, err)
		}
		return nil
	}
	short := make([]string, 0, len(lowers))
	for i := len(lowers) - 1; i >= 0; i-- {
		name := strconv.FormatInt(int64(len(short)), 36)
		if err := link(name, lowers[i]); err != nil {
			return err
		}
		short = append(short, name)
	}
	options := "index=off,lowerdir=" + strings.Join(short, ":")
	flags := uintptr(unix.MS_RDONLY)
	if !m.ReadOnly {
		flags = 0
		options += ",volatile,upperdir=upper,workdir=work"
		if err := link("upper", m.Upper); err != nil {
			return err
		}
		if err := link("work", m.Work); err != nil {
			return err
		}
	}
	if m.Context != "" {
		options += fmt.Sprintf(",context=%q", m.Context)
	}
	return in(scratch, func() error {
		return unix.Mount("overlay", m.Target, "overlay", flags, options)
	})
}

// inDir runs f on a thread with a working directory of its own.
func inDir(dir string, f func() error) error {
	return onOwnThread(unix.CLONE_FS, func() error { return changeDir(dir, f) })
}

func changeDir(dir string, f func() error) error {
	if err := unix.Chdir(dir); err != nil {
		return fmt.Errorf("enter %s: %w", dir, err)
	}
	return f()
}

// onOwnThread runs f on a thread that shares less with the others, by the flags
// of unshare(2). It is not given back: it ends with the goroutine that never
// unlocks it. The process's first thread cannot end and is not used.
func onOwnThread(flags int, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			done <- onOwnThread(flags, f)
			runtime.UnlockOSThread()
			return
		}
		if err := unix.Unshare(flags); err != nil {
			done <- fmt.Errorf("unshare: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}
