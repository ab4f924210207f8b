package runtime

import (
	"errors"
	"fmt"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
)

// limitFiles are the cgroup files, or the OCI runtime's words for one, that limits
// are written to, the longer before those that they hold, with their fields.
var limitFiles = []struct {
	file, field string
	value       func(*cri.LinuxContainerResources) any
}{
	{"memory.memsw", "memory_swap_limit_in_bytes", func(r *cri.LinuxContainerResources) any { return r.GetMemorySwapLimitInBytes() }},
	{"memory.swap", "memory_swap_limit_in_bytes", func(r *cri.LinuxContainerResources) any { return r.GetMemorySwapLimitInBytes() }},
	{"memory limit", "memory_limit_in_bytes", func(r *cri.LinuxContainerResources) any { return r.GetMemoryLimitInBytes() }},
	{"memory.", "memory_limit_in_bytes", func(r *cri.LinuxContainerResources) any { return r.GetMemoryLimitInBytes() }},
	{"cpuset.cpus", "cpuset_cpus", func(r *cri.LinuxContainerResources) any { return fmt.Sprintf("%q", r.GetCpusetCpus()) }},
	{"cpuset.mems", "cpuset_mems", func(r *cri.LinuxContainerResources) any { return fmt.Sprintf("%q", r.GetCpusetMems()) }},
	{"cpu.cfs_period", "cpu_period", func(r *cri.LinuxContainerResources) any { return r.GetCpuPeriod() }},
	{"cpu.cfs_quota", "cpu_quota", func(r *cri.LinuxContainerResources) any { return r.GetCpuQuota() }},
	{"cpu.max", "cpu_quota", func(r *cri.LinuxContainerResources) any { return r.GetCpuQuota() }},
	{"cpu.shares", "cpu_shares", func(r *cri.LinuxContainerResources) any { return r.GetCpuShares() }},
	{"cpu.weight", "cpu_shares", func(r *cri.LinuxContainerResources) any { return r.GetCpuShares() }},
	{"hugetlb.", "hugepage_limits", func(r *cri.LinuxContainerResources) any { return r.GetHugepageLimits() }},
}

// blameLimit names the field whose value the kernel has refused; another error stays
// as it is.
func blameLimit(err error, prefix string, r *cri.LinuxContainerResources) error {
	if !errors.Is(err, oci.ErrLimit) {
		return err
	}
	for _, l := range limitFiles {
		if strings.Contains(err.Error(), l.file) {
			return fmt.Errorf("%s%s %v: %w", prefix, l.field, l.value(r), err)
		}
	}
	return err
}
