package main

import (
	"fmt"
	"os"

	"berth/runtime/config"
)

// systemdRuns is the folder that stands while systemd is the node's init, see
// sd_booted(3).
const systemdRuns = "/run/systemd/system"

// cgroupDriver settles the configured cgroup driver: auto is systemd where that
// is the node's init, for two masters of one tree get into each other's way.
func cgroupDriver(configured string) (string, error) {
	info, err := os.Lstat(systemdRuns)
	systemd := err == nil && info.IsDir()
	switch {
	case configured == config.Systemd && !systemd:
		return "", fmt.Errorf("systemd is not the init of this node (no %s)", systemdRuns)
	case configured == config.Auto && systemd:
		return config.Systemd, nil
	case configured == config.Auto:
		return config.Cgroupfs, nil
	}
	return configured, nil
}
