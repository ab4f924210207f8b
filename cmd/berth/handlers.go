package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/sirupsen/logrus"

	"berth/oci"
	"berth/oci/monitor"
	"berth/oci/runc"
	"berth/oci/spec"
	"berth/runtime"
	"berth/runtime/config"
	"berth/runtime/operation"
	"berth/sandbox/outside"
	"berth/sandbox/regular"
)

// handlers finds or starts the monitor and puts a driver over each configured
// OCI runtime. The service is made here, for it takes the exits; those of
// before are asked for by Restore.
func (d *assembled) handlers(ctx context.Context, cfg config.Config, log *logrus.Entry, parts *runtime.Parts) error {
	binary, err := monitorBinary(cfg)
	if err != nil {
		return err
	}
	d.onset.at("make the rootfs of pause containers")
	pause, err := pauseRootfs(cfg, binary)
	if err != nil {
		return err
	}
	parts.Pause = func() (string, error) {
		if _, err := os.Lstat(filepath.Join(pause, "pause")); err == nil {
			return pause, nil
		}
		return pauseRootfs(cfg, binary) // somebody has removed it
	}
	made := make(chan struct{})
	d.onset.at("find or start the monitor")
	client, err := monitor.Open(ctx, monitor.Options{
		Socket: filepath.Join(cfg.State, "monitor.sock"), Binary: binary,
		OnExit: func(e monitor.Exit) {
			<-made
			if d.service != nil {
				d.service.Exited(runc.Exit(e))
			}
		},
		OnTrouble: func(err error) { log.WithError(err).Warn("monitor") },
		Await:     operation.Await,
		Shelf:     d.systemd.shelf(), Shelved: d.shelved,
	})
	if err != nil {
		return err
	}
	d.closers = append(d.closers, func() { logError(log, client.Close()) })
	d.renewMonitor = func() { renewMonitor(ctx, client, binary, log) }
	d.onset.at("renew the monitor")
	d.renewMonitor()
	d.onset.at("find the OCI runtimes")
	parts.MonitorPID, parts.MonitorMissing, parts.LogTrouble = client.MonitorPID, client.Missing, client.LogTrouble
	defer close(made)
	if err := openHandlers(cfg, client, parts); err != nil {
		return err
	}
	if err := retireHandlers(cfg, client, log, parts); err != nil {
		return err
	}
	d.service, err = runtime.New(*parts)
	return err
}

// lookOutside makes the Looker that all others look with.
func (d *assembled) lookOutside(cfg config.Config, parts *runtime.Parts) error {
	binary, err := monitorBinary(cfg)
	if err != nil {
		return err
	}
	parts.Outside = outside.New(outside.Options{Command: []string{binary, "look"}, Limit: time.Duration(cfg.Runtime.HostPathTimeout),
		LimitKey: "runtime.host_path_timeout", Await: operation.Await, Whereabouts: monitor.Whereabouts})
	d.outside = parts.Outside
	d.closers = append(d.closers, parts.Outside.Close)
	return nil
}

// renewMonitor lets a monitor of an earlier installation become the installed one.
// Where that cannot be, the old one serves on.
func renewMonitor(ctx context.Context, client *monitor.Client, binary string, log *logrus.Entry) {
	log = log.WithFields(logrus.Fields{"monitor": client.MonitorPID(), "binary": binary})
	switch renewed, err := client.Renew(ctx); {
	case err != nil:
		log.WithError(err).Warn("the running monitor is another build than the installed one, and does not become it")
	case renewed:
		log.Info("the monitor has become the installed build in place")
	}
}

// openHandlers makes the drivers of the configured handlers.
func openHandlers(cfg config.Config, client *monitor.Client, parts *runtime.Parts) error {
	parts.Handlers, parts.BaseSpecs = map[string]oci.Runtime{}, map[string]*rspec.Spec{}
	for name, h := range cfg.Runtime.Handlers {
		binary, err := program(h.Path)
		if err != nil {
			return fmt.Errorf("key %q: find OCI runtime: %w", config.HandlerKey(name, "path"), err)
		}
		rt, err := runc.New(runc.Options{Binary: binary, Root: filepath.Join(cfg.State, "runc", name), Monitor: client, Leash: parts.Leash,
			Answer: parts.Outside.Answer, Await: operation.Await})
		if err != nil {
			return fmt.Errorf("key %q: %w", config.HandlerKey(name, "path"), err)
		}
		parts.Handlers[name] = rt
		if h.BaseSpec == "" {
			continue
		}
		if parts.BaseSpecs[name], err = readBaseSpec(h.BaseSpec); err != nil {
			return fmt.Errorf("key %q: %w", config.HandlerKey(name, "base_spec"), err)
		}
	}
	return nil
}

func readBaseSpec(path string) (*rspec.Spec, error) {
	data, err := regular.Read(path, regular.Most)
	if err != nil {
		return nil, err
	}
	base, err := spec.ParseBase(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return base, nil
}

// retireHandlers makes drivers for handlers that are configured no more but
// have pods or containers, so that these can be stopped and removed. Their
// binary is not known any more; the default handler's stands in.
func retireHandlers(cfg config.Config, client *monitor.Client, log *logrus.Entry, parts *runtime.Parts) error {
	used := map[string]bool{}
	for _, sb := range parts.Records.Sandboxes.List() {
		used[sb.Runtime] = true
	}
	for _, c := range parts.Records.Containers.List() {
		used[c.Handler] = true
	}
	parts.Retired = map[string]oci.Runtime{}
	for name := range used {
		if _, ok := parts.Handlers[name]; ok || name == "" {
			continue
		}
		log.WithField("handler", name).Warn("the configuration has this handler no more, but pods use it; they can be stopped and removed")
		binary := cfg.Runtime.Handlers[cfg.Runtime.DefaultHandler].Path
		rt, err := runc.New(runc.Options{Binary: binary, Root: filepath.Join(cfg.State, "runc", name), Monitor: client, Leash: parts.Leash,
			Answer: parts.Outside.Answer, Await: operation.Await})
		if err != nil {
			return fmt.Errorf("stand in for handler %q: %w", name, err)
		}
		parts.Retired[name] = rt
	}
	return nil
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
	if _, err := program(path); err != nil {
		return "", fmt.Errorf("find berth-monitor: %w", err)
	}
	return path, nil
}

// program finds an executable that is a file, for a FIFO may have the mode of one.
func program(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", err
	}
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
		return "", cmp.Or(err, fmt.Errorf("%s is no regular file", path))
	}
	return path, nil
}

// maxBinary bounds the monitor's program, in bytes.
const maxBinary = 256 << 20

// pauseRootfs is the root filesystem of all pause containers: the static
// monitor binary and empty mount points. Made anew by a start after an upgrade;
// running pauses keep the old file. A start without one writes nothing, so that a
// full state directory does not keep the daemon from it.
func pauseRootfs(cfg config.Config, binary string) (string, error) {
	dir := filepath.Join(cfg.State, "pause")
	for _, sub := range []string{"proc", "dev", "sys"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return "", fmt.Errorf("make rootfs of pause: %w", err)
		}
	}
	b, err := regular.Read(binary, maxBinary)
	if err != nil {
		return "", fmt.Errorf("make rootfs of pause: %w", err)
	}
	path := filepath.Join(dir, "pause")
	if there, err := regular.Read(path, maxBinary); err == nil && bytes.Equal(there, b) {
		return dir, nil
	}
	_ = os.RemoveAll(path + ".tmp") // it may be anything
	if err := os.WriteFile(path+".tmp", b, 0o755); err != nil {
		return "", fmt.Errorf("make rootfs of pause: %w", err)
	}
	if err := os.Rename(path+".tmp", path); err != nil {
		return "", fmt.Errorf("make rootfs of pause: %w", err)
	}
	return dir, nil
}
