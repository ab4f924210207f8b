package oci

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
)

func TestBundleIsWrittenReadAndRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "containers", "c")
	for _, args := range [][]string{{"/first"}, {"/second", "arg"}} { // the second replaces the first
		want := &rspec.Spec{Version: "1.2.0", Process: &rspec.Process{Args: args, Cwd: "/"}}
		if err := WriteBundle(dir, want); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(filepath.Join(dir, "config.json"))
		if err != nil {
			t.Fatal(err)
		}
		var got rspec.Spec
		if err := json.Unmarshal(data, &got); err != nil || !reflect.DeepEqual(&got, want) {
			t.Errorf("config.json = %s, %v", data, err)
		}
		if p, err := ReadProcess(dir); err != nil || !reflect.DeepEqual(p, want.Process) {
			t.Errorf("process = %+v, %v", p, err)
		}
	}
	if info, _ := os.Stat(dir); info.Mode().Perm() != 0o700 {
		t.Errorf("mode of the bundle is %v", info.Mode())
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("the bundle has %v", entries)
	}
	if err := os.WriteFile(filepath.Join(dir, "exit.json.new"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "rootfs"), 0o755); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := RemoveBundle(dir); err != nil {
			t.Errorf("remove: %v", err)
		}
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the bundle is left: %v", err)
	}
}

// What is below a rootfs may be a mounted volume: it is never removed.
func TestRemoveBundleLeavesAFilledRootfs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	file := filepath.Join(dir, "rootfs", "precious")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := RemoveBundle(dir); err == nil {
		t.Error("remove says nothing")
	}
	if _, err := os.Lstat(file); err != nil {
		t.Errorf("what was in the rootfs is gone: %v", err)
	}
}

func TestReadProcessOfABrokenBundle(t *testing.T) {
	dir := t.TempDir()
	if _, err := ReadProcess(dir); !errors.Is(err, ErrNotFound) {
		t.Errorf("no config.json: %v", err)
	}
	for _, text := range []string{"{", "{}", `{"process":5}`} {
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if p, err := ReadProcess(dir); err == nil || errors.Is(err, ErrNotFound) {
			t.Errorf("%s: %+v, %v", text, p, err)
		}
	}
}

func TestExecErrorSaysTheCause(t *testing.T) {
	for _, c := range []struct {
		e    ExecError
		want string
	}{
		{ExecError{Args: []string{"/usr/bin/runc", "start"}, ExitCode: 1, Stderr: "no such thing"}, "runc: no such thing"},
		{ExecError{Args: []string{"/usr/bin/runc"}, ExitCode: -1, Err: os.ErrPermission}, "runc: permission denied"},
		{ExecError{Args: []string{"runc", "create"}, ExitCode: 137, Err: ErrRefused}, "runc ended with code 137 and said nothing"},
		{ExecError{ExitCode: 3}, "OCI runtime ended with code 3 and said nothing"},
	} {
		if got := c.e.Error(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	if err := error(&ExecError{Err: ErrNotRunning}); !errors.Is(err, ErrNotRunning) {
		t.Error("the sentinel is lost")
	}
}

// TestRemoveBundleFollowsNoLink finds something else in a bundle's place.
func TestRemoveBundleFollowsNoLink(t *testing.T) {
	node := t.TempDir()
	theirs := filepath.Join(node, "theirs.json")
	dir := filepath.Join(t.TempDir(), "bundle")
	for name, put := range map[string]func() error{
		"link": func() error { return os.Symlink(node, dir) },
		"file": func() error { return os.WriteFile(dir, nil, 0o600) },
	} {
		if err := errors.Join(os.WriteFile(theirs, nil, 0o600), put()); err != nil {
			t.Fatal(err)
		}
		if err := RemoveBundle(dir); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: it is left: %v", name, err)
		}
		if _, err := os.Stat(theirs); err != nil {
			t.Errorf("%s: a file of the node's: %v", name, err)
		}
	}
}
