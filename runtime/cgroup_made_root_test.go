package runtime

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// cgroupsAt lists the hierarchies in which a cgroup is there.
func cgroupsAt(t *testing.T, dir string) (found []string) {
	t.Helper()
	for _, root := range cgroupRoots(t) {
		if _, err := os.Stat(root + dir); err == nil {
			found = append(found, root)
		}
	}
	return found
}

// Directories that were missing above a pod's cgroup go with the last pod that
// needs them; those of somebody else stay.
func TestMissingCgroupParents(t *testing.T) {
	n := newNode(t)
	theirs := filepath.Join(cgroupRoots(t)[0], n.parent, "a")
	must(t, os.MkdirAll(theirs, 0o755))
	defer os.Remove(theirs)
	pods := map[string]string{}
	for _, name := range []string{"b", "c", "c/d"} {
		request := proto.Clone(n.hostPod("pod" + name[len(name)-1:])).(*cri.RunPodSandboxRequest)
		request.Config.Linux.CgroupParent = n.parent + "/a/" + name
		pods[name] = n.runPod(request)
		n.runContainer(pods[name], "main", forever)
	}
	if len(cgroupsAt(t, n.parent+"/a/b")) == 0 {
		t.Fatal("the pod's cgroup is nowhere")
	}
	n.removePod(pods["b"])
	if at := cgroupsAt(t, n.parent+"/a/b"); len(at) != 0 {
		t.Errorf("a removed pod's cgroup is left in %q", at)
	}
	n.restart(nil)
	n.removePod(pods["c"])
	if len(cgroupsAt(t, n.parent+"/a/c/d")) == 0 {
		t.Error("the cgroup of a pod that runs is gone")
	}
	n.removePod(pods["c/d"])
	for _, dir := range []string{"/a/c", "/a", ""} {
		for _, root := range cgroupsAt(t, n.parent+dir) {
			if dir == "/a/c" || root != cgroupRoots(t)[0] {
				t.Errorf("%s%s is left in %s", n.parent, dir, root)
			}
		}
	}
	if _, err := os.Stat(theirs); err != nil {
		t.Errorf("somebody else's cgroup is gone: %v", err)
	}
}

// Of pods that go at once, the last one takes what they share.
func TestCgroupParentsOfPodsThatGoAtOnce(t *testing.T) {
	n := newNode(t)
	for round := range 6 {
		var pods []string
		for i := range 4 {
			request := proto.Clone(n.hostPod(fmt.Sprint("pod", i))).(*cri.RunPodSandboxRequest)
			request.Config.Linux.CgroupParent = fmt.Sprint(n.parent, "/at/once/", i%2)
			pods = append(pods, n.runPod(request))
			n.runContainer(pods[i], "main", forever)
			_, err := n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: pods[i]})
			must(t, err)
		}
		var removals sync.WaitGroup
		for _, pod := range pods {
			removals.Go(func() { n.removePod(pod) })
		}
		removals.Wait()
		if at := cgroupsAt(t, n.parent); len(at) != 0 {
			t.Fatalf("round %d: %s is left in %q", round, n.parent, at)
		}
	}
}

// An operator moves records away by hand while there is no daemon: the cgroups of
// their pods go all the same.
func TestRecordsMovedByHand(t *testing.T) {
	n := newNode(t)
	for name, kinds := range map[string][]string{"pod": {"sandboxes"}, "pod and containers": {"sandboxes", "containers"}} {
		before := n.left()
		request := n.hostPod("lost")
		request.Config.Linux.CgroupParent = ""
		pod := n.runPod(request)
		c := n.runContainer(pod, "c", stubborn)
		n.restart(func() {
			for i, kind := range kinds {
				id := []string{pod, c}[i]
				must(t, os.Rename(filepath.Join(n.cfg.Root, kind, id), filepath.Join(t.TempDir(), id)))
			}
		})
		n.same(before, name)
		if at := cgroupsAt(t, filepath.Join(defaultCgroup, pod)); len(at) != 0 {
			t.Errorf("%s: the pod's cgroup is left in %q", name, at)
		}
	}
}
