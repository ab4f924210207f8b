package oci

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	rspec "github.com/opencontainers/runtime-spec/specs-go"

	"berth/sandbox/regular"
)

const configFile = "config.json"

// WriteBundle makes the bundle directory where it is missing, mode 0700, and
// replaces its config.json atomically. It does not sync: a bundle does not outlive a reboot.
// RemoveBundle undoes it, also when it fails.
func WriteBundle(dir string, s *rspec.Spec) error {
	data, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode specification: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make bundle: %w", err)
	}
	path := filepath.Join(dir, configFile)
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	return nil
}

// maxSpec bounds a bundle's config.json. It is above what a specification can be:
// a request has at most 32 MiB, of which JSON makes six times as much at worst.
const maxSpec = 256 << 20

// ReadRaw reads a bundle's config.json as it stands. ErrNotFound when there is no
// bundle. What is no JSON is an error.
func ReadRaw(dir string) ([]byte, error) {
	data, err := regular.Read(filepath.Join(dir, configFile), maxSpec)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("read bundle %s: %w", dir, ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	if !json.Valid(data) {
		return nil, fmt.Errorf("read bundle %s: its %s is no JSON", dir, configFile)
	}
	return data, nil
}

// ReadProcess reads the process of a bundle's config.json, which an exec starts
// from. ErrNotFound when there is no bundle.
func ReadProcess(dir string) (*rspec.Process, error) {
	var s struct {
		Process *rspec.Process `json:"process"`
	}
	if err := decode(dir, &s); err != nil {
		return nil, err
	}
	if s.Process == nil {
		return nil, fmt.Errorf("read bundle %s: it has no process", dir)
	}
	return s.Process, nil
}

// ReadSpec reads a bundle's config.json, for those who are shown it. ErrNotFound
// when there is no bundle.
func ReadSpec(dir string) (*rspec.Spec, error) {
	s := &rspec.Spec{}
	if err := decode(dir, s); err != nil {
		return nil, err
	}
	return s, nil
}

func decode(dir string, v any) error {
	data, err := ReadRaw(dir)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("decode %s: %w", filepath.Join(dir, configFile), err)
	}
	return nil
}

// RemoveBundle removes a bundle directory and its files. Idempotent. The rootfs
// must be unmounted: a directory that is not empty below it is an error, and
// nothing of a mounted filesystem is ever removed. What stands in its place and is no
// directory is removed itself; nothing behind a link is touched.
func RemoveBundle(dir string) error {
	entries, err := ownEntries(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove bundle: %w", err)
	}
	for _, e := range entries {
		// Not RemoveAll: it would walk into what is still mounted. In the place of a
		// file nothing is.
		remove := os.Remove
		if filepath.Ext(e.Name()) == ".json" {
			remove = os.RemoveAll
		}
		if err := remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove bundle: %w", err)
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove bundle: %w", err)
	}
	return nil
}

// ownEntries is os.ReadDir that follows no link: what is no directory has none.
func ownEntries(dir string) ([]os.DirEntry, error) {
	if info, err := os.Lstat(dir); err != nil || !info.IsDir() {
		return nil, err
	}
	return os.ReadDir(dir)
}
