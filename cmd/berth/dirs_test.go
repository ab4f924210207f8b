package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"berth/runtime/config"

	"golang.org/x/sys/unix"
)

// dirs are a daemon's directories.
type dirs struct {
	*testing.T
	root, state string
}

func newDirs(t *testing.T) *dirs {
	top := t.TempDir()
	return &dirs{T: t, root: filepath.Join(top, "root"), state: filepath.Join(top, "state")}
}

// prepares checks whether a daemon may have the directories: why is a part of the
// refusal, empty when there shall be none.
func (d *dirs) prepares(why string) {
	d.Helper()
	cfg := config.Default()
	cfg.Root, cfg.State = d.root, d.state
	unlock, err := prepare(cfg)
	if err == nil {
		unlock()
	}
	if why == "" && err != nil || why != "" && (err == nil || !strings.Contains(err.Error(), why)) {
		d.Errorf("root %s, state %s: %v, want %q", d.root, d.state, err, why)
	}
}

func (d *dirs) must(err error) {
	d.Helper()
	if err != nil {
		d.Fatal(err)
	}
}

// A root of another version is refused whole; what says no version is not.
func TestRootOfAnotherVersion(t *testing.T) {
	d := newDirs(t)
	d.prepares("")
	version := filepath.Join(d.root, "version")
	if data, err := os.ReadFile(version); err != nil || string(data) != layout {
		t.Errorf("version %q, %v", data, err)
	}
	for text, why := range map[string]string{"2\n": "is of version 2, this berth knows version 1", "0": "version 0", "1\n": "", "": "", "\x00\x00": "", "one": ""} {
		d.must(os.WriteFile(version, []byte(text), 0o600))
		d.prepares(why)
	}
	for _, odd := range []func() error{
		func() error { return errors.Join(os.Remove(version), syscall.Mkfifo(version, 0o600)) },
		func() error { return errors.Join(os.RemoveAll(version), os.MkdirAll(version+"/x", 0o700)) },
	} {
		d.must(odd())
		d.prepares("")
	}
}

// The state directory stays where it is while there are pods in it, whether it was
// moved or only the configuration was changed.
func TestStateElsewhere(t *testing.T) {
	d := newDirs(t)
	d.prepares("")
	old := d.state
	d.must(os.MkdirAll(filepath.Join(old, "containers", "c"), 0o700))
	d.prepares("")
	d.state = old + "-link"
	d.must(os.Symlink(old, d.state))
	d.prepares("") // the same by another path
	d.state = old + "-new"
	d.prepares("has its pods in state " + old)
	d.must(errors.Join(os.RemoveAll(d.state), os.Rename(old, d.state)))
	d.prepares("has its pods in state " + old)
	d.must(os.RemoveAll(filepath.Join(d.state, "containers"))) // or a reboot
	d.prepares("")
	moved := d.root + "-moved"
	d.must(os.Rename(d.root, moved))
	d.root = moved
	d.prepares("")
}

// A directory that has its mode is left as it is, also where nothing can be changed.
func TestDirectoriesOnAReadOnlyFilesystemRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skipf("skipped: mounting needs root, runs as uid %d", os.Geteuid())
	}
	top := t.TempDir()
	for name, mode := range map[string]os.FileMode{"right": 0o711, "open": 0o777} {
		if err := errors.Join(os.Mkdir(filepath.Join(top, name), 0o700), os.Chmod(filepath.Join(top, name), mode)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(unix.Mount(top, top, "", unix.MS_BIND, ""), unix.Mount("", top, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(top, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := makeDir(filepath.Join(top, "right")); err != nil {
		t.Error(err)
	}
	if err := makeDir(filepath.Join(top, "open")); !errors.Is(err, unix.EROFS) {
		t.Errorf("one that everybody may write to: %v", err)
	}
}
