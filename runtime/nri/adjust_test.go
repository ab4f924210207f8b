package nri

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
)

// fullSpec has something of everything that a plugin may change.
func fullSpec() *rspec.Spec {
	limit, shares := int64(64<<20), uint64(512)
	return &rspec.Spec{
		Process: &rspec.Process{Args: []string{"a", "b"}, Env: []string{"KEEP=1", "CHANGE=2", "DROP=3"},
			Rlimits: []rspec.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1, Hard: 2}, {Type: "RLIMIT_CORE", Soft: 3, Hard: 4}}},
		Mounts:      []rspec.Mount{{Destination: "/proc", Type: "proc"}, {Destination: "/data/deep", Source: "/x"}, {Destination: "/drop", Source: "/y"}},
		Annotations: map[string]string{"keep": "1", "change": "2", "drop": "3"},
		Linux: &rspec.Linux{
			CgroupsPath: "/pods/c",
			Namespaces:  []rspec.LinuxNamespace{{Type: rspec.PIDNamespace}, {Type: rspec.NetworkNamespace, Path: "/ns/net"}},
			Devices:     []rspec.LinuxDevice{{Path: "/dev/keep", Type: "c"}, {Path: "/dev/drop", Type: "c"}},
			Resources:   &rspec.LinuxResources{Memory: &rspec.LinuxMemory{Limit: &limit}, CPU: &rspec.LinuxCPU{Shares: &shares}},
			Sysctl:      map[string]string{"net.a": "1", "net.drop": "2"},
		},
	}
}

// Each row is one adjustment and what it makes of its part of the specification.
func TestAdjustments(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*api.ContainerAdjustment)
		part   func(*rspec.Spec) any
		want   string
	}{
		"env": {func(a *api.ContainerAdjustment) {
			a.AddEnv("CHANGE", "20")
			a.RemoveEnv("DROP")
			a.AddEnv("NEW", "x=y")
		}, func(s *rspec.Spec) any { return s.Process.Env }, `["KEEP=1","CHANGE=20","NEW=x=y"]`},
		"args":        {func(a *api.ContainerAdjustment) { a.SetArgs([]string{"c"}) }, func(s *rspec.Spec) any { return s.Process.Args }, `["c"]`},
		"annotations": {func(a *api.ContainerAdjustment) { a.AddAnnotation("change", "20"); a.RemoveAnnotation("drop") }, func(s *rspec.Spec) any { return s.Annotations }, `{"change":"20","keep":"1"}`},
		"mounts, parents first": {func(a *api.ContainerAdjustment) {
			a.AddMount(&api.Mount{Destination: "/data", Source: "/z", Type: "bind", Options: []string{"ro"}})
			a.RemoveMount("/drop")
		}, func(s *rspec.Spec) any { return s.Mounts }, `[{"destination":"/data","type":"bind","source":"/z","options":["ro"]},{"destination":"/proc","type":"proc"},{"destination":"/data/deep","source":"/x"}]`},
		"hooks": {func(a *api.ContainerAdjustment) {
			h := func(path string) []*api.Hook { return []*api.Hook{{Path: path}} }
			a.AddHooks(&api.Hooks{Prestart: h("/1"), CreateRuntime: h("/2"), CreateContainer: h("/3"), StartContainer: h("/4"), Poststart: h("/5"), Poststop: h("/6")})
		}, func(s *rspec.Spec) any { return s.Hooks }, `{"prestart":[{"path":"/1"}],"createRuntime":[{"path":"/2"}],"createContainer":[{"path":"/3"}],"startContainer":[{"path":"/4"}],"poststart":[{"path":"/5"}],"poststop":[{"path":"/6"}]}`},
		"rlimits replace those of their kind": {func(a *api.ContainerAdjustment) { a.AddRlimit("RLIMIT_NOFILE", 20, 10) },
			func(s *rspec.Spec) any { return s.Process.Rlimits }, `[{"type":"RLIMIT_CORE","hard":4,"soft":3},{"type":"RLIMIT_NOFILE","hard":20,"soft":10}]`},
		"devices": {func(a *api.ContainerAdjustment) {
			a.AddDevice(&api.LinuxDevice{Path: "/dev/new", Type: "c", Major: 1, Minor: 3})
			a.RemoveDevice("/dev/drop")
		}, func(s *rspec.Spec) any { return []any{s.Linux.Devices, s.Linux.Resources.Devices} },
			`[[{"path":"/dev/keep","type":"c","major":0,"minor":0},{"path":"/dev/new","type":"c","major":1,"minor":3}],[{"allow":true,"type":"c","major":1,"minor":3,"access":"rw"}]]`},
		"cgroups path": {func(a *api.ContainerAdjustment) { a.SetLinuxCgroupsPath("/other") }, func(s *rspec.Spec) any { return s.Linux.CgroupsPath }, `"/other"`},
		"oom score": {func(a *api.ContainerAdjustment) { v := 77; a.SetLinuxOomScoreAdj(&v) },
			func(s *rspec.Spec) any { return s.Process.OOMScoreAdj }, `77`},
		"memory": {func(a *api.ContainerAdjustment) {
			a.SetLinuxMemoryLimit(32 << 20)
			a.SetLinuxMemorySwap(48 << 20)
			a.SetLinuxMemoryReservation(16 << 20)
			a.SetLinuxMemorySwappiness(5)
		}, func(s *rspec.Spec) any { return s.Linux.Resources.Memory }, `{"limit":33554432,"reservation":16777216,"swap":50331648,"swappiness":5}`},
		"cpu": {func(a *api.ContainerAdjustment) {
			a.SetLinuxCPUQuota(5000)
			a.SetLinuxCPUPeriod(10000)
			a.SetLinuxCPUSetCPUs("0")
			a.SetLinuxCPUSetMems("0")
		}, func(s *rspec.Spec) any { return s.Linux.Resources.CPU }, `{"shares":512,"quota":5000,"period":10000,"cpus":"0","mems":"0"}`},
		"pids":       {func(a *api.ContainerAdjustment) { a.SetLinuxPidLimits(9) }, func(s *rspec.Spec) any { return s.Linux.Resources.Pids }, `{"limit":9}`},
		"huge pages": {func(a *api.ContainerAdjustment) { a.AddLinuxHugepageLimit("2MB", 4<<20) }, func(s *rspec.Spec) any { return s.Linux.Resources.HugepageLimits }, `[{"pageSize":"2MB","limit":4194304}]`},
		"unified":    {func(a *api.ContainerAdjustment) { a.AddLinuxUnified("memory.high", "1") }, func(s *rspec.Spec) any { return s.Linux.Resources.Unified }, `{"memory.high":"1"}`},
		"namespaces": {func(a *api.ContainerAdjustment) {
			a.RemoveNamespace(&api.LinuxNamespace{Type: "pid"})
			a.AddOrReplaceNamespace(&api.LinuxNamespace{Type: "network", Path: "/other"})
			a.AddOrReplaceNamespace(&api.LinuxNamespace{Type: "cgroup"})
		}, func(s *rspec.Spec) any { return s.Linux.Namespaces }, `[{"type":"network","path":"/other"},{"type":"cgroup"}]`},
		"sysctl": {func(a *api.ContainerAdjustment) {
			a.SetLinuxSysctl("net.b", "3")
			a.SetLinuxSysctl(api.MarkForRemoval("net.drop"), "")
		},
			func(s *rspec.Spec) any { return s.Linux.Sysctl }, `{"net.a":"1","net.b":"3"}`},
		"seccomp": {func(a *api.ContainerAdjustment) {
			a.SetLinuxSeccompPolicy(&api.LinuxSeccomp{DefaultAction: "SCMP_ACT_ERRNO", DefaultErrno: api.UInt32(uint32(38)),
				Syscalls: []*api.LinuxSyscall{{Names: []string{"read"}, Action: "SCMP_ACT_ALLOW"}}})
		}, func(s *rspec.Spec) any { return s.Linux.Seccomp }, `{"defaultAction":"SCMP_ACT_ERRNO","defaultErrnoRet":38,"syscalls":[{"names":["read"],"action":"SCMP_ACT_ALLOW"}]}`},
		"I/O priority": {func(a *api.ContainerAdjustment) {
			a.SetLinuxIOPriority(&api.LinuxIOPriority{Class: api.IOPrioClass_IOPRIO_CLASS_BE, Priority: 3})
		}, func(s *rspec.Spec) any { return s.Process.IOPriority }, `{"class":"IOPRIO_CLASS_BE","priority":3}`},
		"scheduler": {func(a *api.ContainerAdjustment) {
			a.SetLinuxScheduler(&api.LinuxScheduler{Policy: api.LinuxSchedulerPolicy_SCHED_BATCH, Nice: 5})
		}, func(s *rspec.Spec) any { return s.Process.Scheduler }, `{"policy":"SCHED_BATCH","nice":5}`},
		"RDT": {func(a *api.ContainerAdjustment) { a.SetLinuxRDTClosID("gold") }, func(s *rspec.Spec) any { return s.Linux.IntelRdt }, `{"closID":"gold"}`},
		"network device": {func(a *api.ContainerAdjustment) {
			a.AddLinuxNetDevice("eth7", &api.LinuxNetDevice{Name: "data"})
		}, func(s *rspec.Spec) any { return s.Linux.NetDevices }, `{"eth7":{"name":"data"}}`},
	} {
		t.Run(name, func(t *testing.T) {
			a, sp, before := &api.ContainerAdjustment{}, fullSpec(), fullSpec()
			tc.change(a)
			out, err := (&Plugins{}).adjust(sp, a)
			if err != nil || !out.Any {
				t.Fatalf("%v %v", out, err)
			}
			if got, err := json.Marshal(tc.part(sp)); err != nil || string(got) != tc.want {
				t.Errorf("got\n%s %v, want\n%s", got, err, tc.want)
			}
			if name != "args" && !reflect.DeepEqual(sp.Process.Args, before.Process.Args) || name != "env" && !reflect.DeepEqual(sp.Process.Env, before.Process.Env) {
				t.Errorf("args or env changed too: %v %v", sp.Process.Args, sp.Process.Env)
			}
		})
	}
}

// An empty answer leaves the specification as it is, to the byte.
func TestNoAdjustment(t *testing.T) {
	for _, a := range []*api.ContainerAdjustment{nil, {}, {Env: []*api.KeyValue{}, Hooks: &api.Hooks{}, Linux: &api.LinuxContainerAdjustment{Resources: &api.LinuxResources{Cpu: &api.LinuxCPU{}}}}} {
		sp := fullSpec()
		if out, err := (&Plugins{}).adjust(sp, a); err != nil || out.Any || !reflect.DeepEqual(sp, fullSpec()) {
			t.Errorf("%v: %v %v, spec changed: %v", a, out, err, !reflect.DeepEqual(sp, fullSpec()))
		}
	}
}

// Limits that were set are told apart, for the container's record.
func TestAdjustedLimits(t *testing.T) {
	a := &api.ContainerAdjustment{}
	a.SetLinuxMemoryLimit(32 << 20)
	a.SetLinuxCPUSetCPUs("0")
	out, err := (&Plugins{}).adjust(fullSpec(), a)
	if err != nil || out.Resources.GetMemoryLimitInBytes() != 32<<20 || out.Resources.GetCpusetCpus() != "0" || out.Resources.GetCpuShares() != 0 {
		t.Errorf("%v %v", out.Resources, err)
	}
	a = &api.ContainerAdjustment{}
	a.AddEnv("A", "b")
	if out, err = (&Plugins{}).adjust(fullSpec(), a); err != nil || out.Resources != nil {
		t.Errorf("without limits: %v %v", out.Resources, err)
	}
}

// CDI devices go through the owner's function; what berth has not is refused.
func TestCDIAndRefusedAdjustments(t *testing.T) {
	cdi := &api.ContainerAdjustment{}
	cdi.AddCDIDevice(&api.CDIDevice{Name: "vendor/class=dev"})
	var asked []string
	p := &Plugins{Options: Options{InjectCDI: func(sp *rspec.Spec, names []string) error {
		asked = names
		sp.Process.Env = append(sp.Process.Env, "CDI=1")
		return nil
	}}}
	sp := fullSpec()
	if _, err := p.adjust(sp, cdi); err != nil || len(asked) != 1 || asked[0] != "vendor/class=dev" || sp.Process.Env[3] != "CDI=1" {
		t.Errorf("asked for %q, %v", asked, err)
	}
	p.InjectCDI = func(*rspec.Spec, []string) error { return errors.New("no such device") }
	blockIO, rdt, bad := &api.ContainerAdjustment{}, &api.ContainerAdjustment{}, &api.ContainerAdjustment{}
	blockIO.SetLinuxBlockIOClass("slow")
	rdt.SetLinuxRDTClass("gold")
	bad.AddOrReplaceNamespace(&api.LinuxNamespace{Type: "flavour"})
	for name, tc := range map[string]struct {
		p    *Plugins
		a    *api.ContainerAdjustment
		want string
	}{
		"CDI fails": {p, cdi, "no such device"}, "no CDI": {&Plugins{}, cdi, "CDI devices are not supported"},
		"block I/O": {p, blockIO, `"slow"`}, "RDT": {p, rdt, `"gold"`}, "namespace": {p, bad, `"flavour"`},
	} {
		if _, err := tc.p.adjust(fullSpec(), tc.a); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
