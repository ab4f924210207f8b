package main

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"berth/runtime/config"
)

// The pause's root filesystem is made of the installed monitor, whatever is left
// there of an earlier start, and not written again for the same one.
func TestPauseRootfs(t *testing.T) {
	cfg := config.Config{State: t.TempDir()}
	binary := filepath.Join(t.TempDir(), "monitor")
	path := filepath.Join(cfg.State, "pause", "pause")
	made := func(build string) os.FileInfo {
		t.Helper()
		if err := os.WriteFile(binary, []byte(build), 0o755); err != nil {
			t.Fatal(err)
		}
		dir, err := pauseRootfs(cfg, binary)
		if err != nil || dir != filepath.Dir(path) {
			t.Fatalf("%s: %q, %v", build, dir, err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != build {
			t.Fatalf("%s: the pause is %q, %v", build, got, err)
		}
		info, err := os.Lstat(path)
		if err != nil || info.Mode() != 0o755 {
			t.Fatalf("%s: %v, %v", build, info, err)
		}
		return info
	}
	first := made("one")
	if err := unix.Mkfifo(path+".tmp", 0o600); err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(first, made("one")) {
		t.Error("the same build is written again")
	}
	if os.SameFile(first, made("two")) {
		t.Error("a file that pauses may run is written to")
	}
}
