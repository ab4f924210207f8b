package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"berth/runtime/config"
	"berth/sandbox/regular"
)

// prepare makes the daemon's directories and takes its locks on them. What is in
// the state directory is of the pods of one root; to a daemon of another it
// would be leftovers.
func prepare(cfg config.Config) (unlock func(), err error) {
	var locks []*os.File
	unlock = func() {
		for _, f := range locks {
			_ = f.Close()
		}
	}
	hold := func(f *os.File, err error) error {
		if err == nil {
			locks = append(locks, f)
		}
		return err
	}
	for _, dir := range []string{cfg.Root, cfg.State} {
		if err = makeDir(dir); err == nil {
			err = hold(lock(dir))
		}
		if err != nil {
			unlock()
			return nil, err
		}
	}
	err = hold(lockDirectory(cfg.Root))
	if err == nil {
		err = checkLayout(cfg.Root)
	}
	if err == nil {
		err = claim(cfg.Root, cfg.State)
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

func makeDir(dir string) error {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	// One that has its mode may be on a read-only filesystem, with what is written
	// mounted below.
	if info, err := os.Stat(dir); err == nil && info.Mode().Perm() == 0o711 {
		return nil
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return fmt.Errorf("set mode of directory: %w", err)
	}
	return nil
}

// lockPatience is for a daemon that was killed and is not yet gone: its successor may
// be quicker than the kernel.
const lockPatience = 2 * time.Second

// lock takes the lock of a directory, which the file returned holds.
func lock(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := take(f); err != nil {
		owner := make([]byte, 32)
		n, _ := f.Read(owner)
		_ = f.Close()
		return nil, fmt.Errorf("%s: another berth daemon uses it, pid %s: %w", dir, owner[:n], err)
	}
	_ = f.Truncate(0)
	_, _ = fmt.Fprintf(f, "%d", os.Getpid())
	return f, nil
}

// lockDirectory locks a directory itself: the file of its lock can be removed and made
// again. Of the state directory that lock is the monitor's.
func lockDirectory(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open to lock it: %w", err)
	}
	if err := take(f); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("%s: another berth daemon uses it, and its file lock was removed: %w", dir, err)
	}
	return f, nil
}

// take waits for lockPatience.
func take(f *os.File) error {
	for limit := time.Now().Add(lockPatience); ; time.Sleep(50 * time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) || time.Now().After(limit) {
			return err
		}
	}
}

const maxMark = 8 << 10 // bytes of an id with a path

// claim marks the state directory as that of root, or refuses one that has the
// mark of another. A root keeps its id wherever it is moved to.
func claim(root, state string) error {
	id, err := rootID(filepath.Join(root, "id"))
	if err != nil {
		return err
	}
	path := filepath.Join(state, "root")
	mark, err := regular.Read(path, maxMark)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read whose state %s is: %w", state, err)
	}
	if owner, of, ok := strings.Cut(string(mark), " "); ok && owner != id {
		return fmt.Errorf("state %s has the pods of another root, %s: root %s needs a state of its own (when the other has gone for good, end its pods and remove %s)", state, of, root, path)
	}
	if err := checkMoved(root, state, id); err != nil {
		return err
	}
	if want := id + " " + root; string(mark) != want { // a full disk does not keep a daemon from starting again
		return replace(path, want)
	}
	return nil
}

// checkMoved refuses another state directory than the one that has the pods of this
// boot: their mounts, namespaces and monitor are there by their paths. A reboot
// empties it.
func checkMoved(root, state, id string) error {
	note := filepath.Join(root, "state")
	data, _ := regular.Read(note, maxMark) // without it nothing was moved
	before := string(data)
	if before == state || sameDir(before, state) {
		return nil
	}
	for _, dir := range []string{before, state} {
		mark, err := regular.Read(filepath.Join(dir, "root"), maxMark)
		if owner, _, _ := strings.Cut(string(mark), " "); before == "" || err != nil || owner != id || !hasPods(dir) {
			continue
		}
		return fmt.Errorf("root %s has its pods in state %s (found at %s): start berth with that state and remove the pods, or reboot, before it is at %s", root, before, dir, state)
	}
	_ = replace(note, state) // a full disk keeps nobody from starting; the next start does it
	return nil
}

// sameDir tells whether two paths lead to one directory, as /run and /var/run do.
func sameDir(a, b string) bool {
	of, err := os.Stat(a)
	if err != nil {
		return false
	}
	other, err := os.Stat(b)
	return err == nil && os.SameFile(of, other)
}

// hasPods tells whether a state directory has something of a pod or container.
func hasPods(state string) bool {
	for _, kind := range []string{"containers", "namespaces", "sandboxes"} {
		if entries, err := os.ReadDir(filepath.Join(state, kind)); err == nil && len(entries) > 0 {
			return true
		}
	}
	return false
}

// layout is the version of all that is below a root. It is raised when an older or
// newer berth would take the records for unreadable, and remove their pods.
const layout = "1"

// checkLayout refuses a root of another version as a whole. A version that cannot be
// read says nothing: each record has its own.
func checkLayout(root string) error {
	path := filepath.Join(root, "version")
	data, err := regular.Read(path, maxMark)
	found := strings.TrimSpace(string(data))
	if err == nil && found == layout {
		return nil
	}
	if _, nan := strconv.Atoi(found); err == nil && nan == nil {
		return fmt.Errorf("root %s is of version %s, this berth knows version %s: run a berth of the release that wrote it, nothing was changed", root, found, layout)
	}
	_ = replace(path, layout) // a full disk keeps nobody from starting; the next start does it
	return nil
}

// rootID reads a root's id and makes one where there is none.
func rootID(path string) (string, error) {
	data, err := regular.Read(path, maxMark)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read id of root: %w", err)
	}
	if len(data) > 0 {
		return string(data), nil
	}
	id := rand.Text()
	return id, replace(path, id)
}

// replace writes a small file whole or not at all.
func replace(path, text string) error {
	temp := path + ".new"
	if err := os.WriteFile(temp, []byte(text), 0o600); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(temp, path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
