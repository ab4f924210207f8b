package spec

import (
	"fmt"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// modes are the namespace modes in force for a container, after those of its
// sandbox were taken into account: POD never stands where the pod itself has
// the host's namespace.
type modes struct {
	network, ipc, pid cri.NamespaceMode
	userNS            *IDMap // of the pod's own user namespace, or nil
}

const modeFields = "linux.security_context.namespace_options"

// SandboxModes checks a sandbox's namespace options: network and ipc are POD
// or NODE, pid is POD, CONTAINER or NODE. ErrInvalid.
func SandboxModes(sandbox *cri.PodSandboxConfig) error {
	o := sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions()
	if err := checkPodOrNode("network", o.GetNetwork()); err != nil {
		return err
	}
	if err := checkPodOrNode("ipc", o.GetIpc()); err != nil {
		return err
	}
	switch o.GetPid() {
	case cri.NamespaceMode_POD, cri.NamespaceMode_CONTAINER, cri.NamespaceMode_NODE:
	default:
		return Invalid(modeFields+".pid", o.GetPid(), "a sandbox's must be POD, CONTAINER or NODE")
	}
	_, err := userNamespace(o)
	return err
}

func checkPodOrNode(name string, mode cri.NamespaceMode) error {
	if mode != cri.NamespaceMode_POD && mode != cri.NamespaceMode_NODE {
		return Invalid(modeFields+"."+name, mode, "must be POD or NODE")
	}
	return nil
}

// containerModes merges a container's options with its sandbox's and refuses
// contradictions.
func containerModes(config *cri.ContainerConfig, sandbox *cri.PodSandboxConfig) (modes, error) {
	if err := SandboxModes(sandbox); err != nil {
		return modes{}, err
	}
	pod := sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions()
	m := modes{network: pod.GetNetwork(), ipc: pod.GetIpc(), pid: pod.GetPid()}
	var err error
	if m.userNS, err = userNamespace(pod); err != nil {
		return modes{}, err
	}
	own := config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	if own == nil {
		return m, nil
	}
	if err := sameUserNamespace(own, m.userNS); err != nil {
		return modes{}, err
	}
	if err := sameAsPod("network", own.GetNetwork(), m.network); err != nil {
		return modes{}, err
	}
	if err := sameAsPod("ipc", own.GetIpc(), m.ipc); err != nil {
		return modes{}, err
	}
	m.pid, err = pidMode(own, m.pid)
	return m, err
}

func sameAsPod(name string, own, pod cri.NamespaceMode) error {
	if err := checkPodOrNode(name, own); err != nil {
		return err
	}
	if own == cri.NamespaceMode_NODE && pod != cri.NamespaceMode_NODE {
		return Invalid(modeFields+"."+name, own, "the sandbox does not use the host's "+name+" namespace")
	}
	return nil
}

func pidMode(own *cri.NamespaceOption, pod cri.NamespaceMode) (cri.NamespaceMode, error) {
	const field = modeFields + ".pid"
	mode := own.GetPid()
	if own.GetTargetId() != "" && mode != cri.NamespaceMode_TARGET {
		return mode, Invalid(modeFields+".target_id", own.GetTargetId(), "goes only with pid TARGET, not "+mode.String())
	}
	switch mode {
	case cri.NamespaceMode_CONTAINER:
	case cri.NamespaceMode_POD:
		if pod == cri.NamespaceMode_CONTAINER {
			return mode, Invalid(field, mode, "the sandbox was made without a shared PID namespace")
		}
		return pod, nil
	case cri.NamespaceMode_NODE:
		if pod != cri.NamespaceMode_NODE {
			return mode, Invalid(field, mode, "the sandbox does not use the host's pid namespace")
		}
	case cri.NamespaceMode_TARGET:
		if own.GetTargetId() == "" {
			return mode, Invalid(modeFields+".target_id", "", "needed by pid TARGET")
		}
	default:
		return mode, Invalid(field, mode, "must be POD, CONTAINER, NODE or TARGET")
	}
	return mode, nil
}

// PIDMode is the PID mode in force for a container: what it asks for, or its
// sandbox's. The flows look up the path to join by it.
func PIDMode(config *cri.ContainerConfig, sandbox *cri.PodSandboxConfig) (cri.NamespaceMode, error) {
	m, err := containerModes(config, sandbox)
	return m.pid, err
}

func (b *builder) namespaces() ([]rspec.LinuxNamespace, error) {
	list := []rspec.LinuxNamespace{{Type: rspec.MountNamespace}}
	join := func(kind rspec.LinuxNamespaceType, mode cri.NamespaceMode, path string) error {
		switch {
		case mode == cri.NamespaceMode_NODE:
			return nil
		case mode == cri.NamespaceMode_CONTAINER:
			path = ""
		case path == "":
			return fmt.Errorf("join the pod's %s namespace: it has none", kind)
		}
		list = append(list, rspec.LinuxNamespace{Type: kind, Path: path})
		return nil
	}
	if b.modes.userNS != nil {
		if err := join(rspec.UserNamespace, cri.NamespaceMode_POD, b.in.Namespaces.User); err != nil {
			return nil, err
		}
	}
	if err := join(rspec.NetworkNamespace, b.modes.network, b.in.Namespaces.Net); err != nil {
		return nil, err
	}
	if err := join(rspec.IPCNamespace, b.modes.ipc, b.in.Namespaces.IPC); err != nil {
		return nil, err
	}
	if err := join(rspec.PIDNamespace, b.modes.pid, b.in.Namespaces.PID); err != nil {
		return nil, err
	}
	if b.in.Namespaces.UTS != "" {
		list = append(list, rspec.LinuxNamespace{Type: rspec.UTSNamespace, Path: b.in.Namespaces.UTS})
	}
	// With v1 the container sees its own cgroups by bind mounts instead.
	if b.in.Host.CgroupV2 && !b.privileged() {
		list = append(list, rspec.LinuxNamespace{Type: rspec.CgroupNamespace})
	}
	return list, nil
}
