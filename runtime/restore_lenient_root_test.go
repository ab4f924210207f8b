package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
)

// endMonitor kills the monitor, and with it what it knows.
func (n *node) endMonitor(pid int) {
	n.t.Helper()
	must(n.t, syscall.Kill(pid, syscall.SIGKILL))
	eventually(n.t, "the monitor has ended", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || strings.Contains(string(b), ") Z ")
	})
}

// A pod whose record cannot be read goes whole: its address, its namespaces, the
// cgroup berth made for it, its pause and its containers. Others are as they were.
func TestQuarantinedPodGoesWhole(t *testing.T) {
	n := newNode(t)
	other := n.runPod(sharedPIDs(n.bridgePod("other")))
	kept := n.runContainer(other, "kept", forever)
	before := n.left()
	request := sharedPIDs(n.bridgePod("lost"))
	request.Config.Linux.CgroupParent = ""
	pod := n.runPod(request)
	c := n.runContainer(pod, "c", stubborn)
	created := n.create(n.container(pod, "created", forever))
	n.restart(func() {
		must(t, os.WriteFile(filepath.Join(n.cfg.Root, "sandboxes", pod, "sandbox.json"), []byte("{"), 0o600))
	})
	if p := n.pods(); len(p) != 1 || p[0] != other {
		t.Errorf("pods %q", p)
	}
	if got := n.containers(); len(got) != 1 || got[0] != kept {
		t.Errorf("containers %q, want only %s", got, kept)
	}
	n.same(before, "the restart")
	for _, root := range cgroupRoots(t) {
		for _, id := range []string{c, created, ""} {
			if _, err := os.Stat(filepath.Join(root, defaultCgroup, pod, id)); err == nil {
				t.Errorf("cgroup %s%s/%s/%s is left", root, defaultCgroup, pod, id)
			}
		}
	}
	if i := n.beginning.info(); len(i.Quarantined) != 1 || !strings.HasSuffix(i.Quarantined[0], pod) || i.Trouble != 0 {
		t.Errorf("restore info %+v", i)
	}
	if got := n.exec(kept, "echo alive"); got != "alive" {
		t.Errorf("the other container says %q", got)
	}
	n.removePod(n.runPod(n.bridgePod("lost")))
}

// faulty is a runtime that cannot be asked about one container for a while.
type faulty struct {
	oci.Runtime
	fail *atomic.Value // the container's id
}

func (f faulty) Restore(ctx context.Context, h oci.Handle) (oci.State, error) {
	if f.fail.Load() == h.ID {
		return oci.State{}, errors.New("no answer")
	}
	return f.Runtime.Restore(ctx, h)
}

// One container that cannot be adopted keeps nothing else from going on; it stays
// as it was, is shown, and adopted later, with the exit it had meanwhile.
func TestRestartGoesOnPastOneContainer(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	bad := n.runContainer(pod, "bad", "while [ ! -e /share/go ]; do sleep 0.02; done; exit 5")
	good := n.runContainer(pod, "good", "while [ ! -e /share/go ]; do sleep 0.02; done; exit 6")
	fail := new(atomic.Value)
	fail.Store(bad)
	n.wrap = func(rt oci.Runtime) oci.Runtime { return faulty{rt, fail} }
	n.restart(func() {
		must(t, os.WriteFile(n.shareFile("go"), nil, 0o600))
		for _, id := range []string{bad, good} {
			eventually(t, "exit record", func() bool {
				_, err := os.Stat(filepath.Join(n.cfg.State, "containers", id, "exit.json"))
				return err == nil
			})
		}
	})
	if st := n.status(good); st.GetExitCode() != 6 {
		t.Errorf("the other container: %v", st)
	}
	if st := n.status(bad); st.GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the one that could not be asked about: %v", st)
	}
	i := n.beginning.info()
	if len(i.Unadopted) != 1 || i.Unadopted[0] != bad || i.Trouble != 1 || !strings.Contains(i.Troubles[0], "no answer") || !strings.Contains(i.Troubles[0], bad) {
		t.Errorf("restore info %+v", i)
	}
	fail.Store("")
	n.adoptAgain(t.Context())
	if st := n.status(bad); st.GetState() != cri.ContainerState_CONTAINER_EXITED || st.GetExitCode() != 5 {
		t.Errorf("adopted later: %v", st)
	}
	if i := n.beginning.info(); len(i.Unadopted) != 0 {
		t.Errorf("restore info %+v", i)
	}
}

// What is written beside containers may be lost or unreadable, whether they live
// or have ended, and with the monitor gone too. Each is settled by itself.
func TestRestartWithBrokenBundles(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	ids := map[string]string{}
	for _, name := range []string{"bundle gone", "notes gone", "exit unreadable", "exit no file", "whole"} {
		ids[name] = n.runContainer(pod, strings.ReplaceAll(name, " ", "-"), forever)
	}
	in := func(name, file string) string { return filepath.Join(n.bundleDir(ids[name]), file) }
	monitor, ends := n.client.MonitorPID(), []string{"exit unreadable", "exit no file"}
	var pids []int
	for _, name := range ends {
		c, err := n.Records.Containers.Get(ids[name])
		must(t, err)
		pids = append(pids, c.Process.PID)
	}
	n.restart(func() {
		n.endMonitor(monitor)
		for _, file := range []string{"config.json", "monitor.json"} {
			must(t, os.Remove(in("bundle gone", file)))
		}
		must(t, os.Remove(in("notes gone", "monitor.json")))
		must(t, os.WriteFile(in("exit unreadable", "exit.json"), []byte("{"), 0o600))
		must(t, os.Mkdir(in("exit no file", "exit.json"), 0o700))
		must(t, os.WriteFile(in("exit no file", "exit.json/x"), nil, 0o600))
		for _, pid := range pids {
			must(t, syscall.Kill(pid, syscall.SIGKILL))
		}
	})
	for name, id := range ids {
		st := n.status(id)
		if name == ends[0] || name == ends[1] {
			if st.GetState() != cri.ContainerState_CONTAINER_EXITED || st.GetFinishedAt() == 0 ||
				st.GetExitCode() != 137 && (st.GetExitCode() != 255 || st.GetReason() != reasonUnknown || st.GetMessage() == "") {
				t.Errorf("%s: %v", name, st)
			}
			continue
		}
		if st.GetState() != cri.ContainerState_CONTAINER_RUNNING {
			t.Errorf("%s: %v", name, st)
		}
		_, err := n.StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: id, Timeout: 20})
		must(t, err)
	}
	must(t, os.RemoveAll(in("exit no file", "exit.json")))
	n.removePod(pod)
	n.empty("removal")
}

// What a lost record left in places that are not named after a bundle is found
// all the same: in the monitor and the OCI runtime, and mounts that nobody knows.
// What those mounts show is not deleted.
func TestRestartSweepsWithoutDirectories(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	c := n.runContainer(pod, "c", stubborn)
	secret := n.shareFile("precious")
	must(t, os.WriteFile(secret, nil, 0o600))
	stray := newID()
	before := n.left()
	lost := n.runContainer(pod, "lost", stubborn)
	n.restart(func() {
		must(t, unmount(n.rootfsDir(lost)))
		must(t, os.RemoveAll(n.bundleDir(lost)))
		must(t, os.RemoveAll(filepath.Join(n.cfg.Root, "containers", lost)))
		for _, dir := range []string{filepath.Dir(n.shmPath(stray)) + "/strange", n.bundleDir(stray) + "/strange"} {
			must(t, os.MkdirAll(dir, 0o700))
			must(t, syscall.Mount(filepath.Dir(secret), dir, "", syscall.MS_BIND, ""))
		}
	})
	n.same(before, "the restart")
	if _, err := os.Stat(secret); err != nil {
		t.Errorf("a file that a stray mount showed: %v", err)
	}
	if got := n.exec(c, "echo alive"); got != "alive" {
		t.Errorf("the container says %q", got)
	}
}

// Links in the places of a pod's and a container's directories go; what they lead to
// stays.
func TestRestartSweepsLinksThemselves(t *testing.T) {
	n := newNode(t)
	before := n.left()
	node := n.dir + "/node"
	must(t, os.MkdirAll(node, 0o700))
	theirs := []string{node + "/a", node + "/config.json", node + "/net", node + "/shm"}
	for _, name := range theirs {
		must(t, os.WriteFile(name, nil, 0o600))
	}
	id := strings.Repeat("8", 64)
	links := []string{n.bundleDir(id), n.namespaceDir(id), filepath.Dir(n.shmPath(id))}
	n.restart(func() {
		for _, link := range links {
			must(t, os.MkdirAll(filepath.Dir(link), 0o700))
			must(t, os.Symlink(node, link))
		}
	})
	n.same(before, "the restart")
	for _, name := range theirs {
		if _, err := os.Stat(name); err != nil {
			t.Errorf("a file of the node's: %v", err)
		}
	}
	for _, link := range links {
		if _, err := os.Lstat(link); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", link, err)
		}
	}
}

// A plugin that hangs in the giving back of what an earlier boot left keeps
// nobody waiting.
func TestARebootWithAHangingPlugin(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.bridgePod("web"))
	undo := n.tell("hang-DEL")
	n.untidied = true
	n.reboot(pod, func() {})
	if n.podState(pod) != cri.PodSandboxState_SANDBOX_NOTREADY {
		t.Errorf("pod is %v", n.podState(pod))
	}
	n.removePod(n.runPod(n.hostPod("other")))
	if n.beginning.info().Tidied {
		t.Error("tidied although a plugin hangs")
	}
	undo()
	n.tidied()
	if len(n.leased()) != 0 {
		t.Errorf("leases %q", n.leased())
	}
}
