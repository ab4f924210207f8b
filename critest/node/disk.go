package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// errMoving: a disk was written to whenever it was copied.
var errMoving = errors.New("the disk does not stand still")

// diskDir is where the disk of Options.RootDisk is, in memory: copies must be quick.
func (n *Node) diskDir() string { return filepath.Join(n.Dir, "disk") }

// makeDisk makes an ext4 of the size in a file and mounts it as root.
func (n *Node) makeDisk(size int64) error {
	if err := os.Mkdir(n.diskDir(), 0o700); err != nil {
		return fmt.Errorf("make a disk for the node's root: %w", err)
	}
	if err := syscall.Mount("tmpfs", n.diskDir(), "tmpfs", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount a tmpfs for the node's disk: %w", err)
	}
	file := filepath.Join(n.diskDir(), "root")
	err := os.WriteFile(file, nil, 0o600)
	if err == nil {
		err = os.Truncate(file, size)
	}
	if err != nil {
		return fmt.Errorf("make a disk for the node's root: %w", err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-m", "0", file).CombinedOutput(); err != nil {
		return fmt.Errorf("make a disk for the node's root: %w: %s", err, out)
	}
	return n.mountDisk(file)
}

func (n *Node) mountDisk(file string) error {
	if out, err := exec.Command("mount", "-t", "ext4", "-o", "loop", file, n.Root()).CombinedOutput(); err != nil {
		return fmt.Errorf("mount %s as the node's root: %w: %s", file, err, out)
	}
	n.disk = file
	return os.Chmod(n.Root(), 0o711)
}

// CopyDisk copies the disk, to a name that no copy has had, as it is at one instant, as a power cut would leave it:
// what the daemon has written and the kernel has not is not in the copy.
func (n *Node) CopyDisk(name string) (string, error) {
	to := filepath.Join(n.diskDir(), name)
	var before []byte
	for range 200 {
		data, err := os.ReadFile(n.disk)
		if err != nil {
			return "", fmt.Errorf("copy the node's disk: %w", err)
		}
		if bytes.Equal(before, data) {
			return to, os.WriteFile(to, data, 0o600)
		}
		before = data
	}
	return "", errMoving
}

// UseDisk does to the node what a power cut does, and gives it a copy of its disk. A
// daemon is to be launched then.
func (n *Node) UseDisk(file string) error {
	if err := n.LoseState(); err != nil {
		return err
	}
	if n.watch != nil {
		if err := n.watch.Close(); err != nil {
			return err
		}
		n.watch = nil
	}
	var err error
	for range 100 {
		if err = syscall.Unmount(n.Root(), 0); !errors.Is(err, syscall.EBUSY) {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		return fmt.Errorf("unmount the node's root: %w", err)
	}
	if err := n.mountDisk(file); err != nil {
		return err
	}
	return n.watchPods()
}
