package cases

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
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

// downed is a container that ends while the daemon is down, and how.
type downed struct {
	name   string
	code   int32
	reason string
	writer bool // logs until its end
	log    string
}

// downed starts the i-th container, of every kind in turns. All but the writers
// wait at the gate, a FIFO that nobody writes to yet.
func (e *env) downed(i int, own, node string, configs [2]*cri.PodSandboxConfig) (string, downed) {
	e.Helper()
	d := downed{name: fmt.Sprint("c", i), code: int32(1 + i%120), reason: "Error", log: "ready\nend\n"}
	pod, config, end := own, configs[0], fmt.Sprintf("echo end; exit %d", d.code)
	signal := map[int]int{1: 9, 2: 15, 3: 11}[i%10]
	switch {
	case i%10 == 0:
		d.code, d.reason, end = 137, "OOMKilled", "echo end; exec dd if=/dev/zero of=/dev/null bs=64M"
	case signal != 0: // an init would not die by its own signal: the PID namespace is the node's
		d.code, pod, config = int32(128+signal), node, configs[1]
		end = fmt.Sprintf("echo end; kill -%d $$; sleep 1000", signal)
	case i%10 == 4:
		d.code, d.reason, end = 0, "Completed", "echo end"
	}
	c := command(d.name, "echo ready; read x < /gate/gate; "+end)
	if i%10 == 5 {
		d.writer = true
		c.Command[2] = fmt.Sprintf("n=0; while [ ! -e /gate/open ]; do seq $n $((n+19)); n=$((n+20)); sleep 0.2; done; echo end $n; exit %d", d.code)
	}
	c.Linux.SecurityContext.NamespaceOptions.Pid = config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetPid()
	c.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: 15 << 20}
	c.Mounts = []*cri.Mount{{HostPath: filepath.Join(e.Dir, "gate"), ContainerPath: "/gate"}}
	return e.startContainer(pod, c, config), d
}

// openGate lets everybody through, and waits until nobody is left.
func (e *env) openGate(gate string) {
	e.Helper()
	put(e.T, filepath.Join(filepath.Dir(gate), "open"), "", 0o644)
	for end := time.Now().Add(leakcheck.Patience(90 * time.Second)); ; time.Sleep(100 * time.Millisecond) {
		fd, err := unix.Open(gate, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err == nil {
			time.Sleep(50 * time.Millisecond) // who opens the gate meanwhile gets through with the others
			_ = unix.Close(fd)
		} else if !errors.Is(err, unix.ENXIO) { // nobody is at the gate
			e.Fatal(err)
		}
		left := strings.Join(e.Processes(), "\n")
		if !strings.Contains(left, "/gate/") && !strings.Contains(left, "dd if=") {
			return
		}
		if time.Now().After(end) {
			e.Fatalf("still running:\n%s", left)
		}
	}
}

// B67: what ends while the daemon is down (by itself, by a signal, out of
// memory) keeps its exit code, its reason and its time; logs go on without the
// daemon, and what runs on is found again. BERTH_DOWN says how many; 200 is the
// long form.
func TestB67ExitsWhileTheDaemonIsDown(t *testing.T) {
	count := 40
	if text := os.Getenv("BERTH_DOWN"); text != "" {
		var err error
		if count, err = strconv.Atoi(text); err != nil {
			t.Fatalf("BERTH_DOWN: %v", err)
		}
	}
	e := startFor(t, node.Options{LogLevel: "info"}, 10*time.Minute)
	e.pull(images.Busybox)
	gate := filepath.Join(e.Dir, "gate", "gate")
	if err := os.Mkdir(filepath.Dir(gate), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(gate, 0o644); err != nil {
		t.Fatal(err)
	}
	configs := [2]*cri.PodSandboxConfig{e.sandbox(), pidMode(e.sandbox(), cri.NamespaceMode_NODE)}
	own, host := e.run(configs[0]), e.run(configs[1])
	all := map[string]downed{}
	var mu sync.Mutex
	inParallel(count, func(i int) {
		id, d := e.downed(i, own, host, configs)
		mu.Lock()
		defer mu.Unlock()
		all[id] = d
	})
	survivor := e.startContainer(own, command("survivor", "exec sleep 1000"), configs[0])
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	down := time.Now()
	time.Sleep(2 * time.Second) // the writers write
	e.openGate(gate)
	time.Sleep(leakcheck.Patience(2 * time.Second)) // so that the times differ, also of who is long in dying
	up := time.Now()
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	for id, d := range all {
		e.ended(id, d, down, up)
	}
	if s := e.status(survivor); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the survivor is %s, want running", s.GetState())
	}
	if out := e.exec(survivor, "echo alive"); out != "alive\n" {
		t.Errorf("exec in the survivor: %q", out)
	}
	t.Logf("%d containers ended within %v without a daemon", count, up.Sub(down).Round(time.Millisecond))
}

// ended checks the first status after the daemon's return.
func (e *env) ended(id string, d downed, down, up time.Time) {
	e.Helper()
	s := e.status(id)
	if s.GetState() != cri.ContainerState_CONTAINER_EXITED || s.GetExitCode() != d.code || s.GetReason() != d.reason {
		e.Errorf("container %s is %s with code %d (%s %s), want exited with %d (%s)", d.name, s.GetState(), s.GetExitCode(), s.GetReason(), s.GetMessage(), d.code, d.reason)
	}
	if at := time.Unix(0, s.GetFinishedAt()); at.After(up) || at.Before(down) || s.GetStartedAt() >= s.GetFinishedAt() {
		e.Errorf("container %s finished at %v; it ended while the daemon was down, %v to %v", d.name, at, down, up)
	}
	out, _ := e.logs(id)
	if d.writer {
		lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
		n := len(lines) - 1
		d.log = ""
		for i := range n {
			d.log += fmt.Sprintln(i)
		}
		d.log += fmt.Sprintln("end", n)
		if n < 100 {
			e.Errorf("container %s logged %d lines in at least 2 s without a daemon: %q", d.name, n, out)
		}
	}
	if out != d.log {
		e.Errorf("container %s logged %.200q, want %.200q", d.name, out, d.log)
	}
}

// A daemon that starts tells everything or nothing: whoever asks meanwhile gets
// Unavailable or the whole list, with the states that are true.
func TestListsDuringAStart(t *testing.T) {
	e := start(t, node.Options{LogLevel: "info"})
	e.pull(images.Busybox)
	const pods = 12
	inParallel(pods, func(i int) {
		config := e.podOf(2 * i) // on the node's network
		e.startContainer(e.run(config), command("c", "exec sleep 1000"), config)
	})
	whole := func() error {
		ready, err := e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}}})
		if err == nil && len(ready.GetItems()) != pods {
			return fmt.Errorf("%d ready pods, want %d", len(ready.GetItems()), pods)
		}
		if err != nil {
			return err
		}
		running, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}}})
		if err == nil && len(running.GetContainers()) != pods {
			return fmt.Errorf("%d running containers, want %d", len(running.GetContainers()), pods)
		}
		return err
	}
	for range 4 {
		if err := e.Kill(); err != nil {
			t.Fatal(err)
		}
		up, refused, answered := make(chan error, 1), 0, 0
		go func() { up <- e.Launch(e.ctx) }()
		for over := false; !over || answered == 0; time.Sleep(200 * time.Microsecond) {
			switch err := whole(); status.Code(err) {
			case codes.OK:
				answered++
			case codes.Unavailable:
				refused++
			default:
				t.Fatalf("after %d refusals and %d whole lists: %v", refused, answered, err)
			}
			select {
			case err := <-up:
				if err != nil {
					t.Fatal(err)
				}
				over = true
			default:
			}
		}
		if refused == 0 {
			t.Error("nobody asked before the daemon was there: nothing was seen")
		}
	}
}
