package sandbox

import (
	"encoding/json"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// Config holds a CRI message in a record as JSON.
type Config[M proto.Message] struct{ Message M }

// MarshalJSON writes the message in protobuf's JSON form.
func (c Config[M]) MarshalJSON() ([]byte, error) { return protojson.Marshal(c.Message) }

// UnmarshalJSON reads it back; fields that a newer berth wrote are dropped.
func (c *Config[M]) UnmarshalJSON(b []byte) error {
	c.Message = c.Message.ProtoReflect().New().Interface().(M)
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(b, c.Message)
}

// Process names a process for one boot.
type Process struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"startTime"` // clock ticks since boot
}

// Step is one step of an object's birth and how long it took.
type Step struct {
	Name        string `json:"name"`
	Nanoseconds int64  `json:"ns"`
}

// SELinux are the contexts of a pod's processes and files.
type SELinux struct {
	Process string `json:"process,omitempty"`
	Mount   string `json:"mount"`
}

// Sandbox is the record of a pod sandbox. Times are Unix nanoseconds, 0 for
// "not yet".
type Sandbox struct {
	ID      string                        `json:"id"`
	Name    string                        `json:"name"`
	Handler string                        `json:"handler"` // as asked for; empty is the default
	Runtime string                        `json:"runtime"` // the handler in force; the default may become another one
	Config  Config[*cri.PodSandboxConfig] `json:"config"`
	BootID  string                        `json:"bootID"`

	CreatedAt int64 `json:"createdAt"`
	ReadyAt   int64 `json:"readyAt,omitempty"`
	StoppedAt int64 `json:"stoppedAt,omitempty"` // a stop began, or the pod was found dead

	CgroupParent string `json:"cgroupParent"`         // directory below each hierarchy
	CgroupMade   bool   `json:"cgroupMade,omitempty"` // it did not exist before the pod: berth removes it
	// CgroupsMade are directories on the way to a CgroupParent of the caller's that
	// were missing: for a hierarchy's mount point the topmost. They go with the last
	// pod that has them here.
	CgroupsMade map[string]string `json:"cgroupsMade,omitempty"`
	Pause       *Process          `json:"pause,omitempty"`   // only with a shared PID namespace
	Network     json.RawMessage   `json:"network,omitempty"` // network.Result; present from before CNI ADD until DEL is done
	IPs         []string          `json:"ips,omitempty"`     // kept after DEL, for whoever asks later
	Steps       []Step            `json:"steps,omitempty"`
	SELinux     *SELinux          `json:"seLinux,omitempty"` // nil where it is not used
	// Checkpointing is the directory of a checkpoint in progress, during which
	// the pod may be frozen.
	Checkpointing string `json:"checkpointing,omitempty"`

	// Overhead and Resources of the whole pod; nil: those of Config.
	Overhead  *Config[*cri.LinuxContainerResources] `json:"overhead,omitempty"`
	Resources *Config[*cri.LinuxContainerResources] `json:"resources,omitempty"`
}

func (s *Sandbox) key() (string, string, int64) { return s.ID, s.Name, s.CreatedAt }

// Namespaces of the sandbox as asked for; never nil.
func (s *Sandbox) Namespaces() *cri.NamespaceOption {
	if n := s.Config.Message.GetLinux().GetSecurityContext().GetNamespaceOptions(); n != nil {
		return n
	}
	return &cri.NamespaceOption{}
}

// EffectiveOverhead and EffectiveResources are those of the whole pod, as it was
// run or last updated; nil where nothing was said.
func (s *Sandbox) EffectiveOverhead() *cri.LinuxContainerResources {
	if s.Overhead != nil {
		return s.Overhead.Message
	}
	return s.Config.Message.GetLinux().GetOverhead()
}

// EffectiveResources is described at EffectiveOverhead.
func (s *Sandbox) EffectiveResources() *cri.LinuxContainerResources {
	if s.Resources != nil {
		return s.Resources.Message
	}
	return s.Config.Message.GetLinux().GetResources()
}

// Ready tells whether the pod can take containers: it was brought up in this
// boot and no stop has begun.
func (s *Sandbox) Ready(bootID string) bool {
	return s.ReadyAt != 0 && s.StoppedAt == 0 && s.BootID == bootID
}

// SandboxName is the unique name that the metadata of a pod makes.
func SandboxName(m *cri.PodSandboxMetadata) string {
	return fmt.Sprintf("%s_%s_%s_%d", m.GetName(), m.GetNamespace(), m.GetUid(), m.GetAttempt())
}

// Container is the record of a container. Times are Unix nanoseconds, 0 for
// "not yet".
type Container struct {
	ID        string                       `json:"id"`
	Name      string                       `json:"name"`
	SandboxID string                       `json:"sandboxID"`
	Handler   string                       `json:"handler,omitempty"` // in force, its sandbox's; kept here for when that is gone
	Config    Config[*cri.ContainerConfig] `json:"config"`
	BootID    string                       `json:"bootID"`
	ImageID   string                       `json:"imageID"`  // config digest
	ImageRef  string                       `json:"imageRef"` // a digest reference, else the id
	// VolumeImages are the ids of mounted images, by the index of the config's mount.
	VolumeImages map[int]string `json:"volumeImages,omitempty"`

	CreatedAt  int64 `json:"createdAt"`        // when the request came
	MadeAt     int64 `json:"madeAt,omitempty"` // create is complete: visible in lists
	StartedAt  int64 `json:"startedAt,omitempty"`
	FinishedAt int64 `json:"finishedAt,omitempty"`
	RemovingAt int64 `json:"removingAt,omitempty"`

	Process    *Process                              `json:"process,omitempty"`
	ExitCode   int32                                 `json:"exitCode,omitempty"`
	Reason     string                                `json:"reason,omitempty"`
	Message    string                                `json:"message,omitempty"`
	LogPath    string                                `json:"logPath,omitempty"` // absolute; empty: no log
	StopSignal string                                `json:"stopSignal,omitempty"`
	User       User                                  `json:"user"`
	Resources  *Config[*cri.LinuxContainerResources] `json:"resources,omitempty"`  // after an update
	SharedPIDs bool                                  `json:"sharedPIDs,omitempty"` // its processes outlive its init
	Restore    bool                                  `json:"restore,omitempty"`    // its start continues processes of a checkpoint
	Cgroup     string                                `json:"cgroup,omitempty"`     // where an NRI plugin put it; empty: below its pod's
}

// User is who a container's process runs as.
type User struct {
	UID    int64   `json:"uid"`
	GID    int64   `json:"gid"`
	Groups []int64 `json:"groups,omitempty"`
}

func (c *Container) key() (string, string, int64) { return c.ID, c.Name, c.CreatedAt }

// ContainerName is the unique name of a container within the node.
func ContainerName(m *cri.ContainerMetadata, sandboxID string) string {
	return fmt.Sprintf("%s_%s_%d", sandboxID, m.GetName(), m.GetAttempt())
}

// State derives CRI's state from the times: EXITED once finished or when the
// boot it ran in is over, RUNNING once started, else CREATED.
func (c *Container) State(bootID string) cri.ContainerState {
	switch {
	case c.FinishedAt != 0 || c.BootID != bootID:
		return cri.ContainerState_CONTAINER_EXITED
	case c.StartedAt != 0:
		return cri.ContainerState_CONTAINER_RUNNING
	default:
		return cri.ContainerState_CONTAINER_CREATED
	}
}

// EffectiveResources are the limits in force: as created or last updated.
func (c *Container) EffectiveResources() *cri.LinuxContainerResources {
	if c.Resources != nil {
		return c.Resources.Message
	}
	return c.Config.Message.GetLinux().GetResources()
}
