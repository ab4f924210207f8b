package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// field is a request that differs in one field, and what comes of it: what its
// script says, or a refusal with these words.
type field struct {
	name   string
	change func(*cri.ContainerConfig)
	script string
	says   string // the whole output
	code   codes.Code
	words  []string
}

// fieldNumber makes the names of containers differ.
var fieldNumber atomic.Int32

// fields runs each in a container of its own in one pod.
func (e *env) fields(pod string, config *cri.PodSandboxConfig, list []field) {
	e.Helper()
	for _, f := range list {
		c := command(fmt.Sprintf("f%d", fieldNumber.Add(1)), f.script)
		f.change(c)
		if f.code == codes.OK {
			if got := e.output(pod, c, config); got != f.says {
				e.Errorf("%s: it says %q, want %q", f.name, got, f.says)
			}
			continue
		}
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		e.refused(f.name, err, f.code, f.words...)
	}
}

func security(change func(*cri.LinuxContainerSecurityContext)) func(*cri.ContainerConfig) {
	return func(c *cri.ContainerConfig) { change(c.Linux.SecurityContext) }
}

func TestUsersAndGroups(t *testing.T) {
	e := start(t, node.Options{})
	const grouped = "gcr.io/k8s-staging-cri-tools/test-image-predefined-group:latest" // USER 1000, in group 50000
	e.pull(grouped)
	config := e.sandbox()
	pod := e.run(config)
	as := func(change func(*cri.LinuxContainerSecurityContext)) func(*cri.ContainerConfig) {
		return func(c *cri.ContainerConfig) {
			c.Image = &cri.ImageSpec{Image: grouped}
			change(c.Linux.SecurityContext)
		}
	}
	const script = "id -u; id -g; id -G"
	e.fields(pod, config, []field{
		{"the image's user", as(func(*cri.LinuxContainerSecurityContext) {}), script, "1000\n1000\n1000 50000\n", 0, nil},
		{"merge", as(func(s *cri.LinuxContainerSecurityContext) { s.SupplementalGroups = []int64{1234} }), script, "1000\n1000\n1000 1234 50000\n", 0, nil},
		{"strict", as(func(s *cri.LinuxContainerSecurityContext) {
			s.SupplementalGroups, s.SupplementalGroupsPolicy = []int64{1234}, cri.SupplementalGroupsPolicy_Strict
		}), script, "1000\n1000\n1000 1234\n", 0, nil},
		{"user and group", as(func(s *cri.LinuxContainerSecurityContext) {
			s.RunAsUser, s.RunAsGroup = &cri.Int64Value{Value: 7}, &cri.Int64Value{Value: 8}
		}), script, "7\n8\n8\n", 0, nil},
		{"by name", as(func(s *cri.LinuxContainerSecurityContext) { s.RunAsUsername = "default-user" }), script, "1000\n1000\n1000 50000\n", 0, nil},
		{"unknown policy", as(func(s *cri.LinuxContainerSecurityContext) { s.SupplementalGroupsPolicy = 7 }), script, "", codes.InvalidArgument,
			[]string{"supplemental_groups_policy", "7"}},
		{"group without user", as(func(s *cri.LinuxContainerSecurityContext) { s.RunAsGroup = &cri.Int64Value{Value: 8} }), script, "", codes.InvalidArgument,
			[]string{"run_as_group", "needs run_as_user"}},
		{"two users", as(func(s *cri.LinuxContainerSecurityContext) {
			s.RunAsUser, s.RunAsUsername = &cri.Int64Value{Value: 7}, "default-user"
		}), script, "", codes.InvalidArgument, []string{"run_as_username"}},
		{"unknown name", as(func(s *cri.LinuxContainerSecurityContext) { s.RunAsUsername = "nobody-knows" }), script, "", codes.InvalidArgument,
			[]string{"run_as_username", "nobody-knows"}},
	})
}

func TestProfiles(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	file := filepath.Join(t.TempDir(), "no-mkdir.json")
	put(t, file, `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdir","mkdirat"],"action":"SCMP_ACT_ERRNO"}]}`, 0o644)
	old := func(p string) func(*cri.ContainerConfig) {
		return security(func(s *cri.LinuxContainerSecurityContext) { s.SeccompProfilePath = p })
	}
	seccomp := func(k cri.SecurityProfile_ProfileType, ref string) func(*cri.ContainerConfig) {
		return security(func(s *cri.LinuxContainerSecurityContext) {
			s.Seccomp, s.SeccompProfilePath = &cri.SecurityProfile{ProfileType: k, LocalhostRef: ref}, "unconfined"
		})
	}
	const mode, mkdir = "grep ^Seccomp: /proc/self/status", "mkdir /d 2>/dev/null && echo made || echo refused"
	filtered, free := "Seccomp:\t2\n", "Seccomp:\t0\n"
	e.fields(pod, config, []field{
		{"seccomp unset", security(func(*cri.LinuxContainerSecurityContext) {}), mode, free, 0, nil},
		{"seccomp RuntimeDefault", seccomp(cri.SecurityProfile_RuntimeDefault, ""), mode, filtered, 0, nil},
		{"seccomp runtime/default", old("runtime/default"), mode, filtered, 0, nil},
		{"seccomp unconfined", old("unconfined"), mode, free, 0, nil},
		{"seccomp Localhost", seccomp(cri.SecurityProfile_Localhost, file), mkdir, "refused\n", 0, nil},
		{"seccomp localhost/", old("localhost/" + file), mkdir, "refused\n", 0, nil},
		{"seccomp by a name that is none", seccomp(cri.SecurityProfile_Localhost, "/nowhere.json"), mode, "", codes.InvalidArgument, []string{"seccomp.localhost_ref", "/nowhere.json"}},
		{"seccomp, old form of a relative name", old("localhost/x.json"), mode, "", codes.InvalidArgument, []string{"x.json", "absolute"}},
		{"seccomp, unknown old form", old("docker/default"), mode, "", codes.InvalidArgument, []string{"docker/default"}},
		{"SELinux options that no context holds", security(func(s *cri.LinuxContainerSecurityContext) {
			s.SelinuxOptions = &cri.SELinuxOption{Level: "s0:c1 c2"}
		}), mode, "", codes.InvalidArgument, []string{"selinux_options.level", "s0:c1 c2"}},
	})
	if text, err := os.ReadFile("/sys/module/apparmor/parameters/enabled"); err != nil || !strings.HasPrefix(string(text), "Y") {
		none := "grep -c . /proc/self/attr/current 2>/dev/null; echo end"
		e.fields(pod, config, []field{
			{"AppArmor RuntimeDefault on a node without", security(func(s *cri.LinuxContainerSecurityContext) {
				s.Apparmor = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
			}), "echo runs", "runs\n", 0, nil},
			{"AppArmor Localhost on a node without", security(func(s *cri.LinuxContainerSecurityContext) {
				s.Apparmor = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "mine"}
			}), none, "", codes.Unimplemented, []string{"apparmor", "mine", "no AppArmor"}},
			{"AppArmor localhost/ on a node without", security(func(s *cri.LinuxContainerSecurityContext) { s.ApparmorProfile = "localhost/mine" }),
				none, "", codes.Unimplemented, []string{"apparmor", "mine", "no AppArmor"}},
		})
	}
	if _, err := os.Stat("/sys/fs/selinux/enforce"); err != nil {
		e.fields(pod, config, []field{{"SELinux options on a node without", security(func(s *cri.LinuxContainerSecurityContext) {
			s.SelinuxOptions = &cri.SELinuxOption{Type: "container_t", Level: "s0:c1,c2"}
		}), "echo runs", "runs\n", 0, nil}})
	}
}

func TestMaskedAndReadonlyPaths(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	const script = "head -c1 /proc/timer_list | wc -c; ls /sys/firmware | wc -l; echo x 2>/dev/null > /proc/sys/kernel/domainname && echo written || echo refused"
	// A container without either list has the defaults; one with a list has that alone.
	e.fields(pod, config, []field{
		{"nothing sent", security(func(*cri.LinuxContainerSecurityContext) {}), script, "0\n0\nrefused\n", 0, nil},
		{"other paths", security(func(s *cri.LinuxContainerSecurityContext) {
			s.MaskedPaths, s.ReadonlyPaths = []string{"/etc/passwd", "/no/such/path"}, []string{"/tmp"}
		}), "wc -c < /etc/passwd; touch /tmp/x 2>/dev/null || echo read-only; head -c1 /proc/timer_list | wc -c", "0\nread-only\n1\n", 0, nil},
		{"a relative path", security(func(s *cri.LinuxContainerSecurityContext) { s.MaskedPaths = []string{"proc/kcore"} }), "true", "", codes.InvalidArgument,
			[]string{"masked_paths", "proc/kcore"}},
	})
}

func TestResourcesOfThisNode(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	with := func(r *cri.LinuxContainerResources) func(*cri.ContainerConfig) {
		return func(c *cri.ContainerConfig) { c.Linux.Resources = r }
	}
	const mib = 1 << 20
	list := []field{
		{"hugepages of a size without a limit", with(&cri.LinuxContainerResources{HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB"}, {PageSize: "1GB", Limit: 1 << 30}}}), "echo runs", "runs\n", 0, nil},
		{"hugepages of a size that no node has", with(&cri.LinuxContainerResources{HugepageLimits: []*cri.HugepageLimit{{PageSize: "3MB"}}}), "true", "", codes.InvalidArgument,
			[]string{"hugepage_limits.page_size", `"3MB"`, "huge pages of"}},
		{"hugepages of no size", with(&cri.LinuxContainerResources{HugepageLimits: []*cri.HugepageLimit{{PageSize: "2Mi"}}}), "true", "", codes.InvalidArgument,
			[]string{"hugepage_limits.page_size", "2Mi"}},
		{"swap below memory", with(&cri.LinuxContainerResources{MemoryLimitInBytes: 64 * mib, MemorySwapLimitInBytes: 32 * mib}), "true", "", codes.InvalidArgument,
			[]string{"memory_swap_limit_in_bytes"}},
		{"a key that is no resource", with(&cri.LinuxContainerResources{Unified: map[string]string{"cgroup.kill": "1"}}), "true", "", codes.InvalidArgument,
			[]string{"unified", "cgroup.kill"}},
	}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err != nil {
		const limits = "cat /sys/fs/cgroup/memory/memory.limit_in_bytes"
		list = append(list, field{"unified on v1", with(&cri.LinuxContainerResources{Unified: map[string]string{"memory.high": "1"}}), "true", "", codes.InvalidArgument,
			[]string{"unified", "memory.high", "cgroup v1"}},
			field{"memory alone", with(&cri.LinuxContainerResources{MemoryLimitInBytes: 64 * mib}), limits, "67108864\n", 0, nil})
		if _, err := os.Stat("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes"); err == nil {
			const swap = "cat /sys/fs/cgroup/memory/memory.memsw.limit_in_bytes"
			list = append(list, field{"no swap with memory alone", with(&cri.LinuxContainerResources{MemoryLimitInBytes: 64 * mib}), swap, "67108864\n", 0, nil},
				field{"swap", with(&cri.LinuxContainerResources{MemoryLimitInBytes: 64 * mib, MemorySwapLimitInBytes: 96 * mib}), swap, "100663296\n", 0, nil})
		}
	}
	e.fields(pod, config, list)
	res, err := e.rt.Status(e.ctx, &cri.StatusRequest{Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/sys/fs/cgroup/hugetlb"); err != nil && !strings.Contains(res.GetInfo()["host"], "hugepage_limits") && !unified() {
		t.Errorf("the status does not say that hugepage limits have no effect: %s", res.GetInfo()["host"])
	}
}

// unified tells whether the node has cgroup v2 alone.
func unified() bool {
	_, err := os.Stat("/sys/fs/cgroup/cgroup.controllers")
	return err == nil
}

// A directory of devices stands for all those below it.
func TestDeviceDirectory(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	dir := filepath.Join(e.Dir, "devices")
	put(t, filepath.Join(dir, "sub", "readme"), "no device", 0o644)
	for name, minor := range map[string]uint32{"nothing": 3, "sub/zeros": 5} {
		if err := unix.Mknod(filepath.Join(dir, name), unix.S_IFCHR|0o666, int(unix.Mkdev(1, minor))); err != nil {
			t.Fatal(err)
		}
	}
	c := command("all", "cd /dev/mine; find . -type c | sort; head -c2 sub/zeros | wc -c; echo x 2>/dev/null > nothing && echo written || echo refused")
	c.Devices = []*cri.Device{{HostPath: dir, ContainerPath: "/dev/mine", Permissions: "r"}}
	if out, want := e.output(pod, c, config), "./nothing\n./sub/zeros\n2\nrefused\n"; out != want {
		// /dev/null itself is allowed for writing by every OCI runtime.
		if strings.ReplaceAll(out, "written", "refused") != want {
			t.Errorf("it says %q, want %q", out, want)
		}
	}
	empty := filepath.Join(e.Dir, "empty")
	put(t, filepath.Join(empty, "readme"), "", 0o644)
	for host, word := range map[string]string{empty: "without devices", filepath.Join(empty, "readme"): "no device", "/dev/nothing-here": "does not exist"} {
		c := command("bad", "true")
		c.Devices = []*cri.Device{{HostPath: host, ContainerPath: "/dev/x", Permissions: "rwm"}}
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		e.refused(host, err, codes.InvalidArgument, "devices[0].host_path", word)
	}
	for _, p := range []string{"", "x", "rr", "rwmm"} {
		c := command("bad", "true")
		c.Devices = []*cri.Device{{HostPath: "/dev/null", ContainerPath: "/dev/x", Permissions: p}}
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		e.refused("permissions "+p, err, codes.InvalidArgument, "devices[0].permissions")
	}
}

// What privileged implies, as far as a shell can see it; not in a pod that is not.
func TestPrivileged(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	plain := e.sandbox()
	pod := e.run(plain)
	c := command("c", "true")
	c.Linux.SecurityContext.Privileged = true
	_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: plain})
	e.refused("privileged in a pod that is not", err, codes.InvalidArgument, "privileged", "sandbox")
	config := e.sandbox()
	config.Linux.SecurityContext.Privileged = true
	pod = e.run(config)
	c = command("all", "grep ^Seccomp: /proc/self/status; head -c1 /proc/timer_list | wc -c; grep -c '^sysfs /sys sysfs rw' /proc/self/mounts; ls /dev/kmsg; head -c1 /dev/zero | wc -c")
	c.Linux.SecurityContext.Privileged = true
	c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
	c.Linux.SecurityContext.MaskedPaths = []string{"/proc/timer_list"}
	got := strings.Split(e.output(pod, c, config), "\n")
	if want := []string{"Seccomp:\t0", "1", "1", "/dev/kmsg", "1", ""}; !slices.Equal(got, want) {
		t.Errorf("it says %q, want %q", got, want)
	}
}
