package monitor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// FreezeCgroup stops every process of a cgroup directory, and of those below
// it, until ThawCgroup: by v1's freezer or by v2's cgroup.freeze, whichever the
// directory has. Idempotent. It blocks until all of them stand still; when ctx
// ends before, they go on.
func FreezeCgroup(ctx context.Context, dir string) error {
	if err := guard(dir); err != nil {
		return err
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		if err := setFreezer(dir, true); err != nil {
			return fmt.Errorf("freeze cgroup %s: %w", dir, err)
		}
		if frozen(dir) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("freeze cgroup %s: some of its processes do not stop: %w", dir, errors.Join(ctx.Err(), ThawCgroup(dir)))
		case <-time.After(wait):
		}
	}
}

// ThawCgroup lets the processes of a cgroup directory go on. Idempotent; nil
// when the directory is gone.
func ThawCgroup(dir string) error {
	if err := guard(dir); err != nil {
		return err
	}
	if err := setFreezer(dir, false); err != nil && !gone(err) {
		return fmt.Errorf("thaw cgroup %s: %w", dir, err)
	}
	return nil
}

// setFreezer writes to the file of whichever version the directory is of.
func setFreezer(dir string, freeze bool) error {
	file, text := filepath.Join(dir, "freezer.state"), "THAWED"
	if freeze {
		text = "FROZEN"
	}
	if _, err := os.Stat(file); err != nil {
		file, text = filepath.Join(dir, "cgroup.freeze"), "0"
		if freeze {
			text = "1"
		}
	}
	return os.WriteFile(file, []byte(text), 0)
}

func frozen(dir string) bool {
	if data, err := os.ReadFile(filepath.Join(dir, "freezer.state")); err == nil {
		return strings.TrimSpace(string(data)) == "FROZEN"
	}
	data, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
	return err == nil && strings.Contains(string(data), "frozen 1")
}
