package runtime

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	goruntime "runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox/leakcheck"
)

func (n *node) stop(ctx context.Context, id string, seconds int64) error {
	_, err := n.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: seconds})
	return err
}

// A stop that its caller gives up goes on with the grace it was given; a later
// one with less grace shortens it, and both get the same end.
func TestStopIsCancelledShortenedAndJoined(t *testing.T) {
	n := newNode(t)
	id := n.runContainer(n.runPod(n.hostPod("web")), "c", stubborn)
	n.waitFile("ready")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err := n.stop(ctx, id, 600)
	n.refused("stop", err, codes.DeadlineExceeded, "stop container "+id, "still at step signal and wait")
	if st := n.status(id); st.GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Fatalf("a cancelled stop left %v", st)
	}
	if got := n.exec(id, "echo alive"); got != "alive" {
		t.Errorf("exec while it stops: %q", got)
	}
	began := time.Now()
	var wg sync.WaitGroup
	for _, grace := range []int64{300, 300, 1, 100} {
		wg.Go(func() {
			if err := n.stop(t.Context(), id, grace); err != nil {
				t.Errorf("stop with %d: %v", grace, err)
			}
		})
	}
	wg.Wait()
	if took := time.Since(began); took < 900*time.Millisecond || took > 15*time.Second {
		t.Errorf("the shortened stop took %v", took)
	}
	if st := n.status(id); st.GetExitCode() != 137 || st.GetState() != cri.ContainerState_CONTAINER_EXITED {
		t.Errorf("status %v", st)
	}
	if err := n.stop(t.Context(), id, 10); err != nil {
		t.Errorf("stop of a stopped container: %v", err)
	}
}

// The signal is the config's or the image's, and grace is only an upper bound.
func TestStopSignals(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	for signal, want := range map[cri.Signal]int32{cri.Signal_SIGNAL_RUNTIME_DEFAULT: 7, cri.Signal_SIGNAL_SIGUSR1: 8} {
		request := n.container(pod, signal.String(), "trap 'exit 8' USR1; echo > /share/ready; "+forever)
		request.Config.StopSignal = signal
		id := n.create(request)
		n.start(id)
		n.waitFile("ready")
		eventually(t, "both traps", func() bool { return n.exec(id, "grep -c SigCgt /proc/1/status") == "1" })
		time.Sleep(50 * time.Millisecond)
		began := time.Now()
		must(t, n.stop(t.Context(), id, 60))
		if st := n.status(id); st.GetExitCode() != want || time.Since(began) > 30*time.Second {
			t.Errorf("%v: %v after %v", signal, st, time.Since(began))
		}
		must(t, os.Remove(n.shareFile("ready")))
	}
	created := n.create(n.container(pod, "created", forever))
	must(t, n.stop(t.Context(), created, 60))
	if st := n.status(created); st.GetState() != cri.ContainerState_CONTAINER_EXITED || st.GetExitCode() != 137 {
		t.Errorf("a container that never ran: %v", st)
	}
	n.refused("negative grace", n.stop(t.Context(), created, -1), codes.InvalidArgument, "timeout -1")
}

func TestRemoveContainerWhateverItsState(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	before := n.left()
	created := n.create(n.container(pod, "created", forever))
	running := n.runContainer(pod, "running", stubborn)
	ended := n.runContainer(pod, "ended", "exit 2")
	n.exited(ended)
	stopping := n.runContainer(pod, "stopping", stubborn)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	n.refused("stop", n.stop(ctx, stopping, 600), codes.Canceled)
	var wg sync.WaitGroup
	for _, id := range []string{created, running, ended, stopping, running, stopping, "nosuch", ""} {
		wg.Go(func() { n.removeContainerOf(id) })
	}
	wg.Wait()
	n.same(before, "removal")
	for _, id := range []string{running, "nosuch", ""} {
		if err := n.stop(t.Context(), id, 1); err != nil {
			t.Errorf("stop of unknown %q: %v", id, err)
		}
		_, err := n.ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: id})
		n.refused("status", err, codes.NotFound)
		_, err = n.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: id})
		n.refused("start", err, codes.NotFound)
	}
	if len(n.containers()) != 0 || n.podState(pod) != cri.PodSandboxState_SANDBOX_READY {
		t.Errorf("containers %q, pod %v", n.containers(), n.podState(pod))
	}
}

// A removal that fails can be repeated, and shows nothing half removed as well.
func TestRemovalThatFailsIsRepeated(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	id := n.runContainer(pod, "c", forever)
	mend := n.tell("fail-delete")
	_, err := n.RemoveContainer(t.Context(), &cri.RemoveContainerRequest{ContainerId: id})
	n.refused("remove", err, codes.Unknown, "fail-delete was told to", id)
	if st := n.status(id); st.GetState() != cri.ContainerState_CONTAINER_EXITED {
		t.Errorf("status %v", st)
	}
	_, err = n.RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: pod})
	n.refused("remove the pod", err, codes.Unknown, "fail-delete was told to", id)
	mend()
	n.removePod(pod)
	n.empty("removal")
}

// A caller of a removal that hangs learns where; it goes on without it.
func TestRemovalOutlivesItsCaller(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.bridgePod("web"))
	id := n.runContainer(pod, "c", forever)
	release := n.tell("hang-delete")
	ctx, cancel := context.WithTimeout(t.Context(), leakcheck.Patience(500*time.Millisecond))
	defer cancel()
	_, err := n.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod})
	n.refused("remove", err, codes.DeadlineExceeded, "RemovePodSandbox", "still at step delete in the OCI runtime")
	release()
	n.removeContainerOf(id)
	n.removePod(pod)
	n.empty("removal")
}

// A daemon that ends does not wait for graces, nor does it cut them short.
func TestRestartWithinAGracePeriod(t *testing.T) {
	n := newNode(t)
	id := n.runContainer(n.runPod(n.hostPod("web")), "c", stubborn)
	n.waitFile("ready")
	ended := make(chan error, 1)
	s := n.Service
	go func() {
		_, err := s.StopContainer(context.Background(), &cri.StopContainerRequest{ContainerId: id, Timeout: 600})
		ended <- err
	}()
	eventually(t, "the stop has begun", func() bool {
		return len(s.operations.Running()) == 1
	})
	began := time.Now()
	n.restart(nil)
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("the restart took %v", took)
	}
	n.refused("stop", <-ended, codes.Unavailable, "stop container "+id, "the daemon is stopping")
	if st := n.status(id); st.GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("status %v", st)
	}
	must(t, n.stop(t.Context(), id, 0))
	if st := n.status(id); st.GetExitCode() != 137 {
		t.Errorf("status %v", st)
	}
}

// What a container leaves running in a PID namespace that is not its own is
// killed when its init ends.
func TestProcessesEndWithTheirContainer(t *testing.T) {
	n := newNode(t)
	for name, r := range map[string]*cri.RunPodSandboxRequest{"node": n.hostPod("node"), "pod": sharedPIDs(n.hostPod("pod"))} {
		if name == "node" {
			nsOptions(r).Pid = cri.NamespaceMode_NODE
		}
		id := n.runContainer(n.runPod(r), "c", "setsid sleep 600 & sleep 0.1; exit 6")
		if st := n.exited(id); st.GetExitCode() != 6 {
			t.Errorf("%s: %v", name, st)
		}
		eventually(t, "its other process is gone", func() bool { return n.processes(id) == "" })
	}
}

// processes lists what is in a container's cgroup.
func (n *node) processes(id string) string {
	var out string
	for _, root := range cgroupRoots(n.t) {
		b, _ := os.ReadFile(root + n.parent + "/" + id + "/cgroup.procs")
		out += string(b)
	}
	return out
}

// A stop of a pod that failed behind the end of its pause goes on where it failed:
// nothing waits for an end that was forgotten.
func TestStopGoesOnBehindTheEndOfPause(t *testing.T) {
	n := newNode(t)
	config := n.hostPod("web")
	config.Config.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
	pod := n.runPod(config)
	held := filepath.Join(n.bundleDir(pod), "held")
	if err := os.Mkdir(held, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", held, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	stop := func() error {
		_, err := n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: pod})
		return err
	}
	if err := stop(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("a stop that cannot remove the bundle: %v", err)
	}
	if err := syscall.Unmount(held, 0); err != nil {
		t.Fatal(err)
	}
	if err := stop(); err != nil {
		t.Errorf("the stop again: %v", err)
	}
}

// What a burst has grown goes back to the node when no operation has ended for a while.
func TestMemoryIsGivenBack(t *testing.T) {
	n := newNode(t)
	forced := func() uint32 {
		var m goruntime.MemStats
		goruntime.ReadMemStats(&m)
		return m.NumForcedGC
	}
	pod := n.runPod(n.hostPod("web"))
	before := forced()
	eventually(t, "memory is given back", func() bool { return forced() > before })
	_, err := n.RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: pod})
	must(t, err)
}

// A disk that was read-only as the addresses were given back has kept what libcni
// cached; it goes with the pod.
func TestCacheOfTheNetworkGoesWithThePod(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.bridgePod("web"))
	files, err := filepath.Glob(filepath.Join(n.cfg.Root, "cni", "results", "*-"+pod+"-*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("cached: %q, %v", files, err)
	}
	cached, err := os.ReadFile(files[0])
	must(t, err)
	_, err = n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	must(t, os.WriteFile(files[0], cached, 0o600))
	_, err = n.RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	if _, err := os.Lstat(files[0]); err == nil {
		t.Errorf("%s is left", files[0])
	}
}
