package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// bootTimeout bounds a boot under emulation on a busy machine.
const bootTimeout = 5 * time.Minute

// snapshot is a guest whose agent is awake: files in the image's folder.
type snapshot struct{ memory, state, disk string }

// newMemory makes the guest's memory: a file without a name, so that nothing
// stays behind whatever happens.
func newMemory() (*os.File, error) {
	fd, err := unix.MemfdCreate("guest", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make the guest's memory: %w", err)
	}
	file := os.NewFile(uintptr(fd), "guest-memory")
	if err := file.Truncate(memory << 20); err != nil {
		return nil, errors.Join(fmt.Errorf("make the guest's memory: %w", err), file.Close())
	}
	return file, nil
}

// copyData copies what is not a hole. Both files have their size already or get
// it, and their positions end anywhere.
func copyData(to, from *os.File) error {
	info, err := from.Stat()
	if err != nil {
		return err
	}
	if err := to.Truncate(info.Size()); err != nil {
		return err
	}
	for end := int64(0); ; {
		begin, err := unix.Seek(int(from.Fd()), end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // nothing but a hole follows
		}
		if err != nil {
			return err
		}
		if end, err = unix.Seek(int(from.Fd()), begin, unix.SEEK_HOLE); err != nil {
			return err
		}
		if _, err := to.Seek(begin, io.SeekStart); err != nil {
			return err
		}
		if _, err := io.Copy(to, io.NewSectionReader(from, begin, end-begin)); err != nil {
			return err
		}
	}
}

// copyFile makes a sparse copy under another name.
func copyFile(to, from string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(copyData(target, source), target.Close())
}

// ensureSnapshot returns the snapshot of the image in dir, and makes it when there
// is none for this image and this qemu. Needs the lock.
func ensureSnapshot(ctx context.Context, dir, stamp string) (snapshot, error) {
	version, err := exec.Command("qemu-system-x86_64", "--version").Output()
	if err != nil {
		return snapshot{}, fmt.Errorf("%w: ask qemu's version: %w", errGuest, err)
	}
	line, _, _ := strings.Cut(string(version), "\n")
	command := strings.Join((&machine{}).command(drive{}), " ")
	key := fmt.Sprintf("%x", sha256.Sum256([]byte(line+command+stamp)))[:12]
	base := filepath.Join(dir, "snapshot-"+key)
	s := snapshot{memory: base + ".memory", state: base + ".state", disk: base + ".disk"}
	if _, err := os.Stat(s.state); err == nil {
		return s, nil
	}
	if err := removeAll(filepath.Join(dir, "snapshot-*")); err != nil {
		return s, err
	}
	fmt.Fprintln(os.Stderr, "guest: booting once, for the snapshot (half a minute)")
	if err := bake(ctx, dir, s); err != nil {
		return s, errors.Join(fmt.Errorf("make the snapshot: %w", err), removeAll(base+"*"))
	}
	return s, nil
}

// bake boots until the agent is awake and keeps the machine's state; the file of
// the state is the last to appear.
func bake(ctx context.Context, dir string, s snapshot) error {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	if err := copyFile(s.disk, filepath.Join(dir, "root.img")); err != nil {
		return err
	}
	ram, err := newMemory()
	if err != nil {
		return err
	}
	defer ram.Close()
	m, err := start(drive{image: dir, disk: s.disk, write: true, memory: ram}, nil)
	if m != nil {
		defer m.close()
	}
	if err != nil {
		return err
	}
	if _, err := m.expect(ctx, "awake"); err != nil {
		return err
	}
	time.Sleep(2 * time.Second) // systemd finishes what it began beside the agent
	state := s.state + ".new"
	if err := m.monitor.transfer("migrate", "cat >"+shellWord(state)); err != nil {
		return err
	}
	if err := m.monitor.do("quit", nil, nil); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	m.ended <- <-m.ended // the disk is written
	target, err := os.OpenFile(s.memory, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(copyData(target, ram), target.Close()); err != nil {
		return err
	}
	return os.Rename(state, s.state)
}
