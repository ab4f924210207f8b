package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sirupsen/logrus"

	"berth/oci"
	"berth/oci/monitor"
	"berth/oci/runc"
	"berth/runtime"
	"berth/runtime/config"
)

// handlers finds or starts the monitor and puts a driver over each configured
// OCI runtime. The service is made here, for it takes the exits; those of
// before are asked for by Restore.
func (d *assembled) handlers(ctx context.Context, cfg config.Config, log *logrus.Entry, parts *runtime.Parts) error {
	binary, err := monitorBinary(cfg)
	if err != nil {
		return err
	}
	if parts.PauseDir, err = pauseRootfs(cfg, binary); err != nil {
		return err
	}
	made := make(chan struct{})
	client, err := monitor.Open(ctx, monitor.Options{
		Socket: filepath.Join(cfg.State, "monitor.sock"), Binary: binary,
		OnExit: func(e monitor.Exit) {
			<-made
			if d.service != nil {
				d.service.Exited(runc.Exit(e))
			}
		},
		OnTrouble: func(err error) { log.WithError(err).Warn("monitor") },
	})
	if err != nil {
		return err
	}
	d.closers = append(d.closers, func() { logError(log, client.Close()) })
	defer close(made)
	parts.Handlers = map[string]oci.Runtime{}
	for name, h := range cfg.Runtime.Handlers {
		parts.Handlers[name], err = runc.New(runc.Options{Binary: h.Path, Root: filepath.Join(cfg.State, "runc", name), Monitor: client})
		if err != nil {
			return fmt.Errorf("key \"runtime.handlers.%s.path\": %w", name, err)
		}
	}
	parts.Handlers[""] = parts.Handlers[cfg.Runtime.DefaultHandler]
	d.service, err = runtime.New(*parts)
	return err
}

// monitorBinary is the configured one, or the one beside this binary.
func monitorBinary(cfg config.Config) (string, error) {
	path := cfg.Monitor
	if path == "" {
		self, err := os.Executable()
		if err != nil {
			return "", fmt.Errorf("find berth-monitor: %w", err)
		}
		path = filepath.Join(filepath.Dir(self), "berth-monitor")
	}
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("find berth-monitor (key \"monitor\"): %w", err)
	}
	return path, nil
}

// pauseRootfs is the root filesystem of all pause containers: the static
// monitor binary and empty mount points. Made anew at each start, so that it
// follows an upgrade; running pauses keep the old file.
func pauseRootfs(cfg config.Config, binary string) (string, error) {
	dir := filepath.Join(cfg.State, "pause")
	for _, sub := range []string{"proc", "dev", "sys"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return "", fmt.Errorf("make rootfs of pause: %w", err)
		}
	}
	b, err := os.ReadFile(binary)
	if err != nil {
		return "", fmt.Errorf("make rootfs of pause: %w", err)
	}
	path := filepath.Join(dir, "pause")
	if err := os.WriteFile(path+".tmp", b, 0o755); err != nil {
		return "", fmt.Errorf("make rootfs of pause: %w", err)
	}
	if err := os.Rename(path+".tmp", path); err != nil {
		return "", fmt.Errorf("make rootfs of pause: %w", err)
	}
	return dir, nil
}
