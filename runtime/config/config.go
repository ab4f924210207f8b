// Package config is berth's one configuration file: its schema, defaults and
// checks. The file is TOML and strict: an unknown key, a wrong type or a value
// out of range is refused with the key and, where TOML gives one, the line.
//
// It owns no state and reads nothing but the file it is given. Paths are those
// of the running host; nothing is created here.
package config

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode"

	"github.com/pelletier/go-toml/v2"
)

// ErrInvalid wraps every refusal of a file or value.
var ErrInvalid = errors.New("invalid configuration")

// Config is the whole file. Every key has a default; see Default.
type Config struct {
	Root      string    `toml:"root" comment:"Records, images and writable layers; survives a reboot. One daemon per root."`
	State     string    `toml:"state" comment:"Sockets, pinned namespaces, mounts and bundles; on a filesystem that a reboot empties."`
	Socket    string    `toml:"socket" comment:"The CRI socket, mode 0660 root:root."`
	LogLevel  string    `toml:"log_level" comment:"trace, debug, info, warning or error."`
	Monitor   string    `toml:"monitor" comment:"The berth-monitor binary. Empty: the one beside the berth binary."`
	CNI       CNI       `toml:"cni" comment:"Pod networks."`
	Image     Image     `toml:"image" comment:"Pulling and keeping images."`
	Streaming Streaming `toml:"streaming" comment:"The server of exec, attach and port-forward, which the kubelet is sent to."`
	Runtime   Runtime   `toml:"runtime" comment:"Sandboxes and containers."`
	NRI       NRI       `toml:"nri" comment:"Plugins that see and adjust pods and containers (Node Resource Interface)."`
}

// NRI's switch.
const (
	NRIAuto = "auto"
	NRIOn   = "on"
	NRIOff  = "off"
)

// NRI configures the Node Resource Interface.
type NRI struct {
	Enable              string   `toml:"enable" comment:"on, off, or auto: on if the directory of socket_path exists when the daemon starts."`
	SocketPath          string   `toml:"socket_path" comment:"Socket that plugins connect to. No other runtime may listen on it."`
	PluginPath          string   `toml:"plugin_path" comment:"Directory of plugins that the daemon starts itself: executables named by two digits, a dash and a name."`
	PluginConfigPath    string   `toml:"plugin_config_path" comment:"Directory of their configuration: 10-name.conf or name.conf."`
	RegistrationTimeout Duration `toml:"plugin_registration_timeout" comment:"A plugin that does not register in this time is left out (100ms to 1m)."`
	RequestTimeout      Duration `toml:"plugin_request_timeout" comment:"A plugin that does not answer in this time is disconnected, and the pod goes on without it (100ms to 1m)."`
}

// CNI says where networks are configured.
type CNI struct {
	ConfDir      string   `toml:"conf_dir" comment:"Directory of CNI configurations; the first valid one by name is used. Followed while running."`
	BinDirs      []string `toml:"bin_dirs" comment:"Directories searched for CNI plugins, in order."`
	Timeout      Duration `toml:"timeout" comment:"Longest time of one ADD or DEL of a whole plugin chain."`
	ConfTemplate string   `toml:"conf_template" comment:"Go template of a CNI configuration, made into conf_dir/10-berth-net.conflist when the kubelet tells the node's pod CIDR and no other file is there. It may use .PodCIDR, .PodCIDRRanges and .Routes. Empty: none."`
	GCAtStart    bool     `toml:"gc_at_start" comment:"Before serving, let the plugins of networks that know CNI's GC remove all attachments that are not of berth's pods. Not where another runtime uses the same network: it would lose its own."`
}

// Image configures package image.
type Image struct {
	RegistriesConf         string   `toml:"registries_conf" comment:"containers-registries.conf(5). Empty: the system's own files."`
	Policy                 string   `toml:"policy" comment:"containers-policy.json(5). Empty: every image is accepted."`
	AuthFile               string   `toml:"auth_file" comment:"containers-auth.json(5), used when a pull brings no credentials. Empty: none."`
	MaxConcurrentDownloads int      `toml:"max_concurrent_downloads" comment:"Layers fetched at once, per pull (1 to 64)."`
	IdleTimeout            Duration `toml:"idle_timeout" comment:"A layer that brings no byte for this long fails the pull."`
	Pinned                 []string `toml:"pinned" comment:"Images that kubelet's garbage collection leaves alone: a reference, the beginning of one and a *, or a part of one between two *."`
	KeepLayerBlobs         bool     `toml:"keep_layer_blobs" comment:"Also keep layers as they were fetched, compressed."`
}

// Runtime configures sandboxes and containers.
type Runtime struct {
	DefaultHandler      string             `toml:"default_handler" comment:"Handler of pods that name none (runtime_handler empty)."`
	DefaultCapabilities []string           `toml:"default_capabilities" comment:"Capabilities of a container that is not privileged, before add and drop."`
	NofileSoft          uint64             `toml:"nofile_soft" comment:"RLIMIT_NOFILE of containers, soft."`
	NofileHard          uint64             `toml:"nofile_hard" comment:"RLIMIT_NOFILE of containers, hard; lowered to the daemon's own where it cannot be raised."`
	ShmSize             int64              `toml:"shm_size" comment:"Bytes of a pod's /dev/shm."`
	MaxLogLine          int                `toml:"max_log_line" comment:"Bytes of one log piece; a longer line is split into P pieces (256 to 1048576)."`
	CgroupDriver        string             `toml:"cgroup_driver" comment:"Who makes cgroups: systemd, cgroupfs, or auto (systemd where it runs the node). The kubelet asks for it."`
	UnprivilegedPorts   bool               `toml:"unprivileged_ports" comment:"Let non-root processes of pods with a network of their own bind ports below 1024 and ping."`
	MissingHostPath     string             `toml:"missing_host_path" comment:"What a mount does whose host path does not exist: create a directory there, or refuse the container."`
	SELinux             bool               `toml:"selinux" comment:"Confine pods by SELinux, on a node that has it."`
	CDIDirs             []string           `toml:"cdi_dirs" comment:"Directories of CDI files (devices by name); of two files for one device that in the later directory counts. Read when a container asks for one."`
	Handlers            map[string]Handler `toml:"handlers" comment:"Runtime handlers by name."`
}

// Values of MissingHostPath.
const (
	Create = "create"
	Refuse = "refuse"
)

// Values of Runtime.CgroupDriver. Auto is settled by the daemon when it starts.
const (
	Systemd  = "systemd"
	Cgroupfs = "cgroupfs"
	Auto     = "auto"
)

// Handler is one OCI runtime binary and how its pods differ from others'.
type Handler struct {
	Path                         string `toml:"path" comment:"The binary; a bare name is looked up in PATH."`
	BaseSpec                     string `toml:"base_spec" comment:"OCI specification (JSON) whose hooks, environment, rlimits, mounts, devices and resources every container gets beside its own. Empty: none."`
	CNIConfDir                   string `toml:"cni_conf_dir" comment:"Directory of CNI configurations of this handler's pods. Empty: that of [cni]."`
	PrivilegedWithoutHostDevices bool   `toml:"privileged_without_host_devices" comment:"Keep the node's devices out of privileged containers."`
	PrivilegedAllDevicesAllowed  bool   `toml:"privileged_all_devices_allowed" comment:"With privileged_without_host_devices: still let them use any device they make."`
	CgroupWritable               bool   `toml:"cgroup_writable" comment:"Let containers that are not privileged write to their own cgroup (cgroup v2 only)."`
}

// Streaming configures package runtime/streaming.
type Streaming struct {
	Address     string   `toml:"address" comment:"IP address to listen on. Kubelet and crictl dial it from the node, so loopback will do; of 0.0.0.0 and :: they are told the loopback address."`
	Port        int      `toml:"port" comment:"TCP port; 0: any free one, another after each start."`
	TLSCert     string   `toml:"tls_cert" comment:"PEM file of the certificate to serve over TLS. Empty: no TLS."`
	TLSKey      string   `toml:"tls_key" comment:"PEM file of its key; set with tls_cert."`
	URLLifetime Duration `toml:"url_lifetime" comment:"How long the URL of an exec, attach or port-forward waits for its one client."`
	IdleTimeout Duration `toml:"idle_timeout" comment:"A session without a byte in either direction for this long is ended."`
}

// Duration is a time.Duration written as "30s" or "5m".
type Duration time.Duration

// MarshalText writes d in Go's form.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText reads Go's form; a bare number is refused.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	*d = Duration(v)
	return err
}

// Default is the configuration of a node that has no file.
func Default() Config {
	return Config{
		Root: "/var/lib/berth", State: "/run/berth", Socket: "/run/berth/berth.sock", LogLevel: "info",
		CNI: CNI{ConfDir: "/etc/cni/net.d", BinDirs: []string{"/opt/cni/bin"}, Timeout: Duration(2 * time.Minute)},
		Image: Image{MaxConcurrentDownloads: 6, IdleTimeout: Duration(2 * time.Minute),
			Pinned: []string{}},
		Streaming: Streaming{Address: "127.0.0.1", URLLifetime: Duration(time.Minute), IdleTimeout: Duration(4 * time.Hour)},
		Runtime: Runtime{
			DefaultHandler: "runc",
			DefaultCapabilities: []string{"CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID",
				"SETUID", "SETFCAP", "SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"},
			NofileSoft: 1024, NofileHard: 524288, ShmSize: 64 << 20, MaxLogLine: 16 << 10, CgroupDriver: Auto, UnprivilegedPorts: true,
			MissingHostPath: Create,
			Handlers:        map[string]Handler{"runc": {Path: "runc"}},
			CDIDirs:         []string{"/etc/cdi", "/var/run/cdi"},
		},
		NRI: NRI{Enable: NRIAuto, SocketPath: "/var/run/nri/nri.sock", PluginPath: "/opt/nri/plugins", PluginConfigPath: "/etc/nri/conf.d",
			RegistrationTimeout: Duration(5 * time.Second), RequestTimeout: Duration(5 * time.Second)},
	}
}

// Load reads and checks a file; an empty path gives the defaults. Keys that
// the file leaves out keep their defaults, except that a [runtime.handlers]
// table replaces the default one whole.
func Load(path string) (Config, error) {
	if path == "" {
		c := Default()
		return c, c.Check()
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return Config{}, fmt.Errorf("read configuration: %w", err)
	}
	c, err := parse(b)
	if err != nil {
		return Config{}, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

func parse(b []byte) (Config, error) {
	c := Default()
	handlers := c.Runtime.Handlers
	c.Runtime.Handlers = nil
	dec := toml.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return Config{}, describe(err)
	}
	if c.Runtime.Handlers == nil {
		c.Runtime.Handlers = handlers
	}
	return c, c.Check()
}

// describe turns the decoder's errors into one line with key and position.
func describe(err error) error {
	var missing *toml.StrictMissingError
	if errors.As(err, &missing) && len(missing.Errors) > 0 {
		line, _ := missing.Errors[0].Position()
		return fmt.Errorf("%w: line %d: unknown key %q", ErrInvalid, line, dotted(missing.Errors[0].Key()))
	}
	var dec *toml.DecodeError
	if errors.As(err, &dec) {
		line, col := dec.Position()
		return fmt.Errorf("%w: line %d, column %d: key %q: %s", ErrInvalid, line, col, dotted(dec.Key()), dec.Error())
	}
	return fmt.Errorf("%w: %w", ErrInvalid, err)
}

func dotted(k toml.Key) string {
	var b bytes.Buffer
	for i, p := range k {
		if i > 0 {
			b.WriteByte('.')
		}
		b.WriteString(p)
	}
	return b.String()
}

// Check refuses values that cannot work, naming the key.
func (c Config) Check() error {
	for _, p := range []struct{ key, path string }{{"root", c.Root}, {"state", c.State}, {"socket", c.Socket}, {"cni.conf_dir", c.CNI.ConfDir},
		{"nri.socket_path", c.NRI.SocketPath}, {"nri.plugin_path", c.NRI.PluginPath}, {"nri.plugin_config_path", c.NRI.PluginConfigPath}} {
		if !filepath.IsAbs(p.path) {
			return fmt.Errorf("%w: key %q: %q is not an absolute path", ErrInvalid, p.key, p.path)
		}
	}
	for _, o := range []struct{ key, path string }{{"socket", c.Socket}, {"nri.socket_path", c.NRI.SocketPath}} {
		if len(o.path) > 107 {
			return fmt.Errorf("%w: key %q: %q is longer than the 107 bytes of a Unix socket address", ErrInvalid, o.key, o.path)
		}
	}
	if filepath.Clean(c.Root) == filepath.Clean(c.State) {
		return fmt.Errorf("%w: keys \"root\" and \"state\" are both %q", ErrInvalid, c.Root)
	}
	for _, o := range []struct{ key, path string }{{"monitor", c.Monitor}, {"image.registries_conf", c.Image.RegistriesConf},
		{"cni.conf_template", c.CNI.ConfTemplate}, {"image.policy", c.Image.Policy}, {"image.auth_file", c.Image.AuthFile},
		{"streaming.tls_cert", c.Streaming.TLSCert}, {"streaming.tls_key", c.Streaming.TLSKey}} {
		if o.path != "" && !filepath.IsAbs(o.path) {
			return fmt.Errorf("%w: key %q: %q is not an absolute path", ErrInvalid, o.key, o.path)
		}
	}
	for _, d := range c.CNI.BinDirs {
		if !filepath.IsAbs(d) {
			return fmt.Errorf("%w: key \"cni.bin_dirs\": %q is not an absolute path", ErrInvalid, d)
		}
	}
	for _, d := range c.Runtime.CDIDirs {
		if !filepath.IsAbs(d) {
			return fmt.Errorf("%w: key \"runtime.cdi_dirs\": %q is not an absolute path", ErrInvalid, d)
		}
	}
	return c.checkValues()
}

func (c Config) checkValues() error {
	ranges := []struct {
		key          string
		v, low, high int64
	}{
		{"image.max_concurrent_downloads", int64(c.Image.MaxConcurrentDownloads), 1, 64},
		{"image.idle_timeout", int64(c.Image.IdleTimeout), int64(time.Second), int64(time.Hour)},
		{"cni.timeout", int64(c.CNI.Timeout), int64(time.Second), int64(time.Hour)},
		{"streaming.port", int64(c.Streaming.Port), 0, 65535},
		{"streaming.url_lifetime", int64(c.Streaming.URLLifetime), int64(time.Second), int64(time.Hour)},
		{"streaming.idle_timeout", int64(c.Streaming.IdleTimeout), int64(time.Second), int64(1000 * time.Hour)},
		{"nri.plugin_registration_timeout", int64(c.NRI.RegistrationTimeout), int64(100 * time.Millisecond), int64(time.Minute)},
		{"nri.plugin_request_timeout", int64(c.NRI.RequestTimeout), int64(100 * time.Millisecond), int64(time.Minute)},
		{"runtime.max_log_line", int64(c.Runtime.MaxLogLine), 256, 1 << 20},
		{"runtime.shm_size", c.Runtime.ShmSize, 4096, 1 << 40},
	}
	for _, r := range ranges {
		if r.v < r.low || r.v > r.high {
			return fmt.Errorf("%w: key %q: %d is outside %d to %d", ErrInvalid, r.key, r.v, r.low, r.high)
		}
	}
	if _, err := netip.ParseAddr(c.Streaming.Address); err != nil {
		return fmt.Errorf("%w: key \"streaming.address\": %q is not an IP address", ErrInvalid, c.Streaming.Address)
	}
	if (c.Streaming.TLSCert == "") != (c.Streaming.TLSKey == "") {
		return fmt.Errorf("%w: keys \"streaming.tls_cert\" %q and \"streaming.tls_key\" %q: both or none", ErrInvalid, c.Streaming.TLSCert, c.Streaming.TLSKey)
	}
	if c.Runtime.NofileSoft > c.Runtime.NofileHard || c.Runtime.NofileSoft == 0 {
		return fmt.Errorf("%w: key \"runtime.nofile_soft\": %d is not between 1 and nofile_hard %d", ErrInvalid, c.Runtime.NofileSoft, c.Runtime.NofileHard)
	}
	switch c.LogLevel {
	case "trace", "debug", "info", "warning", "error":
	default:
		return fmt.Errorf("%w: key \"log_level\": %q is none of trace, debug, info, warning, error", ErrInvalid, c.LogLevel)
	}
	if m := c.Runtime.MissingHostPath; m != Create && m != Refuse {
		return fmt.Errorf("%w: key \"runtime.missing_host_path\": %q is neither create nor refuse", ErrInvalid, m)
	}
	switch c.Runtime.CgroupDriver {
	case Systemd, Cgroupfs, Auto:
	default:
		return fmt.Errorf("%w: key \"runtime.cgroup_driver\": %q is none of systemd, cgroupfs, auto", ErrInvalid, c.Runtime.CgroupDriver)
	}
	switch c.NRI.Enable {
	case NRIAuto, NRIOn, NRIOff:
	default:
		return fmt.Errorf("%w: key \"nri.enable\": %q is none of on, off, auto", ErrInvalid, c.NRI.Enable)
	}
	return c.checkHandlers()
}

func (c Config) checkHandlers() error {
	if _, ok := c.Runtime.Handlers[c.Runtime.DefaultHandler]; !ok {
		return fmt.Errorf("%w: key \"runtime.default_handler\": %q has no [runtime.handlers.%s]", ErrInvalid, c.Runtime.DefaultHandler, c.Runtime.DefaultHandler)
	}
	for name, h := range c.Runtime.Handlers {
		if name == "" || h.Path == "" {
			return fmt.Errorf("%w: key \"runtime.handlers.%s.path\": empty", ErrInvalid, name)
		}
		if name == "." || name == ".." || strings.ContainsFunc(name, func(r rune) bool { return r == '/' || unicode.IsControl(r) }) {
			return fmt.Errorf("%w: key \"runtime.handlers.%s\": a handler's name has no slash or control character", ErrInvalid, name)
		}
		for _, p := range []struct{ key, path string }{{"base_spec", h.BaseSpec}, {"cni_conf_dir", h.CNIConfDir}} {
			if p.path != "" && !filepath.IsAbs(p.path) {
				return fmt.Errorf("%w: key \"runtime.handlers.%s.%s\": %q is not an absolute path", ErrInvalid, name, p.key, p.path)
			}
		}
		if h.PrivilegedAllDevicesAllowed && !h.PrivilegedWithoutHostDevices {
			return fmt.Errorf("%w: key \"runtime.handlers.%s.privileged_all_devices_allowed\": needs privileged_without_host_devices", ErrInvalid, name)
		}
	}
	return nil
}

// Text is the configuration as a file with every key and its comment.
func (c Config) Text() (string, error) {
	var b bytes.Buffer
	if err := toml.NewEncoder(&b).Encode(c); err != nil {
		return "", fmt.Errorf("write configuration: %w", err)
	}
	return b.String(), nil
}
