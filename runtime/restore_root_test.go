package runtime

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox"
	"berth/sandbox/namespaces"
)

// A new daemon finds pods and containers as they are: running, created, ended
// before and ended meanwhile.
func TestRestartFindsTheTruth(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(sharedPIDs(n.bridgePod("web")))
	running := n.runContainer(pod, "running", forever)
	created := n.create(n.container(pod, "created", forever))
	before := n.runContainer(pod, "before", "exit 3")
	n.exited(before)
	meanwhile := n.runContainer(pod, "meanwhile", "while [ ! -e /share/go ]; do sleep 0.02; done; echo bye; exit 9")
	was := map[string]*cri.ContainerStatus{}
	for _, id := range []string{running, created, before, meanwhile} {
		was[id] = n.status(id)
	}
	address := n.leased()
	n.restart(func() {
		must(t, os.WriteFile(n.shareFile("go"), nil, 0o600))
		eventually(t, "exit record", func() bool {
			_, err := os.Stat(filepath.Join(n.cfg.State, "containers", meanwhile, "exit.json"))
			return err == nil
		})
	})
	for id, st := range was {
		now := n.status(id)
		if id != meanwhile && now.String() != st.String() {
			t.Errorf("status was %v and is %v", st, now)
		}
	}
	if st := n.status(meanwhile); st.GetExitCode() != 9 || st.GetReason() != "Error" || st.GetFinishedAt() < st.GetStartedAt() {
		t.Errorf("the one that ended meanwhile: %v", st)
	}
	if n.podState(pod) != cri.PodSandboxState_SANDBOX_READY || len(n.leased()) != 1 || n.leased()[0] != address[0] {
		t.Errorf("pod %v, leases %q", n.podState(pod), n.leased())
	}
	n.start(created)
	if got := n.exec(created, "echo hello"); got != "hello" {
		t.Errorf("exec after the restart: %q", got)
	}
	for _, id := range []string{running, created} {
		_, err := n.StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: id, Timeout: 20})
		must(t, err)
		if st := n.status(id); st.GetExitCode() != 7 {
			t.Errorf("stopped: %v", st)
		}
	}
	n.removePod(pod)
	n.empty("removal")
}

// forget changes records as a crash at some step leaves them.
func (n *node) forget(pod string, sb func(*sandbox.Sandbox), c func(*sandbox.Container)) {
	n.t.Helper()
	if sb != nil {
		_, err := n.Records.Sandboxes.Update(pod, sb)
		must(n.t, err)
	}
	for _, r := range n.Records.ContainersOf(pod) {
		if c != nil {
			_, err := n.Records.Containers.Update(r.ID, c)
			must(n.t, err)
		}
	}
}

// A daemon that ended within RunPodSandbox or CreateContainer, before the step
// was recorded, leaves nothing; the request can be repeated.
func TestRestartRemovesWhatIsHalfMade(t *testing.T) {
	n := newNode(t)
	for name, tc := range map[string]struct {
		sb   func(*sandbox.Sandbox)
		c    func(*sandbox.Container)
		pods int
	}{
		"pod":   {sb: func(sb *sandbox.Sandbox) { sb.ReadyAt = 0 }},
		"pause": {sb: func(sb *sandbox.Sandbox) { sb.ReadyAt, sb.Pause = 0, nil }},
		"container": {c: func(c *sandbox.Container) { c.MadeAt, c.StartedAt, c.Process = 0, 0, nil },
			pods: 1},
	} {
		request := sharedPIDs(n.bridgePod("web"))
		pod := n.runPod(request)
		if tc.c != nil {
			n.create(n.container(pod, "created", forever))
			n.runContainer(pod, "running", stubborn)
		}
		n.forget(pod, tc.sb, tc.c)
		n.restart(nil)
		if p := n.pods(); len(p) != tc.pods || len(n.containers()) != 0 || len(n.Records.Containers.List()) != 0 {
			t.Errorf("%s: pods %q, containers %v", name, p, n.Records.Containers.List())
		}
		if tc.pods == 0 {
			n.empty(name)
		}
		pod = n.runPod(request)
		n.runContainer(pod, "running", forever)
		n.removePod(pod)
		n.empty(name + ", repeated")
	}
}

// Between runc's start and the record of it: the container runs, and that is
// told, also if it has ended since. One that was not started stays so.
func TestRestartFindsAStartThatWasNotRecorded(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	created := n.create(n.container(pod, "created", forever))
	running := n.runContainer(pod, "running", forever)
	ended := n.runContainer(pod, "ended", "exit 4")
	n.exited(ended)
	n.forget(pod, nil, func(c *sandbox.Container) { c.StartedAt, c.FinishedAt, c.ExitCode, c.Reason = 0, 0, 0, "" })
	n.restart(nil)
	if st := n.status(created); st.GetState() != cri.ContainerState_CONTAINER_CREATED || st.GetStartedAt() != 0 {
		t.Errorf("created: %v", st)
	}
	if st := n.status(running); st.GetState() != cri.ContainerState_CONTAINER_RUNNING || st.GetStartedAt() == 0 {
		t.Errorf("running: %v", st)
	}
	if st := n.exited(ended); st.GetExitCode() != 4 || st.GetStartedAt() == 0 {
		t.Errorf("ended: %v", st)
	}
	n.start(created)
}

// A record that cannot be read names nothing any more, so what it named goes: of a
// container that alone, of a pod all that is in it.
func TestRestartWithAnUnreadableRecord(t *testing.T) {
	n := newNode(t)
	spoil := func(path string) func() {
		return func() { must(t, os.WriteFile(filepath.Join(n.cfg.Root, path), []byte("{"), 0o600)) }
	}
	pod := n.runPod(n.hostPod("web"))
	lost := n.runContainer(pod, "lost", forever)
	kept := n.runContainer(pod, "kept", forever)
	n.restart(spoil("containers/" + lost + "/container.json"))
	if got := n.containers(); len(got) != 1 || got[0] != kept {
		t.Errorf("containers %q", got)
	}
	if _, over := n.Handlers["runc"].Exited(kept); over {
		t.Error("the other container has ended")
	}
	eventually(t, "the lost container's things are gone", func() bool { return !strings.Contains(strings.Join(n.left(), " "), lost) })
	if moved, _ := filepath.Glob(n.cfg.Root + "/quarantine/*" + lost); len(moved) != 1 {
		t.Errorf("quarantine: %q", moved)
	}
	n.restart(spoil("sandboxes/" + pod + "/sandbox.json"))
	if len(n.pods()) != 0 || len(n.containers()) != 0 {
		t.Errorf("pods %q, containers %q", n.pods(), n.containers())
	}
	n.empty("removal")
	n.removePod(n.runPod(n.hostPod("web")))
}

// What no record names goes at a start.
func TestRestartSweeps(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(sharedPIDs(n.bridgePod("web")))
	c := n.runContainer(pod, "c", forever)
	before := n.left()
	id := newID()
	n.restart(func() {
		must(t, namespaces.Pin(namespaces.Spec{Dir: n.namespaceDir(id), Net: true, IPC: true, UTS: true}))
		must(t, namespaces.MountShm(n.shmPath(id), namespaces.Shm{Size: 1 << 20}))
		must(t, os.MkdirAll(n.rootfsDir(id), 0o700))
		must(t, os.WriteFile(n.bundleDir(id)+"/config.json", []byte("{}"), 0o600))
		must(t, os.MkdirAll(n.cfg.Root+"/sandboxes/"+id, 0o700))
		must(t, os.MkdirAll(n.cfg.Root+"/containers/"+id+"/upper", 0o700))
	})
	n.same(before, "the restart")
	if got := n.exec(c, "echo alive"); got != "alive" {
		t.Errorf("the container says %q", got)
	}
}

// After a reboot nothing runs: /run is empty and the boot id another. Records
// still give the address back, once.
func TestAfterAReboot(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(sharedPIDs(n.bridgePod("web")))
	c := n.runContainer(pod, "c", forever)
	ended := n.runContainer(pod, "ended", "exit 5")
	half := n.create(n.container(pod, "half", forever))
	n.exited(ended)
	n.reboot(pod, func() {
		_, err := n.Records.Containers.Update(half, func(c *sandbox.Container) { c.MadeAt = 0 })
		must(t, err)
	})
	if n.podState(pod) != cri.PodSandboxState_SANDBOX_NOTREADY {
		t.Errorf("pod is %v", n.podState(pod))
	}
	if st := n.status(c); st.GetState() != cri.ContainerState_CONTAINER_EXITED || st.GetExitCode() != 255 || st.GetReason() != "Unknown" ||
		!strings.Contains(st.GetMessage(), "restarted") || time.Since(time.Unix(0, st.GetFinishedAt())) > time.Minute {
		t.Errorf("container that ran: %v", st)
	}
	if st := n.status(ended); st.GetExitCode() != 5 {
		t.Errorf("container that had ended: %v", st)
	}
	_, err := n.ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: half})
	n.refused("status of half a container", err, codes.NotFound)
	if len(n.leased()) != 0 {
		t.Errorf("leases %q", n.leased())
	}
	_, err = n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	n.removePod(pod)
	n.empty("removal")
}

// reboot kills all that runs, empties the state directory, and gives every
// record another boot's id.
func (n *node) reboot(pod string, more func()) {
	n.t.Helper()
	rt := n.Handlers["runc"]
	ids := []string{pod}
	for _, c := range n.Records.ContainersOf(pod) {
		ids = append(ids, c.ID)
	}
	saved := map[string]*sandbox.Container{}
	for _, id := range ids[1:] {
		saved[id], _ = n.Records.Containers.Get(id)
	}
	for i := range ids {
		must(n.t, rt.Delete(n.t.Context(), ids[len(ids)-1-i]))
	}
	earlier := func(boot *string) { *boot = fmt.Sprintf("not %s", n.bootID) }
	n.forget(pod, func(sb *sandbox.Sandbox) { sb.StoppedAt = 0; earlier(&sb.BootID) }, nil)
	for id, c := range saved {
		_, err := n.Records.Containers.Update(id, func(r *sandbox.Container) { *r = *c; earlier(&r.BootID) })
		must(n.t, err)
	}
	more()
	n.restart(func() {
		for _, m := range n.mounts(n.cfg.State) {
			must(n.t, unmount(m))
		}
		for _, sub := range []string{"containers", "sandboxes", "namespaces", "runc"} {
			must(n.t, os.RemoveAll(filepath.Join(n.cfg.State, sub)))
		}
	})
}
