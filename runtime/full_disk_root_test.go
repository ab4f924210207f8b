package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// smallDisk puts a filesystem of its own under a directory of the node.
func smallDisk(sub string) func(*node) {
	return func(n *node) {
		dir := filepath.Join(n.dir, sub)
		must(n.t, syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=8m,mode=0711"))
		n.t.Cleanup(func() { must(n.t, unmount(dir)) })
	}
}

// fill leaves so many pages free on a small disk.
func (n *node) fill(sub string, pages int64) (empty func()) {
	n.t.Helper()
	path := filepath.Join(n.dir, sub, "ballast")
	f, err := os.Create(path)
	must(n.t, err)
	defer f.Close()
	page := make([]byte, os.Getpagesize())
	var written int64
	for ; ; written++ {
		if _, err := f.Write(page); errors.Is(err, syscall.ENOSPC) {
			break
		} else if err != nil {
			n.t.Fatal(err)
		}
	}
	must(n.t, f.Truncate((written-pages)*int64(len(page))))
	return func() { must(n.t, os.Remove(path)) }
}

// However much room the disk has left, a pod and its container come up whole,
// or the caller is told that the disk is full and nothing is left of them.
func TestFullDisk(t *testing.T) {
	for _, sub := range []string{"root", "state"} {
		t.Run(sub, func(t *testing.T) {
			n := newNode(t, smallDisk(sub))
			made := 0
			for pages := int64(0); made < 2; pages++ {
				if pages > 60 {
					t.Fatal("a pod needs more than 60 pages")
				}
				empty := n.fill(sub, pages)
				id, err := n.podAndContainer()
				empty()
				what := fmt.Sprintf("%d pages", pages)
				if err != nil {
					n.refused(what, err, codes.ResourceExhausted)
				} else {
					made++
					n.restart(nil) // finds on the disk what memory told
					if st := n.status(id); st.GetState() != cri.ContainerState_CONTAINER_CREATED {
						t.Errorf("%s: after a restart %v", what, st)
					}
				}
				for _, pod := range n.pods() {
					n.removePod(pod)
				}
				n.empty(what)
			}
			_, err := n.podAndContainer()
			must(t, err)
		})
	}
}

// podAndContainer makes both; after a container that failed, the pod holds
// nothing of it.
func (n *node) podAndContainer() (container string, err error) {
	n.t.Helper()
	pod, err := n.RunPodSandbox(n.t.Context(), n.hostPod("web"))
	if err != nil {
		n.empty("a refused pod")
		return "", err
	}
	before := n.left()
	c, err := n.CreateContainer(n.t.Context(), n.container(pod.GetPodSandboxId(), "c", forever))
	if err != nil {
		n.same(before, "a refused container")
	}
	return c.GetContainerId(), err
}

// A full disk hinders neither the start of what is made nor its end, and what
// could not be recorded meanwhile a new daemon finds out by itself.
func TestFullDiskHindersNoEnd(t *testing.T) {
	n := newNode(t, smallDisk("root"))
	pod := n.runPod(sharedPIDs(n.bridgePod("web")))
	running := n.create(n.container(pod, "running", forever))
	ended := n.create(n.container(pod, "ended", "exit 4"))
	empty := n.fill("root", 0)
	n.start(running)
	n.start(ended)
	n.exited(ended)
	n.restart(nil)
	if st := n.status(running); st.GetState() != cri.ContainerState_CONTAINER_RUNNING || st.GetStartedAt() == 0 {
		t.Errorf("running: %v", st)
	}
	if st := n.status(ended); st.GetState() != cri.ContainerState_CONTAINER_EXITED || st.GetExitCode() != 4 || st.GetStartedAt() == 0 {
		t.Errorf("ended: %v", st)
	}
	must(t, n.stop(t.Context(), running, 20))
	if st := n.status(running); st.GetExitCode() != 7 {
		t.Errorf("stopped: %v", st)
	}
	_, err := n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	n.removePod(pod)
	n.empty("removal on a full disk")
	n.restart(nil)
	if len(n.pods())+len(n.containers()) != 0 {
		t.Errorf("after a restart: pods %q, containers %q", n.pods(), n.containers())
	}
	empty()
}

// Limits that the disk does not keep are not given: the caller is told, and what
// was in force stays in force and is shown, also after a restart.
func TestFullDiskChangesNoLimits(t *testing.T) {
	n := newNode(t, smallDisk("root"))
	request := n.hostPod("web")
	request.Config.Linux.Resources = &cri.LinuxContainerResources{CpuShares: 20}
	pod := n.runPod(request)
	create := n.container(pod, "c", forever)
	create.Config.Linux.Resources = &cri.LinuxContainerResources{CpuShares: 300}
	id := n.create(create)
	n.start(id)
	before := n.cgroupValue(id, "cpu/cpu.shares", "cpu.weight")
	same := func(when string) {
		t.Helper()
		if got := n.status(id).GetResources().GetLinux().GetCpuShares(); got != 300 {
			t.Errorf("%s: the status says %d CPU shares, want 300", when, got)
		}
		if got := n.cgroupValue(id, "cpu/cpu.shares", "cpu.weight"); got != before {
			t.Errorf("%s: the kernel says %s, before %s", when, got, before)
		}
		if _, r := n.podResources(pod); r != `{"cpuShares":"20"}` {
			t.Errorf("%s: the pod has %s", when, r)
		}
	}
	empty := n.fill("root", 0)
	_, err := n.UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: &cri.LinuxContainerResources{CpuShares: 900}})
	n.refused("container", err, codes.ResourceExhausted)
	_, err = n.UpdatePodSandboxResources(t.Context(), &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: pod, Resources: &cri.LinuxContainerResources{CpuShares: 90}})
	n.refused("pod", err, codes.ResourceExhausted)
	same("a full disk")
	empty()
	n.restart(nil)
	same("a restart")
	_, err = n.UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: &cri.LinuxContainerResources{CpuShares: 900}})
	must(t, err)
	if n.status(id).GetResources().GetLinux().GetCpuShares() != 900 || n.cgroupValue(id, "cpu/cpu.shares", "cpu.weight") == before {
		t.Error("with room on the disk the limits do not change")
	}
}
