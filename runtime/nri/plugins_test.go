package nri

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/containerd/ttrpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Off, every hook does nothing and asks nothing.
func TestOff(t *testing.T) {
	var p *Plugins
	ctx := t.Context()
	for what, err := range map[string]error{"RunPodSandbox": p.RunPodSandbox(ctx, "x"), "UpdatePodSandbox": p.UpdatePodSandbox(ctx, "x", nil, nil),
		"StartContainer": p.StartContainer(ctx, "x")} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if a, err := p.CreateContainer(ctx, "x", nil); err != nil || a.Any {
		t.Errorf("CreateContainer: %v, %v", a, err)
	}
	r := &cri.LinuxContainerResources{CpuShares: 5}
	if u, err := p.UpdateContainer(ctx, "x", r); err != nil || u.ID != "x" || u.Resources != r {
		t.Errorf("UpdateContainer: %v, %v", u, err)
	}
	p.PostUpdatePodSandbox(ctx, "x")
	p.StopPodSandbox(ctx, "x")
	p.RemovePodSandbox(ctx, "x")
	p.PostCreateContainer(ctx, "x")
	p.PostStartContainer(ctx, "x")
	p.PostUpdateContainer(ctx, "x")
	p.StopContainer(ctx, "x")
	p.RemoveContainer(ctx, "x")
	p.Settled("x")
	p.Forget("x")
	p.Stop()
}

// A pod's and a container's whole life, in order; stops and removals are told
// once, and nothing is remembered afterwards.
func TestEveryEvent(t *testing.T) {
	w := open(t)
	p := w.connect("10", &plugin{}, true)
	ctx := t.Context()
	w.node.addPod("pod", false)
	must(t, w.RunPodSandbox(ctx, "pod"))
	w.node.addPod("pod", true)
	w.Settled("pod")
	must(t, w.UpdatePodSandbox(ctx, "pod", &cri.LinuxContainerResources{MemoryLimitInBytes: 1}, &cri.LinuxContainerResources{MemoryLimitInBytes: 2}))
	w.PostUpdatePodSandbox(ctx, "pod")
	w.node.addContainer("box", "pod", false)
	_, err := w.CreateContainer(ctx, "box", emptySpec())
	must(t, err)
	w.node.addContainer("box", "pod", true)
	w.Settled("box")
	w.PostCreateContainer(ctx, "box")
	must(t, w.StartContainer(ctx, "box"))
	w.PostStartContainer(ctx, "box")
	_, err = w.UpdateContainer(ctx, "box", &cri.LinuxContainerResources{MemoryLimitInBytes: 3})
	must(t, err)
	w.PostUpdateContainer(ctx, "box")
	for range 2 {
		w.StopContainer(ctx, "box")
	}
	for range 2 {
		w.RemoveContainer(ctx, "box")
	}
	w.node.remove("box")
	w.Forget("box")
	for range 2 {
		w.StopPodSandbox(ctx, "pod")
	}
	for range 2 {
		w.RemovePodSandbox(ctx, "pod")
	}
	w.node.remove("pod")
	w.Forget("pod")
	want := []string{"Synchronize ", "RunPodSandbox pod", "UpdatePodSandbox pod 1 2", "PostUpdatePodSandbox pod", "CreateContainer box", "PostCreateContainer box",
		"StartContainer box", "PostStartContainer box", "UpdateContainer box 3", "PostUpdateContainer box", "StopContainer box", "RemoveContainer box",
		"StopPodSandbox pod", "RemovePodSandbox pod"}
	if got := p.told(); !slices.Equal(got, want) {
		t.Errorf("told\n%q, want\n%q", got, want)
	}
	if len(w.marks) != 0 {
		t.Errorf("remembered: %v", w.marks)
	}
}

// An object that no plugin was told of, because its birth failed before, is not
// told of when it goes either.
func TestUnbornIsNotToldOf(t *testing.T) {
	w := open(t)
	p := w.connect("10", &plugin{}, true)
	w.node.addPod("pod", false)
	w.node.addContainer("box", "pod", false)
	w.StopContainer(t.Context(), "box")
	w.RemoveContainer(t.Context(), "box")
	w.StopPodSandbox(t.Context(), "pod")
	w.RemovePodSandbox(t.Context(), "pod")
	w.RemoveContainer(t.Context(), "never-was")
	if got := p.told(); len(got) != 1 {
		t.Errorf("told %q, want the synchronisation alone", got)
	}
}

// A refusal names plugin and event and is ErrRefused; stop and removal of what
// was refused are told, and their failures are but logged.
func TestRefusals(t *testing.T) {
	w := open(t)
	p := w.connect("10", &plugin{on: func(event, _ string) error {
		if event == "Synchronize" {
			return nil
		}
		return errors.New("no " + event)
	}}, true)
	ctx := t.Context()
	w.node.addPod("pod", false)
	w.node.addContainer("box", "pod", false)
	_, created := w.CreateContainer(ctx, "box", emptySpec())
	_, updated := w.UpdateContainer(ctx, "box", &cri.LinuxContainerResources{})
	for event, err := range map[string]error{"RunPodSandbox": w.RunPodSandbox(ctx, "pod"), "UpdatePodSandbox": w.UpdatePodSandbox(ctx, "pod", nil, nil),
		"CreateContainer": created, "UpdateContainer": updated, "StartContainer": w.StartContainer(ctx, "box")} {
		if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "plugin 10-test, "+event) || !strings.Contains(err.Error(), "no "+event) {
			t.Errorf("%s: %v", event, err)
		}
	}
	w.StopContainer(ctx, "box")
	w.RemoveContainer(ctx, "box")
	w.StopPodSandbox(ctx, "pod")
	w.RemovePodSandbox(ctx, "pod")
	for _, event := range []string{"StopContainer", "RemoveContainer", "StopPodSandbox", "RemovePodSandbox"} {
		if !w.logged("plugin 10-test, " + event) {
			t.Errorf("no log line about %s", event)
		}
		if !slices.ContainsFunc(p.told(), func(e string) bool { return strings.HasPrefix(e, event+" ") }) {
			t.Errorf("%s was not told", event)
		}
	}
}

// What is being born while a plugin connects is in what it is given, what is
// leaving is not.
func TestSynchronizationIsComplete(t *testing.T) {
	w := open(t)
	ctx := t.Context()
	w.node.addPod("ready", true)
	w.node.addPod("born", false)
	must(t, w.RunPodSandbox(ctx, "born"))
	w.node.addPod("not-yet", false)
	w.node.addPod("leaving", true)
	w.RemovePodSandbox(ctx, "leaving")
	w.node.addContainer("made", "ready", true)
	w.node.addContainer("in-birth", "ready", false)
	if _, err := w.CreateContainer(ctx, "in-birth", emptySpec()); err != nil {
		t.Fatal(err)
	}
	w.node.addContainer("later", "ready", false)
	w.node.addContainer("going", "ready", true)
	w.RemoveContainer(ctx, "going")
	p := w.connect("10", &plugin{}, true)
	if want := []string{"born", "in-birth", "made", "ready"}; !slices.Equal(p.synced, want) {
		t.Errorf("given %q, want %q", p.synced, want)
	}
}

// A hook waits for a synchronisation in progress and then reaches the plugin.
func TestHookDuringSynchronization(t *testing.T) {
	w := open(t)
	w.node.addPod("pod", true)
	w.node.addContainer("box", "pod", false)
	inside, release := make(chan struct{}), make(chan struct{})
	p := w.connect("10", &plugin{on: func(event, _ string) error {
		if event == "Synchronize" {
			close(inside)
			<-release
		}
		return nil
	}}, false)
	<-inside
	done := make(chan error)
	go func() { _, err := w.CreateContainer(t.Context(), "box", emptySpec()); done <- err }()
	select {
	case err := <-done:
		t.Errorf("the hook did not wait: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(release)
	must(t, <-done)
	if got := p.told(); !slices.Equal(got, []string{"Synchronize ", "CreateContainer box"}) {
		t.Errorf("told %q", got)
	}
}

func short(o *Options) { o.RequestTimeout = 2 * time.Second }

// A plugin that does not answer is dropped at its timeout, and the pod goes on.
func TestPluginHangs(t *testing.T) {
	w := open(t, short)
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	p := w.connect("10", &plugin{on: func(event, _ string) error {
		if event == "RunPodSandbox" {
			<-release
		}
		return nil
	}}, true)
	w.node.addPod("pod", false)
	must(t, w.RunPodSandbox(t.Context(), "pod"))
	if !w.none() {
		t.Error("the plugin still counts")
	}
	w.StopPodSandbox(t.Context(), "pod")
	if got := p.told(); len(got) != 2 {
		t.Errorf("told %q after it was dropped", got)
	}
}

// One that hangs when it is given what there is, or that connects and says
// nothing, does not keep hooks from going on.
func TestPluginHangsFromTheStart(t *testing.T) {
	w := open(t, short)
	mute, err := net.Dial("unix", w.Socket)
	must(t, err)
	w.node.addPod("pod", false)
	must(t, w.RunPodSandbox(t.Context(), "pod"))
	must(t, mute.Close())
	inside, release := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(release) })
	p := w.connect("10", &plugin{on: func(string, string) error {
		close(inside)
		<-release
		return nil
	}}, false)
	<-inside
	w.StopPodSandbox(t.Context(), "pod") // returns when the plugin is dropped
	if got := p.told(); !w.none() || len(got) != 1 {
		t.Errorf("told %q; no plugin: %v", got, w.none())
	}
}

// Nor does one that does not even read hold up a hook: the request is larger than what the
// kernel buffers.
func TestPluginStopsReading(t *testing.T) {
	w := open(t, short)
	stop, end := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(end) })
	w.connect("10", &plugin{}, true, stub.WithDialer(func(path string) (net.Conn, error) {
		c, err := net.Dial("unix", path)
		return deaf{c, stop, end}, err
	}))
	w.node.addPod("pod", true)
	w.node.addContainer("box", "pod", false)
	close(stop)
	sp := emptySpec()
	sp.Process.Env = []string{"BIG=" + strings.Repeat("x", 3<<20)}
	for range 2 { // one read was waiting already and takes a piece
		_, err := w.CreateContainer(t.Context(), "box", sp)
		must(t, err)
	}
	if !w.none() {
		t.Error("the plugin still counts")
	}
}

// A plugin that goes away in the middle of a call does not fail it.
func TestPluginDies(t *testing.T) {
	w := open(t)
	gone := make(chan struct{})
	var conn net.Conn
	w.connect("10", &plugin{on: func(event, _ string) error {
		if event == "RunPodSandbox" {
			_ = conn.Close()
			<-gone
		}
		return nil
	}}, true, stub.WithDialer(func(path string) (net.Conn, error) {
		var err error
		conn, err = net.Dial("unix", path)
		return conn, err
	}))
	w.node.addPod("pod", false)
	must(t, w.RunPodSandbox(t.Context(), "pod"))
	close(gone)
	if !w.none() {
		t.Error("the plugin still counts")
	}
}

// Updates that plugins ask for reach the node in the order in which they were
// asked for, those of a synchronisation too, however long the first takes.
func TestUpdatesKeepTheirOrder(t *testing.T) {
	w := open(t)
	w.node.addPod("pod", true)
	w.node.addContainer("old", "pod", true)
	w.node.addContainer("new", "pod", false)
	w.node.hold = make(chan struct{})
	p := w.connect("10", &plugin{update: func(event string) []*api.ContainerUpdate {
		return []*api.ContainerUpdate{memoryOf("old", int64(map[string]int{"Synchronize": 1, "CreateContainer": 2, "UpdateContainer": 3, "StopContainer": 4}[event]))}
	}}, true)
	done := make(chan error)
	go func() { _, err := w.CreateContainer(t.Context(), "new", emptySpec()); done <- err }()
	eventually(t, "the plugin is asked", func() bool { return len(p.told()) == 2 })
	close(w.node.hold)
	must(t, <-done)
	u, err := w.UpdateContainer(t.Context(), "new", &cri.LinuxContainerResources{MemoryLimitInBytes: 7})
	if err != nil || u.Resources.GetMemoryLimitInBytes() != 7 {
		t.Errorf("update: %v %v", u, err)
	}
	w.StopContainer(t.Context(), "old")
	eventually(t, "all are applied", func() bool { return len(w.node.updated()) == 4 })
	if got, want := w.node.updated(), []string{"old 1", "old 2", "old 3", "old 4"}; !slices.Equal(got, want) {
		t.Errorf("applied %q, want %q", got, want)
	}
}

// A plugin's change of the update itself comes back to be applied in its place.
func TestUpdateIsChanged(t *testing.T) {
	w := open(t)
	w.node.addPod("pod", true)
	w.node.addContainer("box", "pod", true)
	w.connect("10", &plugin{update: func(string) []*api.ContainerUpdate {
		u := memoryOf("box", 9<<20)
		u.SetLinuxMemoryReservation(8 << 20)
		return []*api.ContainerUpdate{u}
	}}, true)
	eventually(t, "the synchronisation's is applied", func() bool { return len(w.node.updated()) == 1 })
	u, err := w.UpdateContainer(t.Context(), "box", &cri.LinuxContainerResources{MemoryLimitInBytes: 7 << 20, CpuShares: 512})
	must(t, err)
	if u.Resources.GetMemoryLimitInBytes() != 9<<20 || u.Resources.GetCpuShares() != 512 {
		t.Errorf("to be applied: %v", u.Resources)
	}
	sp := emptySpec()
	sp.Linux.Resources = newEditor(sp).spec.Linux.Resources
	u.AddMore(sp.Linux.Resources)
	if got := *sp.Linux.Resources.Memory.Reservation; got != 8<<20 {
		t.Errorf("reservation %d", got)
	}
	if len(w.node.updated()) != 1 {
		t.Errorf("the node was asked: %q", w.node.updated())
	}
}

// Unsolicited updates: those that fail are named to the plugin, unless it does
// not care.
func TestUnsolicitedUpdates(t *testing.T) {
	w := open(t)
	p := w.connect("10", &plugin{}, true)
	w.node.fail = errors.New("no such limit")
	careless := memoryOf("b", 2)
	careless.SetIgnoreFailure()
	failed, err := p.stub.UpdateContainers([]*api.ContainerUpdate{memoryOf("a", 1), careless})
	must(t, err)
	if len(failed) != 1 || failed[0].GetContainerId() != "a" {
		t.Errorf("failed: %v", failed)
	}
	if !w.logged("update of container a") {
		t.Error("no log line about the failure")
	}
	w.node.fail = nil
	if failed, err = p.stub.UpdateContainers([]*api.ContainerUpdate{memoryOf("a", 3)}); err != nil || len(failed) != 0 {
		t.Errorf("failed %v, error %v", failed, err)
	}
}

// Evictions, which the stub has no words for, are found in answers and requests.
func TestEvictions(t *testing.T) {
	w := open(t)
	w.node.addPod("pod", true)
	w.node.addContainer("box", "pod", true)
	evict := func(why string) []*api.ContainerEviction {
		return []*api.ContainerEviction{{ContainerId: "victim", Reason: why}}
	}
	answer := func(ctx context.Context, u ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, m ttrpc.Method) (any, error) {
		reply, err := m(ctx, u)
		switch r := reply.(type) {
		case *api.CreateContainerResponse:
			r.Evict = evict("create")
		case *api.UpdateContainerResponse:
			r.Evict = evict("update")
		}
		return reply, err
	}
	p := w.connect("10", &plugin{}, true, stub.WithTTRPCOptions([]ttrpc.ClientOpts{evicting(evict("own"))},
		[]ttrpc.ServerOpt{ttrpc.WithUnaryServerInterceptor(answer)}))
	_, err := w.CreateContainer(t.Context(), "box", emptySpec())
	must(t, err)
	_, err = w.UpdateContainer(t.Context(), "box", &cri.LinuxContainerResources{})
	must(t, err)
	_, err = p.stub.UpdateContainers(nil)
	must(t, err)
	if want := []string{"victim: create", "victim: update", "victim: own"}; !slices.Equal(w.node.evicted, want) {
		t.Errorf("evicted %q, want %q", w.node.evicted, want)
	}
}

// Plugins of the directory are launched with their configuration, synchronised,
// called, and end with the adaptation.
func TestLaunchedPlugin(t *testing.T) {
	var file string
	w := open(t, func(o *Options) {
		dir := o.PluginDir[:strings.LastIndexByte(o.PluginDir, '/')]
		file = dir + "/told"
		install(t, dir, "10-launched", file)
		o.Node.(*fakeNode).addPod("old", true)
	})
	if b, err := os.ReadFile(file); err != nil || string(b) != "1 pods, 0 containers\n" {
		t.Fatalf("given %q, %v", b, err)
	}
	w.node.addPod("pod", false)
	must(t, w.RunPodSandbox(t.Context(), "pod"))
	if b, _ := os.ReadFile(file); string(b) != "run pod" {
		t.Errorf("told %q", b)
	}
}

func TestStartRefuses(t *testing.T) {
	w := open(t)
	start := func(o Options) error {
		p, err := New(o)
		must(t, err)
		defer p.Stop()
		return p.Start()
	}
	o := w.Options
	if err := start(o); !errors.Is(err, ErrSocketInUse) || !strings.Contains(err.Error(), o.Socket) {
		t.Errorf("a socket in use: %v", err)
	}
	install(t, w.dir, "misnamed", "")
	o.Socket += "2"
	if err := start(o); err == nil || !strings.Contains(err.Error(), "misnamed") {
		t.Errorf("a misnamed plugin: %v", err)
	}
	// What an earlier daemon left of its socket is no other process.
	w.Plugins.Stop()
	must(t, os.WriteFile(w.Socket, nil, 0o600))
	o = w.Options
	o.PluginDir = w.dir + "/none"
	must(t, start(o))
}

// A hook that comes while the plugins of the directory are started waits for that
// and reaches them.
func TestHookDuringStart(t *testing.T) {
	node := newFake()
	node.addPod("pod", false)
	var p *Plugins
	done := make(chan error, 1)
	node.listed = func() { go func() { done <- p.RunPodSandbox(context.Background(), "pod") }() }
	dir := t.TempDir()
	file := dir + "/told"
	install(t, dir, "10-launched", file)
	var err error
	p, err = New(Options{Node: node, Version: "1", Socket: dir + "/nri.sock", PluginDir: dir + "/plugins", ConfigDir: dir + "/conf",
		RegistrationTimeout: 5 * time.Second, RequestTimeout: 5 * time.Second, Log: func(Level, string) {}})
	must(t, err)
	t.Cleanup(p.Stop)
	must(t, p.Start())
	must(t, <-done)
	if b, err := os.ReadFile(file); err != nil || string(b) != "run pod" {
		t.Errorf("told %q, %v", b, err)
	}
}
