package monitor

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Locked is what a living monitor holds so that there is no second one over the same
// containers: <socket>.lock, and the directory of both, since a file may be removed
// and made again.
type Locked struct{ File, Directory *os.File }

// Lock takes both. unix.EWOULDBLOCK when another monitor has one. They are released
// with the files.
func Lock(socket string) (*Locked, error) {
	l := &Locked{}
	var err error
	if l.File, err = os.OpenFile(socket+".lock", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600); err != nil {
		return nil, fmt.Errorf("open the monitor's lock: %w", err)
	}
	if err = take(l.File); err == nil {
		l.Directory, err = lockDirectory(socket)
	}
	if err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Relock is Lock for descriptors that another build of the same process has locked.
// directory is 0 where that build took only the file.
func Relock(socket string, file, directory int) (*Locked, error) {
	l := &Locked{File: os.NewFile(uintptr(file), socket+".lock")}
	if directory > 0 {
		l.Directory = os.NewFile(uintptr(directory), filepath.Dir(socket))
		return l, nil
	}
	var err error
	l.Directory, err = lockDirectory(socket)
	return l, err
}

func lockDirectory(socket string) (*os.File, error) {
	dir, err := os.Open(filepath.Dir(socket))
	if err != nil {
		return nil, fmt.Errorf("open the monitor's directory: %w", err)
	}
	if err := take(dir); err != nil {
		_ = dir.Close()
		return nil, err
	}
	return dir, nil
}

func take(f *os.File) error {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("take the lock %s: %w", f.Name(), err)
	}
	return nil
}

// Close lets another monitor begin.
func (l *Locked) Close() {
	_ = l.File.Close()
	if l.Directory != nil {
		_ = l.Directory.Close()
	}
}

// program is what a monitor's process is called, or begins with.
const program = "berth-monitor"

// lockOf is the lock's file of a socket as /proc names it.
func lockOf(socket string) string {
	if dir, err := filepath.EvalSymlinks(filepath.Dir(socket)); err == nil {
		socket = filepath.Join(dir, filepath.Base(socket))
	}
	return socket + ".lock"
}

// holder is the pid of the monitor that holds a lock; 0 when none is found.
func holder(lock string) int {
	names, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, name := range names {
		comm, err := os.ReadFile(name)
		if err != nil || !strings.HasPrefix(string(comm), program) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if err != nil {
			continue
		}
		if holds, err := holds(pid, lock); err == nil && holds {
			return pid
		}
	}
	return 0
}

// holds tells whether a process has the lock's file open, which nobody else has for
// longer than a moment. The file may be removed. Of a process that was killed a thread
// that hangs in the kernel still has it.
func holds(pid int, lock string) (bool, error) {
	known := false
	for _, tid := range Threads(pid) {
		dir := fmt.Sprintf("/proc/%d/task/%d/fd", pid, tid)
		entries, err := os.ReadDir(dir)
		known = known || err == nil
		for _, e := range entries {
			if target, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && strings.TrimSuffix(target, " (deleted)") == lock {
				return true, nil
			}
		}
		if len(entries) > 0 {
			return false, nil // threads share them
		}
	}
	if !known {
		return false, fmt.Errorf("read the descriptors of process %d: %w", pid, os.ErrPermission)
	}
	return false, nil
}
