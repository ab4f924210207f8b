package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containernetworking/cni/libcni"
)

// retryPause lies between two attempts at DEL.
const retryPause = 100 * time.Millisecond

// Plan chooses the network and works out all that DEL would need. The caller
// writes the Result into the pod's record before Setup, so that whatever happens
// Teardown knows what to undo. It looks at the configuration directory, so a file
// that has just been written is used. Errors: ErrNotReady, ErrInvalid.
func (m *Manager) Plan(p PodNetwork) (*Result, error) {
	args, err := cniArgs(p)
	if err != nil {
		return nil, err
	}
	ports, err := portMappings(p.PortMappings)
	if err != nil {
		return nil, err
	}
	caps, err := capabilities(p, ports)
	if err != nil {
		return nil, err
	}
	m.check()
	m.mu.Lock()
	loaded, notReady := m.loaded, m.readyLocked()
	m.mu.Unlock()
	if notReady != nil {
		return nil, notReady
	}
	r := &Result{Network: loaded.list.Name, Config: loaded.bytes, Args: args, Capabilities: caps, Ports: ports}
	if !mapsPorts(loaded.list) {
		r.UnmappedPorts = len(ports) > 0
		delete(r.Capabilities, capPortMappings)
	}
	return r, nil
}

// mapsPorts reports whether a plugin of the list takes port mappings.
func mapsPorts(list *libcni.NetworkConfigList) bool {
	for _, p := range list.Plugins {
		if p.Network.Capabilities[capPortMappings] {
			return true
		}
	}
	return false
}

// Setup runs ADD of the planned network in the namespace p.NetNS and returns the
// plan completed with its result; the plan itself is not changed. It blocks until
// the plugins are done, at most Options.Timeout. On error it has run DEL, for
// which it takes as long again; when that has not succeeded either, the error is
// an ErrTeardown too and the caller must keep the record and call Teardown.
// Errors: ErrSetup, ErrTeardown, ErrPluginNotFound.
func (m *Manager) Setup(ctx context.Context, p PodNetwork, plan *Result) (*Result, error) {
	list, err := parseList(plan.Config)
	if err != nil {
		return nil, fmt.Errorf("%w %s: read the planned network: %w", ErrSetup, p.ID, err)
	}
	if !isNamespace(p.NetNS) {
		return nil, fmt.Errorf("%w %s: %q is not a network namespace of its own", ErrSetup, p.ID, p.NetNS)
	}
	if err := m.answer(ctx, list); err != nil {
		return nil, fmt.Errorf("%w %s with network %q: %w", ErrSetup, p.ID, plan.Network, err)
	}
	result, err := m.add(ctx, list, p, plan)
	if err == nil {
		return result, nil
	}
	err = fmt.Errorf("%w %s with network %q: %w", ErrSetup, p.ID, plan.Network, pluginErrorOf(err))
	if undo := m.Teardown(context.WithoutCancel(ctx), p, plan); undo != nil {
		err = errors.Join(err, undo)
	}
	return nil, err
}

func (m *Manager) add(ctx context.Context, list *libcni.NetworkConfigList, p PodNetwork, plan *Result) (*Result, error) {
	ctx, cancel := context.WithTimeout(ctx, m.o.Timeout)
	defer cancel()
	added, err := m.cni.AddNetworkList(ctx, list, plan.runtimeConf(p))
	if err != nil {
		return nil, err
	}
	result := *plan
	if err := result.take(added); err != nil {
		return nil, err
	}
	return &result, nil
}

// Teardown runs DEL of the network in r, which may be a plan whose ADD was never
// begun, has not succeeded, or may still have gone through. It needs neither the
// configuration directory nor the namespace nor libcni's cache. It is idempotent
// and tries twice: first the chain as it stands, then each plugin by itself, so
// that one that fails does not keep the others from giving back what they hold.
// It blocks for at most twice Options.Timeout. Errors: ErrTeardown,
// ErrPluginNotFound (only if ADD had succeeded: a plugin that was never there
// holds nothing). Before, it waits for what an earlier daemon left running for the
// pod, and ends it: an ADD at once, a DEL after Options.Timeout.
func (m *Manager) Teardown(ctx context.Context, p PodNetwork, r *Result) error {
	if r == nil || len(r.Config) == 0 {
		return nil
	}
	list, err := parseList(r.Config)
	if err != nil {
		return fmt.Errorf("%w %s: read the recorded network: %w", ErrTeardown, p.ID, err)
	}
	if !isNamespace(p.NetNS) {
		p.NetNS = "" // CNI's way to say that it has vanished
	}
	if err := m.o.Runs.Settle(ctx, p.ID, m.o.Timeout); err != nil {
		return fmt.Errorf("%w %s from network %q: %w", ErrTeardown, p.ID, r.Network, err)
	}
	if err := m.answer(ctx, list); err != nil {
		return fmt.Errorf("%w %s from network %q: %w", ErrTeardown, p.ID, r.Network, err)
	}
	if err = m.del(ctx, list, p, r); err == nil {
		return nil
	}
	if !errors.Is(err, ErrPluginNotFound) && sleep(ctx, retryPause) != nil {
		return fmt.Errorf("%w %s from network %q: %w", ErrTeardown, p.ID, r.Network, pluginErrorOf(err))
	}
	if err = m.delEach(ctx, list, p, r); err != nil {
		return fmt.Errorf("%w %s from network %q: %w", ErrTeardown, p.ID, r.Network, err)
	}
	return nil
}

// del runs DEL of the whole chain once.
func (m *Manager) del(ctx context.Context, list *libcni.NetworkConfigList, p PodNetwork, r *Result) error {
	ctx, cancel := context.WithTimeout(ctx, m.o.Timeout)
	defer cancel()
	m.restoreCache(p, r)
	return m.cni.DelNetworkList(ctx, list, r.runtimeConf(p))
}

// delEach runs DEL of each plugin, the last one first, whatever the others say.
func (m *Manager) delEach(ctx context.Context, list *libcni.NetworkConfigList, p PodNetwork, r *Result) error {
	ctx, cancel := context.WithTimeout(ctx, m.o.Timeout)
	defer cancel()
	var all []error
	for i := len(list.Plugins) - 1; i >= 0; i-- {
		one := *list
		one.Plugins = list.Plugins[i : i+1]
		m.restoreCache(p, r)
		err := m.cni.DelNetworkList(ctx, &one, r.runtimeConf(p))
		if errors.Is(err, ErrPluginNotFound) && len(r.CNI) == 0 {
			continue
		}
		if err != nil {
			all = append(all, pluginErrorOf(err))
		}
	}
	return errors.Join(all...)
}

// restoreCache writes the result into libcni's cache, from which it hands it to
// the plugins: the cache may be gone, torn, or of another attempt. libcni reads a
// bare result as well as its own format. It is no error when the disk is full:
// DEL has to do without a previous result then, as CNI allows.
func (m *Manager) restoreCache(p PodNetwork, r *Result) {
	if len(r.CNI) == 0 {
		return
	}
	dir := filepath.Join(m.o.CacheDir, "results")
	file := filepath.Join(dir, r.Network+"-"+p.ID+"-"+IfName)
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		_ = os.RemoveAll(file) // it may be anything
		err = os.WriteFile(file, r.CNI, 0o600)
	}
	if err != nil {
		_ = os.Remove(file) // rather none than half of one
	}
}

// runtimeConf is the same for ADD and DEL: portmap, for one, removes only the
// mappings that DEL names.
func (r *Result) runtimeConf(p PodNetwork) *libcni.RuntimeConf {
	caps := make(map[string]any, len(r.Capabilities))
	for name, value := range r.Capabilities {
		caps[name] = json.RawMessage(value)
	}
	return &libcni.RuntimeConf{ContainerID: p.ID, NetNS: p.NetNS, IfName: IfName, Args: r.Args, CapabilityArgs: caps}
}

// isNamespace reports whether path is a network namespace and not the node's: a
// plugin sent there would take the node's own eth0 for the pod's.
func isNamespace(path string) bool {
	info, err := os.Stat(path)
	if err != nil {
		return false
	}
	own, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		return false
	}
	return deviceOf(info) == deviceOf(own) && !os.SameFile(info, own)
}

func deviceOf(info fs.FileInfo) uint64 {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0
	}
	return uint64(st.Dev)
}
