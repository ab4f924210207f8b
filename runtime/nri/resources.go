package nri

import (
	"fmt"
	"maps"
	"math"

	"github.com/containerd/nri/pkg/api"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Update is a change of a container's limits.
type Update struct {
	ID        string
	Resources *cri.LinuxContainerResources // zero fields stay as they are
	more      *api.LinuxResources          // nil, or where the limits are that CRI has no field for
}

// AddMore sets what the update asks for beyond its Resources.
func (u Update) AddMore(r *rspec.LinuxResources) {
	if u.more == nil {
		return
	}
	if m := u.more.GetMemory(); m.GetReservation() != nil || m.GetKernelTcp() != nil || m.GetSwappiness() != nil || m.GetDisableOomKiller() != nil {
		if r.Memory == nil {
			r.Memory = &rspec.LinuxMemory{}
		}
		setMore(r.Memory, m)
	}
	if c := u.more.GetCpu(); c.GetRealtimeRuntime() != nil || c.GetRealtimePeriod() != nil {
		if r.CPU == nil {
			r.CPU = &rspec.LinuxCPU{}
		}
		r.CPU.RealtimeRuntime, r.CPU.RealtimePeriod = c.GetRealtimeRuntime().Get(), c.GetRealtimePeriod().Get()
	}
	if l := u.more.GetPids(); l != nil {
		limit := l.GetLimit()
		r.Pids = &rspec.LinuxPids{Limit: &limit}
	}
}

// setMore sets the memory limits that CRI has no field for.
func setMore(to *rspec.LinuxMemory, m *api.LinuxMemory) {
	set(&to.Reservation, m.GetReservation().Get())
	set(&to.KernelTCP, m.GetKernelTcp().Get())
	set(&to.Swappiness, m.GetSwappiness().Get())
	set(&to.DisableOOMKiller, m.GetDisableOomKiller().Get())
}

// fromCRI translates CRI's resources; a field that is zero is left unset. Nil
// stays nil.
func fromCRI(r *cri.LinuxContainerResources) *api.LinuxResources {
	if r == nil {
		return nil
	}
	out := &api.LinuxResources{
		Memory: &api.LinuxMemory{Limit: int64Unless0(r.GetMemoryLimitInBytes()), Swap: int64Unless0(r.GetMemorySwapLimitInBytes())},
		Cpu: &api.LinuxCPU{
			Shares: uint64Unless0(r.GetCpuShares()), Quota: int64Unless0(r.GetCpuQuota()), Period: uint64Unless0(r.GetCpuPeriod()),
			Cpus: r.GetCpusetCpus(), Mems: r.GetCpusetMems(),
		},
		Unified: maps.Clone(r.GetUnified()),
	}
	for _, l := range r.GetHugepageLimits() {
		out.HugepageLimits = append(out.HugepageLimits, &api.HugepageLimit{PageSize: l.GetPageSize(), Limit: l.GetLimit()})
	}
	return out
}

func int64Unless0(v int64) *api.OptionalInt64 {
	if v == 0 {
		return nil
	}
	return api.Int64(v)
}

func uint64Unless0(v int64) *api.OptionalUInt64 {
	if v <= 0 {
		return nil
	}
	return api.UInt64(uint64(v))
}

// overlay lays the set fields of b over those of a; either may be nil.
func overlay(a, b *api.LinuxResources) *api.LinuxResources {
	if a == nil || b == nil {
		if a == nil {
			return b
		}
		return a
	}
	out := a.Copy()
	if out.Memory == nil {
		out.Memory = &api.LinuxMemory{}
	}
	if out.Cpu == nil {
		out.Cpu = &api.LinuxCPU{}
	}
	set(&out.Memory.Limit, b.Memory.GetLimit())
	set(&out.Memory.Swap, b.Memory.GetSwap())
	set(&out.Cpu.Shares, b.Cpu.GetShares())
	set(&out.Cpu.Quota, b.Cpu.GetQuota())
	set(&out.Cpu.Period, b.Cpu.GetPeriod())
	if b.Cpu.GetCpus() != "" {
		out.Cpu.Cpus = b.Cpu.GetCpus()
	}
	if b.Cpu.GetMems() != "" {
		out.Cpu.Mems = b.Cpu.GetMems()
	}
	if len(b.HugepageLimits) > 0 {
		out.HugepageLimits = b.HugepageLimits
	}
	if len(b.Unified) > 0 {
		if out.Unified == nil {
			out.Unified = map[string]string{}
		}
		maps.Copy(out.Unified, b.Unified)
	}
	return out
}

func set[T any](field **T, value *T) {
	if value != nil {
		*field = value
	}
}

// fromUpdate translates what a plugin asks of a container. What berth cannot
// do is refused.
func fromUpdate(u *api.ContainerUpdate) (Update, error) {
	r := u.GetLinux().GetResources()
	if err := checkClasses(r); err != nil {
		return Update{}, err
	}
	if len(r.GetDevices()) > 0 {
		return Update{}, fmt.Errorf("device rules of a container cannot be updated")
	}
	converted, err := toCRI(r)
	return Update{ID: u.GetContainerId(), Resources: converted, more: r}, err
}

// checkClasses refuses block I/O and RDT classes by name: berth has no list of them.
func checkClasses(r *api.LinuxResources) error {
	if c := r.GetBlockioClass().GetValue(); c != "" {
		return fmt.Errorf("block I/O class %q: berth has no block I/O classes", c)
	}
	if c := r.GetRdtClass().GetValue(); c != "" {
		return fmt.Errorf("RDT class %q: berth has no RDT classes; plugins may set linux.rdt instead", c)
	}
	return nil
}

// toCRI translates the part that CRI has fields for.
func toCRI(r *api.LinuxResources) (*cri.LinuxContainerResources, error) {
	out := &cri.LinuxContainerResources{
		MemoryLimitInBytes: r.GetMemory().GetLimit().GetValue(), MemorySwapLimitInBytes: r.GetMemory().GetSwap().GetValue(),
		CpuQuota: r.GetCpu().GetQuota().GetValue(), CpusetCpus: r.GetCpu().GetCpus(), CpusetMems: r.GetCpu().GetMems(),
		Unified: maps.Clone(r.GetUnified()),
	}
	for _, f := range []struct {
		name string
		from uint64
		to   *int64
	}{{"cpu.shares", r.GetCpu().GetShares().GetValue(), &out.CpuShares}, {"cpu.period", r.GetCpu().GetPeriod().GetValue(), &out.CpuPeriod}} {
		if f.from > math.MaxInt64 {
			return nil, fmt.Errorf("%s %d is out of range", f.name, f.from)
		}
		*f.to = int64(f.from)
	}
	for _, l := range r.GetHugepageLimits() {
		out.HugepageLimits = append(out.HugepageLimits, &cri.HugepageLimit{PageSize: l.GetPageSize(), Limit: l.GetLimit()})
	}
	return out, nil
}
