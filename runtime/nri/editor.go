package nri

import (
	"fmt"
	"slices"
	"strings"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
)

// editor makes the single changes to a specification that NRI's generator puts
// adjustments together from. It is that package's UnderlyingGenerator; names
// and parameters are its.
type editor struct{ spec *rspec.Spec }

// newEditor fills the parts of a specification that a change may land in.
func newEditor(sp *rspec.Spec) *editor {
	if sp.Process == nil {
		sp.Process = &rspec.Process{}
	}
	if sp.Linux == nil {
		sp.Linux = &rspec.Linux{}
	}
	if sp.Linux.Resources == nil {
		sp.Linux.Resources = &rspec.LinuxResources{}
	}
	if sp.Annotations == nil {
		sp.Annotations = map[string]string{}
	}
	return &editor{spec: sp}
}

func (e *editor) Spec() *rspec.Spec { return e.spec }

func (e *editor) AddAnnotation(key, value string) { e.spec.Annotations[key] = value }

func (e *editor) RemoveAnnotation(key string) { delete(e.spec.Annotations, key) }

func (e *editor) AddDevice(d rspec.LinuxDevice) {
	e.RemoveDevice(d.Path)
	e.spec.Linux.Devices = append(e.spec.Linux.Devices, d)
}

func (e *editor) RemoveDevice(path string) {
	e.spec.Linux.Devices = slices.DeleteFunc(e.spec.Linux.Devices, func(d rspec.LinuxDevice) bool { return d.Path == path })
}

// namespaceTypes are those of the runtime specification.
var namespaceTypes = []rspec.LinuxNamespaceType{rspec.NetworkNamespace, rspec.PIDNamespace, rspec.MountNamespace,
	rspec.IPCNamespace, rspec.UTSNamespace, rspec.UserNamespace, rspec.CgroupNamespace, rspec.TimeNamespace}

func namespaceType(name string) (rspec.LinuxNamespaceType, error) {
	t := rspec.LinuxNamespaceType(name)
	if !slices.Contains(namespaceTypes, t) {
		return "", fmt.Errorf("namespace %q is none of %v", name, namespaceTypes)
	}
	return t, nil
}

func (e *editor) AddOrReplaceLinuxNamespace(name, path string) error {
	t, err := namespaceType(name)
	if err != nil {
		return err
	}
	for i := range e.spec.Linux.Namespaces {
		if e.spec.Linux.Namespaces[i].Type == t {
			e.spec.Linux.Namespaces[i].Path = path
			return nil
		}
	}
	e.spec.Linux.Namespaces = append(e.spec.Linux.Namespaces, rspec.LinuxNamespace{Type: t, Path: path})
	return nil
}

func (e *editor) RemoveLinuxNamespace(name string) error {
	t, err := namespaceType(name)
	e.spec.Linux.Namespaces = slices.DeleteFunc(e.spec.Linux.Namespaces, func(n rspec.LinuxNamespace) bool { return err == nil && n.Type == t })
	return err
}

func (e *editor) hooks() *rspec.Hooks {
	if e.spec.Hooks == nil {
		e.spec.Hooks = &rspec.Hooks{}
	}
	return e.spec.Hooks
}

func (e *editor) AddPreStartHook(h rspec.Hook) {
	hooks := e.hooks()
	hooks.Prestart = append(hooks.Prestart, h) // deprecated, but NRI and OCI runtimes still have it
}

func (e *editor) AddPostStartHook(h rspec.Hook) {
	hooks := e.hooks()
	hooks.Poststart = append(hooks.Poststart, h)
}

func (e *editor) AddPostStopHook(h rspec.Hook) {
	hooks := e.hooks()
	hooks.Poststop = append(hooks.Poststop, h)
}

func (e *editor) AddProcessEnv(name, value string) {
	for i, v := range e.spec.Process.Env {
		if strings.HasPrefix(v, name+"=") {
			e.spec.Process.Env[i] = name + "=" + value
			return
		}
	}
	e.spec.Process.Env = append(e.spec.Process.Env, name+"="+value)
}

// ClearProcessEnv leaves the old list alone: the generator still reads it.
func (e *editor) ClearProcessEnv() { e.spec.Process.Env = nil }

func (e *editor) SetProcessArgs(args []string) { e.spec.Process.Args = args }

func (e *editor) SetProcessOOMScoreAdj(score int) { e.spec.Process.OOMScoreAdj = &score }

func (e *editor) AddMount(m rspec.Mount) { e.spec.Mounts = append(e.spec.Mounts, m) }

func (e *editor) RemoveMount(destination string) {
	e.spec.Mounts = slices.DeleteFunc(e.spec.Mounts, func(m rspec.Mount) bool { return m.Destination == destination })
}

func (e *editor) Mounts() []rspec.Mount { return e.spec.Mounts }

// ClearMounts leaves the old list alone: the generator still sorts it.
func (e *editor) ClearMounts() { e.spec.Mounts = nil }

func (e *editor) AddLinuxSysctl(key, value string) {
	if e.spec.Linux.Sysctl == nil {
		e.spec.Linux.Sysctl = map[string]string{}
	}
	e.spec.Linux.Sysctl[key] = value
}

func (e *editor) RemoveLinuxSysctl(key string) { delete(e.spec.Linux.Sysctl, key) }

func (e *editor) SetLinuxCgroupsPath(path string) { e.spec.Linux.CgroupsPath = path }

func (e *editor) SetLinuxRootPropagation(mode string) error {
	e.spec.Linux.RootfsPropagation = mode
	return nil
}

func (e *editor) AddLinuxResourcesDevice(allow bool, kind string, major, minor *int64, access string) {
	e.spec.Linux.Resources.Devices = append(e.spec.Linux.Resources.Devices,
		rspec.LinuxDeviceCgroup{Allow: allow, Type: kind, Major: major, Minor: minor, Access: access})
}

func (e *editor) AddLinuxResourcesHugepageLimit(size string, limit uint64) {
	limits := slices.DeleteFunc(e.spec.Linux.Resources.HugepageLimits, func(l rspec.LinuxHugepageLimit) bool { return l.Pagesize == size })
	e.spec.Linux.Resources.HugepageLimits = append(limits, rspec.LinuxHugepageLimit{Pagesize: size, Limit: limit})
}

func (e *editor) AddLinuxResourcesUnified(key, value string) {
	if e.spec.Linux.Resources.Unified == nil {
		e.spec.Linux.Resources.Unified = map[string]string{}
	}
	e.spec.Linux.Resources.Unified[key] = value
}

func (e *editor) cpu() *rspec.LinuxCPU {
	if e.spec.Linux.Resources.CPU == nil {
		e.spec.Linux.Resources.CPU = &rspec.LinuxCPU{}
	}
	return e.spec.Linux.Resources.CPU
}

func (e *editor) memory() *rspec.LinuxMemory {
	if e.spec.Linux.Resources.Memory == nil {
		e.spec.Linux.Resources.Memory = &rspec.LinuxMemory{}
	}
	return e.spec.Linux.Resources.Memory
}

func (e *editor) SetLinuxResourcesCPUShares(v uint64)         { e.cpu().Shares = &v }
func (e *editor) SetLinuxResourcesCPUQuota(v int64)           { e.cpu().Quota = &v }
func (e *editor) SetLinuxResourcesCPUPeriod(v uint64)         { e.cpu().Period = &v }
func (e *editor) SetLinuxResourcesCPURealtimeRuntime(v int64) { e.cpu().RealtimeRuntime = &v }
func (e *editor) SetLinuxResourcesCPURealtimePeriod(v uint64) { e.cpu().RealtimePeriod = &v }
func (e *editor) SetLinuxResourcesCPUCpus(v string)           { e.cpu().Cpus = v }
func (e *editor) SetLinuxResourcesCPUMems(v string)           { e.cpu().Mems = v }
func (e *editor) SetLinuxResourcesMemoryLimit(v int64)        { e.memory().Limit = &v }
func (e *editor) SetLinuxResourcesMemorySwap(v int64)         { e.memory().Swap = &v }
