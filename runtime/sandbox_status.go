package runtime

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/oci/spec"
	"berth/sandbox"
	"berth/sandbox/namespaces"
)

// visibleSandbox tells whether callers may see a sandbox: not while it is
// being made.
func visibleSandbox(sb *sandbox.Sandbox) bool { return sb.ReadyAt != 0 || sb.StoppedAt != 0 }

func (s *Service) findSandbox(id string) (*sandbox.Sandbox, error) {
	sb, err := s.Records.Sandboxes.Find(id)
	if err == nil && !visibleSandbox(sb) {
		err = fmt.Errorf("%w: %q", sandbox.ErrNotFound, id)
	}
	if err != nil {
		return nil, fmt.Errorf("pod sandbox: %w", err)
	}
	return sb, nil
}

func (s *Service) sandboxState(sb *sandbox.Sandbox) cri.PodSandboxState {
	if sb.Ready(s.bootID) {
		return cri.PodSandboxState_SANDBOX_READY
	}
	return cri.PodSandboxState_SANDBOX_NOTREADY
}

// PodSandboxStatus answers from memory, the pod's containers included. NotFound
// for an unknown id.
func (s *Service) PodSandboxStatus(_ context.Context, req *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error) {
	sb, err := s.findSandbox(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	reply := &cri.PodSandboxStatusResponse{
		Status: s.sandboxStatus(sb), ContainersStatuses: s.containerStatuses(s.visibleContainersOf(sb.ID)), Timestamp: time.Now().UnixNano(),
	}
	if req.GetVerbose() {
		reply.Info, err = s.sandboxInfo(sb)
	}
	return reply, err
}

func (s *Service) sandboxStatus(sb *sandbox.Sandbox) *cri.PodSandboxStatus {
	c := sb.Config.Message
	return &cri.PodSandboxStatus{
		Id: sb.ID, Metadata: c.GetMetadata(), State: s.sandboxState(sb), CreatedAt: sb.CreatedAt,
		Labels: c.GetLabels(), Annotations: c.GetAnnotations(), RuntimeHandler: sb.Handler,
		Network: podIPs(sb.IPs),
		Linux:   &cri.LinuxPodSandboxStatus{Namespaces: &cri.Namespace{Options: sb.Namespaces()}},
	}
}

func podIPs(ips []string) *cri.PodSandboxNetworkStatus {
	n := &cri.PodSandboxNetworkStatus{}
	for i, ip := range ips {
		if i == 0 {
			n.Ip = ip
		} else {
			n.AdditionalIps = append(n.AdditionalIps, &cri.PodIP{Ip: ip})
		}
	}
	return n
}

// sandboxInfo is what operators see with crictl inspectp.
func (s *Service) sandboxInfo(sb *sandbox.Sandbox) (map[string]string, error) {
	info := struct {
		PID       int                                           `json:"pid,omitempty"` // of pause, where there is one
		NetNS     string                                        `json:"netns,omitempty"`
		Cgroup    string                                        `json:"cgroupParent"`
		Steps     []sandbox.Step                                `json:"steps"`
		Network   json.RawMessage                               `json:"network,omitempty"`
		Overhead  *sandbox.Config[*cri.LinuxContainerResources] `json:"overhead,omitempty"`
		Resources *sandbox.Config[*cri.LinuxContainerResources] `json:"resources,omitempty"`
		Config    sandbox.Config[*cri.PodSandboxConfig]         `json:"config"`
		Spec      json.RawMessage                               `json:"runtimeSpec"`
		Omitted   []string                                      `json:"omitted,omitempty"` // for their length
	}{Cgroup: sb.CgroupParent, Steps: sb.Steps, Network: sb.Network, Config: sb.Config}
	var err error
	if info.Spec, err = s.sandboxSpec(sb); err != nil {
		return nil, err
	}
	if r := sb.EffectiveOverhead(); r != nil {
		info.Overhead = &sandbox.Config[*cri.LinuxContainerResources]{Message: r}
	}
	if r := sb.EffectiveResources(); r != nil {
		info.Resources = &sandbox.Config[*cri.LinuxContainerResources]{Message: r}
	}
	if sb.Pause != nil {
		info.PID = sb.Pause.PID
	}
	if sb.Namespaces().GetNetwork() != cri.NamespaceMode_NODE {
		info.NetNS = namespaces.Path(s.namespaceDir(sb.ID), "net")
	}
	return describe("sandbox "+sb.ID, &info,
		func() { info.Config.Message, info.Omitted = nil, []string{"config"} },
		func() { info.Network, info.Omitted = nil, append(info.Omitted, "network") })
}

// sandboxSpec is pause's specification. A pod without pause has none; tools that
// look there for the pod's namespaces still find those that are its own.
func (s *Service) sandboxSpec(sb *sandbox.Sandbox) (json.RawMessage, error) {
	if b, err := oci.ReadRaw(s.bundleDir(sb.ID)); err == nil {
		return b, nil
	}
	sp := rspec.Spec{Version: spec.Version, Linux: &rspec.Linux{CgroupsPath: sb.CgroupParent}}
	ns := s.joinedNamespaces(sb)
	for _, n := range []rspec.LinuxNamespace{{Type: rspec.NetworkNamespace, Path: ns.Net}, {Type: rspec.UTSNamespace, Path: ns.UTS}, {Type: rspec.IPCNamespace, Path: ns.IPC}} {
		if n.Path != "" {
			sp.Linux.Namespaces = append(sp.Linux.Namespaces, n)
		}
	}
	b, err := json.Marshal(sp)
	if err != nil {
		return nil, fmt.Errorf("describe sandbox %s: %w", sb.ID, err)
	}
	return b, nil
}

// matches tells whether labels have every pair of the selector.
func matches(selector, labels map[string]string) bool {
	for k, v := range selector {
		if got, ok := labels[k]; !ok || got != v {
			return false
		}
	}
	return true
}
