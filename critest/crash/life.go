package main

import (
	"bufio"
	"context"
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
)

// hostNetwork is the annotation of pods that have no network of their own.
const hostNetwork = "crash/host-network"

// life is one pod, or one image, from its birth to its end, as requests that may be
// sent again.
type life struct {
	w        *world
	requests []request
	config   *cri.PodSandboxConfig
	handler  string
	pod      string
	ids      map[string]string // containers by name
	attempts map[string]uint32 // of them
	mounts   []*cri.Mount      // of every container
	sessions *sessions         // nil: none
}

// request is one call. A repetition goes through again where the same call would
// be wrong, as for a start that has failed; nil: it is sent as it was.
type request struct {
	name  string
	send  func(context.Context) error
	again func(context.Context) error
}

// logs has a line for each number, in order.
const logs = "i=0; trap 'exit 0' TERM; while :; do echo $i; i=$((i+1)); sleep 0.02; done"

func (l *life) run() request {
	return request{name: "RunPodSandbox", send: func(ctx context.Context) error {
		res, err := l.w.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: l.config, RuntimeHandler: l.handler})
		l.pod = res.GetPodSandboxId()
		return err
	}}
}

func (l *life) create(name, script string) request {
	return request{name: "CreateContainer " + name, send: func(ctx context.Context) error {
		res, err := l.w.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: l.pod, SandboxConfig: l.config, Config: l.container(name, script)})
		l.ids[name] = res.GetContainerId()
		return err
	}}
}

// container is the configuration of a container.
func (l *life) container(name, script string) *cri.ContainerConfig {
	return &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: name, Attempt: l.attempts[name]}, Image: &cri.ImageSpec{Image: images.Busybox},
		Command: []string{"sh", "-c", script}, LogPath: l.logName(name), Mounts: l.mounts,
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			NamespaceOptions: l.config.GetLinux().GetSecurityContext().GetNamespaceOptions()}},
	}
}

func (l *life) logName(name string) string { return fmt.Sprintf("%s-%d.log", name, l.attempts[name]) }

// start is repeated as the kubelet does: nobody starts a container that runs, and
// for one whose start was refused a new one is made.
func (l *life) start(name, script string) request {
	send := func(ctx context.Context) error {
		_, err := l.w.Runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: l.ids[name]})
		return err
	}
	again := func(ctx context.Context) error {
		res, err := l.w.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: l.ids[name]})
		if err != nil {
			return err
		}
		switch s := res.GetStatus(); {
		case s.GetState() == cri.ContainerState_CONTAINER_CREATED:
			return send(ctx)
		case s.GetReason() != "StartError":
			return nil // it runs, or has run
		}
		if err := l.remove(name).send(ctx); err != nil {
			return err
		}
		l.attempts[name]++
		if err := l.create(name, script).send(ctx); err != nil {
			return err
		}
		return send(ctx)
	}
	return request{name: "StartContainer " + name, send: send, again: again}
}

// ended waits for the container that ends by itself.
func (l *life) ended(name string, code int32) request {
	return request{name: "the end of " + name, send: func(ctx context.Context) error {
		for {
			res, err := l.w.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: l.ids[name]})
			if err != nil {
				return err
			}
			if s := res.GetStatus(); s.GetState() == cri.ContainerState_CONTAINER_EXITED {
				if s.GetExitCode() != code {
					return fmt.Errorf("%s ended with code %d (%s: %s), want %d", name, s.GetExitCode(), s.GetReason(), s.GetMessage(), code)
				}
				return nil
			}
			time.Sleep(10 * time.Millisecond)
		}
	}}
}

// speaks waits for the first line of a container's log.
func (l *life) speaks(name string) request {
	return request{name: "the first line of " + name, send: func(ctx context.Context) error {
		for ctx.Err() == nil {
			if info, err := os.Stat(filepath.Join(l.config.GetLogDirectory(), l.logName(name))); err == nil && info.Size() > 0 {
				return nil
			}
			time.Sleep(5 * time.Millisecond)
		}
		return ctx.Err()
	}}
}

func (l *life) update(name string) request {
	return request{name: "UpdateContainerResources " + name, send: func(ctx context.Context) error {
		_, err := l.w.Runtime().UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{ContainerId: l.ids[name],
			Linux: &cri.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 64 << 20}})
		return err
	}}
}

func (l *life) updatePod() request {
	return request{name: "UpdatePodSandboxResources", send: func(ctx context.Context) error {
		_, err := l.w.Runtime().UpdatePodSandboxResources(ctx, &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: l.pod,
			Resources: &cri.LinuxContainerResources{CpuShares: 512}})
		return err
	}}
}

func (l *life) exec(name string) request {
	return request{name: "ExecSync " + name, send: func(ctx context.Context) error {
		res, err := l.w.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: l.ids[name], Cmd: []string{"echo", "-n", "hi"}, Timeout: 30})
		if err == nil && string(res.GetStdout()) != "hi" {
			return fmt.Errorf("exec said %q", res.GetStdout())
		}
		return err
	}}
}

// session runs a command through the streaming server, with the real crictl.
func (l *life) session(name string) request {
	return request{name: "Exec " + name, send: func(ctx context.Context) error {
		out, err := l.w.Crictl(ctx, "exec", l.ids[name], "echo", "hi")
		if err == nil && out != "hi\n" {
			return fmt.Errorf("exec said %q", out)
		}
		return err
	}}
}

func (l *life) attach(name string) request {
	return request{name: "Attach " + name, send: func(ctx context.Context) error {
		_, err := l.w.Runtime().Attach(ctx, &cri.AttachRequest{ContainerId: l.ids[name], Stdout: true})
		return err
	}}
}

func (l *life) forward() request {
	return request{name: "PortForward", send: func(ctx context.Context) error {
		_, err := l.w.Runtime().PortForward(ctx, &cri.PortForwardRequest{PodSandboxId: l.pod, Port: []int32{80}})
		return err
	}}
}

// reopen moves the log away, once, and has it made anew.
func (l *life) reopen(name string) request {
	return request{name: "ReopenContainerLog " + name, send: func(ctx context.Context) error {
		path := filepath.Join(l.config.GetLogDirectory(), l.logName(name))
		if _, err := os.Stat(path + ".old"); errors.Is(err, os.ErrNotExist) {
			if err := os.Rename(path, path+".old"); err != nil {
				return err
			}
		}
		_, err := l.w.Runtime().ReopenContainerLog(ctx, &cri.ReopenContainerLogRequest{ContainerId: l.ids[name]})
		return err
	}}
}

func (l *life) stop(name string) request {
	return request{name: "StopContainer " + name, send: func(ctx context.Context) error {
		_, err := l.w.Runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: l.ids[name], Timeout: 5})
		return err
	}}
}

func (l *life) remove(name string) request {
	return request{name: "RemoveContainer " + name, send: func(ctx context.Context) error {
		l.w.watcher.mayGo(l.ids[name])
		_, err := l.w.Runtime().RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: l.ids[name]})
		return err
	}}
}

func (l *life) stopPod() request {
	return request{name: "StopPodSandbox", send: func(ctx context.Context) error {
		_, err := l.w.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: l.pod})
		return err
	}}
}

func (l *life) removePod() request {
	return request{name: "RemovePodSandbox", send: func(ctx context.Context) error {
		l.w.watcher.mayGo(l.pod)
		for _, id := range l.ids {
			l.w.watcher.mayGo(id)
		}
		_, err := l.w.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: l.pod})
		if err != nil {
			return err
		}
		res, err := l.w.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{Id: l.pod}})
		if err == nil && len(res.GetItems()) > 0 {
			return fmt.Errorf("pod %s is listed after its removal", l.pod)
		}
		return err
	}}
}

// whole checks that the logs of the container main have every line up to the last.
func (l *life) whole() error {
	if l.config == nil {
		return nil
	}
	if s := l.sessions; s != nil && len(s.cut) > 0 {
		return fmt.Errorf("sessions ended that nobody ended: %q", s.cut)
	}
	path := filepath.Join(l.config.GetLogDirectory(), l.logName("main"))
	next, err := follows(path+".old", 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if next, err = follows(path, next); err != nil {
		return err
	}
	if next == 0 {
		return errors.New("the log is empty")
	}
	return os.RemoveAll(l.config.GetLogDirectory())
}

// follows wants a log to go on with line next and returns the number behind its
// last line.
func follows(path string, next int) (int, error) {
	f, err := os.Open(path)
	if err != nil {
		return next, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); next++ {
		part := strings.SplitN(lines.Text(), " ", 4)
		if len(part) != 4 || part[1] != "stdout" || part[2] != "F" || part[3] != strconv.Itoa(next) {
			return next, fmt.Errorf("the log has %q where line %d should be", lines.Text(), next)
		}
	}
	return next, nil
}

// done tells whether a request is refused since it was done already, by a daemon
// whose answer nobody has read.
func done(err error) bool {
	return status.Code(err) == codes.AlreadyExists || strings.Contains(err.Error(), "is not empty")
}

// transient tells whether the kubelet would send a request again after err.
func transient(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.Unknown, codes.FailedPrecondition, codes.DeadlineExceeded, codes.ResourceExhausted:
		return true
	}
	return false
}
