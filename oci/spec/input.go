package spec

import (
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Host is what a specification depends on beyond the request. runtime/resolve
// gathers it once when the daemon starts (HostFacts); the configuration fills
// Rlimits.
type Host struct {
	CgroupV2         bool     // the unified hierarchy is the only one in use
	Capabilities     []string // the daemon's bounding set, CAP_ names; nil: not known, nothing is cut
	OOMScoreAdjMin   int      // the lowest value that may be given when CanLowerOOM is false
	CanLowerOOM      bool     // CAP_SYS_RESOURCE is there
	SeccompSupported bool
	AppArmorEnabled  bool
	SELinuxEnabled   bool
	Arch             string // as GOARCH spells it
	Kernel           Kernel
	SwapControl      bool // the memory controller can limit swap
	HugetlbControl   bool // the hugetlb controller is there
	// HugePages are the sizes of huge pages that the kernel has, such as 2MB; nil: not
	// known, none is refused.
	HugePages []string
	// Rlimits are given to every container. nil means DefaultRlimits, an empty
	// list means that the daemon's own are inherited.
	Rlimits []rspec.POSIXRlimit
	// RlimitMax is the highest hard limit that the daemon may give, by RLIMIT_
	// name. A name that is not there has no bound.
	RlimitMax map[string]uint64
}

// Kernel is the part of the kernel's version that seccomp profiles ask for.
type Kernel struct{ Major, Minor uint64 }

// DefaultRlimits is what a container gets when the configuration is silent:
// never the daemon's own limits, which are "infinity" under many units and make
// programs that walk all descriptors burn CPU and memory.
func DefaultRlimits() []rspec.POSIXRlimit {
	return []rspec.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1024, Hard: 524288}}
}

// Namespaces are the paths of the pod's namespaces. An empty path means that
// there is none to join; the modes of the request say what that means.
type Namespaces struct {
	Net string // pinned network namespace of the pod
	IPC string // pinned IPC namespace of the pod
	UTS string // pinned UTS namespace of the pod; empty: the host's
	PID string // of the pause process for mode POD, of the target for mode TARGET
	// User is the pod's pinned user namespace, when it has one.
	User string
}

// Files are the pod's files that are mounted into each container. Empty means
// not mounted. With host IPC the host's /dev/shm is used instead of Shm.
type Files struct {
	Hosts      string // for /etc/hosts
	Hostname   string // for /etc/hostname
	ResolvConf string // for /etc/resolv.conf
	Shm        string // the pod's tmpfs for /dev/shm
}

// Options come from the configuration. The zero value is berth's default.
type Options struct {
	Capabilities []string // default set, CAP_ names; nil: DefaultCapabilities
	// PrivilegedWithoutHostDevices keeps the host's devices out of privileged
	// containers, and then also their allow-all cgroup rule, unless
	// PrivilegedAllDevicesAllowed is set.
	PrivilegedWithoutHostDevices bool
	PrivilegedAllDevicesAllowed  bool
	// CgroupWritable lets containers write to their own cgroup, where a cgroup
	// namespace shows them no other: with cgroup v2.
	CgroupWritable bool
	// Base is the runtime handler's base specification, from ParseBase; nil: none.
	Base *rspec.Spec
	// AppArmorDefault is the loaded profile that RuntimeDefault means. Empty on a
	// host with AppArmor: none is loaded, for the reason AppArmorProblem.
	AppArmorDefault string
	AppArmorProblem string
}

// User is a container's process identity, resolved in its rootfs.
type User struct {
	UID            uint32
	GID            uint32
	AdditionalGIDs []uint32 // sorted, without repeats, GID among them
	Username       string   // empty when the rootfs names none
	Home           string   // from the rootfs; for information, the runtime sets HOME itself
}

// Resolved is what runtime/resolve found on the machine.
type Resolved struct {
	User User
	// MountSources are the real host paths of the config's mounts, in its order.
	MountSources []string
	// Volumes are the image's, as far as DeclaredVolumes names them.
	Volumes []Volume
	// Devices and DeviceRules are those of the config's devices.
	Devices     []rspec.LinuxDevice
	DeviceRules []rspec.LinuxDeviceCgroup
	// HostDevices are the host's device nodes; filled for privileged containers.
	HostDevices []rspec.LinuxDevice
	// SeccompProfile is the content of a Localhost profile, nil for other types.
	SeccompProfile []byte
}

// ContainerInput is all that a container's specification depends on.
type ContainerInput struct {
	ID, SandboxID string
	Config        *cri.ContainerConfig
	Sandbox       *cri.PodSandboxConfig
	Image         *ispec.Image
	Host          Host
	Resolved      Resolved
	Namespaces    Namespaces
	Files         Files
	Options       Options
	Labels        Labels
	// Hostname is the value of $HOSTNAME; empty: the sandbox config's hostname,
	// and if that is empty too the variable is not set.
	Hostname    string
	CgroupsPath string
	Rootfs      string // absolute
}

// PauseInput is all that the specification of a pod's PID 1 depends on.
type PauseInput struct {
	ID             string // the sandbox's
	Sandbox        *cri.PodSandboxConfig
	Host           Host
	Options        Options    // AppArmor's alone
	Labels         Labels     // empty for a privileged sandbox
	Namespaces     Namespaces // Net, IPC, UTS, User; a new PID namespace is made
	CgroupsPath    string
	Rootfs         string // absolute; holds the monitor's static binary as /pause
	SeccompProfile []byte // content of the sandbox's Localhost profile
}
