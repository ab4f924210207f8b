package config

import (
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// maxSocket is the longest path of a Unix socket, see unix(7).
const maxSocket = 107

// shared are directories that belong to more than berth: it would set their mode
// and empty parts of them.
var shared = []string{"/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin",
	"/srv", "/sys", "/tmp", "/usr", "/usr/lib", "/usr/local", "/usr/share", "/var", "/var/cache", "/var/lib", "/var/log", "/var/run", "/var/tmp"}

// Check finds values that cannot work whatever the node is like.
func (c Config) Check() Problems {
	p := c.Apart()
	c.checkPaths(&p)
	c.checkRanges(&p)
	c.checkWords(&p)
	c.checkStreaming(&p)
	c.checkMetrics(&p)
	c.checkHandlers(&p)
	return p
}

// checkPaths: every path is absolute, for the daemon's working directory is
// nobody's business.
func (c Config) checkPaths(p *Problems) {
	needed := []struct{ key, path string }{{"root", c.Root}, {"state", c.State}, {"socket", c.Socket}, {"cni.conf_dir", c.CNI.ConfDir},
		{"nri.socket_path", c.NRI.SocketPath}, {"nri.plugin_path", c.NRI.PluginPath}, {"nri.plugin_config_path", c.NRI.PluginConfigPath}}
	for _, dir := range c.CNI.BinDirs {
		needed = append(needed, struct{ key, path string }{"cni.bin_dirs", dir})
	}
	for _, dir := range c.Runtime.CDIDirs {
		needed = append(needed, struct{ key, path string }{"runtime.cdi_dirs", dir})
	}
	for _, n := range needed {
		p.absolute(n.key, n.path)
	}
	for _, o := range []struct{ key, path string }{{"monitor", c.Monitor}, {"cni.conf_template", c.CNI.ConfTemplate},
		{"image.registries_conf", c.Image.RegistriesConf}, {"image.hosts_dir", c.Image.HostsDir}, {"image.certs_dir", c.Image.CertsDir},
		{"image.policy", c.Image.Policy}, {"image.policy_dir", c.Image.PolicyDir},
		{"image.registries_dir", c.Image.RegistriesDir}, {"image.auth_file", c.Image.AuthFile}, {"image.preload_dir", c.Image.PreloadDir},
		{"streaming.tls_cert", c.Streaming.TLSCert}, {"streaming.tls_key", c.Streaming.TLSKey}} {
		if o.path != "" {
			p.absolute(o.key, o.path)
		}
	}
	for _, s := range []struct{ key, path string }{{"socket", c.Socket}, {"nri.socket_path", c.NRI.SocketPath}} {
		if len(s.path) > maxSocket {
			p.Refuse(s.key, "%q is longer than the %d bytes of a Unix socket's path", s.path, maxSocket)
		}
	}
	if len(c.CNI.BinDirs) == 0 {
		p.Refuse("cni.bin_dirs", "empty: no pod could have a network")
	}
}

func (p *Problems) absolute(key, path string) {
	if !filepath.IsAbs(path) {
		p.Refuse(key, "%q is not an absolute path", path)
	}
}

// Apart finds where root, state and the sockets are not berth's alone or not
// apart from each other, as far as their names tell.
func (c Config) Apart() Problems {
	var p Problems
	root, state := filepath.Clean(c.Root), filepath.Clean(c.State)
	for _, d := range []struct{ key, path string }{{"root", root}, {"state", state}} {
		if slices.Contains(shared, d.path) {
			p.Refuse(d.key, "%q is not berth's alone; name a directory in it", d.path)
		}
	}
	switch {
	case root == state:
		p.Refuse("state", "%q is also root; a reboot empties the one and not the other", state)
	case inside(state, root):
		p.Refuse("state", "%q is inside root %q, which a reboot does not empty", state, root)
	case inside(root, state):
		p.Refuse("root", "%q is inside state %q, which a reboot empties", root, state)
	}
	taken := map[string]string{root: "root", state: "state", filepath.Join(state, "monitor.sock"): "the monitor's socket"}
	for _, s := range []struct{ key, path string }{{"socket", filepath.Clean(c.Socket)}, {"nri.socket_path", filepath.Clean(c.NRI.SocketPath)}} {
		if owner := taken[s.path]; owner != "" {
			p.Refuse(s.key, "%q is already %s", s.path, owner)
		}
		taken[s.path] = s.key
	}
	return p
}

func inside(path, dir string) bool { return strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/") }

// checkRanges: numbers and times.
func (c Config) checkRanges(p *Problems) {
	for _, r := range []struct {
		key          string
		v, low, high int64
	}{
		{"image.max_concurrent_downloads", int64(c.Image.MaxConcurrentDownloads), 1, 64},
		{"image.connections_per_layer", int64(c.Image.ConnectionsPerLayer), 1, 16},
		{"image.max_concurrent_unpacks", int64(c.Image.MaxConcurrentUnpacks), 1, 256},
		{"image.partial_bytes", c.Image.PartialBytes, 0, 1 << 50},
		{"image.min_rate", c.Image.MinRate, 0, 1 << 30},
		{"streaming.port", int64(c.Streaming.Port), 0, 65535},
		{"runtime.max_log_line", int64(c.Runtime.MaxLogLine), 256, 1 << 20},
		{"runtime.shm_size", c.Runtime.ShmSize, 4096, 1 << 40},
	} {
		if r.v < r.low || r.v > r.high {
			p.Refuse(r.key, "%d is outside %d to %d", r.v, r.low, r.high)
		}
	}
	for _, r := range []struct {
		key       string
		v         Duration
		low, high time.Duration
	}{
		{"image.idle_timeout", c.Image.IdleTimeout, time.Second, time.Hour},
		{"image.partial_age", c.Image.PartialAge, time.Minute, 1000 * time.Hour},
		{"image.min_rate_window", c.Image.MinRateWindow, time.Second, time.Hour},
		{"cni.timeout", c.CNI.Timeout, time.Second, time.Hour},
		{"runtime.host_path_timeout", c.Runtime.HostPathTimeout, time.Second, 10 * time.Minute},
		{"streaming.url_lifetime", c.Streaming.URLLifetime, time.Second, time.Hour},
		{"streaming.idle_timeout", c.Streaming.IdleTimeout, time.Second, 1000 * time.Hour},
		{"nri.plugin_registration_timeout", c.NRI.RegistrationTimeout, 100 * time.Millisecond, time.Minute},
		{"nri.plugin_request_timeout", c.NRI.RequestTimeout, 100 * time.Millisecond, time.Minute},
	} {
		if v := time.Duration(r.v); v < r.low || v > r.high {
			p.Refuse(r.key, "%v is outside %v to %v", r.v, Duration(r.low), Duration(r.high))
		}
	}
	if c.Runtime.NofileSoft > c.Runtime.NofileHard || c.Runtime.NofileSoft == 0 {
		p.Refuse("runtime.nofile_soft", "%d is not between 1 and nofile_hard %d", c.Runtime.NofileSoft, c.Runtime.NofileHard)
	}
}

// checkWords: values of which there are only some.
func (c Config) checkWords(p *Problems) {
	for _, w := range []struct {
		key, value string
		words      []string
	}{
		{"log_level", c.LogLevel, []string{"trace", "debug", "info", "warning", "error"}},
		{"runtime.missing_host_path", c.Runtime.MissingHostPath, []string{Create, Refuse}},
		{"runtime.cgroup_driver", c.Runtime.CgroupDriver, []string{Systemd, Cgroupfs, Auto}},
		{"nri.enable", c.NRI.Enable, []string{NRIOn, NRIOff, NRIAuto}},
	} {
		if !slices.Contains(w.words, w.value) {
			p.Refuse(w.key, "%q is none of %s", w.value, strings.Join(w.words, ", "))
		}
	}
}

func (c Config) checkStreaming(p *Problems) {
	if _, err := netip.ParseAddr(c.Streaming.Address); err != nil {
		p.Refuse("streaming.address", "%q is not an IP address", c.Streaming.Address)
	}
	if c.Streaming.TLSCert != "" && c.Streaming.TLSKey == "" {
		p.Refuse("streaming.tls_key", "empty, but tls_cert is %q: both or none", c.Streaming.TLSCert)
	}
	if c.Streaming.TLSCert == "" && c.Streaming.TLSKey != "" {
		p.Refuse("streaming.tls_cert", "empty, but tls_key is %q: both or none", c.Streaming.TLSKey)
	}
}

func (c Config) checkMetrics(p *Problems) {
	if c.Metrics.Address == "" {
		return
	}
	host, port, err := net.SplitHostPort(c.Metrics.Address)
	if err != nil {
		p.Refuse("metrics.address", "%q is not host:port or :port", c.Metrics.Address)
		return
	}
	if _, err := netip.ParseAddr(host); err != nil && host != "" {
		p.Refuse("metrics.address", "%q is not an IP address", host)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		p.Refuse("metrics.address", "%q is not a port, 0 to 65535", port)
	}
}

func (c Config) checkHandlers(p *Problems) {
	if _, ok := c.Runtime.Handlers[c.Runtime.DefaultHandler]; !ok {
		p.Refuse("runtime.default_handler", "there is no table [%s]", HandlerKey(c.Runtime.DefaultHandler))
	}
	for _, name := range slices.Sorted(maps.Keys(c.Runtime.Handlers)) {
		h := c.Runtime.Handlers[name]
		if name == "" || name == "." || name == ".." || strings.ContainsFunc(name, func(r rune) bool { return r == '/' || unicode.IsControl(r) }) {
			p.Refuse(HandlerKey(name), "a handler's name is not empty and has no slash or control character")
		}
		switch {
		case h.Path == "":
			p.Refuse(HandlerKey(name, "path"), "empty")
		case strings.Contains(h.Path, "/"):
			p.absolute(HandlerKey(name, "path"), h.Path)
		}
		if h.BaseSpec != "" {
			p.absolute(HandlerKey(name, "base_spec"), h.BaseSpec)
		}
		if h.CNIConfDir != "" {
			p.absolute(HandlerKey(name, "cni_conf_dir"), h.CNIConfDir)
		}
		if h.PrivilegedAllDevicesAllowed && !h.PrivilegedWithoutHostDevices {
			p.Refuse(HandlerKey(name, "privileged_all_devices_allowed"), "needs privileged_without_host_devices")
		}
	}
}
