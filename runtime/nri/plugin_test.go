package nri

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
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	"github.com/containerd/nri/pkg/stub"
	"github.com/containerd/ttrpc"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestMain is also the program of a plugin that the adaptation launches.
func TestMain(m *testing.M) {
	if os.Getenv(api.PluginNameEnvVar) != "" {
		runLaunched()
		return
	}
	os.Exit(m.Run())
}

// runLaunched is a plugin that writes what it is given into the file that its
// configuration names.
func runLaunched() {
	l := &launched{}
	s, err := stub.New(l)
	if err == nil {
		err = s.Run(context.Background())
	}
	if l.file != "" {
		_ = os.WriteFile(l.file+".end", []byte(fmt.Sprint(err)), 0o600)
	}
}

type launched struct{ file string }

func (l *launched) Configure(_ context.Context, config, _, _ string) (api.EventMask, error) {
	l.file = strings.TrimSpace(config)
	return 0, nil
}

func (l *launched) Synchronize(_ context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	return nil, os.WriteFile(l.file, []byte(fmt.Sprintf("%d pods, %d containers\n", len(pods), len(containers))), 0o600)
}

func (l *launched) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	return os.WriteFile(l.file, []byte("run "+pod.GetId()), 0o600)
}

// fakeNode is a Node of maps.
type fakeNode struct {
	mu         sync.Mutex
	pods       map[string]Pod
	containers map[string]Container
	updates    []string // "<container> <memory limit>", in the order of their arrival
	evicted    []string
	hold       chan struct{} // when not nil, an update waits for it
	fail       error         // of updates
	listed     func()        // when not nil, called by List
}

func newFake() *fakeNode {
	return &fakeNode{pods: map[string]Pod{}, containers: map[string]Container{}}
}

func (f *fakeNode) addPod(id string, ready bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pods[id] = Pod{ID: id, Ready: ready, Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: id + "-name", Namespace: "ns", Uid: "uid"}}}
}

func (f *fakeNode) addContainer(id, pod string, made bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.containers[id] = Container{ID: id, PodID: pod, Made: made, Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: id + "-name"}}}
}

func (f *fakeNode) remove(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.pods, id)
	delete(f.containers, id)
}

var errGone = errors.New("gone")

func (f *fakeNode) Pod(id string) (Pod, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p, ok := f.pods[id]; ok {
		return p, nil
	}
	return Pod{}, errGone
}

func (f *fakeNode) Container(id string) (Container, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c, ok := f.containers[id]; ok {
		return c, nil
	}
	return Container{}, errGone
}

func (f *fakeNode) List() (pods, containers []string) {
	if f.listed != nil {
		f.listed()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, p := range f.pods {
		if p.Ready {
			pods = append(pods, id)
		}
	}
	for id, c := range f.containers {
		if c.Made {
			containers = append(containers, id)
		}
	}
	return pods, containers
}

func (f *fakeNode) UpdateContainer(_ context.Context, u Update) error {
	if f.hold != nil {
		<-f.hold
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.updates = append(f.updates, fmt.Sprintf("%s %d", u.ID, u.Resources.GetMemoryLimitInBytes()))
	return f.fail
}

func (f *fakeNode) Evict(id, reason string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.evicted = append(f.evicted, id+": "+reason)
}

func (f *fakeNode) updated() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.updates)
}

// world is a Node with NRI switched on.
type world struct {
	*testing.T
	*Plugins
	node *fakeNode
	dir  string
	mu   sync.Mutex
	log  []string // guarded by mu
}

// open starts NRI with short timeouts. change may alter the options.
func open(t *testing.T, change ...func(*Options)) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth-nri") // short: it holds a socket
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	w := &world{T: t, node: newFake(), dir: dir}
	o := Options{Node: w.node, Version: "1", Socket: dir + "/nri.sock", PluginDir: dir + "/plugins", ConfigDir: dir + "/conf",
		RegistrationTimeout: 5 * time.Second, RequestTimeout: 5 * time.Second, Log: w.note}
	for _, f := range change {
		f(&o)
	}
	w.Plugins, err = New(o)
	must(t, err)
	must(t, w.Start())
	t.Cleanup(w.Plugins.Stop)
	return w
}

func (w *world) note(_ Level, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log = append(w.log, text)
}

func (w *world) logged(text string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.log, func(l string) bool { return strings.Contains(l, text) })
}

// slowly bounds what must come by itself on a busy machine.
const slowly = 30 * time.Second

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(slowly); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// plugin is a plugin of the test's own process. It notes what it is told; on
// may answer an event with an error, by the event's name and object.
type plugin struct {
	stub   stub.Stub
	on     func(event, id string) error
	adjust func(*api.Container) *api.ContainerAdjustment
	update func(event string) []*api.ContainerUpdate

	mu     sync.Mutex
	events []string // "<event> <id>", guarded by mu
	synced []string // ids, guarded by mu
	ready  chan struct{}
	once   sync.Once
	seen   *api.Container // of the last CreateContainer, guarded by mu
}

// quiet keeps the stub's own lines out of the test's output.
type quiet struct{}

func (quiet) Debugf(context.Context, string, ...any) {}
func (quiet) Infof(context.Context, string, ...any)  {}
func (quiet) Warnf(context.Context, string, ...any)  {}
func (quiet) Errorf(context.Context, string, ...any) {}

var _ nrilog.Logger = quiet{}

// connect brings a plugin to the socket, and waits for its synchronisation
// unless told otherwise.
func (w *world) connect(index string, p *plugin, wait bool, more ...stub.Option) *plugin {
	w.Helper()
	p.ready = make(chan struct{})
	var err error
	p.stub, err = stub.New(p, append([]stub.Option{stub.WithPluginName("test"), stub.WithPluginIdx(index), stub.WithSocketPath(w.Socket),
		stub.WithLogger(quiet{}), stub.WithOnClose(func() {})}, more...)...)
	must(w.T, err)
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	go func() { ended <- p.stub.Run(ctx) }()
	w.Cleanup(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(slowly):
			w.Error("the plugin does not end")
		}
	})
	if wait {
		select {
		case <-p.ready:
		case err := <-ended:
			ended <- err
			w.Fatalf("the plugin ended: %v", err)
		case <-time.After(slowly):
			w.Fatal("the plugin is not synchronised")
		}
		eventually(w.T, "the plugin counts", func() bool { return !w.none() })
	}
	return p
}

func (p *plugin) note(event, id string) error {
	p.mu.Lock()
	p.events = append(p.events, event+" "+id)
	p.mu.Unlock()
	if p.on != nil {
		return p.on(event, id)
	}
	return nil
}

func (p *plugin) told() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.events)
}

func (p *plugin) updates(event string) []*api.ContainerUpdate {
	if p.update == nil {
		return nil
	}
	return p.update(event)
}

func (p *plugin) Synchronize(_ context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	p.mu.Lock()
	for _, x := range pods {
		p.synced = append(p.synced, x.GetId())
	}
	for _, x := range containers {
		p.synced = append(p.synced, x.GetId())
	}
	slices.Sort(p.synced)
	p.mu.Unlock()
	err := p.note("Synchronize", "")
	p.once.Do(func() { close(p.ready) })
	return p.updates("Synchronize"), err
}

func (p *plugin) RunPodSandbox(_ context.Context, x *api.PodSandbox) error {
	return p.note("RunPodSandbox", x.GetId())
}

func (p *plugin) UpdatePodSandbox(_ context.Context, x *api.PodSandbox, o, r *api.LinuxResources) error {
	return p.note("UpdatePodSandbox", fmt.Sprintf("%s %d %d", x.GetId(), o.GetMemory().GetLimit().GetValue(), r.GetMemory().GetLimit().GetValue()))
}

func (p *plugin) PostUpdatePodSandbox(_ context.Context, x *api.PodSandbox) error {
	return p.note("PostUpdatePodSandbox", x.GetId())
}

func (p *plugin) StopPodSandbox(_ context.Context, x *api.PodSandbox) error {
	return p.note("StopPodSandbox", x.GetId())
}

func (p *plugin) RemovePodSandbox(_ context.Context, x *api.PodSandbox) error {
	return p.note("RemovePodSandbox", x.GetId())
}

func (p *plugin) CreateContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	err := p.note("CreateContainer", x.GetId())
	p.mu.Lock()
	p.seen = x
	p.mu.Unlock()
	var a *api.ContainerAdjustment
	if p.adjust != nil {
		a = p.adjust(x)
	}
	return a, p.updates("CreateContainer"), err
}

func (p *plugin) PostCreateContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) error {
	return p.note("PostCreateContainer", x.GetId())
}

func (p *plugin) StartContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) error {
	return p.note("StartContainer", x.GetId())
}

func (p *plugin) PostStartContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) error {
	return p.note("PostStartContainer", x.GetId())
}

func (p *plugin) UpdateContainer(_ context.Context, _ *api.PodSandbox, x *api.Container, r *api.LinuxResources) ([]*api.ContainerUpdate, error) {
	err := p.note("UpdateContainer", fmt.Sprintf("%s %d", x.GetId(), r.GetMemory().GetLimit().GetValue()))
	return p.updates("UpdateContainer"), err
}

func (p *plugin) PostUpdateContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) error {
	return p.note("PostUpdateContainer", x.GetId())
}

func (p *plugin) StopContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) ([]*api.ContainerUpdate, error) {
	err := p.note("StopContainer", x.GetId())
	return p.updates("StopContainer"), err
}

func (p *plugin) RemoveContainer(_ context.Context, _ *api.PodSandbox, x *api.Container) error {
	return p.note("RemoveContainer", x.GetId())
}

// memoryOf asks for a memory limit of a container.
func memoryOf(id string, limit int64) *api.ContainerUpdate {
	u := &api.ContainerUpdate{}
	u.SetContainerId(id)
	u.SetLinuxMemoryLimit(limit)
	return u
}

// deaf is a connection whose reading can be stopped, as that of a stopped process.
type deaf struct {
	net.Conn
	stop chan struct{} // closed: reads wait for end
	end  chan struct{}
}

func (d deaf) Read(b []byte) (int, error) {
	select {
	case <-d.stop:
		<-d.end
		return 0, net.ErrClosed
	default:
	}
	return d.Conn.Read(b)
}

// install puts the test's own binary into the plugin directory.
func install(t *testing.T, dir, name, config string) {
	t.Helper()
	for _, d := range []string{"plugins", "conf"} {
		must(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	self, err := os.Executable()
	must(t, err)
	must(t, os.Symlink(self, filepath.Join(dir, "plugins", name)))
	must(t, os.WriteFile(filepath.Join(dir, "conf", name+".conf"), []byte(config), 0o600))
}

// emptySpec is a specification as small as can be.
func emptySpec() *rspec.Spec {
	return &rspec.Spec{Process: &rspec.Process{Args: []string{"a"}, Env: []string{"A=1", "B=2"}}, Linux: &rspec.Linux{}}
}

// evicting makes a stub's own requests carry evictions.
func evicting(evictions []*api.ContainerEviction) ttrpc.ClientOpts {
	return ttrpc.WithUnaryClientInterceptor(func(ctx context.Context, req *ttrpc.Request, resp *ttrpc.Response, info *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
		if strings.HasSuffix(info.FullMethod, "/UpdateContainers") {
			var err error
			if req.Payload, err = proto.Marshal(&api.UpdateContainersRequest{Evict: evictions}); err != nil {
				return err
			}
		}
		return invoke(ctx, req, resp)
	})
}
