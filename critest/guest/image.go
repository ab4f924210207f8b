package main

import (
	"context"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

//go:embed image
var imageFiles embed.FS

// errImage: the image could not be made.
var errImage = errors.New("no guest: the image cannot be made")

// lock waits until the caller is the only one to make image or snapshot in dir,
// which it makes. The lock ends with the returned function or the process.
func lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the folder of the image: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock of the image: %w", err)
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("take the lock of the image: %w", err), file.Close())
	}
	return func() { _ = file.Close() }, nil // closing gives the lock back
}

// stamp names the image that these scripts make of a release.
func stamp(suite string) (string, error) {
	sum := sha256.New()
	fmt.Fprintln(sum, suite)
	err := fs.WalkDir(imageFiles, ".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		data, err := imageFiles.ReadFile(path)
		fmt.Fprintf(sum, "%s %d\n%s", path, len(data), data)
		return err
	})
	return fmt.Sprintf("%x", sum.Sum(nil))[:16], err
}

// ensureImage makes the image of a release in dir when it is missing or of other
// scripts than these, and returns its stamp. Needs root, apt and the lock.
func ensureImage(ctx context.Context, dir, suite string) (string, error) {
	want, err := stamp(suite)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errImage, err)
	}
	mark := filepath.Join(dir, "stamp")
	if have, err := os.ReadFile(mark); err == nil && strings.TrimSpace(string(have)) == want {
		if _, err := exec.LookPath("qemu-system-x86_64"); err == nil {
			return want, nil
		}
	}
	for _, pattern := range []string{mark, filepath.Join(dir, "snapshot-*"), filepath.Join(dir, "building.*")} {
		if err := removeAll(pattern); err != nil {
			return "", err
		}
	}
	scripts, err := os.MkdirTemp("", "guest-image-")
	if err != nil {
		return "", fmt.Errorf("%w: %w", errImage, err)
	}
	defer os.RemoveAll(scripts)
	if err := os.CopyFS(scripts, imageFiles); err != nil {
		return "", fmt.Errorf("%w: %w", errImage, err)
	}
	build := exec.CommandContext(ctx, "bash", filepath.Join(scripts, "image", "build.sh"), dir, suite)
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	build.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	build.Cancel = func() error { return syscall.Kill(-build.Process.Pid, syscall.SIGTERM) }
	if err := build.Run(); err != nil {
		return "", fmt.Errorf("%w: image/build.sh: %w", errImage, err)
	}
	if err := os.WriteFile(mark, []byte(want+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("%w: %w", errImage, err)
	}
	return want, nil
}

func removeAll(pattern string) error {
	paths, err := filepath.Glob(pattern)
	if err != nil {
		return fmt.Errorf("list %s: %w", pattern, err)
	}
	for _, path := range paths {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove an old image: %w", err)
		}
	}
	return nil
}
