package spec

import (
	"errors"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// refusal is a request that must be refused, and how its error begins.
type refusal struct {
	name   string
	change func(in *ContainerInput)
	begins string
	kind   error
}

func sc(change func(sc *cri.LinuxContainerSecurityContext)) func(*ContainerInput) {
	return func(in *ContainerInput) {
		s := &cri.LinuxContainerSecurityContext{}
		change(s)
		in.Config.Linux = &cri.LinuxContainerConfig{SecurityContext: s}
	}
}

func podModes(o *cri.NamespaceOption, container *cri.NamespaceOption) func(*ContainerInput) {
	return func(in *ContainerInput) {
		in.Sandbox.Linux = &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: o}}
		in.Config.Linux = &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: container}}
	}
}

func mount(m *cri.Mount) func(*ContainerInput) {
	return func(in *ContainerInput) { in.Config.Mounts = []*cri.Mount{m} }
}

func res(r *cri.LinuxContainerResources) func(*ContainerInput) {
	return func(in *ContainerInput) { in.Config.Linux = &cri.LinuxContainerConfig{Resources: r} }
}

func device(ds ...*cri.Device) func(*ContainerInput) {
	return func(in *ContainerInput) { in.Config.Devices = ds }
}

func env(key string, value string) func(*ContainerInput) {
	return func(in *ContainerInput) {
		in.Config.Envs = []*cri.KeyValue{{Key: "GOOD", Value: []byte("x")}, {Key: key, Value: []byte(value)}}
	}
}

func runRefusals(t *testing.T, list []refusal) {
	t.Helper()
	for _, r := range list {
		t.Run(r.name, func(t *testing.T) {
			in := base()
			r.change(&in)
			if in.Resolved.MountSources == nil {
				in.Resolved.MountSources = sources(in.Config)
			}
			spec, _, err := Container(in)
			if err == nil {
				t.Fatal("not refused")
			}
			if spec != nil {
				t.Error("a specification beside the error")
			}
			kind := r.kind
			if kind == nil {
				kind = ErrInvalid
			}
			if !errors.Is(err, kind) {
				t.Errorf("kind of %v is not %v", err, kind)
			}
			if !strings.HasPrefix(err.Error(), r.begins) {
				t.Errorf("error %q does not begin with %q", err, r.begins)
			}
		})
	}
}

func TestRefusalsProcess(t *testing.T) {
	runRefusals(t, []refusal{
		{"no config", func(in *ContainerInput) { in.Config = nil }, "config: missing", nil},
		{"no sandbox", func(in *ContainerInput) { in.Sandbox = nil }, "sandbox_config: missing", nil},
		{"no command", func(in *ContainerInput) { in.Image = nil }, "command: no command specified", nil},
		{"empty program", func(in *ContainerInput) { in.Config.Command = []string{""} }, "command: the program's name is empty", nil},
		{"NUL in args", func(in *ContainerInput) { in.Config.Args = []string{"a\x00b"} }, `command "a\x00b": contains a NUL`, nil},
		{"args not UTF-8", func(in *ContainerInput) { in.Config.Args = []string{"a\xff"} }, `command "a?": is not UTF-8`, nil},
		{"env without key", env("", "v"), "envs[1].key: missing", nil},
		{"env key with =", env("A=B", "v"), `envs[1].key "A=B"`, nil},
		{"env key not UTF-8", env("A\xff", "v"), `envs[1].key "A?"`, nil},
		{"env value not UTF-8", env("TOKEN", "secret\xff"), "envs[1].value: the value of TOKEN is not UTF-8", nil},
		{"env value with NUL", env("TOKEN", "sec\x00ret"), "envs[1].value: the value of TOKEN contains a NUL", nil},
		{"image env with NUL", func(in *ContainerInput) { in.Image.Config.Env = []string{"A=\x00"} }, "image environment.value", nil},
		{"default capabilities", func(in *ContainerInput) { in.Options.Capabilities = []string{"NOPE"} }, `default capabilities "NOPE"`, nil},
		{"privileged container alone", sc(func(s *cri.LinuxContainerSecurityContext) { s.Privileged = true }), `linux.security_context.privileged "true": the sandbox is not`, nil},
	})
}

func TestEnvErrorsKeepSecrets(t *testing.T) {
	in := base()
	env("TOKEN", "hunter2\xff")(&in)
	_, _, err := Container(in)
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("the value is in the error: %v", err)
	}
}

func TestB87OddWorkingDirectories(t *testing.T) {
	odd := []string{
		"/proc/self/fd/7", "/proc/self/fd", "/proc/self", "/proc/1/root", "/proc/thread-self/cwd", "/dev/fd/7", "/dev/stdin",
		"/a/../proc/self/fd/7", "//proc//self/./fd/7", "relative", "./x", "../x", "/a\x00b", "/" + strings.Repeat("x", 5000), "/\xff",
	}
	var list []refusal
	for _, dir := range odd {
		list = append(list,
			refusal{"request " + clip(dir), func(in *ContainerInput) { in.Config.WorkingDir = dir }, "working_dir", nil},
			refusal{"image " + clip(dir), func(in *ContainerInput) { in.Image.Config.WorkingDir = dir }, "image WorkingDir", nil})
	}
	runRefusals(t, list)
	for _, dir := range []string{"/", "/proc", "/proc/sys", "/dev", "/processes/self", "/home/proc/self/fd"} {
		if got, err := checkCwd("working_dir", dir); err != nil || got != dir {
			t.Errorf("checkCwd(%q) = %q, %v", dir, got, err)
		}
	}
}

func TestRefusalsSecurity(t *testing.T) {
	id := func(v int64) *cri.Int64Value { return &cri.Int64Value{Value: v} }
	const field = "linux.security_context."
	runRefusals(t, []refusal{
		{"group alone", sc(func(s *cri.LinuxContainerSecurityContext) { s.RunAsGroup = id(5) }), field + `run_as_group "5": needs`, nil},
		{"name and uid", sc(func(s *cri.LinuxContainerSecurityContext) { s.RunAsUser, s.RunAsUsername = id(5), "u" }), field + `run_as_username "u": run_as_user`, nil},
		{"negative uid", sc(func(s *cri.LinuxContainerSecurityContext) { s.RunAsUser = id(-1) }), field + `run_as_user "-1"`, nil},
		{"huge uid", sc(func(s *cri.LinuxContainerSecurityContext) { s.RunAsUser = id(1 << 31) }), field + `run_as_user "2147483648"`, nil},
		{"wrapping gid", sc(func(s *cri.LinuxContainerSecurityContext) { s.RunAsUser, s.RunAsGroup = id(1), id(1<<32) }), field + `run_as_group "4294967296"`, nil},
		{"negative group", sc(func(s *cri.LinuxContainerSecurityContext) { s.SupplementalGroups = []int64{1, -5} }), field + `supplemental_groups "-5"`, nil},
		{"policy", sc(func(s *cri.LinuxContainerSecurityContext) { s.SupplementalGroupsPolicy = 9 }), field + `supplemental_groups_policy "9"`, nil},
		{"capability", sc(func(s *cri.LinuxContainerSecurityContext) {
			s.Capabilities = &cri.Capability{AddCapabilities: []string{"CAP_FLY"}}
		}), field + `capabilities.add_capabilities "CAP_FLY": no such`, nil},
		{"dropped capability", sc(func(s *cri.LinuxContainerSecurityContext) {
			s.Capabilities = &cri.Capability{DropCapabilities: []string{""}}
		}), field + `capabilities.drop_capabilities: no such`, nil},
		{"ambient capability", sc(func(s *cri.LinuxContainerSecurityContext) {
			s.Capabilities = &cri.Capability{AddAmbientCapabilities: []string{"CAP_CAP_KILL"}}
		}), field + `capabilities.add_ambient_capabilities "CAP_CAP_KILL"`, nil},
		{"relative masked path", sc(func(s *cri.LinuxContainerSecurityContext) { s.MaskedPaths = []string{"proc"} }), field + `masked_paths "proc"`, nil},
		{"empty readonly path", sc(func(s *cri.LinuxContainerSecurityContext) { s.ReadonlyPaths = []string{""} }), field + `readonly_paths: missing`, nil},
	})
}

func TestRefusalsProfiles(t *testing.T) {
	seccomp := func(p *cri.SecurityProfile, old string) func(*ContainerInput) {
		return sc(func(s *cri.LinuxContainerSecurityContext) { s.Seccomp, s.SeccompProfilePath = p, old })
	}
	apparmor := func(p *cri.SecurityProfile, old string) func(*ContainerInput) {
		return sc(func(s *cri.LinuxContainerSecurityContext) { s.Apparmor, s.ApparmorProfile = p, old })
	}
	local := func(ref string) *cri.SecurityProfile {
		return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: ref}
	}
	content := func(profile string) func(*ContainerInput) {
		return func(in *ContainerInput) {
			seccomp(local("/p.json"), "")(in)
			in.Resolved.SeccompProfile = []byte(profile)
		}
	}
	const field = "linux.security_context."
	runRefusals(t, []refusal{
		{"seccomp without ref", seccomp(local(""), ""), field + "seccomp.localhost_ref: needed", nil},
		{"seccomp relative", seccomp(local("p.json"), ""), field + `seccomp.localhost_ref "p.json": must be absolute`, nil},
		{"seccomp old relative", seccomp(nil, "localhost/p.json"), field + `seccomp.localhost_ref "p.json"`, nil},
		{"seccomp old nameless", seccomp(nil, "localhost/"), field + `seccomp "localhost/"`, nil},
		{"seccomp old unknown", seccomp(nil, "docker/default"), field + `seccomp "docker/default"`, nil},
		{"seccomp type", seccomp(&cri.SecurityProfile{ProfileType: 7}, ""), field + `seccomp.profile_type "7"`, nil},
		{"ref beside default", seccomp(&cri.SecurityProfile{LocalhostRef: "/x"}, ""), field + `seccomp.localhost_ref "/x": goes only with`, nil},
		{"profile missing", content(""), field + `seccomp.localhost_ref "/p.json": not a seccomp profile`, nil},
		{"profile not JSON", content("{"), field + `seccomp.localhost_ref "/p.json": not a seccomp profile`, nil},
		{"profile of nothing", content("{}"), field + `seccomp.localhost_ref "/p.json": not a seccomp profile: no defaultAction`, nil},
		{"profile of wrong type", content(`{"defaultAction":5}`), field + `seccomp.localhost_ref "/p.json"`, nil},
		{"apparmor without ref", apparmor(local(""), ""), field + "apparmor.localhost_ref: needed", nil},
		{"apparmor old", apparmor(nil, "nonsense"), field + `apparmor "nonsense"`, nil},
		{"apparmor on a host without", apparmor(local("p"), ""), field + `apparmor "p": this host has no AppArmor`, ErrUnsupported},
		{"seccomp on a host without", func(in *ContainerInput) {
			seccomp(&cri.SecurityProfile{}, "")(in)
			in.Host.SeccompSupported = false
		}, field + `seccomp "RuntimeDefault": this host has no seccomp`, ErrUnsupported},
		{"selinux", func(in *ContainerInput) {
			sc(func(s *cri.LinuxContainerSecurityContext) {
				s.SelinuxOptions = &cri.SELinuxOption{User: "u", Role: "r", Type: "t", Level: "s0"}
			})(in)
			in.Host.SELinuxEnabled = true
		}, field + `selinux_options "u:r:t:s0"`, ErrUnsupported},
	})
}

func TestRefusalsNamespaces(t *testing.T) {
	node, target := cri.NamespaceMode_NODE, cri.NamespaceMode_TARGET
	const f = modeFields
	runRefusals(t, []refusal{
		{"container on host network alone", podModes(nil, &cri.NamespaceOption{Network: node}), f + `.network "NODE": the sandbox`, nil},
		{"container with host ipc alone", podModes(nil, &cri.NamespaceOption{Ipc: node}), f + `.ipc "NODE": the sandbox`, nil},
		{"container with host pid alone", podModes(nil, &cri.NamespaceOption{Pid: node}), f + `.pid "NODE": the sandbox`, nil},
		{"network of the container", podModes(nil, &cri.NamespaceOption{Network: cri.NamespaceMode_CONTAINER}), f + `.network "CONTAINER"`, nil},
		{"unknown pid mode", podModes(nil, &cri.NamespaceOption{Pid: 9}), f + `.pid "9"`, nil},
		{"shared pid in a pod without", podModes(&cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}, &cri.NamespaceOption{}), f + `.pid "POD": the sandbox was made without`, nil},
		{"target without id", podModes(nil, &cri.NamespaceOption{Pid: target}), f + ".target_id: needed", nil},
		{"id without target", podModes(nil, &cri.NamespaceOption{TargetId: "x"}), f + `.target_id "x": goes only`, nil},
		{"sandbox with target", podModes(&cri.NamespaceOption{Pid: target}, nil), f + `.pid "TARGET": a sandbox's`, nil},
		{"sandbox network", podModes(&cri.NamespaceOption{Network: target}, nil), f + `.network "TARGET"`, nil},
	})
	for kind, lost := range map[string]func(*Namespaces){
		"network": func(n *Namespaces) { n.Net = "" }, "ipc": func(n *Namespaces) { n.IPC = "" }, "pid": func(n *Namespaces) { n.PID = "" },
	} {
		in := base()
		lost(&in.Namespaces)
		if _, _, err := Container(in); err == nil || err.Error() != "join the pod's "+kind+" namespace: it has none" {
			t.Errorf("without a %s namespace: %v", kind, err)
		}
	}
}

func TestRefusalsMounts(t *testing.T) {
	private, slave := cri.MountPropagation_PROPAGATION_PRIVATE, cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
	const c, h = "/c", "/h"
	runRefusals(t, []refusal{
		{"no container path", mount(&cri.Mount{HostPath: h}), "mounts[0].container_path: missing", nil},
		{"relative container path", mount(&cri.Mount{ContainerPath: "c", HostPath: h}), `mounts[0].container_path "c": must be absolute`, nil},
		{"climbing to the root", mount(&cri.Mount{ContainerPath: "/c/../..", HostPath: h}), `mounts[0].container_path "/c/../.."`, nil},
		{"over the root", mount(&cri.Mount{ContainerPath: "//.", HostPath: h}), `mounts[0].container_path "//."`, nil},
		{"no host path", mount(&cri.Mount{ContainerPath: c}), "mounts[0].host_path: missing", nil},
		{"relative host path", mount(&cri.Mount{ContainerPath: c, HostPath: "h"}), `mounts[0].host_path "h"`, nil},
		{"NUL", mount(&cri.Mount{ContainerPath: "/c\x00", HostPath: h}), `mounts[0].container_path "/c`, nil},
		{"long", mount(&cri.Mount{ContainerPath: "/" + strings.Repeat("x", 4096), HostPath: h}), `mounts[0].container_path "/xx`, nil},
		{"propagation", mount(&cri.Mount{ContainerPath: c, HostPath: h, Propagation: 8}), `mounts[0].propagation "8"`, nil},
		{"recursive but writable", mount(&cri.Mount{ContainerPath: c, HostPath: h, RecursiveReadOnly: true}), `mounts[0].recursive_read_only "true": needs readonly`, nil},
		{"recursive slave", mount(&cri.Mount{ContainerPath: c, HostPath: h, Readonly: true, RecursiveReadOnly: true, Propagation: slave}), `mounts[0].recursive_read_only "true": needs propagation`, nil},
		{"option", mount(&cri.Mount{ContainerPath: c, HostPath: h, Propagation: private, MountOptions: []string{"noexec", "rw"}}), `mounts[0].mount_options "rw"`, nil},
		{"inside /proc", mount(&cri.Mount{ContainerPath: "/proc/./self/attr", HostPath: h}), `mounts[0].container_path "/proc/./self/attr": lies inside /proc`, nil},
		{"climbing to /proc", mount(&cri.Mount{ContainerPath: "/a/../proc/cpuinfo/x", HostPath: h}), `mounts[0].container_path "/a/../proc/cpuinfo/x"`, nil},
		{"sub path alone", mount(&cri.Mount{ContainerPath: c, HostPath: h, ImageSubPath: "s"}), `mounts[0].image_sub_path "s"`, nil},
	})
	in := base()
	mount(&cri.Mount{ContainerPath: c, HostPath: h})(&in)
	if _, _, err := Container(in); err == nil || err.Error() != "list 1 mounts: 0 sources were resolved" {
		t.Errorf("unresolved mounts: %v", err)
	}
}

func TestRefusalsDevices(t *testing.T) {
	runRefusals(t, []refusal{
		{"no container path", device(&cri.Device{HostPath: "/d", Permissions: "r"}), "devices[0].container_path: missing", nil},
		{"no host path", device(&cri.Device{ContainerPath: "/d", Permissions: "r"}), "devices[0].host_path: missing", nil},
		{"no permissions", device(&cri.Device{ContainerPath: "/d", HostPath: "/d"}), "devices[0].permissions: must be", nil},
		{"odd permissions", device(&cri.Device{ContainerPath: "/d", HostPath: "/d", Permissions: "rx"}), `devices[0].permissions "rx"`, nil},
		{"repeated permission", device(&cri.Device{ContainerPath: "/d", HostPath: "/d", Permissions: "rr"}), `devices[0].permissions "rr": r is repeated`, nil},
		{"two at one place", device(
			&cri.Device{ContainerPath: "/d", HostPath: "/d", Permissions: "r"},
			&cri.Device{ContainerPath: "/d/", HostPath: "/e", Permissions: "r"}), `devices[1].container_path "/d": another device (/d)`, nil},
		{"CDI", func(in *ContainerInput) {
			in.Config.CDIDevices = []*cri.CDIDevice{{Name: "v.test/c=d"}, {Name: "v.test/c"}}
		}, `CDI_devices[1].name "v.test/c"`, nil},
		{"CDI annotation", func(in *ContainerInput) {
			in.Config.Annotations = map[string]string{"cdi.k8s.io/a": "v.test/c=d,", "other": "x"}
		}, `annotations[cdi.k8s.io/a]`, nil},
	})
}

func TestRefusalsResources(t *testing.T) {
	type r = cri.LinuxContainerResources
	huge := func(l ...*cri.HugepageLimit) *r { return &r{HugepageLimits: l} }
	for _, c := range []struct {
		field  string
		value  *r
		reason string
	}{
		{"cpu_period", &r{CpuPeriod: -1}, `"-1": must be between`},
		{"cpu_period", &r{CpuPeriod: 999}, `"999": must be at least 1000`},
		{"cpu_period", &r{CpuPeriod: 1_000_001}, `"1000001": must be between`},
		{"cpu_quota", &r{CpuQuota: -2}, `"-2": must be`},
		{"cpu_quota", &r{CpuQuota: 10}, `"10": must be at least 1000`},
		{"cpu_shares", &r{CpuShares: -1}, `"-1": must be`},
		{"cpu_shares", &r{CpuShares: 1}, `"1": must be at least 2`},
		{"cpu_shares", &r{CpuShares: 262145}, `"262145": must be between`},
		{"memory_limit_in_bytes", &r{MemoryLimitInBytes: -2}, `"-2": must be`},
		{"memory_swap_limit_in_bytes", &r{MemorySwapLimitInBytes: -2}, `"-2": must be`},
		{"memory_swap_limit_in_bytes", &r{MemorySwapLimitInBytes: 5}, `"5": needs memory_limit_in_bytes`},
		{"memory_swap_limit_in_bytes", &r{MemoryLimitInBytes: 9, MemorySwapLimitInBytes: 8}, `"8": is less than memory_limit_in_bytes 9`},
		{"memory_swap_limit_in_bytes", &r{MemoryLimitInBytes: -1, MemorySwapLimitInBytes: 8}, `"8": is less than memory_limit_in_bytes -1`},
		{"oom_score_adj", &r{OomScoreAdj: -1001}, `"-1001": must be`},
		{"oom_score_adj", &r{OomScoreAdj: 1001}, `"1001": must be`},
		{"cpuset_cpus", &r{CpusetCpus: "0-"}, `"0-": must be a list`},
		{"cpuset_cpus", &r{CpusetCpus: "3-1"}, `"3-1": must be a list`},
		{"cpuset_cpus", &r{CpusetCpus: "0,,1"}, `"0,,1": must be a list`},
		{"cpuset_mems", &r{CpusetMems: "all"}, `"all": must be a list`},
		{"hugepage_limits.page_size", huge(&cri.HugepageLimit{PageSize: "2M"}), `"2M": must be like`},
		{"hugepage_limits.page_size", huge(&cri.HugepageLimit{PageSize: "../x"}), `"../x": must be like`},
		{"hugepage_limits.page_size", huge(&cri.HugepageLimit{PageSize: "2MB", Limit: 1}, &cri.HugepageLimit{PageSize: "2MB", Limit: 2}), `"2MB": has two limits`},
		{"unified", &r{Unified: map[string]string{"memory.min": "1", "io.weight": "1"}}, `"io.weight": this host uses cgroup v1`},
		{"unified", &r{Unified: map[string]string{"../memory.max": "1"}}, `"../memory.max": is no control file`},
		{"unified", &r{Unified: map[string]string{"": "1"}}, `: is no control file`},
		{"unified", &r{Unified: map[string]string{"cgroup.kill": "1"}}, `"cgroup.kill": cgroup.* files`},
	} {
		prefix := c.field
		if !strings.HasPrefix(c.reason, ":") {
			prefix += " "
		}
		runRefusals(t, []refusal{{prefix + c.reason, res(c.value), "linux.resources." + prefix + c.reason, nil}})
		if _, err := UpdateResources(c.value, base().Host); !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), "linux."+prefix+c.reason) {
			t.Errorf("UpdateResources: %v", err)
		}
	}
}

func TestFieldErrorsAreBounded(t *testing.T) {
	err := Invalid("f", strings.Repeat("x", 1<<20), "too long")
	if len(err.Error()) > 400 {
		t.Errorf("an error of %d bytes", len(err.Error()))
	}
	var field *FieldError
	if !errors.As(err, &field) || field.Field != "f" {
		t.Errorf("no FieldError in %T", err)
	}
}

func TestPauseRefusals(t *testing.T) {
	type S = cri.LinuxSandboxSecurityContext
	for name, c := range map[string]struct {
		sc     *S
		begins string
	}{
		"group alone":   {&S{RunAsGroup: &cri.Int64Value{Value: 5}}, `linux.security_context.run_as_group "5"`},
		"negative user": {&S{RunAsUser: &cri.Int64Value{Value: -5}}, `linux.security_context.run_as_user "-5"`},
		"huge group":    {&S{RunAsUser: &cri.Int64Value{}, RunAsGroup: &cri.Int64Value{Value: 1 << 40}}, "linux.security_context.run_as_group"},
		"group":         {&S{SupplementalGroups: []int64{1 << 31}}, "linux.security_context.supplemental_groups"},
		"mode":          {&S{NamespaceOptions: &cri.NamespaceOption{Ipc: 3}}, "linux.security_context.namespace_options.ipc"},
		"seccomp":       {&S{SeccompProfilePath: "x"}, `linux.security_context.seccomp "x"`},
		"profile":       {&S{SeccompProfilePath: "localhost//p"}, `linux.security_context.seccomp.localhost_ref "/p": not a seccomp`},
	} {
		in := base()
		in.Sandbox.Linux = &cri.LinuxPodSandboxConfig{SecurityContext: c.sc}
		_, err := Pause(PauseInput{Sandbox: in.Sandbox, Host: in.Host})
		if !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), c.begins) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Pause(PauseInput{}); !errors.Is(err, ErrInvalid) {
		t.Errorf("no sandbox: %v", err)
	}
}
