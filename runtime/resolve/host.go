package resolve

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"

	rspec "github.com/opencontainers/runtime-spec/specs-go"

	"berth/oci/spec"
)

// HostFacts reads the facts about the host that specifications depend on. The
// daemon calls it once when it starts. Rlimits are left to the caller: they are
// configuration.
func HostFacts() (spec.Host, error) { return hostFacts("/") }

// hostFacts reads below root, so that tests can show it other hosts.
func hostFacts(root string) (spec.Host, error) {
	r := reader{root: root}
	host := spec.Host{
		Arch:            goruntime.GOARCH,
		CgroupV2:        r.has("sys/fs/cgroup/cgroup.controllers"),
		AppArmorEnabled: strings.HasPrefix(r.text("sys/module/apparmor/parameters/enabled"), "Y") && r.has("sys/kernel/security/apparmor/profiles"),
		SELinuxEnabled:  r.has("sys/fs/selinux/enforce"),
	}
	status := r.text("proc/self/status")
	bounding, err := strconv.ParseUint(field(status, "CapBnd:"), 16, 64)
	if err != nil {
		return spec.Host{}, fmt.Errorf("read the capability bounding set in /proc/self/status: %w", err)
	}
	host.Capabilities = capabilityNames(bounding)
	host.SeccompSupported = field(status, "Seccomp:") != ""
	// The capability counts for these two only in the first user namespace.
	resource := slices.Contains(host.Capabilities, "CAP_SYS_RESOURCE") && r.firstUserNamespace()
	host.CanLowerOOM = resource
	if host.OOMScoreAdjMin, err = strconv.Atoi(r.text("proc/self/oom_score_adj")); err != nil {
		return spec.Host{}, fmt.Errorf("read /proc/self/oom_score_adj: %w", err)
	}
	if host.Kernel, err = parseKernel(r.text("proc/sys/kernel/osrelease")); err != nil {
		return spec.Host{}, err
	}
	if host.RlimitMax, err = r.rlimitMax(resource); err != nil {
		return spec.Host{}, err
	}
	host.HugePages = r.hugePages()
	host.SwapControl, host.HugetlbControl = r.swapControl(host.CgroupV2), r.hugetlbControl(host.CgroupV2)
	return host, nil
}

// Nofile is the configured open-file limit of containers as a list for
// spec.Host.Rlimits.
func Nofile(soft, hard uint64) []rspec.POSIXRlimit {
	return []rspec.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: soft, Hard: hard}}
}

// reader reads small kernel files below a root.
type reader struct{ root string }

func (r reader) has(name string) bool {
	_, err := os.Stat(filepath.Join(r.root, name))
	return err == nil
}

// text is a file's content without its last newline; empty when it cannot be read.
func (r reader) text(name string) string {
	data, err := os.ReadFile(filepath.Join(r.root, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// field is the value of a "Name: value" line.
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

func capabilityNames(set uint64) []string {
	names := []string{}
	for i := range 64 {
		if name := spec.CapabilityName(i); name != "" && set&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}

func (r reader) firstUserNamespace() bool {
	return strings.Join(strings.Fields(r.text("proc/self/uid_map")), " ") == "0 0 4294967295"
}

func parseKernel(release string) (spec.Kernel, error) {
	var k spec.Kernel
	if _, err := fmt.Sscanf(release, "%d.%d", &k.Major, &k.Minor); err != nil {
		return k, fmt.Errorf("read the kernel's version %q: %w", release, err)
	}
	return k, nil
}

// limitNames maps the words of /proc/self/limits to names of limits.
var limitNames = map[string]string{
	"Max cpu time": "RLIMIT_CPU", "Max file size": "RLIMIT_FSIZE", "Max data size": "RLIMIT_DATA",
	"Max stack size": "RLIMIT_STACK", "Max core file size": "RLIMIT_CORE", "Max resident set": "RLIMIT_RSS",
	"Max processes": "RLIMIT_NPROC", "Max open files": "RLIMIT_NOFILE", "Max locked memory": "RLIMIT_MEMLOCK",
	"Max address space": "RLIMIT_AS", "Max file locks": "RLIMIT_LOCKS", "Max pending signals": "RLIMIT_SIGPENDING",
	"Max msgqueue size": "RLIMIT_MSGQUEUE", "Max nice priority": "RLIMIT_NICE",
	"Max realtime priority": "RLIMIT_RTPRIO", "Max realtime timeout": "RLIMIT_RTTIME",
}

// rlimitMax is the daemon's own hard limits, which nobody without
// CAP_SYS_RESOURCE can exceed. With it only the kernel's bound on open files is left.
func (r reader) rlimitMax(resource bool) (map[string]uint64, error) {
	most := map[string]uint64{}
	if resource {
		if n, err := strconv.ParseUint(r.text("proc/sys/fs/nr_open"), 10, 64); err == nil {
			most["RLIMIT_NOFILE"] = n
		}
		return most, nil
	}
	lines := bufio.NewScanner(bytes.NewReader([]byte(r.text("proc/self/limits"))))
	for lines.Scan() {
		for words, name := range limitNames {
			rest, ok := strings.CutPrefix(lines.Text(), words+" ")
			values := strings.Fields(rest)
			if !ok || len(values) < 2 || values[1] == "unlimited" {
				continue
			}
			n, err := strconv.ParseUint(values[1], 10, 64)
			if err != nil {
				return nil, fmt.Errorf("read %s in /proc/self/limits: %w", name, err)
			}
			most[name] = n
		}
	}
	return most, lines.Err()
}

// swapControl looks for the control file, which a kernel without swap accounting
// does not have. The root of a v2 hierarchy never has it, so there its children
// are looked at; where none has the memory controller yet, the kernel's command
// line is all there is to go by.
func (r reader) swapControl(v2 bool) bool {
	if !v2 {
		return r.has("sys/fs/cgroup/memory/memory.memsw.limit_in_bytes")
	}
	if r.any("sys/fs/cgroup/*/memory.swap.max") {
		return true
	}
	off := slices.Contains(strings.Fields(r.text("proc/cmdline")), "swapaccount=0")
	return !r.any("sys/fs/cgroup/*/memory.max") && r.has("proc/swaps") && !off
}

func (r reader) any(pattern string) bool {
	found, err := filepath.Glob(filepath.Join(r.root, pattern))
	return err == nil && len(found) > 0
}

// hugePages are the sizes of huge pages as cgroup files have them in their names; nil
// where the kernel has none.
func (r reader) hugePages() (sizes []string) {
	entries, _ := os.ReadDir(filepath.Join(r.root, "sys/kernel/mm/hugepages"))
	for _, e := range entries {
		text, ok := strings.CutPrefix(e.Name(), "hugepages-")
		kb, err := strconv.ParseUint(strings.TrimSuffix(text, "kB"), 10, 54)
		switch {
		case !ok || err != nil:
		case kb >= 1<<20:
			sizes = append(sizes, fmt.Sprintf("%dGB", kb>>20))
		case kb >= 1<<10:
			sizes = append(sizes, fmt.Sprintf("%dMB", kb>>10))
		default:
			sizes = append(sizes, fmt.Sprintf("%dKB", kb))
		}
	}
	return sizes
}

func (r reader) hugetlbControl(v2 bool) bool {
	if !v2 {
		return r.has("sys/fs/cgroup/hugetlb/cgroup.procs")
	}
	return slices.Contains(strings.Fields(r.text("sys/fs/cgroup/cgroup.controllers")), "hugetlb")
}
