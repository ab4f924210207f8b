package cases

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/sandbox/leakcheck"
)

// impatient calls CreateContainer as a client whose deadline is short.
func (e *env) impatient(pod string, c *cri.ContainerConfig, sandbox *cri.PodSandboxConfig) (string, error) {
	ctx, cancel := context.WithTimeout(e.ctx, 700*time.Millisecond)
	defer cancel()
	res, err := e.rt.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: sandbox})
	return res.GetContainerId(), err
}

// B63: whoever asks again for a container whose making is slow joins that
// attempt, is told where it is, and in the end there is exactly one container.
func TestB63SlowCreateIsJoined(t *testing.T) {
	dir := t.TempDir()
	slow, hold, count := filepath.Join(dir, "slow-runc"), filepath.Join(dir, "hold"), filepath.Join(dir, "count")
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	put(t, slow, fmt.Sprintf("#!/bin/sh\nfor a in \"$@\"; do if [ \"$a\" = create ]; then echo create >> %s; while [ -e %s ]; do sleep 0.05; done; break; fi; done\nexec %s/bin/runc \"$@\"\n",
		count, hold, deps), 0o755)
	e := start(t, node.Options{Settings: map[string]string{"runtime.handlers.runc": fmt.Sprintf("[runtime.handlers.slow]\npath = %q", slow)}})
	e.pull(images.Busybox)
	config := e.sandbox()
	res, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: "slow"})
	if err != nil {
		t.Fatal(err)
	}
	pod := res.GetPodSandboxId()
	put(t, hold, "", 0o644)
	c := command("slow", "exec sleep 1000")
	for i := range 5 {
		_, err := e.impatient(pod, c, config)
		e.refused(fmt.Sprintf("call %d", i+1), err, codes.DeadlineExceeded, "still at step create in the OCI runtime, for ", pod, "slow")
	}
	if why := e.running(); !strings.Contains(why, "create in the OCI runtime") || !strings.Contains(why, "slow") {
		t.Errorf("nobody can see what it waits for: %q", why)
	}
	if list, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{}); err != nil || len(list.GetContainers()) != 0 {
		t.Errorf("a container that is not made yet is listed: %v, %v", list, err)
	}
	if err := os.Remove(hold); err != nil {
		t.Fatal(err)
	}
	id := e.create(pod, c, config)
	if again := e.create(pod, c, config); again != id {
		t.Errorf("one request made %s and %s", id, again)
	}
	list, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{})
	if err != nil || len(list.GetContainers()) != 1 {
		t.Errorf("there are %v, %v; want one container", list.GetContainers(), err)
	}
	if n, err := os.ReadFile(count); err != nil || string(n) != "create\n" {
		t.Errorf("the OCI runtime made it %q times, %v", n, err)
	}
	if _, err := e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	if out := e.exec(id, "echo alive"); out != "alive\n" {
		t.Errorf("the container said %q", out)
	}
}

// running is what the verbose status says of operations in progress.
func (e *env) running() string {
	e.Helper()
	res, err := e.rt.Status(e.ctx, &cri.StatusRequest{Verbose: true})
	if err != nil {
		e.Fatal(err)
	}
	return res.GetInfo()["operations"]
}

// silent mounts a FUSE filesystem whose server never answers.
func (e *env) silent(dir string) (release func()) {
	e.Helper()
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		e.Skipf("skipped: the kernel has no FUSE: %v", err)
	}
	put(e.T, dir+"/.keep", "", 0o644)
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd())
	if err := unix.Mount("silent", dir, "fuse", 0, options); err != nil {
		e.Fatalf("mount a silent FUSE filesystem: %v", err)
	}
	var once sync.Once
	release = func() {
		once.Do(func() {
			_ = fuse.Close()
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				e.Errorf("unmount the silent FUSE filesystem: %v", err)
			}
		})
	}
	e.Cleanup(release)
	return release
}

// B63 again, with a volume that hangs: the attempt's death frees the name.
func TestB63HangingVolume(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	volume := filepath.Join(e.Dir, "volume")
	release := e.silent(volume)
	c := command("hangs", "exec sleep 1000")
	c.Mounts = []*cri.Mount{{HostPath: volume, ContainerPath: "/data"}}
	for i := range 3 {
		_, err := e.impatient(pod, c, config)
		e.refused(fmt.Sprintf("call %d", i+1), err, codes.DeadlineExceeded, "still at step resolve users, devices, mounts, for ")
	}
	if why := e.running(); !strings.Contains(why, "mounts") || !strings.Contains(why, "hangs") {
		t.Errorf("nobody can see what it waits for: %q", why)
	}
	// Nobody else waits for it.
	e.output(pod, command("other", "true"), config)
	release()
	// A call may still join the attempt, and gets its error; then the name is free.
	if _, err := e.impatient(pod, c, config); err != nil && status.Code(err) != codes.DeadlineExceeded && !strings.Contains(err.Error(), volume) {
		t.Errorf("after the volume's end: %v", err)
	}
	id := e.create(pod, c, config)
	if s := e.status(id); s.GetMetadata().GetName() != "hangs" {
		t.Errorf("made %v", s)
	}
	if list, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{}); err != nil || len(list.GetContainers()) != 2 {
		t.Errorf("there are %v, %v", list.GetContainers(), err)
	}
}

// pid is the container's first process.
func (e *env) pid(id string) int {
	e.Helper()
	res, err := e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		e.Fatalf("status of container %s: %v", id, err)
	}
	pid, _ := info(e.T, res.GetInfo())["pid"].(float64)
	return int(pid)
}

// B65: whatever ends a container, and whoever waits or gives up waiting for it
// meanwhile, its status says so soon after.
func TestB65EveryDeathIsSeen(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	one := func(i int) error {
		oom := i%2 == 0
		c := command(fmt.Sprintf("c%d", i), "exec sleep 300")
		if oom {
			c.Command = []string{"sh", "-c", "sleep 0.1; exec dd if=/dev/zero of=/dev/null bs=64M"}
			c.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: 15 << 20}
		}
		id := e.startContainer(pod, c, config)
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			ctx, cancel := context.WithTimeout(e.ctx, time.Duration(i%5)*20*time.Millisecond)
			defer cancel()
			_, _ = e.rt.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 120})
		}()
		pid := e.pid(id)
		if !oom && pid > 1 {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				return fmt.Errorf("kill %d: %w", pid, err)
			}
		}
		<-gone
		s := e.exited(id) // within 20 s, where a machine at leisure takes milliseconds
		// The stop's SIGTERM can reach the OCI runtime's own init, which ends with 2.
		if s.GetExitCode() != 137 && s.GetExitCode() != 2 {
			return fmt.Errorf("exit code %d, reason %s", s.GetExitCode(), s.GetReason())
		}
		if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 0}); err != nil {
			return fmt.Errorf("stop after the end: %w", err)
		}
		_, err := e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: id})
		return err
	}
	for i := range 100 {
		if err := one(i); err != nil {
			t.Errorf("round %d: %v", i, err)
		}
	}
	if list, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{}); err != nil || len(list.GetContainers()) != 0 {
		t.Errorf("left: %v, %v", list.GetContainers(), err)
	}
}

// The ioctls of fsfreeze(8).
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// freezable mounts an ext4 of its own on dir; thaw may be called any number of
// times.
func (e *env) freezable(dir string) (freeze, thaw func()) {
	e.Helper()
	file := filepath.Join(e.Dir, "frozen.img")
	put(e.T, dir+"/.keep", "", 0o644)
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		e.Fatal(err)
	}
	if err := os.Truncate(file, 32<<20); err != nil {
		e.Fatal(err)
	}
	for _, argv := range [][]string{{"mkfs.ext4", "-q", "-F", file}, {"mount", "-o", "loop", file, dir}} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			e.Skipf("skipped: no ext4 on a loop device here: %s: %v: %s", argv[0], err, out)
		}
	}
	root, err := os.Open(dir)
	if err != nil {
		e.Fatal(err)
	}
	call := func(request uint, what string) error {
		if err := unix.IoctlSetInt(int(root.Fd()), request, 0); err != nil && err != unix.EINVAL {
			return fmt.Errorf("%s %s: %w", what, dir, err)
		}
		return nil
	}
	thaw = func() {
		if err := call(fiThaw, "thaw"); err != nil {
			e.Error(err)
		}
	}
	freeze = func() {
		if err := call(fiFreeze, "freeze"); err != nil {
			e.Fatal(err)
		}
	}
	e.Cleanup(func() {
		thaw()
		_ = root.Close()
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			e.Errorf("unmount %s: %v", dir, err)
		}
	})
	return freeze, thaw
}

// B81: a process that the kernel cannot kill holds up nobody but its own stop,
// which says where it hangs; it ends by itself once the kernel lets go.
func TestB81UninterruptibleSleep(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	volume := filepath.Join(e.Dir, "volume")
	freeze, thaw := e.freezable(volume)
	c := command("writer", "while :; do echo x > /data/x; done")
	c.Mounts = []*cri.Mount{{HostPath: volume, ContainerPath: "/data"}}
	id := e.startContainer(pod, c, config)
	neighbour := e.startContainer(pod, command("neighbour", "exec sleep 1000"), config)
	freeze()
	pid := e.pid(id)
	e.eventually("the writer hangs", func() bool {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err == nil && strings.Contains(string(text), ") D ")
	})
	stopped := make(chan error, 1)
	began := time.Now()
	go func() {
		_, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 2})
		stopped <- err
	}()
	e.others(pod, neighbour, config)
	err := <-stopped
	e.refused("the stop", err, codes.DeadlineExceeded, id, fmt.Sprintf("pid %d", pid), "state D")
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("the stop took %v, for 2 s of grace", took)
	}
	e.others(pod, neighbour, config)
	if s := e.status(id); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the writer is %s while it hangs", s.GetState())
	}
	_, err = e.rt.StopPodSandbox(e.ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod})
	e.refused("the stop of its pod", err, codes.DeadlineExceeded, fmt.Sprintf("pid %d", pid))
	thaw()
	if s := e.exited(id); s.GetExitCode() != 137 {
		t.Errorf("exit code %d, want that of SIGKILL", s.GetExitCode())
	}
	e.removePod(pod)
	e.empty("removal")
}

// others are calls that have nothing to do with what hangs.
func (e *env) others(pod, neighbour string, config *cri.PodSandboxConfig) {
	e.Helper()
	began := time.Now()
	_, err1 := e.rt.Status(e.ctx, &cri.StatusRequest{Verbose: true})
	_, err2 := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{})
	_, err3 := e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{})
	_, err4 := e.rt.ListContainerStats(e.ctx, &cri.ListContainerStatsRequest{})
	_, err5 := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod})
	for _, err := range []error{err1, err2, err3, err4, err5} {
		if err != nil {
			e.Errorf("while another hangs: %v", err)
		}
	}
	if took := time.Since(began); took > 5*time.Second {
		e.Errorf("status and lists took %v while another hangs", took)
	}
	if out := e.exec(neighbour, "echo alive"); out != "alive\n" {
		e.Errorf("exec while another hangs: %q", out)
	}
	other := e.sandbox()
	e.removePod(e.run(other))
}

// A log directory hangs after the container was made: its output waits, and nothing
// else does. The log and berth why name the log; when it answers nothing is missing.
func TestLogThatHangsAfterTheCreate(t *testing.T) {
	e := start(t, node.Options{LogLevel: "info"})
	e.pull(images.Busybox)
	neighbours := e.sandbox()
	other := e.run(neighbours)
	neighbour := e.startContainer(other, command("neighbour", "exec sleep 1000"), neighbours)
	config := e.sandbox()
	config.LogDirectory = filepath.Join(e.Dir, "pod-logs")
	freeze, thaw := e.freezable(config.LogDirectory)
	pod := e.run(config)
	id := e.startContainer(pod, command("talker", "i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); sleep 0.02; done; exec sleep 1000"), config)
	e.eventually("it logs", func() bool { out, _ := e.logs(id); return out != "" })
	freeze()
	want := "the log " + e.status(id).GetLogPath() + " has not answered for 1"
	e.others(other, neighbour, neighbours)
	for end := time.Now().Add(leakcheck.Patience(30 * time.Second)); ; time.Sleep(100 * time.Millisecond) {
		out, code := e.berth("why", "--socket", e.Socket, id[:12])
		if code == 0 && strings.Contains(out, want) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("berth why: code %d: %s; want %q in it", code, out, want)
		}
	}
	if text := e.LogTail(100); !strings.Contains(text, want) {
		t.Errorf("the daemon's log does not say %q", want)
	}
	e.others(other, neighbour, neighbours)
	thaw()
	e.eventually("the log has every line", func() bool { out, _ := e.logs(id); return strings.Count(out, "line ") == 100 })
	e.removePod(pod)
	e.removePod(other)
}
