package runtime

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox"
	"berth/sandbox/namespaces"
)

// userNode is a node that has user namespaces; tests that need one are skipped
// where it says it has none, with its reason.
func userNode(t *testing.T) *node {
	t.Helper()
	n := newNode(t)
	if err := n.abilities["runc"].userNamespaces; err != nil {
		t.Skipf("skipped: %v", err)
	}
	return n
}

// mapped gives a pod a user namespace.
func mapped(r *cri.RunPodSandboxRequest) *cri.RunPodSandboxRequest {
	ids := []*cri.IDMapping{{HostId: 200000, Length: 65536}}
	nsOptions(r).UsernsOptions = &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: ids, Gids: ids}
	return r
}

// Each step of the birth of a pod with a user namespace and of its container fails
// once: nothing is left, and the same request then succeeds.
func TestEachStepWithAUserNamespaceFails(t *testing.T) {
	n := userNode(t)
	img, err := n.Images.Resolve(n.image)
	must(t, err)
	for what, tc := range map[string]struct {
		spoil  func() (mend func())
		code   codes.Code
		words  []string
		late   bool // the pod is made, its container fails
		always bool // the pod stays, not ready, until the retry
	}{
		"namespaces":     {func() func() { return n.readOnly("state/namespaces") }, codes.FailedPrecondition, []string{"pin namespaces", "read-only"}, false, true},
		"ADD at last":    {func() func() { return n.tell("late-ADD") }, codes.Unknown, []string{"network setup", "late-ADD was told to"}, false, false},
		"create pause":   {func() func() { return n.tell("fail-create") }, codes.FailedPrecondition, []string{"start pause", "fail-create was told to"}, false, false},
		"create at last": {func() func() { return n.tell("late-create") }, codes.FailedPrecondition, []string{"start pause", "late-create was told to"}, false, false},
		"layer": {func() func() {
			must(t, os.Rename(img.Layers[0], img.Layers[0]+".away"))
			return func() { must(t, os.Rename(img.Layers[0]+".away", img.Layers[0])) }
		}, codes.Unknown, []string{"mount rootfs", "no such file"}, true, false},
		"container":         {func() func() { return n.tell("fail-create") }, codes.FailedPrecondition, []string{"create in the OCI runtime", "fail-create was told to"}, true, false},
		"container at last": {func() func() { return n.tell("late-create") }, codes.FailedPrecondition, []string{"create in the OCI runtime", "late-create was told to"}, true, false},
	} {
		t.Run(what, func(t *testing.T) {
			n := n.sub(t)
			request := mapped(sharedPIDs(n.bridgePod("web")))
			if tc.late {
				pod := n.runPod(request)
				before := n.left()
				mend := tc.spoil()
				_, err := n.CreateContainer(t.Context(), n.container(pod, "c", forever))
				n.refused(what, err, tc.code, tc.words...)
				mend()
				n.same(before, "the failed create")
				n.runContainer(pod, "c", forever)
				n.removePod(pod)
				n.empty("the retry")
				return
			}
			mend := tc.spoil()
			_, err := n.RunPodSandbox(t.Context(), request)
			n.refused(what, err, tc.code, tc.words...)
			mend()
			if !tc.always {
				n.empty("the failed run")
			}
			n.removePod(n.runPod(request))
			n.empty("the retry")
		})
	}
}

// A daemon that ended within a birth leaves nothing of it; one that ended at any
// other time finds the pod, its user namespace and what it needs to take both away.
func TestRestartWithAUserNamespace(t *testing.T) {
	n := userNode(t)
	for what, crash := range map[string]struct {
		sb func(*sandbox.Sandbox)
		c  func(*sandbox.Container)
	}{
		"pod":       {sb: func(sb *sandbox.Sandbox) { sb.ReadyAt = 0 }},
		"pause":     {sb: func(sb *sandbox.Sandbox) { sb.ReadyAt, sb.Pause = 0, nil }},
		"container": {c: func(c *sandbox.Container) { c.MadeAt, c.StartedAt, c.Process = 0, 0, nil }},
		"nothing":   {},
	} {
		pod := n.runPod(mapped(sharedPIDs(n.bridgePod("web"))))
		id := n.runContainer(pod, "c", forever)
		n.forget(pod, crash.sb, crash.c)
		n.restart(nil)
		switch {
		case crash.sb != nil:
			n.empty(what)
			continue
		case crash.c != nil:
			id = n.runContainer(pod, "c", forever)
		}
		if got := strings.Join(strings.Fields(n.exec(id, "cat /proc/self/uid_map; cat /name")), " "); got != "0 200000 65536 tiny" {
			t.Errorf("%s: mapping and image say %q", what, got)
		}
		n.removePod(pod)
		n.empty(what)
	}
	id := newID()
	n.restart(func() {
		must(t, namespaces.Pin(namespaces.Spec{Dir: n.namespaceDir(id), IPC: true, User: namespaceIDs(probeIDs)}))
	})
	n.empty("a start that sweeps a user namespace of nobody's")
}

// A pod whose user namespace is no longer pinned takes no containers, and goes.
func TestLostUserNamespace(t *testing.T) {
	n := userNode(t)
	pod := n.runPod(mapped(n.bridgePod("web")))
	n.runContainer(pod, "c", forever)
	n.restart(func() { must(t, unmount(namespaces.Path(n.namespaceDir(pod), namespaces.User))) })
	if st := n.podState(pod); st != cri.PodSandboxState_SANDBOX_NOTREADY {
		t.Errorf("the pod is %v", st)
	}
	_, err := n.CreateContainer(t.Context(), n.container(pod, "d", forever))
	n.refused("create", err, codes.FailedPrecondition, "not ready")
	n.removePod(pod)
	n.empty("removal")
}

// After a reboot the namespace is gone with the state directory, and the record
// alone is enough to give back the rest.
func TestUserNamespaceAfterAReboot(t *testing.T) {
	n := userNode(t)
	pod := n.runPod(mapped(sharedPIDs(n.bridgePod("web"))))
	n.runContainer(pod, "c", forever)
	n.reboot(pod, func() {})
	if st := n.podState(pod); st != cri.PodSandboxState_SANDBOX_NOTREADY {
		t.Errorf("the pod is %v", st)
	}
	n.removePod(pod)
	n.empty("removal")
	n.removePod(n.runPod(mapped(sharedPIDs(n.bridgePod("web")))))
}

// Everything a pod's root must be able to write to or pass through is open to it,
// and nothing else.
func TestFilesOfAUserNamespace(t *testing.T) {
	n := userNode(t)
	pod := n.runPod(mapped(n.bridgePod("web")))
	id := n.runContainer(pod, "c", forever)
	for path, want := range map[string]uint32{
		n.podFile(pod, "hosts"): 200000, n.podFile(pod, "resolv.conf"): 200000, n.podFile(pod, "hostname"): 200000, n.shmPath(pod): 200000,
		filepath.Join(n.Records.Containers.Dir(id), "upper"): 200000,
		filepath.Join(n.Records.Sandboxes.Dir(pod)):          0, n.bundleDir(id): 0, filepath.Join(n.bundleDir(id), "config.json"): 0,
		n.status(id).GetLogPath(): 0,
	} {
		if got := ownerOf(t, path); got != want {
			t.Errorf("%s belongs to %d, want %d", path, got, want)
		}
	}
	// A directory of the node that others may not search ends it, by name.
	must(t, os.Chmod(n.cfg.State, 0o700))
	defer func() { must(t, os.Chmod(n.cfg.State, 0o711)) }()
	if err := n.kernelAbilities().userNamespaces; err == nil || !strings.Contains(err.Error(), n.cfg.State) {
		t.Errorf("a closed state directory: %v", err)
	}
}
