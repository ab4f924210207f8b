package nri

import (
	"maps"
	"slices"
	"time"

	"github.com/containerd/nri/pkg/api"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Pod is what plugins learn of a pod sandbox.
type Pod struct {
	ID         string
	Config     *cri.PodSandboxConfig
	Handler    string // as asked for
	Cgroup     string // of the pod
	IPs        []string
	PID        int // of the pause process, 0 without one
	Namespaces []rspec.LinuxNamespace
	Overhead   *cri.LinuxContainerResources // of the whole pod, in force
	Resources  *cri.LinuxContainerResources
	Ready      bool // its record shows it
}

// Container is what plugins learn of a container.
type Container struct {
	ID, PodID         string
	Config            *cri.ContainerConfig
	Spec              *rspec.Spec // nil when its bundle is gone
	Made              bool        // its record shows it
	State             cri.ContainerState
	PID               int
	Created           time.Time
	Started, Finished time.Time // zero for not yet
	ExitCode          int32
	Reason, Message   string
	ImageID, ImageRef string
	Resources         *cri.LinuxContainerResources // in force
	UID, GID          uint32
	Groups            []uint32
}

func (p Pod) api() *api.PodSandbox {
	m := p.Config.GetMetadata()
	return &api.PodSandbox{
		Id: p.ID, Name: m.GetName(), Uid: m.GetUid(), Namespace: m.GetNamespace(),
		Labels: maps.Clone(p.Config.GetLabels()), Annotations: maps.Clone(p.Config.GetAnnotations()),
		RuntimeHandler: p.Handler, Pid: uint32(p.PID), Ips: p.IPs,
		Linux: &api.LinuxPodSandbox{
			PodOverhead:  fromCRI(p.Overhead),
			PodResources: fromCRI(p.Resources),
			CgroupParent: p.Config.GetLinux().GetCgroupParent(),
			CgroupsPath:  p.Cgroup,
			Namespaces:   api.FromOCILinuxNamespaces(p.Namespaces),
		},
	}
}

// states are NRI's words for CRI's.
var states = map[cri.ContainerState]api.ContainerState{
	cri.ContainerState_CONTAINER_CREATED: api.ContainerState_CONTAINER_CREATED,
	cri.ContainerState_CONTAINER_RUNNING: api.ContainerState_CONTAINER_RUNNING,
	cri.ContainerState_CONTAINER_EXITED:  api.ContainerState_CONTAINER_STOPPED,
}

func (c Container) api() *api.Container {
	out := &api.Container{
		Id: c.ID, PodSandboxId: c.PodID, Name: c.Config.GetMetadata().GetName(), State: states[c.State],
		Labels: maps.Clone(c.Config.GetLabels()), Annotations: maps.Clone(c.Config.GetAnnotations()),
		Pid: uint32(c.PID), CreatedAt: nanoseconds(c.Created), StartedAt: nanoseconds(c.Started), FinishedAt: nanoseconds(c.Finished),
		ExitCode: c.ExitCode, StatusReason: c.Reason, StatusMessage: c.Message,
		Image: &api.Image{Name: c.imageName(), Digest: c.ImageRef, ConfigDigest: c.ImageID},
		User:  &api.User{Uid: c.UID, Gid: c.GID, AdditionalGids: c.Groups},
	}
	for _, d := range c.Config.GetCDIDevices() {
		out.CDIDevices = append(out.CDIDevices, &api.CDIDevice{Name: d.GetName()})
	}
	if c.Spec != nil {
		c.fillFromSpec(out)
	}
	if c.Made && c.Resources != nil { // the specification has them as they were at first
		if out.Linux == nil {
			out.Linux = &api.LinuxContainer{}
		}
		out.Linux.Resources = overlay(out.Linux.GetResources(), fromCRI(c.Resources))
	}
	return out
}

func nanoseconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func (c Container) imageName() string {
	if name := c.Config.GetImage().GetUserSpecifiedImage(); name != "" {
		return name
	}
	return c.Config.GetImage().GetImage()
}

func (c Container) fillFromSpec(out *api.Container) {
	sp := c.Spec
	if out.Annotations == nil {
		out.Annotations = map[string]string{}
	}
	maps.Copy(out.Annotations, sp.Annotations)
	out.Mounts, out.Hooks = api.FromOCIMounts(sp.Mounts), api.FromOCIHooks(sp.Hooks)
	out.Linux = &api.LinuxContainer{}
	if p := sp.Process; p != nil {
		out.Args, out.Env = slices.Clone(p.Args), slices.Clone(p.Env) // the adaptation changes them
		out.User = &api.User{Uid: p.User.UID, Gid: p.User.GID, AdditionalGids: p.User.AdditionalGids}
		for _, l := range p.Rlimits {
			out.Rlimits = append(out.Rlimits, &api.POSIXRlimit{Type: l.Type, Hard: l.Hard, Soft: l.Soft})
		}
		out.Linux.OomScoreAdj = api.Int(p.OOMScoreAdj)
		out.Linux.IoPriority = api.FromOCILinuxIOPriority(p.IOPriority)
		out.Linux.Scheduler = api.FromOCILinuxScheduler(p.Scheduler)
	}
	if l := sp.Linux; l != nil {
		out.Linux.Namespaces, out.Linux.Devices = api.FromOCILinuxNamespaces(l.Namespaces), api.FromOCILinuxDevices(l.Devices)
		out.Linux.Resources = api.FromOCILinuxResources(l.Resources, nil)
		out.Linux.CgroupsPath, out.Linux.Sysctl = l.CgroupsPath, maps.Clone(l.Sysctl)
		out.Linux.SeccompProfile = c.seccompProfile()
		if l.Seccomp != nil {
			out.Linux.SeccompPolicy = api.FromOCILinuxSeccomp(l.Seccomp)
		}
		out.Linux.NetDevices = api.FromOCILinuxNetDevices(l.NetDevices)
		if r := l.IntelRdt; r != nil {
			out.Linux.Rdt = &api.LinuxRdt{ClosId: api.String(r.ClosID), Schemata: api.RepeatedString(r.Schemata), EnableMonitoring: api.Bool(r.EnableMonitoring)}
		}
	}
}

func (c Container) seccompProfile() *api.SecurityProfile {
	s := c.Config.GetLinux().GetSecurityContext().GetSeccomp()
	switch {
	case s == nil:
		return &api.SecurityProfile{ProfileType: api.SecurityProfile_UNCONFINED}
	case s.GetProfileType() == cri.SecurityProfile_RuntimeDefault:
		return &api.SecurityProfile{ProfileType: api.SecurityProfile_RUNTIME_DEFAULT}
	case s.GetProfileType() == cri.SecurityProfile_Localhost:
		return &api.SecurityProfile{ProfileType: api.SecurityProfile_LOCALHOST, LocalhostRef: s.GetLocalhostRef()}
	default:
		return &api.SecurityProfile{ProfileType: api.SecurityProfile_UNCONFINED}
	}
}
