package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/runtime/config"
)

// A key whose meaning is a leaf's is checked with the file, by name.
func TestConfigCheckKnowsPins(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.toml")
	for pins, ok := range map[string]bool{
		`"busybox", "registry.example/base/*", "*pause*"`: true,
		`"busybox", "registry.example/*/pause"`:           false,
		`""`:                                              false,
	} {
		if err := os.WriteFile(file, []byte("[image]\npinned = ["+pins+"]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := load(file)
		if ok != (err == nil) || err != nil && (!errors.Is(err, config.ErrInvalid) || !strings.Contains(err.Error(), "image.pinned")) {
			t.Errorf("pinned = [%s]: %v", pins, err)
		}
	}
}
