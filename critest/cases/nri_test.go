package cases

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// launchedByDaemon tells whether this process is a plugin that a daemon started
// from its directory: the tests' own binary, see TestNRIPluginFromDirectory.
func launchedByDaemon() bool { return os.Getenv(api.PluginNameEnvVar) != "" }

// runLaunched is that plugin. It writes what it is told into the file that its
// configuration names, and ends with its connection.
func runLaunched() int {
	p := &launchedPlugin{}
	s, err := stub.New(p)
	if err == nil {
		err = s.Run(context.Background())
	}
	if err != nil {
		return 1
	}
	return 0
}

type launchedPlugin struct{ file string }

func (p *launchedPlugin) Configure(_ context.Context, config, _, _ string) (api.EventMask, error) {
	p.file = strings.TrimSpace(config)
	return 0, nil
}

func (p *launchedPlugin) Synchronize(_ context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	return nil, os.WriteFile(p.file, []byte(fmt.Sprintf("%d pods, %d containers", len(pods), len(containers))), 0o600)
}

func (p *launchedPlugin) CreateContainer(context.Context, *api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	a := &api.ContainerAdjustment{}
	a.AddEnv("LAUNCHED", "yes")
	return a, nil, nil
}

// plugin is an NRI plugin in the test's process, with one method for each event.
type plugin struct {
	e      *env
	conn   net.Conn
	cancel context.CancelFunc
	ended  chan error
	stub   stub.Stub

	on      func(event string) error // called at each event; set before it connects
	adjust  func(*api.ContainerAdjustment)
	evicts  []*api.ContainerEviction // sent with a request of its own
	mu      sync.Mutex
	told    []string // events with the name of their object, guarded by mu
	objects []string // what it was synchronised with, guarded by mu
}

// plug connects a plugin and waits until it is synchronised.
func (e *env) plug(p *plugin) *plugin {
	e.Helper()
	p.e, p.ended = e, make(chan error, 1)
	var err error
	p.stub, err = stub.New(p, stub.WithPluginName("case"), stub.WithPluginIdx("10"), stub.WithSocketPath(e.NRISocket()), stub.WithOnClose(func() {}),
		stub.WithDialer(func(path string) (net.Conn, error) {
			c, err := net.Dial("unix", path)
			p.conn = c
			return c, err
		}),
		stub.WithTTRPCOptions([]ttrpc.ClientOpts{ttrpc.WithUnaryClientInterceptor(p.addEvictions)}, nil))
	if err != nil {
		e.Fatal(err)
	}
	var ctx context.Context
	ctx, p.cancel = context.WithCancel(context.Background())
	go func() { p.ended <- p.stub.Run(ctx) }()
	e.Cleanup(p.unplug)
	e.eventually("the plugin is synchronised", func() bool { return p.heard("Synchronize ") })
	return p
}

// unplug ends the plugin. Idempotent.
func (p *plugin) unplug() {
	p.cancel()
	select {
	case err := <-p.ended:
		p.ended <- err
	case <-time.After(20 * time.Second):
		p.e.Error("the plugin does not end")
	}
}

// addEvictions puts evictions into UpdateContainers, for which the stub has no
// parameter.
func (p *plugin) addEvictions(ctx context.Context, req *ttrpc.Request, resp *ttrpc.Response, info *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
	if strings.HasSuffix(info.FullMethod, "/UpdateContainers") && len(p.evicts) > 0 {
		var err error
		if req.Payload, err = proto.Marshal(&api.UpdateContainersRequest{Evict: p.evicts}); err != nil {
			return err
		}
	}
	return invoke(ctx, req, resp)
}

func (p *plugin) note(event, name string) error {
	p.mu.Lock()
	p.told = append(p.told, event+" "+name)
	p.mu.Unlock()
	if p.on != nil {
		return p.on(event)
	}
	return nil
}

func (p *plugin) heard(event string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Contains(p.told, event)
}

func (p *plugin) Synchronize(_ context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	p.mu.Lock()
	for _, x := range pods {
		p.objects = append(p.objects, x.GetName())
	}
	for _, x := range containers {
		p.objects = append(p.objects, x.GetName()+" "+x.GetState().String())
	}
	slices.Sort(p.objects)
	p.mu.Unlock()
	return nil, p.note("Synchronize", "")
}

func (p *plugin) RunPodSandbox(_ context.Context, x *api.PodSandbox) error {
	return p.note("RunPodSandbox", x.GetName())
}

func (p *plugin) StopPodSandbox(_ context.Context, x *api.PodSandbox) error {
	return p.note("StopPodSandbox", x.GetName())
}

func (p *plugin) RemovePodSandbox(_ context.Context, x *api.PodSandbox) error {
	return p.note("RemovePodSandbox", x.GetName())
}

func (p *plugin) CreateContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	a := &api.ContainerAdjustment{}
	if p.adjust != nil {
		p.adjust(a)
	}
	return a, nil, p.note("CreateContainer", x.GetName())
}

func (p *plugin) PostCreateContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) error {
	return p.note("PostCreateContainer", x.GetName())
}

func (p *plugin) StartContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) error {
	return p.note("StartContainer", x.GetName())
}

func (p *plugin) PostStartContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) error {
	return p.note("PostStartContainer", x.GetName())
}

func (p *plugin) UpdateContainer(_ context.Context, _ *api.PodSandbox, x *api.Container, _ *api.LinuxResources) ([]*api.ContainerUpdate, error) {
	return nil, p.note("UpdateContainer", x.GetName())
}

func (p *plugin) PostUpdateContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) error {
	return p.note("PostUpdateContainer", x.GetName())
}

func (p *plugin) StopContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) ([]*api.ContainerUpdate, error) {
	return nil, p.note("StopContainer", x.GetName())
}

func (p *plugin) RemoveContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) error {
	return p.note("RemoveContainer", x.GetName())
}

// nriEvents are all that a pod's life has.
var nriEvents = []string{"RunPodSandbox", "CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer", "UpdateContainer",
	"PostUpdateContainer", "StopContainer", "RemoveContainer", "StopPodSandbox", "RemovePodSandbox"}

// wholeLife takes a pod and a container from birth to removal.
func (e *env) wholeLife() {
	e.Helper()
	config := e.sandbox()
	pod := e.run(config)
	id := e.startContainer(pod, command("main", "sleep 100"), config)
	if _, err := e.rt.UpdateContainerResources(e.ctx, &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: &cri.LinuxContainerResources{CpuShares: 300}}); err != nil {
		e.Errorf("update: %v", err)
	}
	if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id}); err != nil {
		e.Errorf("stop: %v", err)
	}
	if _, err := e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
		e.Errorf("remove: %v", err)
	}
	e.removePod(pod)
}

// A plugin that hangs in any event, or goes away in the middle of it, costs a
// pod its timeout once, and nothing else.
func TestNRIPluginHangsOrDies(t *testing.T) {
	e := start(t, node.Options{Settings: map[string]string{"nri": `plugin_request_timeout = "1500ms"`}})
	e.pull(images.Busybox)
	for _, event := range nriEvents {
		for how, fail := range map[string]func(*plugin, <-chan struct{}){
			"hangs": func(_ *plugin, end <-chan struct{}) { <-end },
			"dies":  func(p *plugin, end <-chan struct{}) { _ = p.conn.Close(); <-end },
		} {
			t.Run(event+" "+how, func(t *testing.T) {
				e := e.sub(t)
				end := make(chan struct{})
				t.Cleanup(func() { close(end) })
				p := &plugin{}
				p.on = func(at string) error {
					if at == event {
						fail(p, end)
					}
					return nil
				}
				e.plug(p)
				e.wholeLife()
				e.empty("a pod's life beside a plugin that " + how)
				p.mu.Lock()
				last := p.told[len(p.told)-1]
				p.mu.Unlock()
				if !strings.HasPrefix(last, event+" ") {
					t.Errorf("the last event it was told is %s", last)
				}
			})
		}
	}
}

// A plugin's adjustment is in the container, its update reaches the kernel, its
// refusal refuses, and a container that it evicts is stopped.
func TestNRIAdjustUpdateRefuseEvict(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	var no atomic.Bool
	p := &plugin{adjust: func(a *api.ContainerAdjustment) { a.AddEnv("ADJUSTED", "yes") }}
	p.on = func(event string) error {
		if no.Load() && event == "CreateContainer" {
			return errors.New("the cache is full")
		}
		return nil
	}
	e.plug(p)
	config := e.sandbox()
	pod := e.run(config)
	id := e.startContainer(pod, command("main", "trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done"), config)
	if got := e.exec(id, "echo $ADJUSTED"); got != "yes\n" {
		t.Errorf("in the container: %q", got)
	}
	u := &api.ContainerUpdate{ContainerId: id}
	u.SetLinuxMemoryLimit(77 << 20)
	if failed, err := p.stub.UpdateContainers([]*api.ContainerUpdate{u}); err != nil || len(failed) != 0 {
		t.Errorf("update: failed %v, error %v", failed, err)
	}
	if got := e.status(id).GetResources().GetLinux().GetMemoryLimitInBytes(); got != 77<<20 {
		t.Errorf("memory limit in status: %d", got)
	}
	if got := strings.TrimSpace(e.exec(id, "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null; true")); got != fmt.Sprint(77<<20) {
		t.Errorf("memory limit in the container: %s", got)
	}
	no.Store(true)
	_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: command("second", "true"), SandboxConfig: config})
	e.refused("a container that the plugin refuses", err, codes.FailedPrecondition, "10-case", "the cache is full")
	e.said(id, "ready\n")
	p.evicts = []*api.ContainerEviction{{ContainerId: id, Reason: "noisy"}}
	if _, err := p.stub.UpdateContainers(nil); err != nil {
		t.Errorf("evict: %v", err)
	}
	if s := e.exited(id); s.GetExitCode() != 5 {
		t.Errorf("the evicted container: exit code %d, want 5: it gets its stop signal", s.GetExitCode())
	}
}

// A plugin that comes late, or again after the daemon was killed, is given all
// there is, and told what comes.
func TestNRILatePluginAndRestart(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	e.startContainer(pod, command("runs", "sleep 1000"), config)
	e.create(pod, command("made", "sleep 1000"), config)
	e.exited(e.startContainer(pod, command("ended", "true"), config))
	want := []string{"ended CONTAINER_STOPPED", "made CONTAINER_CREATED", config.GetMetadata().GetName(), "runs CONTAINER_RUNNING"}
	slices.Sort(want)
	check := func(p *plugin, when string) {
		t.Helper()
		if !slices.Equal(p.objects, want) {
			t.Errorf("%s: given %q, want %q", when, p.objects, want)
		}
	}
	late := e.plug(&plugin{})
	check(late, "late")
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	late.unplug()
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	again := e.plug(&plugin{})
	check(again, "after a restart")
	e.startContainer(pod, command("new", "sleep 1000"), config)
	e.removePod(pod)
	for _, event := range []string{"CreateContainer new", "PostStartContainer new", "StopContainer runs", "RemoveContainer made", "RemoveContainer ended",
		"StopPodSandbox " + config.GetMetadata().GetName(), "RemovePodSandbox " + config.GetMetadata().GetName()} {
		if !again.heard(event) {
			t.Errorf("%s was not told: %q", event, again.told)
		}
	}
}

// The daemon is killed while a plugin ponders: what was being made is gone with
// the next daemon, and can be made then.
func TestNRIDaemonKilledWhilePluginIsAsked(t *testing.T) {
	e := start(t, node.Options{Settings: map[string]string{"nri": `plugin_request_timeout = "1m"`}})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	for _, event := range []string{"RunPodSandbox", "CreateContainer"} {
		asked, end := make(chan struct{}), make(chan struct{})
		p := e.plug(&plugin{on: func(at string) error {
			if at == event {
				close(asked)
				<-end
			}
			return nil
		}})
		failed := make(chan error, 1)
		second := e.sandbox()
		go func() {
			var err error
			if event == "RunPodSandbox" {
				_, err = e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: second})
			} else {
				_, err = e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: command("main", "sleep 1000"), SandboxConfig: config})
			}
			failed <- err
		}()
		<-asked
		if err := e.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := <-failed; err == nil {
			t.Errorf("%s: the call succeeded", event)
		}
		close(end)
		p.unplug()
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
		pods, err := e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{})
		if err != nil || len(pods.GetItems()) != 1 {
			t.Errorf("%s: pods %v, error %v; want one", event, pods.GetItems(), err)
		}
		list, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{})
		if err != nil || len(list.GetContainers()) != 0 {
			t.Errorf("%s: containers %v, error %v; want none", event, list.GetContainers(), err)
		}
		e.removePod(e.run(second))
	}
	e.startContainer(pod, command("main", "sleep 1000"), config)
}

// A plugin in the directory is started with its configuration, is synchronised
// before the daemon serves, and ends with the daemon, however that ends.
func TestNRIPluginFromDirectory(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	e.startContainer(pod, command("old", "sleep 1000"), config)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, told := filepath.Dir(e.NRISocket()), filepath.Join(e.Dir, "told")
	for _, sub := range []string{"plugins", "conf.d"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	binary := filepath.Join(dir, "plugins", "10-launched")
	if err := errors.Join(os.Symlink(self, binary), os.WriteFile(filepath.Join(dir, "conf.d", "launched.conf"), []byte(told), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, end := range []func() error{e.Terminate, e.Kill} {
		if err := end(); err != nil {
			t.Fatal(err)
		}
		e.eventually("no plugin runs without a daemon", func() bool { return running(binary) == 0 })
		_ = os.Remove(told)
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(told); err != nil || string(b) != "1 pods, 1 containers" {
			t.Errorf("the plugin was given %q (%v)", b, err)
		}
	}
	if got := running(binary); got != 1 {
		t.Errorf("%d plugins run, want 1", got)
	}
	if got := e.output(pod, command("new", "echo $LAUNCHED"), config); got != "yes\n" {
		t.Errorf("adjusted to %q", got)
	}
}

// running counts the processes that were started as a binary.
func running(binary string) (count int) {
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range lines {
		if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), binary+"\x00") {
			count++
		}
	}
	return count
}

// A socket that another runtime listens on is not taken over, and a plugin's
// executable without an index is named.
func TestNRIDaemonRefusesToStart(t *testing.T) {
	e := start(t, node.Options{})
	config := filepath.Join(e.Dir, "config.toml")
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Terminate(); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", e.NRISocket())
	if err != nil {
		t.Fatal(err)
	}
	out, code := e.berth("serve", "--config", config)
	if code == 0 || !strings.Contains(out, e.NRISocket()) || !strings.Contains(out, "nri.enable") {
		t.Errorf("with a foreign socket: exit code %d, %q", code, out)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	plugins := filepath.Join(filepath.Dir(e.NRISocket()), "plugins")
	if err := errors.Join(os.MkdirAll(plugins, 0o755), os.WriteFile(filepath.Join(plugins, "misnamed"), nil, 0o755)); err != nil {
		t.Fatal(err)
	}
	if out, code = e.berth("serve", "--config", config); code == 0 || !strings.Contains(out, "misnamed") {
		t.Errorf("with a misnamed plugin: exit code %d, %q", code, out)
	}
	// Switched off, neither matters.
	off := strings.Replace(string(text), `enable = "on"`, `enable = "off"`, 1)
	if err := os.WriteFile(config, []byte(off), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(e.NRISocket()); err == nil {
		t.Error("switched off, there is a socket")
	}
}
