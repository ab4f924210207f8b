// Package config is berth's configuration: its schema, defaults and checks, how
// files are merged, and what a running daemon can take over.
//
// It owns no state and reads nothing but the file it is given and its drop-ins,
// FILE.d/*.toml. Files are TOML and strict: an unknown key, a wrong type or a
// value out of range is refused with file, line and key. Paths are those of the
// running host; nothing is created here, and what a named file holds is checked
// by whoever knows its format, see Load.
//
// Terms: a "key" is written with its tables, cni.conf_dir; a "place" is where a
// file sets one; a key is "live" (tag live) when a daemon takes its new value
// over without a restart.
package config

import (
	"bytes"
	"fmt"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
)

// Config is the whole file. Every key has a default; see Default.
type Config struct {
	Root      string    `toml:"root" comment:"Records, images and writable layers; survives a reboot. One daemon per root."`
	State     string    `toml:"state" comment:"Sockets, pinned namespaces, mounts and bundles; on a filesystem that a reboot empties."`
	Socket    string    `toml:"socket" comment:"The CRI socket, mode 0660 root:root."`
	LogLevel  string    `toml:"log_level" live:"yes" comment:"trace, debug, info, warning or error."`
	Monitor   string    `toml:"monitor" comment:"The berth-monitor binary. Empty: the one beside the berth binary."`
	CNI       CNI       `toml:"cni" comment:"Pod networks."`
	Image     Image     `toml:"image" comment:"Pulling and keeping images."`
	Streaming Streaming `toml:"streaming" comment:"The server of exec, attach and port-forward, which the kubelet is sent to."`
	Runtime   Runtime   `toml:"runtime" comment:"Sandboxes and containers."`
	NRI       NRI       `toml:"nri" comment:"Plugins that see and adjust pods and containers (Node Resource Interface)."`
	Metrics   Metrics   `toml:"metrics" comment:"The daemon's own metrics."`
}

// Metrics configures package runtime/exporter.
type Metrics struct {
	Address string `toml:"address" comment:"Where Prometheus scrapes over HTTP, at /metrics: host:port, the host an IP address, or :port for loopback; port 0: any free one. Empty: nowhere."`
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
	GCAtStart    bool     `toml:"gc_at_start" comment:"At the start, before a pod gets a network, let the plugins of networks that know CNI's GC remove all attachments that are not of berth's pods. Not where another runtime uses the same network: it would lose its own."`
}

// Image configures package image.
type Image struct {
	RegistriesConf         string   `toml:"registries_conf" live:"yes" comment:"containers-registries.conf(5). Empty: the system's own files."`
	HostsDir               string   `toml:"hosts_dir" live:"yes" comment:"Directory of containerd's hosts.toml files (/etc/containerd/certs.d), for registries that registries.conf does not name. Empty: none is read."`
	CertsDir               string   `toml:"certs_dir" live:"yes" comment:"Directory of certificates by registry (certs.d). Empty: /etc/containers/certs.d and /etc/docker/certs.d."`
	Policy                 string   `toml:"policy" live:"yes" comment:"containers-policy.json(5). Asked when an image is pulled and each time one is used. Empty: every image is accepted."`
	PolicyDir              string   `toml:"policy_dir" live:"yes" comment:"Directory of policies for single namespaces, NAMESPACE.json; one that has none is under policy. Empty: all are."`
	RegistriesDir          string   `toml:"registries_dir" live:"yes" comment:"Directory that says where images' signatures are, containers-registries.d(5). Empty: the system's own."`
	AuthFile               string   `toml:"auth_file" live:"yes" comment:"containers-auth.json(5), used when a pull brings no credentials. Empty: none."`
	MaxConcurrentDownloads int      `toml:"max_concurrent_downloads" live:"yes" comment:"Layers fetched at once, per pull (1 to 64)."`
	IdleTimeout            Duration `toml:"idle_timeout" live:"yes" comment:"A layer that brings no byte for this long fails the pull."`
	MinRate                int64    `toml:"min_rate" live:"yes" comment:"Bytes a second that a layer must bring on the average of min_rate_window, counting only the time that is spent waiting for them; less fails the pull. 0: no such rule."`
	MinRateWindow          Duration `toml:"min_rate_window" live:"yes" comment:"Over how much waiting min_rate is taken."`
	ConnectionsPerLayer    int      `toml:"connections_per_layer" live:"yes" comment:"Connections for one layer at most (1 to 16). A layer begins with one; what is large and mostly waited for comes in ranges over several, where the registry knows ranges. 1: always one."`
	PartialBytes           int64    `toml:"partial_bytes" live:"yes" comment:"Bytes that pulls which broke off may leave on disk, so that the next one goes on from there: beginnings of large layers, and whole layers. The oldest go first, all of them when the disk is full. 0: nothing is left."`
	PartialAge             Duration `toml:"partial_age" live:"yes" comment:"How long they stay."`
	MaxConcurrentUnpacks   int      `toml:"max_concurrent_unpacks" live:"yes" comment:"Layers fetched and unpacked at once by all pulls and imports together (1 to 256). It bounds memory (2 MiB each, of zstd layers as much as they were compressed with: mostly 8 MiB) and connections."`
	Pinned                 []string `toml:"pinned" live:"yes" comment:"Images that kubelet's garbage collection leaves alone: a reference, the beginning of one and a *, or a part of one between two *."`
	PreloadDir             string   `toml:"preload_dir" live:"yes" comment:"Directory of archives, *.tar, *.tar.gz and *.tar.zst, that are imported when the daemon starts or reloads, each once; those in its directory pinned are pinned. Empty: preload below root."`
	KeepLayerBlobs         bool     `toml:"keep_layer_blobs" live:"yes" comment:"Also keep layers as they were fetched, compressed: exports are exact, and what is damaged or was dropped after a power cut is unpacked again without the registry."`
}

// Runtime configures sandboxes and containers.
type Runtime struct {
	DefaultHandler      string             `toml:"default_handler" comment:"Handler of pods that name none (runtime_handler empty)."`
	DefaultCapabilities []string           `toml:"default_capabilities" live:"yes" comment:"Capabilities of a container that is not privileged, before add and drop."`
	NofileSoft          uint64             `toml:"nofile_soft" live:"yes" comment:"RLIMIT_NOFILE of containers, soft."`
	NofileHard          uint64             `toml:"nofile_hard" live:"yes" comment:"RLIMIT_NOFILE of containers, hard; lowered to the daemon's own where it cannot be raised."`
	ShmSize             int64              `toml:"shm_size" live:"yes" comment:"Bytes of a pod's /dev/shm."`
	MaxLogLine          int                `toml:"max_log_line" live:"yes" comment:"Bytes of one log piece; a longer line is split into P pieces (256 to 1048576)."`
	CgroupDriver        string             `toml:"cgroup_driver" comment:"Who makes cgroups: systemd, cgroupfs, or auto (systemd where it runs the node). The kubelet asks for it."`
	UnprivilegedPorts   bool               `toml:"unprivileged_ports" live:"yes" comment:"Let non-root processes of pods with a network of their own bind ports below 1024 and ping."`
	MissingHostPath     string             `toml:"missing_host_path" live:"yes" comment:"What a mount does whose host path does not exist: create a directory there, or refuse the container."`
	HostPathTimeout     Duration           `toml:"host_path_timeout" comment:"A path of the node (volume, device, log directory, file of the configuration, archive) that does not answer in this time fails what needs it, with its name (1s to 10m)."`
	SELinux             bool               `toml:"selinux" comment:"Confine pods by SELinux, on a node that has it."`
	CDIDirs             []string           `toml:"cdi_dirs" live:"yes" comment:"Directories of CDI files (devices by name); of two files for one device that in the later directory counts. Read when a container asks for one."`
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

// String is the shortest form that can be read: 2m, not 2m0s.
func (d Duration) String() string {
	s := time.Duration(d).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// MarshalText writes String's form.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

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
		Image: Image{MaxConcurrentDownloads: 6, IdleTimeout: Duration(2 * time.Minute), MinRate: 1 << 10,
			MinRateWindow: Duration(time.Minute), MaxConcurrentUnpacks: 16,
			ConnectionsPerLayer: 4,
			PartialBytes:        4 << 30, PartialAge: Duration(24 * time.Hour),
			Pinned: []string{}},
		Streaming: Streaming{Address: "127.0.0.1", URLLifetime: Duration(time.Minute), IdleTimeout: Duration(4 * time.Hour)},
		Runtime: Runtime{
			DefaultHandler: "runc",
			DefaultCapabilities: []string{"CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID",
				"SETUID", "SETFCAP", "SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"},
			NofileSoft: 1024, NofileHard: 524288, ShmSize: 64 << 20, MaxLogLine: 16 << 10, CgroupDriver: Auto, UnprivilegedPorts: true,
			MissingHostPath: Create, HostPathTimeout: Duration(time.Minute),
			Handlers: map[string]Handler{"runc": {Path: "runc"}},
			CDIDirs:  []string{"/etc/cdi", "/var/run/cdi"},
		},
		NRI: NRI{Enable: NRIAuto, SocketPath: "/var/run/nri/nri.sock", PluginPath: "/opt/nri/plugins", PluginConfigPath: "/etc/nri/conf.d",
			RegistrationTimeout: Duration(5 * time.Second), RequestTimeout: Duration(5 * time.Second)},
	}
}

// Text is the configuration as a file with every key and its comment.
func (c Config) Text() (string, error) {
	var b bytes.Buffer
	if err := toml.NewEncoder(&b).Encode(c); err != nil {
		return "", fmt.Errorf("write configuration: %w", err)
	}
	return b.String(), nil
}
