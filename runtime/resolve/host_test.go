package resolve

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
	"berth/sandbox/outside"
)

// fakeHost is a root with the files that every Linux has.
func fakeHost(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	all := map[string]string{
		"proc/self/status":          "Name:\tx\nCapBnd:\t000001ffffffffff\nSeccomp:\t0\n",
		"proc/self/oom_score_adj":   "-5\n",
		"proc/self/uid_map":         "         0          0 4294967295\n",
		"proc/sys/kernel/osrelease": "6.18.44-rc1\n",
		"proc/sys/fs/nr_open":       "1048576\n",
		"proc/self/limits":          "Limit                     Soft Limit           Hard Limit           Units     \nMax open files            1024                 20000                files     \nMax core file size        0                    unlimited            bytes     \nMax processes             7                    8                    processes \n",
	}
	maps.Copy(all, files)
	for name, content := range all {
		write(t, filepath.Join(root, name), content)
	}
	return root
}

func TestHostFactsOfOthers(t *testing.T) {
	// Without CAP_SYS_RESOURCE (24), on cgroup v1.
	h, err := hostFacts(fakeHost(t, map[string]string{
		"proc/self/status": "CapBnd:\t000001fffeffffff\n",
		"sys/fs/cgroup/memory/memory.memsw.limit_in_bytes": "x",
	}))
	if err != nil {
		t.Fatal(err)
	}
	if len(h.Capabilities) != 40 || slices.Contains(h.Capabilities, "CAP_SYS_RESOURCE") || h.CanLowerOOM || h.OOMScoreAdjMin != -5 {
		t.Errorf("%+v", h)
	}
	if h.CgroupV2 || !h.SwapControl || h.HugetlbControl || h.SeccompSupported || h.AppArmorEnabled || h.SELinuxEnabled {
		t.Errorf("%+v", h)
	}
	if !maps.Equal(h.RlimitMax, map[string]uint64{"RLIMIT_NOFILE": 20000, "RLIMIT_NPROC": 8}) || h.Kernel != (spec.Kernel{Major: 6, Minor: 18}) {
		t.Errorf("%v, %v", h.RlimitMax, h.Kernel)
	}
	// All there, on cgroup v2.
	h, err = hostFacts(fakeHost(t, map[string]string{
		"sys/fs/cgroup/cgroup.controllers":           "cpu memory hugetlb pids\n",
		"sys/fs/cgroup/system.slice/memory.swap.max": "max\n",
		"sys/module/apparmor/parameters/enabled":     "Y\n",
		"sys/kernel/security/apparmor/profiles":      "",
		"sys/fs/selinux/enforce":                     "1",
	}))
	if err != nil {
		t.Fatal(err)
	}
	if !h.CgroupV2 || !h.SwapControl || !h.HugetlbControl || !h.SeccompSupported || !h.AppArmorEnabled || !h.SELinuxEnabled || !h.CanLowerOOM {
		t.Errorf("%+v", h)
	}
	if len(h.Capabilities) != 41 || !maps.Equal(h.RlimitMax, map[string]uint64{"RLIMIT_NOFILE": 1048576}) {
		t.Errorf("%+v", h)
	}
}

// B103: on a kernel without swap accounting nothing of swap is asked of the OCI
// runtime, neither by a limit of memory alone nor by one of swap, at creation
// and at an update.
func TestB103NoSwapAccounting(t *testing.T) {
	v1 := map[string]string{"sys/fs/cgroup/memory/memory.limit_in_bytes": "x"}
	v2 := map[string]string{"sys/fs/cgroup/cgroup.controllers": "memory", "sys/fs/cgroup/a/memory.max": "max", "proc/swaps": ""}
	bare := map[string]string{"sys/fs/cgroup/cgroup.controllers": "memory", "proc/swaps": "", "proc/cmdline": "quiet swapaccount=0"}
	for name, tc := range map[string]struct {
		files map[string]string
		more  string // a file that makes it a host with accounting
	}{
		"v1": {v1, "sys/fs/cgroup/memory/memory.memsw.limit_in_bytes"}, "v2": {v2, "sys/fs/cgroup/b/memory.swap.max"},
		"v2 without children": {bare, "sys/fs/cgroup/b/memory.swap.max"},
	} {
		h, err := hostFacts(fakeHost(t, tc.files))
		if err != nil || h.SwapControl {
			t.Fatalf("%s: swap can be limited: %v, %v", name, h.SwapControl, err)
		}
		if m := memoryOf(t, h); m.Limit == nil || *m.Limit != 1<<20 || m.Swap != nil {
			t.Errorf("%s: memory %+v; no swap must be asked for", name, m)
		}
		tc.files[tc.more] = "max"
		h, err = hostFacts(fakeHost(t, tc.files))
		if err != nil || !h.SwapControl {
			t.Fatalf("%s: swap cannot be limited: %v", name, err)
		}
		if m := memoryOf(t, h); m.Swap == nil || *m.Swap != 1<<20 {
			t.Errorf("%s: memory %+v; swap must be limited to the same", name, m)
		}
	}
	delete(bare, "sys/fs/cgroup/b/memory.swap.max")
	bare["proc/cmdline"] = "quiet"
	if h, err := hostFacts(fakeHost(t, bare)); err != nil || !h.SwapControl {
		t.Errorf("v2 before any child has the controller: %v", err)
	}
}

// memoryOf is what a memory limit of 1 MiB becomes, by an update and at
// creation alike.
func memoryOf(t *testing.T, h spec.Host) rspec.LinuxMemory {
	t.Helper()
	limit := &cri.LinuxContainerResources{MemoryLimitInBytes: 1 << 20}
	r, err := spec.UpdateResources(limit, h)
	if err != nil {
		t.Fatal(err)
	}
	sp, _, err := spec.Container(spec.ContainerInput{Host: h, Sandbox: &cri.PodSandboxConfig{}, Rootfs: "/r",
		Namespaces: spec.Namespaces{Net: "/n", IPC: "/n", PID: "/n"},
		Config:     &cri.ContainerConfig{Command: []string{"x"}, Linux: &cri.LinuxContainerConfig{Resources: limit}}})
	if err != nil {
		t.Fatal(err)
	}
	if at := sp.Linux.Resources.Memory; (at.Swap == nil) != (r.Memory.Swap == nil) || *at.Limit != *r.Memory.Limit {
		t.Errorf("at creation %+v, by an update %+v", at, r.Memory)
	}
	return *r.Memory
}

func TestHostFactsInUserNamespace(t *testing.T) {
	h, err := hostFacts(fakeHost(t, map[string]string{"proc/self/uid_map": "0 100000 65536\n"}))
	if err != nil || h.CanLowerOOM || h.RlimitMax["RLIMIT_NOFILE"] != 20000 {
		t.Errorf("%+v, %v", h, err)
	}
}

func TestHostFactsUnreadable(t *testing.T) {
	for file, word := range map[string]string{
		"proc/self/status": "bounding set", "proc/self/oom_score_adj": "oom_score_adj", "proc/sys/kernel/osrelease": "kernel's version",
	} {
		_, err := hostFacts(fakeHost(t, map[string]string{file: "nonsense"}))
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v", file, err)
		}
	}
	_, err := hostFacts(fakeHost(t, map[string]string{
		"proc/self/status": "CapBnd: 0\n", "proc/self/limits": "Max open files   many   more   files\n"}))
	if err == nil || !strings.Contains(err.Error(), "RLIMIT_NOFILE") {
		t.Errorf("limits: %v", err)
	}
}

func TestHostFactsHere(t *testing.T) {
	h, err := HostFacts()
	if err != nil {
		t.Fatal(err)
	}
	if h.Kernel.Major < 4 || h.Arch == "" {
		t.Errorf("%+v", h)
	}
	if n := Nofile(7, 9); len(n) != 1 || n[0].Type != "RLIMIT_NOFILE" || n[0].Soft != 7 || n[0].Hard != 9 {
		t.Errorf("%+v", n)
	}
}

func TestSeccompFiles(t *testing.T) {
	dir := t.TempDir()
	good := filepath.Join(dir, "good.json")
	write(t, good, `{"defaultAction":"SCMP_ACT_ALLOW"}`)
	link(t, good, filepath.Join(dir, "link.json"))
	for _, at := range []string{good, filepath.Join(dir, "link.json")} {
		data, err := readProfile(outside.Here{}, at)
		if err != nil || !strings.Contains(string(data), "ALLOW") {
			t.Errorf("%s: %q, %v", at, data, err)
		}
	}
	write(t, filepath.Join(dir, "huge.json"), `"`+strings.Repeat(" ", profileMax)+`"`)
	write(t, filepath.Join(dir, "bad.json"), `{"defaultAction":`)
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo.json"), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, reason := range map[string]string{
		"absent.json": "no such file", "huge.json": "is larger than 1048576 bytes", "bad.json": "is not JSON", "fifo.json": "is no regular file", ".": "is no regular file",
	} {
		at := filepath.Clean(filepath.Join(dir, name))
		_, err := readProfile(outside.Here{}, at)
		if !errors.Is(err, ErrInvalid) || err.Error() != `linux.security_context.seccomp.localhost_ref "`+at+`": `+reason {
			t.Errorf("%s: %v", name, err)
		}
	}
	if data, err := readProfile(outside.Here{}, ""); data != nil || err != nil {
		t.Errorf("no path: %q, %v", data, err)
	}
}

func TestSeccompOfRequests(t *testing.T) {
	root := rootfs(t)
	file := filepath.Join(t.TempDir(), "p.json")
	write(t, file, `{"defaultAction":"SCMP_ACT_ALLOW"}`)
	local := &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: file}
	r := userRequest(root, "app", &cri.LinuxContainerSecurityContext{Seccomp: local})
	out, err := Resolve(r)
	if err != nil || len(out.SeccompProfile) == 0 || out.HostDevices != nil {
		t.Errorf("container: %+v, %v", out, err)
	}
	sandbox := &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{Seccomp: local}}}
	if data, err := SandboxSeccomp(outside.Here{}, sandbox); err != nil || len(data) == 0 {
		t.Errorf("sandbox: %q, %v", data, err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if _, err := Resolve(r); !errors.Is(err, ErrInvalid) {
		t.Errorf("container without the file: %v", err)
	}
	if _, err := SandboxSeccomp(outside.Here{}, sandbox); !errors.Is(err, ErrInvalid) {
		t.Errorf("sandbox without the file: %v", err)
	}
	// Privileged containers run without a filter, so its file does not matter; they get the host's devices.
	r.Config.Linux.SecurityContext.Privileged = true
	r.Sandbox = &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{Privileged: true}}}
	out, err = Resolve(r)
	if err != nil || out.SeccompProfile != nil || len(out.HostDevices) == 0 {
		t.Errorf("privileged: %+v, %v", out, err)
	}
}

func TestAppArmorProfiles(t *testing.T) {
	root := fakeHost(t, map[string]string{"sys/kernel/security/apparmor/profiles": "berth-default (enforce)\nmy profile (complain)\n"})
	enabled := spec.Host{AppArmorEnabled: true}
	ask := func(ref string, old string) *cri.LinuxContainerSecurityContext {
		sc := &cri.LinuxContainerSecurityContext{ApparmorProfile: old}
		if ref != "" {
			sc.Apparmor = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: ref}
		}
		return sc
	}
	for name, sc := range map[string]*cri.LinuxContainerSecurityContext{
		"by name": ask("my profile", ""), "with prefix": ask("localhost/berth-default", ""), "old form": ask("", "localhost/my profile"),
		"nothing": ask("", ""), "default": ask("", "runtime/default"), "unconfined": ask("", "unconfined"),
	} {
		if err := appArmor(sc, enabled, root); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, sc := range map[string]*cri.LinuxContainerSecurityContext{"other": ask("other", ""), "part of a name": ask("my", ""), "old form": ask("", "localhost/x")} {
		if err := appArmor(sc, enabled, root); !errors.Is(err, ErrInvalid) || !strings.HasSuffix(err.Error(), "no such profile is loaded") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := appArmor(ask("x", ""), enabled, t.TempDir()); err == nil || errors.Is(err, ErrInvalid) {
		t.Errorf("an unreadable list: %v", err)
	}
	if err := appArmor(ask("x", ""), spec.Host{}, root); err != nil {
		t.Errorf("a host without AppArmor: %v", err)
	}
}
