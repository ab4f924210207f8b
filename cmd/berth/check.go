package main

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"

	"berth/image"
	"berth/network"
	"berth/oci/spec"
	"berth/runtime"
	"berth/runtime/config"
	"berth/runtime/exporter"
	"berth/runtime/nri"
	"berth/runtime/resolve"

	"berth/sandbox/regular"
	"berth/sandbox/regular/keypair"
)

// checkNode finds what the node, or the owner of a key's meaning, has against a
// configuration: names nobody knows, files that are not there or hold nonsense.
// It changes nothing. What it cannot know is what only the running daemon does:
// whether sockets and ports are free.
func checkNode(c config.Config) config.Problems {
	p := apartOnDisk(c)
	refuse := func(key string, err error) {
		if err != nil {
			p.Refuse(key, "%v", err)
		}
	}
	for _, pin := range c.Image.Pinned {
		refuse("image.pinned", image.CheckPin(pin))
	}
	refuse("runtime.default_capabilities", spec.CheckCapabilities(c.Runtime.DefaultCapabilities))
	_, err := cgroupDriver(c.Runtime.CgroupDriver)
	refuse("runtime.cgroup_driver", err)
	_, err = monitorBinary(c)
	refuse("monitor", err)
	refuse("socket", runtime.CheckSocket(c.Socket))
	if runtime.WantsPlugins(c.NRI) {
		refuse("nri.socket_path", runtime.CheckSocket(c.NRI.SocketPath))
		refuse("nri.plugin_path", nri.CheckDirectory(c.NRI.PluginPath))
	}
	checkFiles(c, refuse)
	checkDirectories(c, refuse)
	checkStreams(c.Streaming, refuse)
	checkMetrics(c.Metrics, refuse)
	checkHandlers(c, refuse)
	return p
}

// apartOnDisk looks through symlinks for what Config.Apart finds by name.
func apartOnDisk(c config.Config) config.Problems {
	for _, path := range []*string{&c.Root, &c.State, &c.Socket, &c.NRI.SocketPath} {
		*path = realPath(*path)
	}
	return c.Apart()
}

// realPath follows the symlinks of the part of a path that is there.
func realPath(path string) string {
	path = filepath.Clean(path)
	if real, err := filepath.EvalSymlinks(path); err == nil || path == "/" {
		return real
	}
	return filepath.Join(realPath(filepath.Dir(path)), filepath.Base(path))
}

// checkFiles: each named file can be read, and by its reader.
func checkFiles(c config.Config, refuse func(string, error)) {
	for _, f := range []struct {
		key, path string
		read      func(string) error
	}{
		{"cni.conf_template", c.CNI.ConfTemplate, network.CheckTemplate},
		{"image.registries_conf", c.Image.RegistriesConf, image.CheckRegistries},
		{"image.policy", c.Image.Policy, image.CheckPolicy},
		{"image.auth_file", c.Image.AuthFile, image.CheckAuthFile},
	} {
		if f.path != "" {
			refuse(f.key, readable(f.path, f.read))
		}
	}
}

// readable hands a regular file to its reader; a FIFO would hold it up.
func readable(path string, read func(string) error) error {
	if err := regular.Check(path, regular.Most); err != nil {
		return err
	}
	return read(path)
}

// checkDirectories: what is to be a directory is one or can become one.
func checkDirectories(c config.Config, refuse func(string, error)) {
	one := func(key, path string) {
		info, err := os.Stat(path)
		if err == nil && !info.IsDir() {
			err = fmt.Errorf("%s is no directory", path)
		}
		if !errors.Is(err, os.ErrNotExist) {
			refuse(key, err)
		}
	}
	one("root", c.Root)
	one("state", c.State)
	one("socket", filepath.Dir(c.Socket))
	one("cni.conf_dir", c.CNI.ConfDir)
	one("image.preload_dir", c.Image.PreloadDir)
	refuse("image.certs_dir", image.CheckCerts(c.Image.CertsDir))
	refuse("image.hosts_dir", image.CheckHosts(c.Image.HostsDir))
	for _, dir := range c.CNI.BinDirs {
		one("cni.bin_dirs", dir)
	}
	for _, dir := range c.Runtime.CDIDirs {
		one("runtime.cdi_dirs", dir)
	}
	one("nri.plugin_config_path", c.NRI.PluginConfigPath)
	one("nri.socket_path", filepath.Dir(c.NRI.SocketPath))
	if c.Image.PolicyDir != "" { // where it is missing, policies might be
		refuse("image.policy_dir", image.CheckPolicies(c.Image.PolicyDir))
	}
	if c.Image.RegistriesDir != "" {
		refuse("image.registries_dir", image.CheckSources(c.Image.RegistriesDir))
	}
}

// checkStreams: the address is the node's, certificate and key belong together.
func checkStreams(c config.Streaming, refuse func(string, error)) {
	if l, err := net.Listen("tcp", net.JoinHostPort(c.Address, "0")); err != nil {
		refuse("streaming.address", fmt.Errorf("%s is no address of this node: %w", c.Address, err))
	} else {
		_ = l.Close()
	}
	if c.TLSCert == "" {
		return
	}
	cert, key := regular.Check(c.TLSCert, regular.Most), regular.Check(c.TLSKey, regular.Most)
	refuse("streaming.tls_cert", cert)
	refuse("streaming.tls_key", key)
	if cert == nil && key == nil {
		_, err := keypair.Read(c.TLSCert, c.TLSKey)
		refuse("streaming.tls_cert", err)
	}
}

// checkMetrics: the address is the node's.
func checkMetrics(c config.Metrics, refuse func(string, error)) {
	if c.Address == "" {
		return
	}
	address, err := exporter.Address(c.Address)
	if err != nil {
		refuse("metrics.address", err)
		return
	}
	host, _, _ := net.SplitHostPort(address) // Address has joined it
	if l, err := net.Listen("tcp", net.JoinHostPort(host, "0")); err != nil {
		refuse("metrics.address", fmt.Errorf("%s is no address of this node: %w", host, err))
	} else {
		_ = l.Close()
	}
}

// checkHandlers: the binaries can be run, and the specifications read.
func checkHandlers(c config.Config, refuse func(string, error)) {
	for _, name := range slices.Sorted(maps.Keys(c.Runtime.Handlers)) {
		h := c.Runtime.Handlers[name]
		_, err := program(h.Path)
		refuse(config.HandlerKey(name, "path"), err)
		if h.BaseSpec != "" {
			refuse(config.HandlerKey(name, "base_spec"), readable(h.BaseSpec, func(path string) error {
				_, err := readBaseSpec(path)
				return err
			}))
		}
		if h.CgroupWritable {
			if host, err := resolve.HostFacts(); err != nil || !host.CgroupV2 {
				refuse(config.HandlerKey(name, "cgroup_writable"), errors.Join(err, errors.New("needs a node with cgroup v2")))
			}
		}
		if h.CNIConfDir != "" {
			if info, err := os.Stat(h.CNIConfDir); err == nil && !info.IsDir() {
				refuse(config.HandlerKey(name, "cni_conf_dir"), fmt.Errorf("%s is no directory", h.CNIConfDir))
			}
		}
	}
}
