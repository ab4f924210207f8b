// Package cases tests berth over its socket: public reports of container
// runtimes going wrong (tests named after the case, TestB21…), and bad input.
//
// Every test starts a node of its own (critest/node), which ends with the leak
// check; the registry and the standard images are shared.
package cases

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/klog/v2"

	"berth/critest/images"
	"berth/critest/node"
	"berth/critest/registry"
)

// Shared by all tests of the package.
var (
	reg   *registry.Registry
	parts *images.Parts
)

func TestMain(m *testing.M) {
	if launchedByDaemon() {
		os.Exit(runLaunched())
	}
	code, err := setUp(m)
	if errors.Is(err, node.ErrNotRoot) {
		fmt.Println("skipped: the cases start containers, which", err)
		os.Exit(0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cases:", err)
		os.Exit(1)
	}
	os.Exit(code)
}

func setUp(m *testing.M) (int, error) {
	klog.SetLogger(logr.Discard()) // client-go tells of every session that is cut off
	if err := node.Isolate(); err != nil {
		return 0, err
	}
	stock, err := node.OpenStock()
	if err != nil {
		return 0, err
	}
	defer stock.Close()
	reg, parts = stock.Registry, stock.Parts
	return m.Run(), nil
}

// env is a test with its node.
type env struct {
	*testing.T
	*node.Node
	ctx context.Context
	rt  cri.RuntimeServiceClient
	im  cri.ImageServiceClient
	pod int // pods made, for their names
}

// start gives the test a node, which is closed and checked for leaks at its end.
func start(t *testing.T, o node.Options) *env {
	t.Helper()
	return startFor(t, o, 3*time.Minute)
}

// startFor is start for a test that may take longer.
func startFor(t *testing.T, o node.Options, limit time.Duration) *env {
	t.Helper()
	if o.Mirror == "" {
		o.Mirror = reg.Addr()
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	n, err := node.Start(ctx, o)
	if err != nil {
		cancel()
		t.Fatalf("start a node: %v", err)
	}
	t.Cleanup(func() {
		defer cancel()
		if t.Failed() {
			t.Logf("the daemon's log ends with:\n%s", n.LogTail(25))
		}
		if err := n.Close(context.Background()); err != nil {
			t.Errorf("close the node: %v", err)
		}
	})
	return &env{T: t, Node: n, ctx: ctx, rt: n.Runtime(), im: n.Images()}
}

// sub is the same node for a subtest.
func (e *env) sub(t *testing.T) *env {
	inner := *e
	inner.T = t
	return &inner
}

// pull pulls a reference and returns the id that came back.
func (e *env) pull(reference string) string {
	e.Helper()
	res, err := e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: reference}})
	if err != nil {
		e.Fatalf("pull %s: %v", reference, err)
	}
	return res.GetImageRef()
}

// sandbox is the configuration of a pod with a network, each container with
// its own PID namespace, as the kubelet sends it for an ordinary pod.
func (e *env) sandbox() *cri.PodSandboxConfig {
	e.pod++
	name := fmt.Sprintf("pod%d", e.pod)
	return &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: name, Namespace: "cases", Uid: name + "-uid"},
		Hostname:     name,
		LogDirectory: filepath.Join(e.LogDir(), name),
		Labels:       map[string]string{"app": name},
		Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
		}},
	}
}

// pidMode is the sandbox configuration with another PID mode.
func pidMode(c *cri.PodSandboxConfig, mode cri.NamespaceMode) *cri.PodSandboxConfig {
	c.Linux.SecurityContext.NamespaceOptions.Pid = mode
	return c
}

// run runs a pod and returns its id.
func (e *env) run(c *cri.PodSandboxConfig) string {
	e.Helper()
	res, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: c})
	if err != nil {
		e.Fatalf("run pod %s: %v", c.GetMetadata().GetName(), err)
	}
	return res.GetPodSandboxId()
}

// command is a container's configuration that runs sh -c script in the standard
// image, with the PID mode of its pod's configuration.
func command(name, script string) *cri.ContainerConfig {
	return &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: name},
		Image:    &cri.ImageSpec{Image: images.Busybox},
		Command:  []string{"sh", "-c", script},
		LogPath:  name + ".log",
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
		}},
	}
}

// commandIn is the same with another PID mode.
func commandIn(mode cri.NamespaceMode, name, script string) *cri.ContainerConfig {
	c := command(name, script)
	c.Linux.SecurityContext.NamespaceOptions.Pid = mode
	return c
}

// create makes a container.
func (e *env) create(pod string, c *cri.ContainerConfig, sandbox *cri.PodSandboxConfig) string {
	e.Helper()
	res, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: sandbox})
	if err != nil {
		e.Fatalf("create container %s: %v", c.GetMetadata().GetName(), err)
	}
	return res.GetContainerId()
}

// start makes and starts a container.
func (e *env) startContainer(pod string, c *cri.ContainerConfig, sandbox *cri.PodSandboxConfig) string {
	e.Helper()
	id := e.create(pod, c, sandbox)
	if _, err := e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: id}); err != nil {
		e.Fatalf("start container %s: %v", c.GetMetadata().GetName(), err)
	}
	return id
}

// status asks for a container's status.
func (e *env) status(id string) *cri.ContainerStatus {
	e.Helper()
	res, err := e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: id})
	if err != nil {
		e.Fatalf("status of container %s: %v", id, err)
	}
	return res.GetStatus()
}

// exited waits until the container has ended and returns its first status that says so.
func (e *env) exited(id string) *cri.ContainerStatus {
	e.Helper()
	return e.exitedIn(id, 20*time.Second)
}

func (e *env) exitedIn(id string, limit time.Duration) *cri.ContainerStatus {
	e.Helper()
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if s := e.status(id); s.GetState() == cri.ContainerState_CONTAINER_EXITED {
			return s
		}
	}
	e.Fatalf("container %s still runs after %s", id, limit)
	return nil
}

// exec runs sh -c script inside and returns what it wrote to stdout; it must end with 0.
func (e *env) exec(id, script string) string {
	e.Helper()
	res, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", script}, Timeout: 20})
	if err != nil {
		e.Fatalf("exec %q: %v", script, err)
	}
	if res.GetExitCode() != 0 {
		e.Fatalf("exec %q: exit code %d, stderr %q", script, res.GetExitCode(), res.GetStderr())
	}
	return string(res.GetStdout())
}

// eventually waits at most 10 s for something that comes by itself.
func (e *env) eventually(what string, holds func() bool) {
	e.Helper()
	for end := time.Now().Add(10 * time.Second); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			e.Fatalf("not within 10 s: %s", what)
		}
	}
}

// said waits until a running container has logged exactly this on stdout.
func (e *env) said(id, text string) {
	e.Helper()
	last := ""
	for end := time.Now().Add(10 * time.Second); last != text; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			e.Fatalf("container %s logged %q, want %q", id, last, text)
		}
		last, _ = e.logs(id)
	}
}

// output runs script in a fresh container of the pod to its end, which must be
// with 0, and returns what it logged on both streams.
func (e *env) output(pod string, c *cri.ContainerConfig, sandbox *cri.PodSandboxConfig) string {
	e.Helper()
	id := e.startContainer(pod, c, sandbox)
	s := e.exited(id)
	stdout, stderr := e.logs(id)
	if s.GetExitCode() != 0 {
		e.Fatalf("container %s: exit code %d (%s), stdout %q, stderr %q", c.GetMetadata().GetName(), s.GetExitCode(), s.GetReason(), stdout, stderr)
	}
	return stdout + stderr
}

// removePod stops and removes a pod.
func (e *env) removePod(id string) {
	e.Helper()
	if _, err := e.rt.StopPodSandbox(e.ctx, &cri.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		e.Errorf("stop pod %s: %v", id, err)
	}
	if _, err := e.rt.RemovePodSandbox(e.ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
		e.Errorf("remove pod %s: %v", id, err)
	}
}

// refused checks code and text of an error.
func (e *env) refused(what string, err error, code codes.Code, words ...string) {
	e.Helper()
	if err == nil {
		e.Errorf("%s: no error, want %s", what, code)
		return
	}
	if got := status.Code(err); got != code {
		e.Errorf("%s: code %s, want %s: %v", what, got, code, err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			e.Errorf("%s: the message does not name %q: %v", what, w, err)
		}
	}
}

// empty checks that no pod and no container is listed.
func (e *env) empty(after string) {
	e.Helper()
	pods, err := e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{})
	if err != nil || len(pods.GetItems()) != 0 {
		e.Errorf("after %s: pods %v, error %v; want none", after, pods.GetItems(), err)
	}
	list, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{})
	if err != nil || len(list.GetContainers()) != 0 {
		e.Errorf("after %s: containers %v, error %v; want none", after, list.GetContainers(), err)
	}
}
