package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
)

// restarts begins the names of requests that are a daemon's start. Of the steps in
// them only those of the start are points: what was asked for before is in other
// requests.
const restarts = "Restart"

// ofStart tells whether a step is one of a daemon's start.
func ofStart(step string) bool {
	verb, _, _ := strings.Cut(step, "/")
	return verb == "Restore" || verb == "Tidy" || verb == "Preload"
}

// restart kills the daemon, if it runs, and starts it; it is over when the daemon
// has undone what the one before has left.
func (l *life) restart(after string) request {
	return request{name: strings.TrimSpace(restarts + " " + after), send: func(ctx context.Context) error {
		if err := l.w.relaunch(ctx); err != nil {
			return err
		}
		return l.w.Tidied(ctx)
	}}
}

// halfMake has the daemon killed when a container and another pod are all but made.
func (l *life) halfMake() request {
	return request{name: "the half made", send: func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		stands, killed := make(chan struct{}), make(chan struct{})
		create := l.w.steps.set("CreateContainer/write created record", func(int) { close(stands); <-killed })
		created := make(chan error, 1)
		go func() { created <- l.sendHalf(ctx) }()
		select {
		case <-stands:
		case err := <-created:
			close(killed)
			l.w.steps.unset(create)
			return fmt.Errorf("a container that shall be half made: %w", err)
		}
		run := l.w.steps.set("RunPodSandbox/write ready record", func(pid int) { _ = syscall.Kill(pid, syscall.SIGKILL) })
		other := l.podConfig("other")
		other.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 18084}}
		_, err := l.w.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: other})
		close(killed)
		if !l.w.steps.unset(run) || err == nil {
			return fmt.Errorf("the daemon was not killed with a pod half made: %w", err)
		}
		<-created
		return l.w.Kill()
	}}
}

func (l *life) sendHalf(ctx context.Context) error {
	_, err := l.w.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: l.pod, SandboxConfig: l.config, Config: &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: "half"}, Image: &cri.ImageSpec{Image: images.Busybox}, Command: []string{"true"}, LogPath: "half.log",
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			NamespaceOptions: l.config.GetLinux().GetSecurityContext().GetNamespaceOptions()}},
	}})
	return err
}

// removeOthers does what the kubelet does to pods that it does not know: what a start
// could not undo is listed as not ready, for that.
func (l *life) removeOthers() request {
	return request{name: "the removal of other pods", send: func(ctx context.Context) error {
		res, err := l.w.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
		for _, p := range res.GetItems() {
			if p.GetId() == l.pod {
				continue
			}
			if p.GetState() == cri.PodSandboxState_SANDBOX_READY {
				return fmt.Errorf("pod %s is ready, whose request never ended", p.GetMetadata().GetName())
			}
			l.w.watcher.mayGo(p.GetId())
			if _, err = l.w.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.GetId()}); err != nil {
				return err
			}
		}
		return err
	}}
}

// reboot does what a reboot does to daemon, monitor and pods, up to the daemon's next
// start. The starts of the rest of the life are in the new boot.
func (l *life) reboot() request {
	return request{name: "the reboot", send: func(context.Context) error {
		l.w.rebooted = true
		if err := l.w.LoseState(); err != nil {
			return err
		}
		l.w.dropBridges()
		_ = exec.Command("ip", "link", "del", l.w.Bridge).Run() // absent when no pod had a network
		if out, err := exec.Command("nft", "flush", "ruleset").CombinedOutput(); err != nil {
			return fmt.Errorf("flush the packet filter: %w: %s", err, out)
		}
		dirs, err := filepath.Glob("/sys/fs/cgroup/*/berth/" + l.pod)
		for _, dir := range dirs {
			_ = exec.Command("find", dir, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+").Run()
		}
		return err
	}}
}

// ends wants pod and container to be as a reboot leaves them.
func (l *life) ends(name string) request {
	return request{name: "the states after the reboot", send: func(ctx context.Context) error {
		pod, err := l.w.Runtime().PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: l.pod})
		if err != nil {
			return err
		}
		if s := pod.GetStatus().GetState(); s != cri.PodSandboxState_SANDBOX_NOTREADY {
			return fmt.Errorf("the pod is %s after a reboot", s)
		}
		c, err := l.w.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: l.ids[name]})
		if err != nil {
			return err
		}
		if s := c.GetStatus(); s.GetState() != cri.ContainerState_CONTAINER_EXITED || !strings.Contains(s.GetMessage(), "restarted") {
			return fmt.Errorf("after a reboot the container is %s: %q", s.GetState(), s.GetMessage())
		}
		return nil
	}}
}

// bootEnds gives the daemon the machine's boot again.
func (l *life) bootEnds() request {
	return request{name: restarts + " in the first boot", send: func(ctx context.Context) error {
		l.w.rebooted = false
		return l.w.relaunch(ctx)
	}}
}

// bootIDFile is what tells a daemon that the node was started again.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

// Launch starts the daemon, after a reboot in another boot. The other boot's id does not stay:
// what covers a part of /proc keeps containers with a user namespace from mounting theirs.
func (w *world) Launch(ctx context.Context) error {
	if !w.rebooted {
		return w.Node.Launch(ctx)
	}
	file := filepath.Join(w.dir, "boot_id")
	if err := os.WriteFile(file, []byte("12345678-1234-4321-8765-123456789abc\n"), 0o444); err != nil {
		return err
	}
	if err := syscall.Mount(file, bootIDFile, "", syscall.MS_BIND, ""); err != nil {
		return fmt.Errorf("cover the boot's id: %w", err)
	}
	err := w.Node.Launch(ctx)
	return errors.Join(err, syscall.Unmount(bootIDFile, syscall.MNT_DETACH))
}

// preloads is the folder whose archives the daemon imports as it starts.
func (w *world) preloads() string { return filepath.Join(w.dir, "preload") }

// preload puts an archive into that folder.
func (l *life) preload(archive string) request {
	return request{name: "the archive to preload", send: func(context.Context) error {
		data, err := os.ReadFile(archive)
		if err == nil {
			err = os.MkdirAll(l.w.preloads(), 0o700)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(l.w.preloads(), "thing.tar"), data, 0o600)
		}
		return err
	}}
}

// restartPreloaded is a start that imports an image.
func (l *life) restartPreloaded() request {
	restart := l.restart("with an archive")
	return request{name: restart.name, send: func(ctx context.Context) error {
		log := filepath.Join(l.w.Dir, "berth.log")
		from := size(log)
		if err := restart.send(ctx); err != nil {
			return err
		}
		for {
			failed := strings.Contains(behind(log, from), "not imported")
			res, err := l.w.Images().ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: thing}})
			noted, _ := os.ReadFile(filepath.Join(l.w.Root(), "images", "preloaded.json"))
			switch {
			case err != nil:
				return err
			case res.GetImage() == nil && failed:
				return fmt.Errorf("the archive was not imported:\n%s", behind(log, from))
			case res.GetImage() != nil && (failed || strings.Contains(string(noted), "thing.tar")):
				return nil
			}
			time.Sleep(10 * time.Millisecond)
		}
	}}
}

func size(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// behind is what a file has behind an offset.
func behind(path string, offset int64) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	data, err := io.ReadAll(io.NewSectionReader(f, offset, size(path)-offset))
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// unload takes the archive out of the folder.
func (l *life) unload() request {
	return request{name: "the end of preloading", send: func(context.Context) error {
		return os.RemoveAll(l.w.preloads())
	}}
}
