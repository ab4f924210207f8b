package cases

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/sandbox/leakcheck"
	"berth/sandbox/outside/hung"
)

// hangs mounts a filesystem that can be told to answer no more.
func (e *env) hangs(name string) (*hung.FS, string) {
	e.Helper()
	dir := filepath.Join(e.Dir, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		e.Fatal(err)
	}
	fs, err := hung.Mount(dir)
	if errors.Is(err, hung.ErrNoFUSE) {
		e.Skipf("skipped: %v", err)
	}
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() {
		if err := fs.Release(); err != nil {
			e.Error(err)
		}
	})
	return fs, dir
}

// A volume, a device, a log directory or a seccomp profile on a filesystem that
// answers no more fails what needs it, by its name and in its time. Nobody else
// waits, retries do not pile up, and the daemon can be stopped and started although
// SIGKILL does not reach the process that hangs.
func TestHungHostPaths(t *testing.T) {
	e := start(t, node.Options{Settings: map[string]string{"runtime": `host_path_timeout = "2s"`}})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	neighbour := e.startContainer(pod, command("neighbour", "exec sleep 1000"), config)
	fs, dir := e.hangs("hung")
	fs.Hang()

	file := filepath.Join(dir, hung.File)
	volume, device, profile := command("volume", "true"), command("device", "true"), command("profile", "true")
	volume.Mounts = []*cri.Mount{{HostPath: file, ContainerPath: "/data"}}
	device.Devices = []*cri.Device{{HostPath: filepath.Join(dir, "device"), ContainerPath: "/dev/x", Permissions: "r"}}
	profile.Linux.SecurityContext = &cri.LinuxContainerSecurityContext{Seccomp: &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: filepath.Join(dir, "profile")}}
	for field, c := range map[string]*cri.ContainerConfig{"mounts[0].host_path": volume, "devices[0].host_path": device, "profile": profile} {
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		e.refused(field, err, codes.DeadlineExceeded, "resolve users, devices, mounts", field, dir, "does not answer", "(berth-monitor) in state")
	}
	logs := e.sandbox()
	logs.LogDirectory = filepath.Join(dir, "logs")
	_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: logs})
	e.refused("log directory", err, codes.DeadlineExceeded, "config.log_directory", logs.LogDirectory, "does not answer")
	e.others(pod, neighbour, config)

	again := make(chan error, 1)
	go func() {
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: volume, SandboxConfig: config})
		again <- err
	}()
	e.eventually("berth why names the path", func() bool {
		out, code := e.berth("why", "--socket", e.Socket, config.GetMetadata().GetName())
		return code == 0 && strings.Contains(out, "CreateContainer") && strings.Contains(out, "path "+file)
	})
	e.refused("the retry", <-again, codes.DeadlineExceeded, file, "does not answer")
	if n := lookers(t, e); n > 6 {
		t.Errorf("%d processes look at paths", n)
	}

	e.stopsInTime()
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	e.others(pod, neighbour, config)
	fs.Go()
	e.exited(e.startContainer(pod, volume, config))
}

// lookers counts the processes that look at paths for the daemon.
func lookers(t *testing.T, e *env) (n int) {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, stat := range stats {
		line, err := os.ReadFile(filepath.Join(filepath.Dir(stat), "cmdline"))
		if err != nil || string(line) != filepath.Join(e.Bin, "berth-monitor")+"\x00look\x00" {
			continue
		}
		n++
	}
	return n
}

// A container whose volume hangs when the OCI runtime mounts it: the create ends
// with an error that says where it hangs, and once it lets go the pod can be removed.
func TestHangInsideTheOCIRuntime(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	fs, dir := e.hangs("hung")
	c := command("reader", "exec cat /data/file")
	c.Mounts = []*cri.Mount{{HostPath: dir, ContainerPath: "/data"}}
	id := e.create(pod, c, config)
	fs.Hang()
	if _, err := e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	<-fs.Held()
	began := time.Now()
	_, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 0})
	e.refused("the stop", err, codes.DeadlineExceeded, id, "state D")
	if took := time.Since(began); took > leakcheck.Patience(15*time.Second) {
		t.Errorf("the stop took %v", took)
	}
	_, err = e.rt.RemovePodSandbox(e.ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod})
	e.refused("the removal of its pod", err, codes.DeadlineExceeded, "state D")
	e.removePod(e.run(e.sandbox()))
	if out, code := e.berth("why", "--socket", e.Socket, id[:12]); code != 0 || !strings.Contains(out, "StopContainer failed") || !strings.Contains(out, "state D") {
		t.Errorf("berth why of the container: code %d: %s", code, out)
	}
	fs.Go()
	e.eventually("the pod can be removed", func() bool {
		_, err := e.rt.RemovePodSandbox(e.ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod})
		return err == nil
	})
	e.empty("the removal")
}

// stopsInTime ends the daemon by SIGTERM, whatever hangs.
func (e *env) stopsInTime() {
	e.Helper()
	began := time.Now()
	if err := e.Terminate(); err != nil {
		e.Fatal(err)
	}
	if took := time.Since(began); took > leakcheck.Patience(10*time.Second) {
		e.Errorf("the daemon took %v to stop", took)
	}
}
