package spec

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// hugepageSize is the form that the kernel's control files have.
var hugepageSize = regexp.MustCompile(`^[1-9][0-9]*(KB|MB|GB)$`)

// CheckResources refuses values that no kernel takes, by field name, which begins
// with prefix. A nil request is right. ErrInvalid.
func CheckResources(prefix string, r *cri.LinuxContainerResources) error {
	field := func(name string) string { return prefix + "." + name }
	for _, check := range []struct {
		name     string
		value    int64
		min, max int64
	}{
		{"cpu_period", r.GetCpuPeriod(), 0, 1_000_000},
		{"cpu_quota", r.GetCpuQuota(), -1, 1 << 44},
		{"cpu_shares", r.GetCpuShares(), 0, 262144},
		{"memory_limit_in_bytes", r.GetMemoryLimitInBytes(), -1, 1<<63 - 1},
		{"memory_swap_limit_in_bytes", r.GetMemorySwapLimitInBytes(), -1, 1<<63 - 1},
		{"oom_score_adj", r.GetOomScoreAdj(), -1000, 1000},
	} {
		if check.value < check.min || check.value > check.max {
			return Invalid(field(check.name), check.value, fmt.Sprintf("must be between %d and %d", check.min, check.max))
		}
	}
	if p := r.GetCpuPeriod(); p > 0 && p < 1000 {
		return Invalid(field("cpu_period"), p, "must be at least 1000 microseconds")
	}
	if q := r.GetCpuQuota(); q > 0 && q < 1000 {
		return Invalid(field("cpu_quota"), q, "must be at least 1000 microseconds")
	}
	if r.GetCpuShares() == 1 {
		return Invalid(field("cpu_shares"), 1, "must be at least 2")
	}
	limit, swap := r.GetMemoryLimitInBytes(), r.GetMemorySwapLimitInBytes()
	if swap > 0 && limit == 0 {
		return Invalid(field("memory_swap_limit_in_bytes"), swap, "needs memory_limit_in_bytes")
	}
	if swap > 0 && (limit < 0 || swap < limit) {
		return Invalid(field("memory_swap_limit_in_bytes"), swap, fmt.Sprintf("is less than memory_limit_in_bytes %d", limit))
	}
	if err := checkCpuset(field("cpuset_cpus"), r.GetCpusetCpus()); err != nil {
		return err
	}
	if err := checkCpuset(field("cpuset_mems"), r.GetCpusetMems()); err != nil {
		return err
	}
	if err := checkHugepages(field("hugepage_limits"), r.GetHugepageLimits()); err != nil {
		return err
	}
	return checkUnified(field("unified"), r.GetUnified())
}

// checkCpuset accepts lists of numbers and ranges: "0-3,7".
func checkCpuset(field, list string) error {
	if list == "" {
		return nil
	}
	for _, part := range strings.Split(list, ",") {
		low, high, isRange := strings.Cut(part, "-")
		first, err := strconv.ParseUint(low, 10, 16)
		last := first
		if err == nil && isRange {
			last, err = strconv.ParseUint(high, 10, 16)
		}
		if err != nil || last < first {
			return Invalid(field, list, "must be a list of numbers and ranges, like 0-3,7")
		}
	}
	return nil
}

func checkHugepages(field string, limits []*cri.HugepageLimit) error {
	seen := map[string]uint64{}
	for _, l := range limits {
		size := l.GetPageSize()
		if !hugepageSize.MatchString(size) {
			return Invalid(field+".page_size", size, "must be like 2MB or 1GB")
		}
		if other, ok := seen[size]; ok && other != l.GetLimit() {
			return Invalid(field+".page_size", size, fmt.Sprintf("has two limits, %d and %d", other, l.GetLimit()))
		}
		seen[size] = l.GetLimit()
	}
	return nil
}

// checkUnified keeps the keys to files of controllers. The cgroup.* files move,
// freeze and kill processes; they are no resources.
func checkUnified(field string, unified map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(unified)) {
		switch {
		case key == "" || strings.ContainsAny(key, "/\x00\n") || !strings.Contains(key, "."):
			return Invalid(field, key, "is no control file of a cgroup v2 controller")
		case strings.HasPrefix(key, "cgroup."):
			return Invalid(field, key, "cgroup.* files are no resources")
		}
	}
	return nil
}

// UpdateResources translates UpdateContainerResources. Fields that the request
// leaves at zero stay unset, so the runtime leaves them as they are. The OOM
// score cannot be updated and is ignored. ErrInvalid.
func UpdateResources(r *cri.LinuxContainerResources, host Host) (*rspec.LinuxResources, error) {
	if err := CheckResources("linux", r); err != nil {
		return nil, err
	}
	out, _, err := translateResources("linux", r, host)
	if err != nil {
		return nil, err
	}
	if out.Memory != nil && out.Memory.Limit != nil {
		// cgroup v2 would take a limit below what is in use and kill for it; v1 refuses.
		check := true
		out.Memory.CheckBeforeUpdate = &check
	}
	return out, nil
}

func (b *builder) resources() (*rspec.LinuxResources, error) {
	out, warnings, err := translateResources("linux.resources", b.config.GetLinux().GetResources(), b.in.Host)
	b.warnings = append(b.warnings, warnings...)
	return out, err
}

func translateResources(prefix string, r *cri.LinuxContainerResources, host Host) (*rspec.LinuxResources, []string, error) {
	out := &rspec.LinuxResources{CPU: cpu(r)}
	var warnings []string
	out.Memory = memory(r, host.SwapControl)
	if r.GetMemorySwapLimitInBytes() != 0 && !host.SwapControl {
		warnings = append(warnings, fmt.Sprintf("memory_swap_limit_in_bytes %d ignored: this host cannot limit swap", r.GetMemorySwapLimitInBytes()))
	}
	for _, l := range r.GetHugepageLimits() {
		if size := l.GetPageSize(); host.HugePages != nil && !slices.Contains(host.HugePages, size) {
			return nil, nil, Invalid(prefix+".hugepage_limits.page_size", size, "this host has huge pages of "+strings.Join(host.HugePages, ", "))
		}
		if host.HugetlbControl {
			out.HugepageLimits = append(out.HugepageLimits, rspec.LinuxHugepageLimit{Pagesize: l.GetPageSize(), Limit: l.GetLimit()})
		} else if l.GetLimit() > 0 {
			// The kubelet sends a zero for every size it knows; those say nothing.
			warnings = append(warnings, fmt.Sprintf("hugepage_limits %s %d ignored: this host has no hugetlb controller", l.GetPageSize(), l.GetLimit()))
		}
	}
	if unified := r.GetUnified(); len(unified) > 0 {
		if !host.CgroupV2 {
			key := slices.Min(slices.Collect(maps.Keys(unified)))
			return nil, nil, Invalid(prefix+".unified", key, "this host uses cgroup v1")
		}
		out.Unified = maps.Clone(unified)
	}
	return out, warnings, nil
}

func cpu(r *cri.LinuxContainerResources) *rspec.LinuxCPU {
	c := &rspec.LinuxCPU{Cpus: r.GetCpusetCpus(), Mems: r.GetCpusetMems()}
	if v := uint64(r.GetCpuShares()); v > 0 {
		c.Shares = &v
	}
	if v := r.GetCpuQuota(); v != 0 {
		c.Quota = &v
	}
	if v := uint64(r.GetCpuPeriod()); v > 0 {
		c.Period = &v
	}
	if *c == (rspec.LinuxCPU{}) {
		return nil
	}
	return c
}

// memory sets swap (the kernel's sum of memory and swap) to the memory limit
// when the request names none: a container without a swap limit must not swap.
func memory(r *cri.LinuxContainerResources, swapControl bool) *rspec.LinuxMemory {
	limit, swap := r.GetMemoryLimitInBytes(), r.GetMemorySwapLimitInBytes()
	m := &rspec.LinuxMemory{}
	if limit != 0 {
		m.Limit = &limit
	}
	if swap == 0 {
		swap = limit
	}
	if swap != 0 && swapControl {
		m.Swap = &swap
	}
	if *m == (rspec.LinuxMemory{}) {
		return nil
	}
	return m
}
