package runtime

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	goruntime "runtime"
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/runtime/config"
)

// Version answers with berth's name and version.
func (s *Service) Version(context.Context, *cri.VersionRequest) (*cri.VersionResponse, error) {
	return &cri.VersionResponse{Version: "0.1.0", RuntimeName: "berth", RuntimeVersion: s.Parts.Version, RuntimeApiVersion: "v1"}, nil
}

// RuntimeConfig tells the cgroup driver; static for the daemon's life.
func (s *Service) RuntimeConfig(context.Context, *cri.RuntimeConfigRequest) (*cri.RuntimeConfigResponse, error) {
	driver := cri.CgroupDriver_CGROUPFS
	if s.Config().Runtime.CgroupDriver == config.Systemd {
		driver = cri.CgroupDriver_SYSTEMD
	}
	return &cri.RuntimeConfigResponse{Linux: &cri.LinuxRuntimeConfiguration{CgroupDriver: driver}}, nil
}

// Status tells whether pods can be run, and with which handlers. It waits for
// nothing.
func (s *Service) Status(_ context.Context, req *cri.StatusRequest) (*cri.StatusResponse, error) {
	networkReady := &cri.RuntimeCondition{Type: cri.NetworkReady, Status: true}
	if err := s.Network.Ready(); err != nil {
		networkReady.Status = false
		networkReady.Reason = "NetworkPluginNotReady"
		networkReady.Message = err.Error()
	}
	conditions := []*cri.RuntimeCondition{s.runtimeReady(), networkReady}
	if s.AppArmor != nil && s.AppArmor.Problem() != nil {
		conditions = append(conditions, &cri.RuntimeCondition{Type: "AppArmorDefaultLoaded", Reason: "ProfileNotLoaded", Message: s.AppArmor.Problem().Error()})
	}
	reply := &cri.StatusResponse{
		Status:          &cri.RuntimeStatus{Conditions: conditions},
		RuntimeHandlers: s.handlers,
		Features:        s.features,
	}
	if req.GetVerbose() {
		reply.Info = s.statusInfo()
	}
	return reply, nil
}

// runtimeReady is false where there has been no monitor for a while: nothing can be
// made or started.
func (s *Service) runtimeReady() *cri.RuntimeCondition {
	c := &cri.RuntimeCondition{Type: cri.RuntimeReady, Status: true}
	if s.MonitorMissing == nil {
		return c
	}
	if text := s.MonitorMissing(); text != "" {
		c.Status, c.Reason, c.Message = false, "MonitorUnavailable", "no monitor takes requests; they wait for "+text
	}
	return c
}

func (s *Service) statusInfo() map[string]string {
	info := map[string]string{}
	put := func(key string, v any) {
		if b, err := json.Marshal(v); err == nil {
			info[key] = string(b)
		}
	}
	put("config", struct {
		Root     string `json:"rootDir"`
		State    string `json:"stateDir"`
		Settings any    `json:"settings"`
	}{s.Config().Root, s.Config().State, s.Config()})
	put("golang", goruntime.Version())
	put("goroutines", goruntime.NumGoroutine())
	put("streaming", struct {
		Address  string `json:"address"`
		Sessions int    `json:"sessions"`
	}{s.Streams.Addr(), s.Streams.Sessions()})
	put("cniconfig", s.Network.Describe())
	for name, m := range s.Networks {
		put("cniconfig."+name, m.Describe())
	}
	put("hostports", s.HostPorts.Describe())
	put("host", s.hostInfo())
	put("operations", s.runningOperations())
	put("events", s.events.counts())
	put("restore", s.beginning.info())
	if possible := s.checkpoints.Load(); possible != nil {
		put("checkpoint", *possible)
	}
	return info
}

func (s *Service) runningOperations() []string {
	running := []string{}
	for _, o := range s.operations.Running() {
		running = append(running, fmt.Sprintf("%s %s: %s", o.Verb, o.Object, o.Where()))
	}
	return running
}

// Running names the operations, pulls and imports that have not ended, and where
// each is. From memory.
func (s *Service) Running() []string {
	running := s.runningOperations()
	for _, p := range s.Images.Progress() {
		if p.Ended.IsZero() {
			running = append(running, fmt.Sprintf("%s %s: %s", p.Op, p.Image, p.Stage))
		}
	}
	return running
}

// hostFacts is what of a request this node can do, as an operator sees it.
type hostFacts struct {
	CgroupVersion int      `json:"cgroupVersion"`
	SwapLimits    bool     `json:"swapLimits"`
	Hugetlb       bool     `json:"hugetlbLimits"`
	Seccomp       bool     `json:"seccomp"`
	AppArmor      bool     `json:"appArmor"`
	SELinux       bool     `json:"seLinux"`
	Capabilities  int      `json:"capabilities"` // in the daemon's bounding set
	Without       []string `json:"without"`      // what requests ask for in vain here, and why
}

func (s *Service) hostInfo() hostFacts {
	h := s.Host
	f := hostFacts{CgroupVersion: 1, SwapLimits: h.SwapControl, Hugetlb: h.HugetlbControl, Seccomp: h.SeccompSupported,
		AppArmor: h.AppArmorEnabled, SELinux: h.SELinuxEnabled, Capabilities: len(h.Capabilities), Without: []string{}}
	swap := "the memory controller has no memory.memsw.limit_in_bytes"
	if h.CgroupV2 {
		f.CgroupVersion, swap = 2, "the memory controller has no memory.swap.max"
	}
	without := func(holds bool, text string) {
		if !holds {
			f.Without = append(f.Without, text)
		}
	}
	without(h.SwapControl, "memory_swap_limit_in_bytes has no effect: "+swap)
	without(h.HugetlbControl, "hugepage_limits have no effect: there is no hugetlb controller")
	without(h.CgroupV2, "unified is refused: this is cgroup v1")
	for _, name := range slices.Sorted(maps.Keys(s.abilities)) {
		a := s.abilities[name]
		without(a.recursiveReadOnly == nil, fmt.Sprintf("recursive_read_only is refused by handler %s: %v", name, a.recursiveReadOnly))
		without(a.idMappedMounts == nil, fmt.Sprintf("uidMappings are refused by handler %s: %v", name, a.idMappedMounts))
		without(a.userNamespaces == nil, fmt.Sprintf("user namespaces are refused by handler %s: %v", name, a.userNamespaces))
		without(a.userVolumes == nil || a.userNamespaces != nil,
			fmt.Sprintf("the feature user_namespaces is off for handler %s, for Kubernetes' secrets are on tmpfs: %v", name, a.userVolumes))
	}
	without(h.CanLowerOOM, "oom_score_adj below the daemon's own is raised to it: the daemon lacks CAP_SYS_RESOURCE")
	without(!h.AppArmorEnabled || s.AppArmor == nil || s.AppArmor.Problem() == nil, "apparmor RuntimeDefault is refused: its profile is not loaded")
	without(h.AppArmorEnabled, "apparmor Localhost is refused: the kernel has no AppArmor")
	without(!h.SELinuxEnabled || s.SELinux != nil, "selinux_options are refused: runtime.selinux is off")
	without(h.SELinuxEnabled, "selinux_options have no effect: the kernel has no SELinux")
	if reason := s.HostPorts.Describe().Unavailable; reason != "" {
		without(false, "host ports are refused where no plugin of the network maps them: "+reason)
	}
	return f
}

// readCheckpoints asks every handler, beside the daemon's start, why it cannot
// checkpoint containers; an empty text means that it can.
func (s *Service) readCheckpoints() {
	ctx, cancel := context.WithTimeout(context.Background(), featuresPatience)
	defer cancel()
	reasons := map[string]string{}
	for name, rt := range s.Handlers {
		reasons[name] = ""
		if err := rt.CanCheckpoint(ctx); err != nil {
			reasons[name] = err.Error()
		}
	}
	s.checkpoints.Store(&reasons)
}

// featuresPatience bounds the questions to OCI runtimes at the daemon's start.
const featuresPatience = 30 * time.Second
