package node

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"berth/critest/images"
)

// locate finds the binaries: BERTH_BIN and BERTH_DEPS, or bin and .deps of the
// nearest folder above that has both.
func locate() (bin, deps string, err error) {
	bin, deps = os.Getenv("BERTH_BIN"), os.Getenv("BERTH_DEPS")
	dir, err := os.Getwd()
	if err != nil {
		return "", "", fmt.Errorf("find the working directory: %w", err)
	}
	for ; (bin == "" || deps == "") && dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, ".deps")); err == nil {
			bin, deps = either(bin, filepath.Join(dir, "bin")), either(deps, filepath.Join(dir, ".deps"))
		}
	}
	for _, file := range []string{bin + "/berth", bin + "/berth-monitor", deps + "/bin/runc", deps + "/bin/crictl", deps + "/cni/bridge"} {
		if _, err := os.Stat(file); err != nil {
			return "", "", fmt.Errorf("%w: %w", ErrBinaries, err)
		}
	}
	return bin, deps, nil
}

func either(s, otherwise string) string {
	if s != "" {
		return s
	}
	return otherwise
}

// Deps is the folder that `make deps` filled. ErrBinaries when there is none.
func Deps() (string, error) {
	_, deps, err := locate()
	return deps, err
}

// writeFiles makes the node's directories and configuration.
func (n *Node) writeFiles() error {
	if err := n.makeRoot(); err != nil {
		return err
	}
	dirs := []string{n.LogDir(), n.Leases}
	if !n.options.NoCNI {
		dirs = append(dirs, n.ConfDir)
	}
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make a directory of the node: %w", err)
		}
	}
	files := map[string]string{"config.toml": n.config(), "registries.conf": n.registries(), "crictl.yaml": n.crictl()}
	if !n.options.NoCNI {
		files["net.d/10-bridge.conflist"] = n.Conflist()
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(n.Dir, name), []byte(text), 0o600); err != nil {
			return fmt.Errorf("write the node's files: %w", err)
		}
	}
	return nil
}

// makeRoot makes root and state, on the filesystems that they are to be on.
func (n *Node) makeRoot() error {
	if err := os.MkdirAll(n.Root(), 0o755); err != nil {
		return fmt.Errorf("make a directory of the node: %w", err)
	}
	if size := n.options.RootDisk; size > 0 {
		return n.makeDisk(size)
	}
	for dir, size := range map[string]string{n.Root(): n.options.RootSize, n.State(): n.options.StateSize} {
		if size == "" {
			continue
		}
		if err := mountMemory(dir, size); err != nil {
			return err
		}
	}
	return nil
}

// mountMemory makes a directory of the daemon's a tmpfs of the size.
func mountMemory(dir, size string) error {
	err := os.MkdirAll(dir, 0o711)
	if err == nil {
		err = syscall.Mount("tmpfs", dir, "tmpfs", 0, "mode=0711,size="+size)
	}
	if err != nil {
		return fmt.Errorf("mount a tmpfs of %s at %s: %w", size, dir, err)
	}
	return nil
}

// config is the daemon's file, with Options.Settings after each table's own lines.
func (n *Node) config() string {
	var b strings.Builder
	table := func(name string, lines ...string) {
		if name != "" {
			fmt.Fprintf(&b, "\n[%s]\n", name)
		}
		for _, l := range lines {
			b.WriteString(l + "\n")
		}
		if extra := n.options.Settings[name]; extra != "" {
			b.WriteString(extra + "\n")
		}
	}
	table("", fmt.Sprintf("root = %q", n.Root()), fmt.Sprintf("state = %q", n.State()), fmt.Sprintf("socket = %q", n.Socket),
		fmt.Sprintf("monitor = %q", filepath.Join(n.Bin, "berth-monitor")),
		fmt.Sprintf("log_level = %q", either(n.options.LogLevel, "debug")))
	plugins := fmt.Sprintf("%q", filepath.Join(n.Deps, "cni"))
	if n.options.Plugins != "" {
		plugins = fmt.Sprintf("%q, %s", n.options.Plugins, plugins)
	}
	table("cni", fmt.Sprintf("conf_dir = %q", n.ConfDir), fmt.Sprintf("bin_dirs = [%s]", plugins))
	table("image", fmt.Sprintf("registries_conf = %q", filepath.Join(n.Dir, "registries.conf")))
	table("nri", `enable = "on"`, fmt.Sprintf("socket_path = %q", n.NRISocket()),
		fmt.Sprintf("plugin_path = %q", filepath.Join(n.Dir, "nri", "plugins")), fmt.Sprintf("plugin_config_path = %q", filepath.Join(n.Dir, "nri", "conf.d")))
	if n.options.Settings["streaming"] != "" {
		table("streaming")
	}
	if n.options.Settings["metrics"] != "" {
		table("metrics")
	}
	table("runtime", `default_handler = "runc"`, fmt.Sprintf("cgroup_driver = %q", either(n.options.CgroupDriver, "cgroupfs")))
	table("runtime.handlers.runc", fmt.Sprintf("path = %q", either(n.options.Runc, filepath.Join(n.Deps, "bin", "runc"))))
	for _, name := range slices.Sorted(maps.Keys(n.options.Settings)) {
		if strings.HasPrefix(name, "runtime.handlers.") && name != "runtime.handlers.runc" {
			table(name)
		}
	}
	return b.String()
}

// crictl is the configuration that crictl and critest are given, so that they
// look for no other.
func (n *Node) crictl() string {
	return fmt.Sprintf("runtime-endpoint: unix://%s\nimage-endpoint: unix://%s\ntimeout: 60\n", n.Socket, n.Socket)
}

// registries sends every host of the standard images, and the mirror itself,
// to the mirror.
func (n *Node) registries() string {
	var b strings.Builder
	if n.options.Mirror == "" {
		return ""
	}
	for _, host := range images.Hosts {
		fmt.Fprintf(&b, "[[registry]]\nprefix = %q\nlocation = %q\ninsecure = true\n\n", host, n.options.Mirror)
	}
	fmt.Fprintf(&b, "[[registry]]\nlocation = %q\ninsecure = true\n", n.options.Mirror)
	return b.String()
}

// Conflist is the node's network: a bridge with addresses, masquerading and
// host ports.
func (n *Node) Conflist() string {
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": %q,
  "plugins": [
    {"type": "bridge", "bridge": %q, "isGateway": true, "ipMasq": true, "ipMasqBackend": "nftables", "hairpinMode": true,
     "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": %q}]], "routes": [{"dst": "0.0.0.0/0"}]}},
    {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}}
  ]
}
`, n.Bridge, n.Bridge, n.Leases, n.Subnet)
}

// LogTail returns the last lines of the daemon's log.
func (n *Node) LogTail(lines int) string {
	data, err := os.ReadFile(filepath.Join(n.Dir, "berth.log"))
	if err != nil {
		return err.Error()
	}
	all := bytes.Split(bytes.TrimRight(data, "\n"), []byte("\n"))
	return string(bytes.Join(all[max(0, len(all)-lines):], []byte("\n")))
}

// CopyLog keeps the daemon's log at path, for a failure to be understood after
// the node is gone.
func (n *Node) CopyLog(path string) error {
	data, err := os.ReadFile(filepath.Join(n.Dir, "berth.log"))
	if err != nil {
		return fmt.Errorf("read the daemon's log: %w", err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return fmt.Errorf("keep the daemon's log: %w", err)
	}
	return nil
}
