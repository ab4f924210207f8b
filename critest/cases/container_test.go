package cases

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// B69: the first status that says EXITED says OOMKilled too.
func TestB69OutOfMemoryIsSaidAtOnce(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	for i := range 20 {
		c := command(fmt.Sprintf("oom%d", i), "")
		c.Command = []string{"dd", "if=/dev/zero", "of=/dev/null", "bs=64M"}
		c.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: 15 << 20}
		s := e.exited(e.startContainer(pod, c, config))
		if s.GetReason() != "OOMKilled" || s.GetExitCode() != 137 {
			t.Errorf("run %d: reason %q, code %d at the first EXITED; want OOMKilled, 137", i, s.GetReason(), s.GetExitCode())
		}
	}
	killed := e.startContainer(pod, command("killed", "exec sleep 555"), config)
	e.kill("sleep 555")
	if s := e.exited(killed); s.GetReason() == "OOMKilled" || s.GetExitCode() != 137 {
		t.Errorf("a plain SIGKILL: reason %q, code %d; want 137 and no OOM", s.GetReason(), s.GetExitCode())
	}
}

// B79: a client that goes away during the grace period neither kills the
// container early nor takes the next stop's own grace away.
func TestB79CancelledStopKillsNothing(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	id := e.startContainer(pod, command("slow", "trap 'sleep 4; echo done; exit 0' TERM; echo ready; while :; do sleep 0.1; done"), config)
	e.said(id, "ready\n")
	ctx, cancel := context.WithTimeout(e.ctx, time.Second)
	defer cancel()
	_, err := e.rt.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 30})
	e.refused("a stop cancelled after 1 s", err, codes.DeadlineExceeded)
	time.Sleep(1500 * time.Millisecond)
	if s := e.status(id); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the container is %s 2.5 s after the stop began, want running until its own end", s.GetState())
	}
	if s := e.exited(id); s.GetExitCode() != 0 {
		t.Errorf("exit code %d, want its own 0", s.GetExitCode())
	}
	if out, _ := e.logs(id); out != "ready\ndone\n" {
		t.Errorf("it logged %q, want ready and done", out)
	}
	stubborn := e.startContainer(pod, command("stubborn", "trap '' TERM; echo ready; while :; do sleep 0.1; done"), config)
	e.said(stubborn, "ready\n")
	ctx, cancel = context.WithTimeout(e.ctx, 300*time.Millisecond)
	defer cancel()
	_, err = e.rt.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: stubborn, Timeout: 60})
	e.refused("a stop cancelled after 300 ms", err, codes.DeadlineExceeded)
	begin := time.Now()
	if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: stubborn, Timeout: 1}); err != nil {
		t.Errorf("a later, shorter stop: %v", err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("a later stop with 1 s of grace took %v", took)
	}
	if s := e.status(stubborn); s.GetState() != cri.ContainerState_CONTAINER_EXITED || s.GetExitCode() != 137 {
		t.Errorf("the stubborn one is %s with %d, want exited with 137", s.GetState(), s.GetExitCode())
	}
}

// B83: where the PID namespace is shared, a stop still ends every process of
// the container, and no other.
func TestB83StopEndsEveryProcessOfASharedNamespace(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	for i, mode := range []cri.NamespaceMode{cri.NamespaceMode_POD, cri.NamespaceMode_NODE} {
		config := pidMode(e.sandbox(), mode)
		pod := e.run(config)
		sibling := e.startContainer(pod, commandIn(mode, "sibling", "exec sleep 777"), config)
		id := e.startContainer(pod, commandIn(mode, "many", fmt.Sprintf("sleep 90%d1 & setsid sleep 90%d2 & exec sleep 90%d3", i, i, i)), config)
		e.eventually("three processes of the container", func() bool {
			return strings.Count(strings.Join(e.Processes(), "\n"), fmt.Sprintf("sleep 90%d", i)) == 3
		})
		if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 1}); err != nil {
			t.Errorf("%s: stop: %v", mode, err)
		}
		if left := strings.Join(e.Processes(), "\n"); strings.Contains(left, fmt.Sprintf("sleep 90%d", i)) {
			t.Errorf("%s: left after the stop:\n%s", mode, left)
		}
		if s := e.status(sibling); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
			t.Errorf("%s: the sibling is %s, want running", mode, s.GetState())
		}
	}
}

// B85: a sandbox that is stopped takes no container, and none is recorded.
func TestB85NoContainerInAStoppedSandbox(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	if _, err := e.rt.StopPodSandbox(e.ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod}); err != nil {
		t.Fatal(err)
	}
	_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: command("late", "true"), SandboxConfig: config})
	e.refused("create in a stopped sandbox", err, codes.FailedPrecondition, pod, "not ready")
	e.removePod(pod)
	e.empty("a refused create")

	shared := pidMode(e.sandbox(), cri.NamespaceMode_POD)
	pod = e.run(shared)
	killPause(e)
	e.eventually("the sandbox is not ready without its pause process", func() bool {
		s, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod})
		return err == nil && s.GetStatus().GetState() == cri.PodSandboxState_SANDBOX_NOTREADY
	})
	_, err = e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: command("late", "true"), SandboxConfig: shared})
	e.refused("create in a sandbox without its pause", err, codes.FailedPrecondition, pod)
}

// killPause kills the pod's one process, its pause.
func killPause(e *env) {
	e.Helper()
	if list := e.Processes(); len(list) != 1 {
		e.Fatalf("the pod has processes %q, want its pause alone", list)
	}
	e.kill("")
}

// kill kills the pods' process whose command line has this part, from outside.
func (e *env) kill(part string) {
	e.Helper()
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		for _, text := range e.Processes() {
			var pid int
			if _, err := fmt.Sscanf(text, "process %d", &pid); err != nil {
				e.Fatal(err)
			}
			if strings.Contains(text, part) {
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
					e.Fatalf("kill %s: %v", text, err)
				}
				return
			}
		}
	}
	e.Fatalf("no process %q in %q", part, e.Processes())
}

// B87: nested mounts keep their order by depth however they were sent, only
// descriptors 0 to 2 reach a container, and its working directory is a path of
// its own.
func TestB87MountOrderAndDescriptors(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	var mounts []*cri.Mount
	var targets []string
	for _, top := range []string{"/a", "/b", "/c", "/d", "/e", "/f"} {
		for depth, path := 0, top; depth < 5; depth, path = depth+1, path+"/n" {
			source := filepath.Join(e.Dir, "sources", strings.ReplaceAll(path, "/", "_"))
			if err := os.MkdirAll(filepath.Join(source, "n"), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(source, "name"), []byte(path+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
			mounts = append(mounts, &cri.Mount{ContainerPath: path, HostPath: source})
			targets = append(targets, path)
		}
	}
	script := "cat " + strings.Join(targets, "/name ") + "/name"
	for i := range 6 {
		rand.Shuffle(len(mounts), func(i, j int) { mounts[i], mounts[j] = mounts[j], mounts[i] })
		c := command(fmt.Sprintf("mounts%d", i), script)
		c.Mounts = mounts
		if got := e.output(pod, c, config); got != strings.Join(targets, "\n")+"\n" {
			t.Fatalf("shuffle %d: the mounts show %q", i, got)
		}
	}
	id := e.startContainer(pod, command("fds", "ls /proc/self/fd; sleep 1000"), config)
	inside := strings.Fields(e.exec(id, "ls /proc/self/fd"))
	if len(inside) != 4 { // the last is the folder that ls reads
		t.Errorf("an exec sees descriptors %v, want 0, 1, 2 and ls's own", inside)
	}
	e.said(id, "0\n1\n2\n3\n")
	for _, dir := range []string{"/proc/self/fd/7", "/proc/1/fd/8/x", "relative", "/a/../../proc/self/fd/9"} {
		c := command("cwd", "pwd; ls")
		c.WorkingDir = dir
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		e.refused("working directory "+dir, err, codes.InvalidArgument, "working_dir", dir)
	}
}

// B89: a process without root writes to /dev/stderr and to the streams of
// process 1, with and without a terminal, and from an exec.
func TestB89StreamsBelongToTheContainersUser(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	for _, tty := range []bool{false, true} {
		c := command(fmt.Sprintf("tty-%v", tty), "echo to-stderr >/dev/stderr && echo to-one >/proc/1/fd/1 && echo to-stdout >/dev/stdout; sleep 1000")
		c.Tty = tty
		c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1000}
		id := e.startContainer(pod, c, config)
		if out := e.exec(id, "id -u; echo seen >/proc/1/fd/1; echo here >/dev/stderr; echo there >/dev/stdout"); out != "1000\nthere\n" {
			t.Errorf("tty %v: exec says %q", tty, out)
		}
		for _, want := range []string{"to-stderr", "to-one", "to-stdout", "seen"} {
			e.eventually(fmt.Sprintf("tty %v: %q in the log", tty, want), func() bool {
				stdout, stderr := e.logs(id)
				return strings.Contains(stdout+stderr, want)
			})
		}
	}
}

// B105: the limit on open files is the configured one, whatever the daemon's own.
func TestB105OpenFileLimitIsTheConfigured(t *testing.T) {
	for _, daemon := range []string{"256:", "4096:", "20000:"} {
		t.Run("daemon"+strings.TrimSuffix(daemon, ":"), func(t *testing.T) {
			e := start(t, node.Options{
				Wrap:     []string{"prlimit", "--nofile=" + daemon},
				Settings: map[string]string{"runtime": "nofile_soft = 1024\nnofile_hard = 8192"},
			})
			e.pull(images.Busybox)
			config := e.sandbox()
			c := command("limits", "echo $(ulimit -Sn) $(ulimit -Hn); sleep 1000")
			id := e.startContainer(e.run(config), c, config)
			if got := e.exec(id, "echo $(ulimit -Sn) $(ulimit -Hn)"); got != "1024 8192\n" {
				t.Errorf("an exec has %q, want 1024 8192", got)
			}
			e.said(id, "1024 8192\n")
		})
	}
}
