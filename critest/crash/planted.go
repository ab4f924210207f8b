package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"berth/oci/monitor"
	"berth/sandbox/leakcheck"
)

// plant is a leak of one kind that the test makes itself: a check that finds no leak
// must be one that would.
type plant struct {
	says string // how the check begins to tell of it
	make func(*world) (undo func() error, err error)
}

// plants are leaks of every kind.
var plants = []plant{
	{"process ", func(*world) (func() error, error) {
		c := exec.Command("sleep", "100000")
		return func() error { err := c.Process.Kill(); _ = c.Wait(); return err }, c.Start()
	}},
	{"mount ", func(w *world) (func() error, error) {
		dir := filepath.Join(w.Dir, "planted")
		err := os.Mkdir(dir, 0o700)
		if err == nil {
			err = syscall.Mount("tmpfs", dir, "tmpfs", 0, "")
		}
		return func() error { return errors.Join(syscall.Unmount(dir, 0), os.Remove(dir)) }, err
	}},
	{"mount ", func(w *world) (func() error, error) { // a network namespace without a process
		file := filepath.Join(w.State(), "namespaces", "planted")
		err := os.WriteFile(file, nil, 0o600)
		if err == nil {
			err = command("unshare", "--net="+file, "true")
		}
		return func() error { return errors.Join(syscall.Unmount(file, 0), os.Remove(file)) }, err
	}},
	{"network link veth", func(*world) (func() error, error) {
		return func() error { return command("ip", "link", "del", "veth90") }, command("ip", "link", "add", "veth90", "type", "veth", "peer", "name", "veth91")
	}},
	{"cgroup ", func(w *world) (func() error, error) { // of a pod there once was
		id := strings.Repeat("0a", 32)
		roots, err := monitor.CgroupRoots()
		if err != nil {
			return nil, err
		}
		parent := filepath.Join(roots[0], "berth") // there or not
		record, dir := filepath.Join(w.Root(), "sandboxes", id), filepath.Join(parent, id)
		undo := func() error {
			err := os.Remove(dir)
			_ = os.Remove(parent) // if nobody else needs it
			return err
		}
		return undo, errors.Join(os.Mkdir(record, 0o700), os.Remove(record), os.MkdirAll(dir, 0o755))
	}},
	{"cgroup ", func(w *world) (func() error, error) { // of a plugin
		held, err := os.ReadFile(filepath.Join(w.State(), "leash"))
		dir := filepath.Join(string(held), "ADD.planted.1")
		return func() error { return os.Remove(dir) }, errors.Join(err, os.Mkdir(dir, 0o700))
	}},
	{"lease ", func(w *world) (func() error, error) { return file(filepath.Join(w.Leases, w.Bridge, "10.88.1.250")) }},
	{"lease ", func(w *world) (func() error, error) {
		return file(filepath.Join(w.leases(), "crash-iptables", "10.87.0.250"))
	}},
	{"rule chain PREROUTING: ip saddr 10.87.0.250", func(*world) (func() error, error) { // of iptables, in a table that no plugin has
		return func() error { return command("nft", "delete", "table", "ip", "raw") },
			command("iptables", "-t", "raw", "-A", "PREROUTING", "-s", "10.87.0.250", "-j", "ACCEPT")
	}},
	{"rule table ip planted", func(*world) (func() error, error) {
		return func() error { return command("nft", "delete", "table", "ip", "planted") }, command("nft", "add", "table", "ip", "planted")
	}},
	{"file ", func(w *world) (func() error, error) { return file(filepath.Join(w.State(), "runc", "runc", "planted")) }},
	{"file ", func(w *world) (func() error, error) {
		return file(filepath.Join(w.State(), "runc", "iptables", "planted"))
	}},
	{"file ", func(w *world) (func() error, error) { return file(filepath.Join(w.Root(), "containers", "planted")) }},
	{"file ", func(w *world) (func() error, error) {
		return file(filepath.Join(w.Root(), "cni", "results", "planted"))
	}},
	{"file ", func(w *world) (func() error, error) {
		return file(filepath.Join(w.Root(), "images", "blobs", "planted"))
	}},
	{"descriptors of the daemon", func(w *world) (func() error, error) { return connections(w.Socket) }},
	{"goroutines", func(w *world) (func() error, error) { return connections(w.Socket) }},
	{"descriptors of the monitor", func(w *world) (func() error, error) { return connections(filepath.Join(w.State(), "monitor.sock")) }},
}

func command(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

func file(path string) (func() error, error) {
	return func() error { return os.Remove(path) }, os.WriteFile(path, nil, 0o600)
}

// connections are some that stay, to a process that serves a socket.
func connections(socket string) (func() error, error) {
	var all []net.Conn
	undo := func() (err error) {
		for _, c := range all {
			err = errors.Join(err, c.Close())
		}
		return err
	}
	for range 8 {
		c, err := net.Dial("unix", socket)
		if err != nil {
			return undo, err
		}
		all = append(all, c)
	}
	return undo, nil
}

// notices wants each leak to be told that is made for it, and none to be told then.
func (w *world) notices(ctx context.Context) error {
	for _, p := range plants {
		undo, err := p.make(w)
		if err == nil {
			err = w.notice(p.says)
		}
		if undo != nil {
			err = errors.Join(err, undo())
		}
		if err != nil {
			return fmt.Errorf("a leak made by the test, %s: %w", strings.TrimSpace(p.says), err)
		}
	}
	return w.left(ctx)
}

func (w *world) notice(says string) error {
	for end := time.Now().Add(leakcheck.Patience(settle)); ; time.Sleep(20 * time.Millisecond) {
		leaks, err := w.leaks()
		if err != nil {
			return err
		}
		if slices.ContainsFunc(leaks, func(l string) bool { return strings.Contains(l, says) }) {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("it is not noticed, only %q", leaks)
		}
	}
}
