package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// patience bounds one request, its repetitions and the daemon's restart.
const patience = 90 * time.Second

// world is the node on which the pods live.
type world struct {
	*node.Node
	faults string
	serial int // of the life, for names
}

// life is one pod from its birth to its end, as requests that may be sent again.
type life struct {
	w        *world
	requests []request
	config   *cri.PodSandboxConfig
	pod      string
	ids      map[string]string // containers by name
}

type request struct {
	name string
	send func(context.Context) error
}

// life is a pod with all that a pod can have: a network with a host port, a
// shared PID namespace, a container that runs and logs, one that never starts,
// and one that ends by itself.
func (w *world) life() *life {
	name := fmt.Sprintf("crash%d", w.serial)
	l := &life{w: w, ids: map[string]string{}, config: &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: name, Namespace: "crash", Uid: name}, Hostname: name,
		LogDirectory: filepath.Join(w.LogDir(), name),
		PortMappings: []*cri.PortMapping{{ContainerPort: 80, HostPort: 18080}},
		Linux: &cri.LinuxPodSandboxConfig{Sysctls: map[string]string{"net.ipv4.ip_local_port_range": "20000 30000"},
			SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: &cri.NamespaceOption{}}},
	}}
	const logs = "i=0; trap 'exit 0' TERM; while :; do echo $i; i=$((i+1)); sleep 0.02; done"
	l.requests = []request{
		{"RunPodSandbox", l.run},
		{"CreateContainer main", func(ctx context.Context) error { return l.create(ctx, "main", logs) }},
		{"StartContainer main", func(ctx context.Context) error { return l.start(ctx, "main") }},
		{"CreateContainer idle", func(ctx context.Context) error { return l.create(ctx, "idle", "true") }},
		{"CreateContainer short", func(ctx context.Context) error { return l.create(ctx, "short", "exit 7") }},
		{"StartContainer short", func(ctx context.Context) error { return l.start(ctx, "short") }},
		{"the end of short", l.ended},
		{"UpdateContainerResources main", l.update},
		{"ExecSync main", l.exec},
		{"RemoveContainer short", func(ctx context.Context) error { return l.remove(ctx, "short") }},
		{"StopContainer main", l.stop},
		{"StopPodSandbox", l.stopPod},
		{"RemovePodSandbox", l.removePod},
	}
	return l
}

func (l *life) run(ctx context.Context) error {
	res, err := l.w.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: l.config})
	l.pod = res.GetPodSandboxId()
	return err
}

func (l *life) create(ctx context.Context, name, script string) error {
	res, err := l.w.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: l.pod, SandboxConfig: l.config, Config: &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: images.Busybox},
		Command: []string{"sh", "-c", script}, LogPath: name + ".log", Linux: &cri.LinuxContainerConfig{},
	}})
	l.ids[name] = res.GetContainerId()
	return err
}

// start is repeated by nobody once the container runs: the kubelet looks first.
func (l *life) start(ctx context.Context, name string) error {
	_, err := l.w.Runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: l.ids[name]})
	if status.Code(err) != codes.FailedPrecondition {
		return err
	}
	res, serr := l.w.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: l.ids[name]})
	if serr == nil && res.GetStatus().GetStartedAt() != 0 {
		return nil
	}
	return errors.Join(err, serr)
}

// ended waits for the container that ends by itself.
func (l *life) ended(ctx context.Context) error {
	for {
		res, err := l.w.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: l.ids["short"]})
		if err != nil {
			return err
		}
		if s := res.GetStatus(); s.GetState() == cri.ContainerState_CONTAINER_EXITED {
			if s.GetExitCode() != 7 {
				return fmt.Errorf("short ended with code %d (%s: %s), want 7", s.GetExitCode(), s.GetReason(), s.GetMessage())
			}
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (l *life) update(ctx context.Context) error {
	_, err := l.w.Runtime().UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{ContainerId: l.ids["main"],
		Linux: &cri.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 64 << 20}})
	return err
}

func (l *life) exec(ctx context.Context) error {
	res, err := l.w.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: l.ids["main"], Cmd: []string{"echo", "-n", "hi"}, Timeout: 30})
	if err == nil && string(res.GetStdout()) != "hi" {
		return fmt.Errorf("exec said %q", res.GetStdout())
	}
	return err
}

func (l *life) stop(ctx context.Context) error {
	_, err := l.w.Runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: l.ids["main"], Timeout: 5})
	return err
}

func (l *life) remove(ctx context.Context, name string) error {
	_, err := l.w.Runtime().RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: l.ids[name]})
	return err
}

func (l *life) stopPod(ctx context.Context) error {
	_, err := l.w.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: l.pod})
	return err
}

func (l *life) removePod(ctx context.Context) error {
	_, err := l.w.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: l.pod})
	return err
}

// whole checks that the running container's log has every line up to its last.
func (l *life) whole() error {
	path := filepath.Join(l.config.GetLogDirectory(), "main.log")
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	next := 0
	for lines := bufio.NewScanner(f); lines.Scan(); {
		part := strings.SplitN(lines.Text(), " ", 4)
		if len(part) != 4 || part[1] != "stdout" || part[2] != "F" || part[3] != strconv.Itoa(next) {
			return fmt.Errorf("the log has %q where line %d should be", lines.Text(), next)
		}
		next++
	}
	if next == 0 {
		return errors.New("the log is empty")
	}
	return os.RemoveAll(l.config.GetLogDirectory())
}

// crash lives a life in which the point's victim is killed.
func (w *world) crash(ctx context.Context, p point) error {
	l := w.life()
	for i, request := range l.requests {
		limited, cancel := context.WithTimeout(ctx, patience)
		var err error
		if i == p.request {
			err = w.crashIn(limited, l, request, p)
		} else {
			err = w.repeat(limited, request)
		}
		cancel()
		if err != nil {
			w.clear(ctx)
			return fmt.Errorf("%s: %w", request.name, err)
		}
	}
	if err := l.whole(); err != nil {
		return err
	}
	return w.left()
}

// crashIn sends a request during which the victim is killed, and again until it
// succeeds.
func (w *world) crashIn(ctx context.Context, l *life, r request, p point) error {
	victim := 0
	if p.victim == "monitor" {
		if victim = w.monitor(); victim == 0 {
			return errors.New("the node has no monitor")
		}
	}
	arm := filepath.Join(w.faults, "arm")
	if err := os.WriteFile(arm, []byte(p.step+"\t"+strconv.Itoa(victim)+"\n"), 0o600); err != nil {
		return err
	}
	err := r.send(ctx)
	if _, serr := os.Stat(arm); serr == nil {
		return fmt.Errorf("the step %s was not reached (%v)", p.step, err)
	}
	if p.victim == "daemon" {
		if err == nil {
			return errors.New("the request succeeded although its daemon was killed")
		}
		if err := w.relaunch(ctx); err != nil {
			return err
		}
	}
	if err := w.soonTrue(ctx); err != nil {
		return fmt.Errorf("after the crash: %w", err)
	}
	return w.repeat(ctx, r)
}

// truthTime is how long an exit may take to show while a monitor is replaced.
const truthTime = 5 * time.Second

// soonTrue waits until the lists are true.
func (w *world) soonTrue(ctx context.Context) error {
	for end := time.Now().Add(truthTime); ; time.Sleep(20 * time.Millisecond) {
		err := w.truth(ctx)
		if err == nil || time.Now().After(end) || ctx.Err() != nil {
			return err
		}
	}
}

// repeat sends a request until it succeeds, as the kubelet does.
func (w *world) repeat(ctx context.Context, r request) error {
	for {
		err := r.send(ctx)
		if err == nil || ctx.Err() != nil {
			return err
		}
		if code := status.Code(err); code != codes.Unavailable && code != codes.Unknown && code != codes.FailedPrecondition {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// truth compares the lists with the processes that there are.
func (w *world) truth(ctx context.Context) error {
	list, err := w.Runtime().ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return err
	}
	for _, c := range list.GetContainers() {
		res, err := w.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.GetId(), Verbose: true})
		if status.Code(err) == codes.NotFound {
			continue // it was being removed
		}
		if err != nil {
			return err
		}
		var info struct{ PID int }
		if err := json.Unmarshal([]byte(res.GetInfo()["info"]), &info); err != nil {
			return err
		}
		runs := info.PID > 0 && alive(info.PID)
		if says := res.GetStatus().GetState() == cri.ContainerState_CONTAINER_RUNNING; says && !runs {
			return fmt.Errorf("container %s is said to run, but its process %d is gone", c.GetMetadata().GetName(), info.PID)
		}
	}
	pods, err := w.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	if len(pods.GetItems()) > 1 {
		return fmt.Errorf("%d pods are listed, there is one at most", len(pods.GetItems()))
	}
	return nil
}

// alive: there is such a process, and it is no zombie.
func alive(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, after, ok := strings.Cut(string(data), ") ")
	return err == nil && ok && !strings.HasPrefix(after, "Z")
}

// monitor is the pid of the node's monitor, 0 when there is none.
func (w *world) monitor() int {
	for _, pid := range w.Monitors() {
		return pid
	}
	return 0
}

// left looks for what a life has left behind.
func (w *world) left() error {
	leaks, err := w.Leaks()
	if err != nil {
		return err
	}
	if len(leaks) > 0 {
		return fmt.Errorf("left behind: %q", leaks)
	}
	return nil
}

// clear removes what a life that went wrong has left, for the next one.
func (w *world) clear(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_ = os.Remove(filepath.Join(w.faults, "arm"))
	_ = w.relaunch(limited)
	_ = w.RemoveAll(limited)
}

// relaunch starts the daemon again, whether it was killed or still runs.
func (w *world) relaunch(ctx context.Context) error {
	if err := w.Kill(); err != nil {
		return err
	}
	return w.Launch(ctx)
}
