package runtime

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox"
)

// podCgroup gives a pod of measured a cgroup for itself, with more in it than
// its containers have.
func (m measured) podCgroup(t *testing.T, id string) {
	t.Helper()
	for name, content := range map[string]string{
		"cpu.stat": "usage_usec 20000000\n", "memory.current": "9000\n", "memory.max": "20000\n",
		"memory.stat": "anon 800\ninactive_file 1000\npgfault 21\npgmajfault 22\n", "cgroup.procs": "",
		"io.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=8\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
	} {
		m.write(t, "pods/"+id+"/"+name, content)
	}
	m.change(t, id, func(sb *sandbox.Sandbox) { sb.CgroupMade = true })
}

func (m measured) change(t *testing.T, id string, change func(*sandbox.Sandbox)) {
	t.Helper()
	if _, err := m.Records.Sandboxes.Update(id, change); err != nil {
		t.Fatal(err)
	}
}

func (m measured) podStatsOf(t *testing.T, id string) *cri.LinuxPodSandboxStats {
	t.Helper()
	reply, err := m.PodSandboxStats(t.Context(), &cri.PodSandboxStatsRequest{PodSandboxId: id})
	if err != nil {
		t.Fatal(err)
	}
	return reply.GetStats().GetLinux()
}

func containersOf(linux *cri.LinuxPodSandboxStats) []string {
	ids := []string{}
	for _, c := range linux.GetContainers() {
		ids = append(ids, c.GetAttributes().GetId())
	}
	slices.Sort(ids)
	return ids
}

func (m measured) processes(t *testing.T, container, list string) {
	t.Helper()
	m.write(t, "pods/"+container+"/cgroup.procs", list)
}

func TestPodSandboxStatsOfItsOwnCgroup(t *testing.T) {
	m := newMeasured(t)
	m.podCgroup(t, "a1")
	m.processes(t, "a1/c1", "1\n2\n")
	m.processes(t, "a1/c2", "3\n")
	m.change(t, "a1", func(sb *sandbox.Sandbox) {
		sb.Config.Message.Metadata = &cri.PodSandboxMetadata{Name: "web", Namespace: "ns", Uid: "u"}
		sb.Config.Message.Labels, sb.Config.Message.Annotations = map[string]string{"l": "1"}, map[string]string{"a": "2"}
	})
	reply, err := m.PodSandboxStats(t.Context(), &cri.PodSandboxStatsRequest{PodSandboxId: "a1"})
	if err != nil {
		t.Fatal(err)
	}
	a, linux := reply.GetStats().GetAttributes(), reply.GetStats().GetLinux()
	if a.GetId() != "a1" || a.GetMetadata().GetNamespace() != "ns" || a.GetLabels()["l"] != "1" || a.GetAnnotations()["a"] != "2" {
		t.Errorf("attributes %v", a)
	}
	if c := linux.GetCpu(); c.GetTimestamp() == 0 || c.GetUsageCoreNanoSeconds().GetValue() != 20e9 {
		t.Errorf("cpu %v", c)
	}
	if mem := linux.GetMemory(); mem.GetUsageBytes().GetValue() != 9000 || mem.GetWorkingSetBytes().GetValue() != 8000 || mem.GetAvailableBytes().GetValue() != 12000 || mem.GetTimestamp() == 0 {
		t.Errorf("memory %v", mem)
	}
	if p := linux.GetProcess(); p.GetTimestamp() == 0 || p.GetProcessCount().GetValue() != 3 {
		t.Errorf("processes %v", p)
	}
	if io := linux.GetIo(); io.GetPsi().GetSome().GetTotal() != 8000 {
		t.Errorf("io %v", io)
	}
	if got := containersOf(linux); !slices.Equal(got, []string{"c1", "c2"}) || linux.GetContainers()[0].GetMemory().GetUsageBytes().GetValue() != 1000 {
		t.Errorf("containers %v", got)
	}
	if linux.GetNetwork() != nil {
		t.Errorf("a network of no namespace: %v", linux.GetNetwork())
	}
}

// Where a cgroup is not the pod's alone, the pod is what its containers are.
func TestPodSandboxStatsOfASharedCgroup(t *testing.T) {
	for what, share := range map[string]func(sb *sandbox.Sandbox){
		"the same":             func(sb *sandbox.Sandbox) { sb.CgroupParent = "/pods/a1" },
		"below":                func(sb *sandbox.Sandbox) { sb.CgroupParent = "/pods/a1/more/b2" },
		"one nobody asked for": nil,
	} {
		m := newMeasured(t)
		m.podCgroup(t, "a1")
		m.processes(t, "a1/c1", "1\n2\n")
		m.processes(t, "a1/c2", "3\n")
		if share != nil {
			m.change(t, "b2", share)
		} else {
			m.change(t, "a1", func(sb *sandbox.Sandbox) { sb.CgroupMade = false })
		}
		linux := m.podStatsOf(t, "a1")
		mem := linux.GetMemory()
		if linux.GetCpu().GetUsageCoreNanoSeconds().GetValue() != 10e9 || mem.GetUsageBytes().GetValue() != 2000 || mem.GetRssBytes().GetValue() != 1000 ||
			mem.GetAvailableBytes() != nil || linux.GetProcess().GetProcessCount().GetValue() != 3 || linux.GetIo() != nil {
			t.Errorf("%s: %v", what, linux)
		}
	}
}

// A pod in which nothing has run yet has no cgroup: it uses nothing.
func TestPodSandboxStatsOfAnEmptyPod(t *testing.T) {
	m := newMeasured(t)
	m.change(t, "b2", func(sb *sandbox.Sandbox) { sb.CgroupMade = true })
	if _, err := m.Records.Containers.Update("d3", func(c *sandbox.Container) { c.FinishedAt = 9 }); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(m.cgroups, "pods/b2")); err != nil {
		t.Fatal(err)
	}
	linux := m.podStatsOf(t, "b2")
	if linux.GetCpu().GetUsageCoreNanoSeconds() == nil || linux.GetCpu().GetUsageCoreNanoSeconds().GetValue() != 0 || linux.GetMemory().GetUsageBytes().GetValue() != 0 ||
		linux.GetProcess().GetProcessCount() == nil || len(linux.GetContainers()) != 0 {
		t.Errorf("an empty pod: %v", linux)
	}
}

func TestPodSandboxStatsRefused(t *testing.T) {
	m := newMeasured(t)
	m.change(t, "b2", func(sb *sandbox.Sandbox) { sb.StoppedAt = 9 })
	for id, want := range map[string]codes.Code{"": codes.NotFound, "unknown": codes.NotFound, "b2": codes.FailedPrecondition, "a": codes.OK} {
		if _, err := m.PodSandboxStats(t.Context(), &cri.PodSandboxStatsRequest{PodSandboxId: id}); status.Code(statusOf(err)) != want {
			t.Errorf("%q: %v, want %v", id, err, want)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := m.ListPodSandboxStats(ended, nil); status.Code(statusOf(err)) != codes.Canceled {
		t.Errorf("a caller that is gone: %v", err)
	}
	if _, err := m.ListPodSandboxMetrics(ended, nil); status.Code(statusOf(err)) != codes.Canceled {
		t.Errorf("a caller that is gone: %v", err)
	}
}

func TestListPodSandboxStatsFilters(t *testing.T) {
	m := newMeasured(t)
	for _, id := range []string{"a1", "b2"} {
		m.change(t, id, func(sb *sandbox.Sandbox) { sb.Config.Message.Labels = map[string]string{"id": id, "all": ""} })
	}
	ready := &sandbox.Sandbox{ID: "x9", Name: "x9", BootID: "boot before", CreatedAt: 1, ReadyAt: 2, CgroupParent: "/pods/x9",
		Config: sandbox.Config[*cri.PodSandboxConfig]{Message: &cri.PodSandboxConfig{}}}
	if err := m.Records.Sandboxes.Create(ready); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		filter *cri.PodSandboxStatsFilter
		want   []string
	}{
		{nil, []string{"a1", "b2"}},
		{&cri.PodSandboxStatsFilter{}, []string{"a1", "b2"}},
		{&cri.PodSandboxStatsFilter{Id: "a1"}, []string{"a1"}},
		{&cri.PodSandboxStatsFilter{Id: "b"}, []string{"b2"}}, // the beginning of an id
		{&cri.PodSandboxStatsFilter{Id: "unknown"}, []string{}},
		{&cri.PodSandboxStatsFilter{Id: "x9"}, []string{}}, // not ready
		{&cri.PodSandboxStatsFilter{LabelSelector: map[string]string{"all": ""}}, []string{"a1", "b2"}},
		{&cri.PodSandboxStatsFilter{LabelSelector: map[string]string{"all": "", "id": "b2"}}, []string{"b2"}},
		{&cri.PodSandboxStatsFilter{Id: "a1", LabelSelector: map[string]string{"id": "b2"}}, []string{}},
	} {
		reply, err := m.ListPodSandboxStats(t.Context(), &cri.ListPodSandboxStatsRequest{Filter: c.filter})
		if err != nil {
			t.Fatal(err)
		}
		got := []string{}
		for _, s := range reply.Stats {
			got = append(got, s.GetAttributes().GetId())
		}
		if slices.Sort(got); !slices.Equal(got, c.want) {
			t.Errorf("%v: %v, want %v", c.filter, got, c.want)
		}
	}
}

// What has gone is missing alone: a container from its pod, a pod's cgroup from
// the pod's figures (case B93).
func TestB93PodsOfTheLiving(t *testing.T) {
	m := newMeasured(t)
	for _, c := range []string{"a1/c1", "a1/c2", "b2/d3"} {
		m.processes(t, c, "1\n")
	}
	if err := os.RemoveAll(filepath.Join(m.cgroups, "pods/a1/c1")); err != nil {
		t.Fatal(err)
	}
	m.write(t, "pods/b2/d3/cpu.stat", "usage_usec nonsense\n")
	reply, err := m.ListPodSandboxStats(t.Context(), nil)
	if err != nil || len(reply.Stats) != 2 {
		t.Fatalf("%v, %v", reply, err)
	}
	want := map[string][]string{"a1": {"c2"}, "b2": {}}
	for _, s := range reply.Stats {
		id := s.GetAttributes().GetId()
		if got := containersOf(s.GetLinux()); !slices.Equal(got, want[id]) || s.GetLinux().GetCpu() == nil {
			t.Errorf("pod %s has %v, want %v: %v", id, got, want[id], s.GetLinux())
		}
	}
	metrics, err := m.ListPodSandboxMetrics(t.Context(), nil)
	if err != nil || len(metrics.PodMetrics) != 2 {
		t.Fatalf("%v, %v", metrics, err)
	}
	for _, p := range metrics.PodMetrics {
		got := []string{}
		for _, c := range p.GetContainerMetrics() {
			if got = append(got, c.GetContainerId()); len(c.GetMetrics()) < 10 {
				t.Errorf("container %s has %d metrics", c.GetContainerId(), len(c.GetMetrics()))
			}
		}
		if !slices.Equal(got, want[p.GetPodSandboxId()]) {
			t.Errorf("metrics of pod %s: %v", p.GetPodSandboxId(), got)
		}
	}
}

// A pod on the host's network has the host's interfaces.
func TestPodSandboxStatsOnTheHostsNetwork(t *testing.T) {
	m := newMeasured(t)
	m.change(t, "a1", func(sb *sandbox.Sandbox) {
		sb.Config.Message.Linux = &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Network: cri.NamespaceMode_NODE}}}
	})
	network := m.podStatsOf(t, "a1").GetNetwork()
	if network.GetTimestamp() == 0 {
		t.Fatalf("network %v", network)
	}
	for _, i := range append(network.GetInterfaces(), network.GetDefaultInterface()) {
		if _, err := os.Stat("/sys/class/net/" + i.GetName()); i != nil && (err != nil || i.GetName() == "lo" || i.GetRxBytes() == nil || i.GetTxErrors() == nil) {
			t.Errorf("interface %v, %v", i, err)
		}
	}
}

// Metrics say whose they are.
func TestListPodSandboxMetricsLabels(t *testing.T) {
	m := newMeasured(t)
	m.processes(t, "b2/d3", "1\n")
	m.change(t, "b2", func(sb *sandbox.Sandbox) {
		sb.Config.Message.Metadata = &cri.PodSandboxMetadata{Name: "web", Namespace: "ns"}
	})
	if _, err := m.Records.Containers.Update("d3", func(c *sandbox.Container) {
		c.Config.Message.Image = &cri.ImageSpec{Image: "sha256:1", UserSpecifiedImage: "busybox:1"}
		c.Config.Message.Linux = &cri.LinuxContainerConfig{Resources: &cri.LinuxContainerResources{CpuShares: 99}}
	}); err != nil {
		t.Fatal(err)
	}
	reply, err := m.ListPodSandboxMetrics(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range reply.PodMetrics {
		for _, c := range p.GetContainerMetrics() {
			for _, x := range c.GetMetrics() {
				if c.ContainerId == "d3" && !slices.Equal(x.LabelValues[:5], []string{"d3", "busybox:1", "ns", "web", "nd3"}) {
					t.Fatalf("%s has the labels %v", x.Name, x.LabelValues)
				}
				if c.ContainerId == "d3" && x.Name == "container_spec_cpu_shares" && x.GetValue().GetValue() != 99 {
					t.Errorf("shares %v", x)
				}
			}
		}
	}
	descriptors, err := m.ListMetricDescriptors(t.Context(), nil)
	if err != nil || len(descriptors.Descriptors) < 56 {
		t.Errorf("%d descriptors, %v", len(descriptors.GetDescriptors()), err)
	}
}
