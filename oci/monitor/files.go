package monitor

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"berth/sandbox/regular"
)

// Names of the files in a bundle.
const (
	containerFile = "monitor.json"
	exitFile      = "exit.json"
)

// WriteExit writes the bundle's exit.json, replacing it atomically.
func WriteExit(bundle string, e Exit) error {
	e.Version = Version
	return writeJSON(filepath.Join(bundle, exitFile), e)
}

// ReadExit reads the bundle's exit.json; os.ErrNotExist when there is none.
func ReadExit(bundle string) (Exit, error) {
	var e Exit
	err := readJSON(filepath.Join(bundle, exitFile), &e)
	return e, err
}

// WriteContainer writes the bundle's monitor.json, replacing it atomically.
func WriteContainer(c Container) error {
	c.Version, c.Exit = Version, nil
	return writeJSON(filepath.Join(c.Bundle, containerFile), c)
}

// ReadContainer reads the bundle's monitor.json; os.ErrNotExist when there is none.
func ReadContainer(bundle string) (Container, error) {
	var c Container
	err := readJSON(filepath.Join(bundle, containerFile), &c)
	return c, err
}

// RemoveContainer removes the bundle's monitor.json, which a monitor that died while it
// made the container may have left. Idempotent.
func RemoveContainer(bundle string) { _ = os.Remove(filepath.Join(bundle, containerFile)) }

// writeJSON needs no sync: after a power cut no container is left to tell of.
func writeJSON(path string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", path, err)
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, append(data, '\n'), 0o600); err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(tmp, path); err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("replace %s: %w", path, err)
	}
	return nil
}

func readJSON(path string, v any) error {
	data, err := regular.Read(path, regular.Most)
	if err != nil {
		return fmt.Errorf("read record: %w", err)
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("decode %s: %w", path, err)
	}
	return nil
}
