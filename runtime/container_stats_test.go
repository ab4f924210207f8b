package runtime

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/image/rootfs"
	"berth/runtime/config"
	"berth/runtime/exporter"
	"berth/runtime/stats"
	"berth/sandbox"
)

// measured is a Service over two pods on a fake cgroup hierarchy of version 2:
// pod "a1" with containers "c1" and "c2", pod "b2" with "d3".
type measured struct {
	*Service
	cgroups string
}

func newMeasured(t *testing.T) measured {
	t.Helper()
	root := t.TempDir()
	records, err := sandbox.Open(root, func(sandbox.Problem) {})
	if err != nil {
		t.Fatal(err)
	}
	images, err := image.Open(t.Context(), image.Options{Root: filepath.Join(root, "images")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = images.Close() })
	m := measured{cgroups: filepath.Join(root, "cgroup")}
	m.write(t, "cgroup.controllers", "cpu memory\n")
	log := logrus.New()
	log.SetOutput(io.Discard)
	m.Service = &Service{Parts: Parts{Config: config.Config{Root: root, State: filepath.Join(root, "state")}, Records: records, Images: images, Log: log.WithField("", "")}, bootID: "boot",
		metrics: noMetrics(), stats: stats.NewCollector(stats.OpenCgroups(m.cgroups), rootfs.Usage)}
	for _, id := range []string{"a1", "b2"} {
		sb := &sandbox.Sandbox{ID: id, Name: id, BootID: "boot", CreatedAt: 1, ReadyAt: 2, CgroupParent: "/pods/" + id,
			Config: sandbox.Config[*cri.PodSandboxConfig]{Message: &cri.PodSandboxConfig{}}}
		if err := records.Sandboxes.Create(sb); err != nil {
			t.Fatal(err)
		}
	}
	m.container(t, "c1", "a1")
	m.container(t, "c2", "a1")
	m.container(t, "d3", "b2")
	return m
}

func (m measured) write(t *testing.T, name, content string) {
	t.Helper()
	path := filepath.Join(m.cgroups, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// noMetrics are for a Service that is made without New.
func noMetrics() *exporter.Metrics {
	return exporter.New("test", func() exporter.State { return exporter.State{} })
}

// container makes a running one, with a cgroup and a writable layer.
func (m measured) container(t *testing.T, id, pod string) {
	t.Helper()
	started := time.Now().Add(-10 * time.Second).UnixNano()
	c := &sandbox.Container{ID: id, Name: id, SandboxID: pod, BootID: "boot", CreatedAt: started, MadeAt: started, StartedAt: started,
		Config: sandbox.Config[*cri.ContainerConfig]{Message: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "n" + id, Attempt: 2},
			Labels: map[string]string{"pod": pod, "id": id}, Annotations: map[string]string{"note": id}}}}
	if err := m.Records.Containers.Create(c); err != nil {
		t.Fatal(err)
	}
	upper := filepath.Join(m.Records.Containers.Dir(id), "upper")
	if err := os.Mkdir(upper, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(upper, "file"), make([]byte, 100000), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := "pods/" + pod + "/" + id
	for name, content := range map[string]string{
		"cpu.stat": "usage_usec 5000000\n", "memory.current": "1000\n", "memory.max": "5000\n", "memory.swap.current": "70\n", "memory.swap.max": "max\n",
		"memory.stat": "anon 500\ninactive_file 300\npgfault 11\npgmajfault 12\n", "memory.pressure": "some avg10=1.00 avg60=0.00 avg300=0.00 total=4\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
		"io.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=3\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=2\n",
	} {
		m.write(t, dir+"/"+name, content)
	}
}

func (m measured) ids(t *testing.T, f *cri.ContainerStatsFilter) []string {
	t.Helper()
	reply, err := m.ListContainerStats(t.Context(), &cri.ListContainerStatsRequest{Filter: f})
	if err != nil {
		t.Fatal(err)
	}
	ids := []string{}
	for _, s := range reply.Stats {
		ids = append(ids, s.GetAttributes().GetId())
	}
	slices.Sort(ids)
	return ids
}

func TestContainerStatsTellsAll(t *testing.T) {
	m := newMeasured(t)
	reply, err := m.ContainerStats(t.Context(), &cri.ContainerStatsRequest{ContainerId: "c1"})
	if err != nil {
		t.Fatal(err)
	}
	s := reply.GetStats()
	if a := s.GetAttributes(); a.GetId() != "c1" || a.GetMetadata().GetName() != "nc1" || a.GetMetadata().GetAttempt() != 2 ||
		a.GetLabels()["pod"] != "a1" || a.GetAnnotations()["note"] != "c1" {
		t.Errorf("attributes: %v", a)
	}
	if c := s.GetCpu(); c.GetTimestamp() == 0 || c.GetUsageCoreNanoSeconds().GetValue() != 5e9 || c.GetPsi() != nil {
		t.Errorf("cpu: %v", c)
	}
	if rate := s.GetCpu().GetUsageNanoCores(); rate == nil || rate.GetValue() < 3e8 || rate.GetValue() > 5e8 { // 5 s in 10 s and a bit
		t.Errorf("rate: %v", rate)
	}
	mem := s.GetMemory()
	got := []*cri.UInt64Value{mem.GetUsageBytes(), mem.GetWorkingSetBytes(), mem.GetAvailableBytes(), mem.GetRssBytes(), mem.GetPageFaults(), mem.GetMajorPageFaults()}
	for i, want := range []uint64{1000, 700, 4300, 500, 11, 12} {
		if got[i] == nil || got[i].GetValue() != want {
			t.Errorf("memory value %d: %v, want %d", i, got[i], want)
		}
	}
	if mem.GetTimestamp() == 0 || mem.GetPsi().GetSome().GetTotal() != 4000 || mem.GetPsi().GetSome().GetAvg10() != 1 {
		t.Errorf("memory: %v", mem)
	}
	if w := s.GetSwap(); w.GetTimestamp() == 0 || w.GetSwapUsageBytes().GetValue() != 70 || w.GetSwapAvailableBytes() != nil {
		t.Errorf("swap: %v", w)
	}
	if i := s.GetIo(); i.GetTimestamp() == 0 || i.GetPsi().GetFull().GetTotal() != 2000 {
		t.Errorf("io: %v", i)
	}
}

// The layer's size may come with a later reply, when the machine is slow; it
// lies on the filesystem that ImageFsInfo names.
func TestContainerStatsWritableLayer(t *testing.T) {
	m := newMeasured(t)
	fs, err := (&imageService{service: m.Service}).ImageFsInfo(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var layer *cri.FilesystemUsage
	for end := time.Now().Add(10 * time.Second); layer == nil && time.Now().Before(end); {
		reply, err := m.ContainerStats(t.Context(), &cri.ContainerStatsRequest{ContainerId: "c1"})
		if err != nil {
			t.Fatal(err)
		}
		layer = reply.GetStats().GetWritableLayer()
	}
	if layer.GetTimestamp() == 0 || layer.GetUsedBytes().GetValue() < 100000 || layer.GetUsedBytes().GetValue() > 200000 || layer.GetInodesUsed().GetValue() != 2 {
		t.Errorf("layer: %v", layer)
	}
	if want := fs.ImageFilesystems[0].GetFsId().GetMountpoint(); want == "" || layer.GetFsId().GetMountpoint() != want || fs.ContainerFilesystems != nil {
		t.Errorf("layer is on %q, images on %q, containers apart on %v", layer.GetFsId().GetMountpoint(), want, fs.ContainerFilesystems)
	}
}

func TestListContainerStatsFilters(t *testing.T) {
	m := newMeasured(t)
	for _, c := range []struct {
		filter *cri.ContainerStatsFilter
		want   []string
	}{
		{nil, []string{"c1", "c2", "d3"}},
		{&cri.ContainerStatsFilter{}, []string{"c1", "c2", "d3"}},
		{&cri.ContainerStatsFilter{Id: "c2"}, []string{"c2"}},
		{&cri.ContainerStatsFilter{Id: "d"}, []string{"d3"}}, // the beginning of an id
		{&cri.ContainerStatsFilter{Id: "c"}, []string{}},     // of two
		{&cri.ContainerStatsFilter{Id: "unknown"}, []string{}},
		{&cri.ContainerStatsFilter{PodSandboxId: "a1"}, []string{"c1", "c2"}},
		{&cri.ContainerStatsFilter{PodSandboxId: "unknown"}, []string{}},
		{&cri.ContainerStatsFilter{LabelSelector: map[string]string{"pod": "a1", "id": "c2"}}, []string{"c2"}},
		{&cri.ContainerStatsFilter{LabelSelector: map[string]string{"pod": "a1", "id": "d3"}}, []string{}},
		{&cri.ContainerStatsFilter{PodSandboxId: "a1", Id: "d3"}, []string{}},
		{&cri.ContainerStatsFilter{PodSandboxId: "b2", Id: "d3", LabelSelector: map[string]string{"pod": "b2"}}, []string{"d3"}},
	} {
		if got := m.ids(t, c.filter); !slices.Equal(got, c.want) {
			t.Errorf("%v: %v, want %v", c.filter, got, c.want)
		}
	}
}

// Only what runs has statistics, and what cannot be measured spoils nothing
// (case B93).
func TestB93StatsOfTheLiving(t *testing.T) {
	m := newMeasured(t)
	for i, change := range []func(*sandbox.Container){
		func(c *sandbox.Container) { c.StartedAt = 0 },
		func(c *sandbox.Container) { c.FinishedAt = 9 },
		func(c *sandbox.Container) { c.BootID = "boot before" },
		func(c *sandbox.Container) { c.MadeAt = 0 },
	} {
		id := fmt.Sprint("e", i)
		m.container(t, id, "a1")
		if _, err := m.Records.Containers.Update(id, change); err != nil {
			t.Fatal(err)
		}
		want := codes.FailedPrecondition
		if i == 3 { // half made: nobody knows it
			want = codes.NotFound
		}
		if _, err := m.ContainerStats(t.Context(), &cri.ContainerStatsRequest{ContainerId: id}); status.Code(statusOf(err)) != want {
			t.Errorf("%s: %v, want %v", id, err, want)
		}
	}
	if got := m.ids(t, nil); !slices.Equal(got, []string{"c1", "c2", "d3"}) {
		t.Errorf("listed: %v", got)
	}
	if err := os.RemoveAll(filepath.Join(m.cgroups, "pods/a1/c1")); err != nil {
		t.Fatal(err)
	}
	m.write(t, "pods/b2/d3/cpu.stat", "usage_usec nonsense\n")
	if got := m.ids(t, nil); !slices.Equal(got, []string{"c2"}) {
		t.Errorf("listed: %v; want the one that can be measured", got)
	}
	for id, want := range map[string]codes.Code{"c1": codes.FailedPrecondition, "d3": codes.Unknown, "unknown": codes.NotFound, "": codes.NotFound} {
		if _, err := m.ContainerStats(t.Context(), &cri.ContainerStatsRequest{ContainerId: id}); status.Code(statusOf(err)) != want {
			t.Errorf("%q: %v, want %v", id, err, want)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := m.ListContainerStats(ended, nil); status.Code(statusOf(err)) != codes.Canceled {
		t.Errorf("a caller that is gone: %v", err)
	}
}

// A pod whose record is gone must not be taken for the root cgroup.
func TestStatsOfAContainerWithoutItsPod(t *testing.T) {
	m := newMeasured(t)
	m.write(t, "cpu.stat", "usage_usec 1\n")
	if err := m.Records.Sandboxes.Remove("b2"); err != nil {
		t.Fatal(err)
	}
	if got := m.ids(t, nil); !slices.Equal(got, []string{"c1", "c2"}) {
		t.Errorf("listed: %v", got)
	}
}
