package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/runtime/config"
	"berth/sandbox/leakcheck"
)

// plugin is an NRI plugin in the test's own process. It notes what it is told.
type plugin struct {
	n      *node
	stub   stub.Stub
	cancel context.CancelFunc
	ended  chan error

	// What it answers; set before it connects. All may be nil.
	refuse func(event, name string) error
	adjust func(*api.ContainerAdjustment, *api.Container)
	update func(event string) []*api.ContainerUpdate

	mu     sync.Mutex
	events []string                   // "<event> <name>", guarded by mu
	pods   map[string]*api.PodSandbox // by event, the last one; guarded by mu
	boxes  map[string]*api.Container  // by event, the last one; guarded by mu
	synced []string                   // guarded by mu
}

// withPlugins switches NRI on for a node, with a new daemon.
func (n *node) withPlugins() {
	n.t.Helper()
	n.cfg.NRI.Enable, n.cfg.NRI.SocketPath = config.NRIOn, n.dir+"/nri.sock"
	n.cfg.NRI.PluginPath, n.cfg.NRI.PluginConfigPath = n.dir+"/no-plugins", n.dir+"/no-plugins"
	n.restart(nil)
}

// plug connects a plugin and waits until it is synchronised.
func (n *node) plug(p *plugin) *plugin {
	n.t.Helper()
	p.n, p.pods, p.boxes, p.ended = n, map[string]*api.PodSandbox{}, map[string]*api.Container{}, make(chan error, 1)
	var err error
	p.stub, err = stub.New(p, stub.WithPluginName("test"), stub.WithPluginIdx("10"), stub.WithSocketPath(n.cfg.NRI.SocketPath), stub.WithOnClose(func() {}))
	must(n.t, err)
	var ctx context.Context
	ctx, p.cancel = context.WithCancel(context.Background())
	go func() { p.ended <- p.stub.Run(ctx) }()
	n.t.Cleanup(p.unplug)
	eventually(n.t, "the plugin is synchronised", func() bool { return len(p.told("Synchronize")) > 0 })
	return p
}

func (p *plugin) unplug() {
	p.cancel()
	select {
	case err := <-p.ended:
		p.ended <- err
	case <-time.After(leakcheck.Patience(20 * time.Second)):
		p.n.t.Error("the plugin does not end")
	}
}

func (p *plugin) note(event string, pod *api.PodSandbox, box *api.Container) error {
	name := pod.GetName()
	if box != nil {
		name = box.GetName()
	}
	p.mu.Lock()
	p.events = append(p.events, event+" "+name)
	p.pods[event], p.boxes[event] = pod, box
	p.mu.Unlock()
	if p.refuse != nil {
		return p.refuse(event, name)
	}
	return nil
}

// told are the names that an event was told with.
func (p *plugin) told(event string) (names []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.events {
		if name, ok := strings.CutPrefix(e, event+" "); ok {
			names = append(names, name)
		}
	}
	return names
}

func (p *plugin) all() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.events)
}

func (p *plugin) box(event string) *api.Container {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.boxes[event]
}

func (p *plugin) updates(event string) []*api.ContainerUpdate {
	if p.update == nil {
		return nil
	}
	return p.update(event)
}

func (p *plugin) Synchronize(_ context.Context, pods []*api.PodSandbox, boxes []*api.Container) ([]*api.ContainerUpdate, error) {
	p.mu.Lock()
	for _, x := range pods {
		p.synced = append(p.synced, "pod "+x.GetName())
	}
	for _, x := range boxes {
		p.synced = append(p.synced, fmt.Sprintf("%s %s %v", x.GetName(), x.GetState(), x.GetPid() != 0))
	}
	slices.Sort(p.synced)
	p.mu.Unlock()
	return p.updates("Synchronize"), p.note("Synchronize", nil, nil)
}

func (p *plugin) RunPodSandbox(_ context.Context, x *api.PodSandbox) error {
	return p.note("RunPodSandbox", x, nil)
}

func (p *plugin) UpdatePodSandbox(_ context.Context, x *api.PodSandbox, _, _ *api.LinuxResources) error {
	return p.note("UpdatePodSandbox", x, nil)
}

func (p *plugin) PostUpdatePodSandbox(_ context.Context, x *api.PodSandbox) error {
	return p.note("PostUpdatePodSandbox", x, nil)
}

func (p *plugin) StopPodSandbox(_ context.Context, x *api.PodSandbox) error {
	return p.note("StopPodSandbox", x, nil)
}

func (p *plugin) RemovePodSandbox(_ context.Context, x *api.PodSandbox) error {
	return p.note("RemovePodSandbox", x, nil)
}

func (p *plugin) CreateContainer(_ context.Context, x *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	a := &api.ContainerAdjustment{}
	if p.adjust != nil {
		p.adjust(a, c)
	}
	return a, p.updates("CreateContainer"), p.note("CreateContainer", x, c)
}

func (p *plugin) PostCreateContainer(_ context.Context, x *api.PodSandbox, c *api.Container) error {
	return p.note("PostCreateContainer", x, c)
}

func (p *plugin) StartContainer(_ context.Context, x *api.PodSandbox, c *api.Container) error {
	return p.note("StartContainer", x, c)
}

func (p *plugin) PostStartContainer(_ context.Context, x *api.PodSandbox, c *api.Container) error {
	return p.note("PostStartContainer", x, c)
}

func (p *plugin) UpdateContainer(_ context.Context, x *api.PodSandbox, c *api.Container, _ *api.LinuxResources) ([]*api.ContainerUpdate, error) {
	return p.updates("UpdateContainer"), p.note("UpdateContainer", x, c)
}

func (p *plugin) PostUpdateContainer(_ context.Context, x *api.PodSandbox, c *api.Container) error {
	return p.note("PostUpdateContainer", x, c)
}

func (p *plugin) StopContainer(_ context.Context, x *api.PodSandbox, c *api.Container) ([]*api.ContainerUpdate, error) {
	return p.updates("StopContainer"), p.note("StopContainer", x, c)
}

func (p *plugin) RemoveContainer(_ context.Context, x *api.PodSandbox, c *api.Container) error {
	return p.note("RemoveContainer", x, c)
}

// The whole life of a pod and a container, in order, and what a plugin can see
// of them.
func TestPluginsSeeALife(t *testing.T) {
	n := newNode(t)
	n.withPlugins()
	p := n.plug(&plugin{})
	pod := n.runPod(n.bridgePod("web"))
	_, err := n.UpdatePodSandboxResources(t.Context(), &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: pod, Resources: &cri.LinuxContainerResources{CpuShares: 77}})
	must(t, err)
	id := n.runContainer(pod, "app", "trap 'exit 7' TERM; echo > /share/ready; while :; do sleep 0.05; done")
	n.waitFile("ready")
	_, err = n.UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: &cri.LinuxContainerResources{CpuShares: 300}})
	must(t, err)
	must(t, n.stop(t.Context(), id, 10))
	n.removeContainerOf(id)
	n.removePod(pod)
	want := []string{"Synchronize ", "RunPodSandbox web", "UpdatePodSandbox web", "PostUpdatePodSandbox web",
		"CreateContainer app", "PostCreateContainer app", "StartContainer app", "PostStartContainer app", "UpdateContainer app", "PostUpdateContainer app",
		"StopContainer app", "RemoveContainer app", "StopPodSandbox web", "RemovePodSandbox web"}
	if got := p.all(); !slices.Equal(got, want) {
		t.Errorf("told\n%q, want\n%q", got, want)
	}
	run := p.pods["RunPodSandbox"]
	if len(run.GetIps()) != 1 || !slices.ContainsFunc(run.GetLinux().GetNamespaces(), func(ns *api.LinuxNamespace) bool {
		return ns.GetType() == "network" && strings.HasSuffix(ns.GetPath(), "/net")
	}) {
		t.Errorf("the pod: addresses %q, namespaces %v", run.GetIps(), run.GetLinux().GetNamespaces())
	}
	if stopped := p.pods["StopPodSandbox"]; stopped.GetLinux().GetPodResources().GetCpu().GetShares().GetValue() != 77 || len(stopped.GetLinux().GetNamespaces()) == 0 {
		t.Errorf("the stopped pod: %v", stopped.GetLinux())
	}
	c := p.box("CreateContainer")
	if !slices.Contains(c.GetEnv(), "PATH=/usr/bin") || c.GetArgs()[0] != "/bin/sh" || c.GetPid() != 0 || len(c.GetMounts()) == 0 {
		t.Errorf("the container: %v", c)
	}
	if c = p.box("PostStartContainer"); c.GetState() != api.ContainerState_CONTAINER_RUNNING || c.GetPid() == 0 || c.GetStartedAt() == 0 {
		t.Errorf("the started container: %v", c)
	}
	if c = p.box("PostUpdateContainer"); c.GetLinux().GetResources().GetCpu().GetShares().GetValue() != 300 {
		t.Errorf("the updated container: %v", c.GetLinux().GetResources())
	}
	if c = p.box("StopContainer"); c.GetState() != api.ContainerState_CONTAINER_STOPPED || c.GetExitCode() != 7 || c.GetFinishedAt() == 0 {
		t.Errorf("the stopped container: %v", c)
	}
}

// A container that ends by itself is told as stopped, once; one that never ran
// too, when it is removed.
func TestPluginsHearOfExits(t *testing.T) {
	n := newNode(t)
	n.withPlugins()
	p := n.plug(&plugin{})
	pod := n.runPod(n.hostPod("web"))
	id := n.runContainer(pod, "short", "exit 3")
	n.exited(id)
	eventually(t, "the exit is told", func() bool { return len(p.told("StopContainer")) == 1 })
	n.create(n.container(pod, "unstarted", forever))
	n.removePod(pod)
	if got := p.told("StopContainer"); !slices.Equal(got, []string{"short", "unstarted"}) {
		t.Errorf("told as stopped: %q", got)
	}
	all := p.all()
	for _, name := range []string{"short", "unstarted"} {
		if slices.Index(all, "StopContainer "+name) > slices.Index(all, "RemoveContainer "+name) {
			t.Errorf("%s: told %q", name, all)
		}
	}
	if slices.Index(all, "PostStartContainer short") > slices.Index(all, "StopContainer short") {
		t.Errorf("told %q", all)
	}
}

// What a plugin adjusts is there in the container, its status and its record.
func TestPluginsAdjust(t *testing.T) {
	n := newNode(t)
	n.withPlugins()
	moved := n.parent + "/moved-by-plugin"
	must(t, os.WriteFile(n.dir+"/share/file", []byte("of the plugin"), 0o644))
	n.plug(&plugin{adjust: func(a *api.ContainerAdjustment, c *api.Container) {
		a.AddEnv("FROM", "plugin")
		a.AddMount(&api.Mount{Destination: "/mnt/plugin", Type: "bind", Source: n.dir + "/share/file", Options: []string{"bind", "ro"}})
		a.AddRlimit("RLIMIT_CORE", 4096, 4096)
		a.AddDevice(&api.LinuxDevice{Path: "/dev/my-zero", Type: "c", Major: 1, Minor: 5})
		a.AddAnnotation("by", "plugin")
		a.SetLinuxCgroupsPath(moved)
		a.SetLinuxMemoryLimit(48 << 20)
		a.SetLinuxCPUShares(333)
	}})
	pod := n.runPod(n.hostPod("web"))
	id := n.runContainer(pod, "app", forever)
	got := n.exec(id, `echo $FROM; cat /mnt/plugin; echo; grep core /proc/self/limits | tr -s ' '; head -c 3 /dev/my-zero | wc -c`)
	c, err := n.Records.Containers.Get(id)
	must(t, err)
	cgroups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", c.Process.PID))
	must(t, err)
	got += "\n" + string(cgroups)
	for _, want := range []string{"plugin\n", "of the plugin\n", "4096 4096", "3\n", moved + "\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("the container has not %q:\n%s", want, got)
		}
	}
	if r := n.status(id).GetResources().GetLinux(); r.GetMemoryLimitInBytes() != 48<<20 || r.GetCpuShares() != 333 {
		t.Errorf("resources in status: %v", r)
	}
	n.restart(nil)
	stats, err := n.ContainerStats(t.Context(), &cri.ContainerStatsRequest{ContainerId: id})
	must(t, err)
	if stats.GetStats().GetMemory().GetWorkingSetBytes().GetValue() == 0 {
		t.Errorf("no memory is counted: %v", stats.GetStats().GetMemory())
	}
	n.removePod(pod)
	n.empty("the removal")
	for _, root := range cgroupRoots(t) {
		if _, err := os.Stat(root + moved); err == nil {
			t.Errorf("%s%s is left", root, moved)
		}
	}
}

// Adjustments that cannot be made refuse the container, and nothing is left.
func TestPluginsAdjustWrongly(t *testing.T) {
	n := newNode(t)
	n.withPlugins()
	var wrong func(*api.ContainerAdjustment)
	n.plug(&plugin{adjust: func(a *api.ContainerAdjustment, _ *api.Container) { wrong(a) }})
	pod := n.runPod(n.hostPod("web"))
	before := n.left()
	for name, tc := range map[string]struct {
		change func(*api.ContainerAdjustment)
		code   codes.Code
		words  []string
	}{
		"cgroup of the root": {func(a *api.ContainerAdjustment) { a.SetLinuxCgroupsPath("/") }, codes.FailedPrecondition, []string{"cgroups_path", "root cgroup"}},
		"cgroup outside":     {func(a *api.ContainerAdjustment) { a.SetLinuxCgroupsPath("/a/../..") }, codes.FailedPrecondition, []string{"cgroups_path"}},
		"block I/O class":    {func(a *api.ContainerAdjustment) { a.SetLinuxBlockIOClass("slow") }, codes.FailedPrecondition, []string{"slow"}},
		"CDI device":         {func(a *api.ContainerAdjustment) { a.AddCDIDevice(&api.CDIDevice{Name: "no.such/dev=ice"}) }, codes.FailedPrecondition, []string{"no.such/dev=ice"}},
		"mount source": {func(a *api.ContainerAdjustment) {
			a.AddMount(&api.Mount{Destination: "/x", Type: "bind", Source: n.dir + "/no-such", Options: []string{"bind"}})
		}, codes.FailedPrecondition, []string{"no-such"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := n.sub(t)
			wrong = tc.change
			_, err := n.CreateContainer(t.Context(), n.container(pod, "app", forever))
			n.refused("create", err, tc.code, tc.words...)
			n.same(before, "the refusal")
		})
	}
}

// A plugin refuses one event after the other: births are undone and told so,
// a refused start ends the container, stops and removals go on.
func TestPluginsRefuse(t *testing.T) {
	n := newNode(t)
	n.withPlugins()
	var no sync.Map // events
	p := n.plug(&plugin{refuse: func(event, _ string) error {
		if _, ok := no.Load(event); ok {
			return errors.New("not today")
		}
		return nil
	}})
	no.Store("RunPodSandbox", true)
	_, err := n.RunPodSandbox(t.Context(), n.bridgePod("web"))
	n.refused("run", err, codes.FailedPrecondition, "plugin 10-test", "RunPodSandbox", "not today")
	n.empty("the refused pod")
	if got := p.all()[1:]; !slices.Equal(got, []string{"RunPodSandbox web", "StopPodSandbox web", "RemovePodSandbox web"}) {
		t.Errorf("told %q", got)
	}
	no.Delete("RunPodSandbox")
	pod := n.runPod(n.bridgePod("web"))
	before := n.left()
	no.Store("CreateContainer", true)
	_, err = n.CreateContainer(t.Context(), n.container(pod, "app", forever))
	n.refused("create", err, codes.FailedPrecondition, "plugin 10-test", "CreateContainer", "not today")
	n.same(before, "the refused container")
	no.Delete("CreateContainer")

	no.Store("StartContainer", true)
	id := n.create(n.container(pod, "app", forever))
	_, err = n.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: id})
	n.refused("start", err, codes.FailedPrecondition, "StartContainer", "not today")
	if s := n.status(id); s.GetState() != cri.ContainerState_CONTAINER_EXITED || s.GetExitCode() != 128 || s.GetReason() != "StartError" {
		t.Errorf("after the refused start: %v", s)
	}
	no.Delete("StartContainer")

	id = n.runContainer(pod, "second", forever)
	no.Store("UpdateContainer", true)
	no.Store("UpdatePodSandbox", true)
	limits := n.limits(id)
	_, err = n.UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: &cri.LinuxContainerResources{CpuShares: 300}})
	n.refused("update", err, codes.FailedPrecondition, "UpdateContainer", "not today")
	if got := n.limits(id); got != limits {
		t.Errorf("limits changed from %s to %s", limits, got)
	}
	_, err = n.UpdatePodSandboxResources(t.Context(), &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: pod, Resources: &cri.LinuxContainerResources{CpuShares: 5}})
	n.refused("update of the pod", err, codes.FailedPrecondition, "UpdatePodSandbox", "not today")
	for _, event := range []string{"StopContainer", "RemoveContainer", "StopPodSandbox", "RemovePodSandbox"} {
		no.Store(event, true)
	}
	must(t, n.stop(t.Context(), id, 0))
	n.removePod(pod)
	n.empty("removal against a plugin's will")
}

// A plugin changes other containers: when one is made, updated, stopped, and
// on its own; and an update of a container before it is applied.
func TestPluginsUpdate(t *testing.T) {
	n := newNode(t)
	n.withPlugins()
	pod := n.runPod(n.hostPod("web"))
	first := n.runContainer(pod, "first", forever)
	shares := func(id string, v uint64) *api.ContainerUpdate {
		u := &api.ContainerUpdate{ContainerId: id}
		u.SetLinuxCPUShares(v)
		return u
	}
	_, err := os.Stat("/sys/fs/cgroup/cpu")
	v2 := err != nil
	want := func(id string, v int64, after string) {
		t.Helper()
		eventually(t, after, func() bool { return n.status(id).GetResources().GetLinux().GetCpuShares() == v })
		// cgroup v2 has a weight computed from the shares instead.
		if got := n.cgroupValue(id, "cpu/cpu.shares", "cpu.weight"); !v2 && got != fmt.Sprint(v) {
			t.Errorf("%s: the kernel has %s shares, want %d", after, got, v)
		}
	}
	second := ""
	p := n.plug(&plugin{update: func(event string) []*api.ContainerUpdate {
		switch event {
		case "Synchronize":
			return []*api.ContainerUpdate{shares(first, 201)}
		case "CreateContainer":
			return []*api.ContainerUpdate{shares(first, 202)}
		case "UpdateContainer":
			return []*api.ContainerUpdate{shares(first, 203), shares(second, 403)}
		case "StopContainer":
			return []*api.ContainerUpdate{shares(first, 204)}
		}
		return nil
	}})
	want(first, 201, "the synchronisation")
	second = n.runContainer(pod, "second", forever)
	want(first, 202, "the creation of another")
	_, err = n.UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: second,
		Linux: &cri.LinuxContainerResources{CpuShares: 999, MemoryLimitInBytes: 64 << 20}})
	must(t, err)
	want(first, 203, "the update of another")
	want(second, 403, "an update that the plugin changed")
	if got := n.status(second).GetResources().GetLinux().GetMemoryLimitInBytes(); got != 64<<20 {
		t.Errorf("memory limit %d", got)
	}
	must(t, n.stop(t.Context(), second, 0))
	want(first, 204, "the stop of another")
	failed, err := p.stub.UpdateContainers([]*api.ContainerUpdate{shares(first, 205), shares(second, 1), shares("no-such", 1)})
	must(t, err)
	if len(failed) != 2 || failed[0].GetContainerId() != second || failed[1].GetContainerId() != "no-such" {
		t.Errorf("failed: %v", failed)
	}
	want(first, 205, "an unsolicited update")
}

// A plugin that connects after a restart of the daemon is given what there is.
func TestPluginsAfterARestart(t *testing.T) {
	n := newNode(t)
	n.withPlugins()
	early := n.plug(&plugin{})
	pod := n.runPod(n.hostPod("web"))
	n.runContainer(pod, "runs", forever)
	n.create(n.container(pod, "made", forever))
	n.exited(n.runContainer(pod, "ended", "exit 0"))
	early.unplug()
	n.restart(nil)
	late := n.plug(&plugin{})
	want := []string{"ended CONTAINER_STOPPED false", "made CONTAINER_CREATED true", "pod web", "runs CONTAINER_RUNNING true"}
	if !slices.Equal(late.synced, want) {
		t.Errorf("given %q, want %q", late.synced, want)
	}
	n.removePod(pod)
	for _, event := range []string{"StopPodSandbox web", "RemovePodSandbox web", "RemoveContainer runs", "RemoveContainer made", "RemoveContainer ended"} {
		if !slices.Contains(late.all(), event) {
			t.Errorf("%s was not told: %q", event, late.all())
		}
	}
}

// Containers made while a plugin is given the others are not lost on it, nor
// those whose making had begun before.
func TestPluginsLoseNoContainer(t *testing.T) {
	n := newNode(t)
	n.withPlugins()
	pod := n.runPod(n.hostPod("web"))
	slow := n.tell("hang-create")
	made := make(chan error, 2)
	create := func(name string) {
		_, err := n.CreateContainer(context.Background(), n.container(pod, name, forever))
		made <- err
	}
	go create("before")
	n.waitCalls("create", 1)
	inside, release := make(chan struct{}), make(chan struct{})
	p := &plugin{refuse: func(event, _ string) error {
		if event == "Synchronize" {
			close(inside)
			<-release
		}
		return nil
	}}
	go func() {
		<-inside
		go create("meanwhile")
		slow()
		close(release)
	}()
	n.plug(p)
	must(t, <-made)
	must(t, <-made)
	eventually(t, "both containers reach the plugin", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return slices.Contains(p.synced, "before CONTAINER_CREATED false") && slices.Contains(p.events, "CreateContainer meanwhile")
	})
}

func TestWantsPlugins(t *testing.T) {
	dir := t.TempDir()
	for _, tc := range []struct {
		enable, socket string
		want           bool
	}{
		{config.NRIOn, dir + "/none/nri.sock", true}, {config.NRIOff, dir + "/nri.sock", false},
		{config.NRIAuto, dir + "/nri.sock", true}, {config.NRIAuto, dir + "/none/nri.sock", false},
	} {
		if got := WantsPlugins(config.NRI{Enable: tc.enable, SocketPath: tc.socket}); got != tc.want {
			t.Errorf("%s with %s: %v", tc.enable, filepath.Base(filepath.Dir(tc.socket)), got)
		}
	}
}
