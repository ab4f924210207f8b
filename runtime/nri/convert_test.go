package nri

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// same compares with a message in protobuf's JSON form.
func same[M proto.Message](t *testing.T, got M, want string) {
	t.Helper()
	w := got.ProtoReflect().New().Interface()
	if err := protojson.Unmarshal([]byte(want), w); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(got, w) {
		t.Errorf("got\n%s, want\n%s", protojson.Format(got), protojson.Format(w))
	}
}

func TestPod(t *testing.T) {
	p := Pod{
		ID: "p", Handler: "crun", Cgroup: "/kube/p", IPs: []string{"10.0.0.2", "fd00::2"}, PID: 7,
		Namespaces: []rspec.LinuxNamespace{{Type: rspec.NetworkNamespace, Path: "/run/net"}},
		Overhead:   &cri.LinuxContainerResources{MemoryLimitInBytes: 1}, Resources: &cri.LinuxContainerResources{CpuQuota: -1, CpuPeriod: 5, CpuShares: 6},
		Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "n", Namespace: "s", Uid: "u"},
			Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"a": "2"}, Linux: &cri.LinuxPodSandboxConfig{CgroupParent: "/kube"}},
	}
	same(t, p.api(), `{"id":"p","name":"n","uid":"u","namespace":"s","labels":{"l":"1"},"annotations":{"a":"2"},"runtimeHandler":"crun","pid":7,
		"ips":["10.0.0.2","fd00::2"],"linux":{"podOverhead":{"memory":{"limit":{"value":"1"}},"cpu":{}},
		"podResources":{"memory":{},"cpu":{"shares":{"value":"6"},"quota":{"value":"-1"},"period":{"value":"5"}}},
		"cgroupParent":"/kube","cgroupsPath":"/kube/p","namespaces":[{"type":"network","path":"/run/net"}]}}`)
	p.api().Labels["l"] = "changed"
	if p.Config.Labels["l"] != "1" {
		t.Error("the pod's own labels were handed out")
	}
}

func TestContainer(t *testing.T) {
	oom, limit := 5, int64(9)
	c := Container{
		ID: "c", PodID: "p", Made: true, State: cri.ContainerState_CONTAINER_RUNNING, PID: 8,
		Created: time.Unix(0, 1), Started: time.Unix(0, 2), ImageID: "sha256:cfg", ImageRef: "repo@sha256:man",
		Resources: &cri.LinuxContainerResources{MemoryLimitInBytes: 10},
		Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "n"}, Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"a": "2"},
			Image: &cri.ImageSpec{Image: "sha256:cfg", UserSpecifiedImage: "repo:tag"}, CDIDevices: []*cri.CDIDevice{{Name: "v/c=d"}},
			Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{Seccomp: &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "/p.json"}}}},
		Spec: &rspec.Spec{
			Process: &rspec.Process{Args: []string{"x"}, Env: []string{"A=b"}, OOMScoreAdj: &oom, User: rspec.User{UID: 3, GID: 4, AdditionalGids: []uint32{5}},
				Rlimits: []rspec.POSIXRlimit{{Type: "RLIMIT_CORE", Hard: 2, Soft: 1}}},
			Mounts:      []rspec.Mount{{Destination: "/d", Type: "bind", Source: "/s", Options: []string{"ro"}}},
			Annotations: map[string]string{"spec": "3"},
			Linux: &rspec.Linux{CgroupsPath: "/cg", Namespaces: []rspec.LinuxNamespace{{Type: rspec.PIDNamespace}}, Sysctl: map[string]string{"k": "v"},
				Resources: &rspec.LinuxResources{Memory: &rspec.LinuxMemory{Limit: &limit, Swap: &limit}}},
		},
	}
	same(t, c.api(), `{"id":"c","podSandboxId":"p","name":"n","state":"CONTAINER_RUNNING","labels":{"l":"1"},"annotations":{"a":"2","spec":"3"},
		"args":["x"],"env":["A=b"],"mounts":[{"destination":"/d","type":"bind","source":"/s","options":["ro"]}],"pid":8,
		"linux":{"namespaces":[{"type":"pid"}],"oomScoreAdj":{"value":"5"},"cgroupsPath":"/cg","sysctl":{"k":"v"},
		"seccompProfile":{"profileType":"LOCALHOST","localhostRef":"/p.json"},
		"resources":{"memory":{"limit":{"value":"10"},"swap":{"value":"9"}},"cpu":{}}},
		"rlimits":[{"type":"RLIMIT_CORE","hard":"2","soft":"1"}],"createdAt":"1","startedAt":"2","CDIDevices":[{"name":"v/c=d"}],
		"user":{"uid":3,"gid":4,"additionalGids":[5]},"image":{"name":"repo:tag","digest":"repo@sha256:man","configDigest":"sha256:cfg"}}`)

	ended := Container{ID: "c", PodID: "p", Made: true, State: cri.ContainerState_CONTAINER_EXITED, Finished: time.Unix(0, 3), ExitCode: 137,
		Reason: "OOMKilled", Message: "m", Config: &cri.ContainerConfig{Image: &cri.ImageSpec{Image: "i"}}, UID: 6}
	same(t, ended.api(), `{"id":"c","podSandboxId":"p","state":"CONTAINER_STOPPED","finishedAt":"3","exitCode":137,"statusReason":"OOMKilled",
		"statusMessage":"m","user":{"uid":6},"image":{"name":"i"}}`)
}

func TestSeccompProfiles(t *testing.T) {
	for kind, want := range map[cri.SecurityProfile_ProfileType]api.SecurityProfile_ProfileType{
		cri.SecurityProfile_RuntimeDefault: api.SecurityProfile_RUNTIME_DEFAULT, cri.SecurityProfile_Unconfined: api.SecurityProfile_UNCONFINED,
	} {
		c := Container{Config: &cri.ContainerConfig{Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{Seccomp: &cri.SecurityProfile{ProfileType: kind}}}}}
		if got := c.seccompProfile().GetProfileType(); got != want {
			t.Errorf("%s: %s", kind, got)
		}
	}
	if got := (Container{}).seccompProfile().GetProfileType(); got != api.SecurityProfile_UNCONFINED {
		t.Errorf("none: %s", got)
	}
}

// CRI's resources survive the way to NRI and back.
func TestResourcesRoundTrip(t *testing.T) {
	r := &cri.LinuxContainerResources{CpuPeriod: 1, CpuQuota: -1, CpuShares: 3, MemoryLimitInBytes: -1, MemorySwapLimitInBytes: 5,
		CpusetCpus: "0-1", CpusetMems: "0", HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 6}}, Unified: map[string]string{"memory.high": "7"}}
	if got, err := toCRI(fromCRI(r)); err != nil || !proto.Equal(got, r) {
		t.Errorf("%v %v", got, err)
	}
	if got, err := toCRI(fromCRI(&cri.LinuxContainerResources{})); err != nil || proto.Size(got) != 0 {
		t.Errorf("empty: %v %v", got, err)
	}
	if fromCRI(nil) != nil {
		t.Error("nil became something")
	}
}

func TestOverlay(t *testing.T) {
	a := fromCRI(&cri.LinuxContainerResources{CpuShares: 1, MemoryLimitInBytes: 2, CpusetCpus: "0", Unified: map[string]string{"a.b": "1", "c.d": "2"},
		HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 6}}})
	b := fromCRI(&cri.LinuxContainerResources{CpuShares: 9, CpuQuota: 8, CpuPeriod: 7, CpusetMems: "0", MemorySwapLimitInBytes: 5, Unified: map[string]string{"a.b": "3"},
		HugepageLimits: []*cri.HugepageLimit{{PageSize: "1GB", Limit: 4}}})
	got, err := toCRI(overlay(a, b))
	want := &cri.LinuxContainerResources{CpuShares: 9, CpuQuota: 8, CpuPeriod: 7, MemoryLimitInBytes: 2, MemorySwapLimitInBytes: 5, CpusetCpus: "0", CpusetMems: "0",
		Unified: map[string]string{"a.b": "3", "c.d": "2"}, HugepageLimits: []*cri.HugepageLimit{{PageSize: "1GB", Limit: 4}}}
	if err != nil || !proto.Equal(got, want) {
		t.Errorf("got %v %v, want %v", got, err, want)
	}
	if overlay(nil, b) != b || overlay(a, nil) != a {
		t.Error("nil is no layer")
	}
}

func TestUpdatesThatAreRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		r    *api.LinuxResources
		want string
	}{
		"block I/O class": {&api.LinuxResources{BlockioClass: api.String("slow")}, `"slow"`},
		"RDT class":       {&api.LinuxResources{RdtClass: api.String("gold")}, `"gold"`},
		"devices":         {&api.LinuxResources{Devices: []*api.LinuxDeviceCgroup{{Allow: true}}}, "device rules"},
		"huge shares":     {&api.LinuxResources{Cpu: &api.LinuxCPU{Shares: api.UInt64(uint64(math.MaxUint64))}}, "cpu.shares"},
		"huge period":     {&api.LinuxResources{Cpu: &api.LinuxCPU{Period: api.UInt64(uint64(math.MaxUint64))}}, "cpu.period"},
	} {
		if _, err := fromUpdate(&api.ContainerUpdate{ContainerId: "c", Linux: &api.LinuxContainerUpdate{Resources: tc.r}}); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Limits that CRI has no field for reach the OCI runtime beside the others.
func TestUpdateBeyondCRI(t *testing.T) {
	u := &api.ContainerUpdate{ContainerId: "c"}
	u.SetLinuxMemoryLimit(1)
	u.SetLinuxMemoryReservation(2)
	u.SetLinuxMemorySwappiness(3)
	u.SetLinuxCPURealtimePeriod(4)
	u.SetLinuxPidLimits(5)
	got, err := fromUpdate(u)
	if err != nil || got.ID != "c" || got.Resources.GetMemoryLimitInBytes() != 1 {
		t.Fatalf("%v %v", got, err)
	}
	r := &rspec.LinuxResources{}
	got.AddMore(r)
	if *r.Memory.Reservation != 2 || *r.Memory.Swappiness != 3 || *r.CPU.RealtimePeriod != 4 || *r.Pids.Limit != 5 || r.Memory.Limit != nil {
		t.Errorf("%+v", r)
	}
	r = &rspec.LinuxResources{}
	Update{}.AddMore(r)
	if r.Memory != nil || r.CPU != nil || r.Pids != nil {
		t.Errorf("nothing asked for: %+v", r)
	}
}
