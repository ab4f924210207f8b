package runtime

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/runtime/operation"
	"berth/sandbox"
)

func mountReadOnly(dir string) error {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return err
	}
	if err := syscall.Mount(dir, dir, "", syscall.MS_BIND, ""); err != nil {
		return err
	}
	return syscall.Mount("", dir, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY, "")
}

func unmount(dir string) error { return syscall.Unmount(dir, 0) }

// Each step of a pod's birth fails once: the error tells the step and the
// cause, nothing is left, and the same request then succeeds.
func TestEachStepOfRunPodSandboxFails(t *testing.T) {
	n := newNode(t)
	conf := filepath.Join(n.dir, "net.d")
	for name, tc := range map[string]struct {
		spoil func() (mend func())
		code  codes.Code
		words []string
		stuck bool // undoing it fails as well, until the retry
	}{
		"no network": {func() func() {
			must(t, os.Rename(conf, conf+".away"))
			return func() { must(t, os.Rename(conf+".away", conf)) }
		}, codes.Unavailable, nil, false},
		"record":       {func() func() { return n.readOnly("root/sandboxes") }, codes.FailedPrecondition, []string{"write record", "read-only"}, false},
		"namespaces":   {func() func() { return n.readOnly("state/namespaces") }, codes.FailedPrecondition, []string{"pin namespaces", "read-only"}, true},
		"shm":          {func() func() { return n.readOnly("state/sandboxes") }, codes.FailedPrecondition, []string{"mount shm", "read-only"}, true},
		"ADD":          {func() func() { return n.tell("fail-ADD") }, codes.Unknown, []string{"network setup", "fail-ADD was told to"}, false},
		"ADD at last":  {func() func() { return n.tell("late-ADD") }, codes.Unknown, []string{"network setup", "late-ADD was told to"}, false},
		"pause bundle": {func() func() { return n.readOnly("state/containers") }, codes.FailedPrecondition, []string{"start pause", "read-only"}, false},
		"create pause": {func() func() { return n.tell("fail-create") }, codes.FailedPrecondition, []string{"start pause", "create pause", "fail-create was told to"}, false},
		"create at last": {func() func() { return n.tell("late-create") }, codes.FailedPrecondition,
			[]string{"start pause", "create pause", "late-create was told to"}, false},
		"start pause": {func() func() { return n.tell("fail-start") }, codes.Unknown, []string{"start pause", "fail-start was told to"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := n.sub(t)
			request := sharedPIDs(n.bridgePod("web"))
			mend := tc.spoil()
			_, err := n.RunPodSandbox(t.Context(), request)
			n.refused("run", err, tc.code, tc.words...)
			mend()
			if !tc.stuck {
				n.empty("the failed run")
			} else if pods := n.pods(); len(pods) != 1 || n.podState(pods[0]) != cri.PodSandboxState_SANDBOX_NOTREADY {
				t.Errorf("after a run that could not be undone: pods %q", pods)
			}
			id := n.runPod(request)
			if n.podState(id) != cri.PodSandboxState_SANDBOX_READY {
				t.Error("the retry's pod is not ready")
			}
			n.removePod(id)
			n.empty("the retry")
		})
	}
}

// sub is the node with failures told to a subtest.
func (n *node) sub(t *testing.T) *node {
	c := *n
	c.t = t
	return &c
}

// What the request itself says wrong shows late for these, and is the
// caller's fault by its code.
func TestBadPodsLeaveNothing(t *testing.T) {
	n := newNode(t)
	for word, spoil := range map[string]func(*cri.PodSandboxConfig){
		"kernel.nosuch": func(c *cri.PodSandboxConfig) { c.Linux.Sysctls = map[string]string{"kernel.nosuch": "1"} },
		"net.ipv4.ip_local_port_range": func(c *cri.PodSandboxConfig) {
			c.Linux.Sysctls = map[string]string{"net.ipv4.ip_local_port_range": "many"}
		},
		"dns_config.servers": func(c *cri.PodSandboxConfig) { c.DnsConfig = &cri.DNSConfig{Servers: []string{"1.1.1.1\nsearch x"}} },
	} {
		request := n.bridgePod("bad")
		spoil(request.Config)
		_, err := n.RunPodSandbox(t.Context(), request)
		n.refused(word, err, codes.InvalidArgument, word)
		n.empty(word)
	}
	n.removePod(n.runPod(n.bridgePod("bad")))
	n.empty("the mended request")
}

// A caller that gives up while a plugin hangs learns the step, and its retry
// gets the pod that was made meanwhile. Nobody sees the pod before.
func TestRunPodSandboxOutlivesItsCaller(t *testing.T) {
	n := newNode(t)
	release := n.tell("hang-ADD")
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	request := n.bridgePod("slow")
	_, err := n.RunPodSandbox(ctx, request)
	n.refused("run", err, codes.DeadlineExceeded, "still at step network setup, for ", "slow_default_uid-slow_0")
	if still := new(operation.StillRunning); !errors.As(err, &still) {
		t.Errorf("the error is a %T", err)
	}
	if p := n.pods(); len(p) != 0 {
		t.Errorf("a pod in the making is listed: %q", p)
	}
	var wg sync.WaitGroup
	ids := make([]string, 8)
	for i := range ids {
		wg.Go(func() { ids[i] = n.runPod(request) })
	}
	release()
	wg.Wait()
	for _, id := range append(ids, n.runPod(request)) {
		if id != ids[0] || id == "" {
			t.Errorf("ids differ: %q", ids)
		}
	}
	if n.calls("ADD") != 1 || len(n.leased()) != 1 || len(n.pods()) != 1 {
		t.Errorf("%d runs of ADD, leases %q, pods %q", n.calls("ADD"), n.leased(), n.pods())
	}
	n.removePod(ids[0])
	n.empty("removal")
}

// A cancelled caller does not end the operation, and it may end in failure
// without anybody waiting: nothing is left then either.
func TestAbandonedRunIsUndone(t *testing.T) {
	n := newNode(t)
	release, mend := n.tell("hang-ADD"), n.tell("fail-ADD")
	ctx, cancel := context.WithCancel(t.Context())
	go func() { n.waitCalls("ADD", 1); cancel() }()
	_, err := n.RunPodSandbox(ctx, n.bridgePod("gone"))
	n.refused("run", err, codes.Canceled, "network setup")
	release()
	eventually(t, "the operation has ended", func() bool { return len(n.operations.Running()) == 0 })
	mend()
	n.empty("an abandoned run")
}

// TestB51: whatever fails, an address is never forgotten. A pod whose DEL fails
// stays, not ready, until a later removal gives its address back.
func TestB51FailingDEL(t *testing.T) {
	n := newNode(t)
	id := n.runPod(n.bridgePod("web"))
	c := n.runContainer(id, "c", forever)
	mend := n.tell("fail-DEL")
	for range 2 {
		_, err := n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: id})
		n.refused("stop", err, codes.Unknown, "fail-DEL was told to")
	}
	if st := n.exited(c); st.GetExitCode() != 137 {
		t.Errorf("the container ended with %d", st.GetExitCode())
	}
	_, err := n.RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: id})
	n.refused("remove", err, codes.Unknown, "fail-DEL was told to")
	n.restart(nil)
	if n.podState(id) != cri.PodSandboxState_SANDBOX_NOTREADY || len(n.leased()) != 1 {
		t.Errorf("state %v, leases %q", n.podState(id), n.leased())
	}
	mend()
	_, err = n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: id})
	must(t, err)
	if len(n.leased()) != 0 {
		t.Errorf("leases %q after a stop that succeeded", n.leased())
	}
	dels := n.calls("DEL")
	_, err = n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: id})
	must(t, err)
	n.removePod(id)
	if n.calls("DEL") != dels {
		t.Error("DEL ran again although it was done")
	}
	n.empty("removal")
}

// ADD fails and so does its undoing: the record keeps what DEL needs, also over
// a restart, and the name is free again when it is gone.
func TestB51FailingADDAndDEL(t *testing.T) {
	n := newNode(t)
	mendAdd, mendDel := n.tell("late-ADD"), n.tell("fail-DEL")
	_, err := n.RunPodSandbox(t.Context(), n.bridgePod("web"))
	n.refused("run", err, codes.Unknown, "late-ADD was told to", "undoing it", "fail-DEL was told to")
	mendAdd()
	pods := n.pods()
	if len(pods) != 1 || n.podState(pods[0]) != cri.PodSandboxState_SANDBOX_NOTREADY || len(n.leased()) != 1 {
		t.Fatalf("pods %q, leases %q", pods, n.leased())
	}
	_, err = n.RunPodSandbox(t.Context(), n.bridgePod("web"))
	n.refused("run again", err, codes.Unknown, pods[0], "earlier attempt", "fail-DEL was told to")
	n.restart(nil)
	if got := n.pods(); len(got) != 1 || got[0] != pods[0] {
		t.Fatalf("pods %q after a restart", got)
	}
	mendDel()
	id := n.runPod(n.bridgePod("web"))
	if len(n.leased()) != 1 || len(n.pods()) != 1 || id == pods[0] {
		t.Errorf("leases %q, pods %q after the retry", n.leased(), n.pods())
	}
	_, err = n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: id})
	must(t, err)
	_, err = n.RunPodSandbox(t.Context(), n.bridgePod("web"))
	n.refused("run after a stop", err, codes.AlreadyExists, id)
	n.removePod(id)
	n.empty("removal")
}

// The network's own things may be gone when a pod is stopped.
func TestStopPodSandboxWithoutItsNamespace(t *testing.T) {
	n := newNode(t)
	id := n.runPod(n.bridgePod("web"))
	must(t, syscall.Unmount(filepath.Join(n.namespaceDir(id), "net"), syscall.MNT_DETACH))
	must(t, os.Rename(n.dir+"/net.d", n.dir+"/net.d.away"))
	_, err := n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: id})
	must(t, err)
	n.removePod(id)
	n.empty("removal")
}

func TestStopAndRemoveManyTimes(t *testing.T) {
	n := newNode(t)
	id := n.runPod(sharedPIDs(n.bridgePod("web")))
	n.runContainer(id, "c", stubborn)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if i%2 == 0 {
				_, err := n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: id})
				if err != nil {
					t.Errorf("stop: %v", err)
				}
				return
			}
			n.removePod(id)
		})
	}
	wg.Wait()
	n.empty("removal")
	for _, unknown := range []string{id, "nosuch", ""} {
		n.removePod(unknown)
		if _, err := n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: unknown}); err != nil {
			t.Errorf("stop of unknown %q: %v", unknown, err)
		}
		_, err := n.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: unknown})
		n.refused("status", err, codes.NotFound)
	}
}

// The pod dies with its pause process.
func TestKilledPauseMakesThePodNotReady(t *testing.T) {
	n := newNode(t)
	id := n.runPod(sharedPIDs(n.hostPod("web")))
	sb, err := n.Records.Sandboxes.Get(id)
	must(t, err)
	must(t, syscall.Kill(sb.Pause.PID, syscall.SIGKILL))
	eventually(t, "the pod is not ready", func() bool { return n.podState(id) == cri.PodSandboxState_SANDBOX_NOTREADY })
	_, err = n.CreateContainer(t.Context(), n.container(id, "c", forever))
	n.refused("create", err, codes.FailedPrecondition, "not ready")
	n.removePod(id)
	n.empty("removal")
	if _, err := n.Records.Sandboxes.Get(id); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("record: %v", err)
	}
}

// Pods that name no cgroup get one of their own, which goes with them.
func TestDefaultCgroupGoesWithThePod(t *testing.T) {
	n := newNode(t)
	request := sharedPIDs(n.hostPod("web"))
	request.Config.Linux.CgroupParent = ""
	id := n.runPod(request)
	n.runContainer(id, "c", forever)
	there := func() (out []string) {
		for _, root := range cgroupRoots(t) {
			if _, err := os.Stat(root + defaultCgroup + "/" + id); err == nil {
				out = append(out, root)
			}
		}
		return out
	}
	if len(there()) == 0 {
		t.Error("the pod has no cgroup")
	}
	n.removePod(id)
	if left := there(); len(left) != 0 {
		t.Errorf("the pod's cgroup is left in %q", left)
	}
	n.empty("removal")
}
