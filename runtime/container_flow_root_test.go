package runtime

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/sandbox"
)

// Each step of a container's birth fails once: the error tells the step and
// the cause, nothing is left, and the same request then succeeds.
func TestEachStepOfCreateContainerFails(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	before := n.left()
	img, err := n.Images.Resolve(n.image)
	must(t, err)
	move := func(path string) func() {
		must(t, os.Rename(path, path+".away"))
		return func() { must(t, os.Rename(path+".away", path)) }
	}
	for name, tc := range map[string]struct {
		spoil func() (mend func())
		words []string
	}{
		"record": {func() func() { return n.readOnly("root/containers") }, []string{"read-only"}},
		"bundle": {func() func() { return n.readOnly("state/containers") }, []string{"mount rootfs", "read-only"}},
		"layer":  {func() func() { return move(img.Layers[0]) }, []string{"mount rootfs", "no such file"}},
		"mount source": {func() func() {
			mend := move(filepath.Join(n.dir, "share"))
			must(t, os.Symlink("nowhere", filepath.Join(n.dir, "share")))
			return func() { must(t, os.Remove(filepath.Join(n.dir, "share"))); mend() }
		}, []string{"host_path", n.dir + "/share"}},
		"log directory": {func() func() {
			must(t, os.RemoveAll(filepath.Join(n.dir, "logs", "web")))
			must(t, os.WriteFile(filepath.Join(n.dir, "logs", "web"), nil, 0o600))
			return func() { must(t, os.Remove(filepath.Join(n.dir, "logs", "web"))) }
		}, []string{"log directory", "not a directory"}},
		"runc":         {func() func() { return n.tell("fail-create") }, []string{"create in the OCI runtime", "fail-create was told to"}},
		"runc at last": {func() func() { return n.tell("late-create") }, []string{"create in the OCI runtime", "late-create was told to"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := n.sub(t)
			request := n.container(pod, "c", forever)
			mend := tc.spoil()
			_, err := n.CreateContainer(t.Context(), request)
			code := codes.Unknown
			switch name {
			case "mount source", "log directory":
				code = codes.InvalidArgument
			case "record", "bundle", "runc", "runc at last":
				code = codes.FailedPrecondition
			}
			n.refused("create", err, code, tc.words...)
			mend()
			n.same(before, "the failed create")
			id := n.create(request)
			n.start(id)
			n.removeContainerOf(id)
			n.same(before, "the retry")
		})
	}
}

// same fails the test unless the node has what it had before.
func (n *node) same(before []string, after string) {
	n.t.Helper()
	had := strings.Join(before, "\n")
	for limit := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		now := strings.Join(n.left(), "\n")
		if now == had {
			return
		}
		if time.Now().After(limit) {
			n.t.Errorf("after %s there is\n%s\nand was\n%s", after, now, had)
			return
		}
	}
}

func (n *node) removeContainerOf(id string) {
	n.t.Helper()
	if _, err := n.RemoveContainer(context.Background(), &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
		n.t.Errorf("remove container: %v", err)
	}
}

func TestBadContainersLeaveNothing(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	before := n.left()
	for word, tc := range map[string]struct {
		spoil func(*cri.CreateContainerRequest)
		code  codes.Code
	}{
		"localhost/nosuch:1": {func(r *cri.CreateContainerRequest) { r.Config.Image.Image = "localhost/nosuch:1" }, codes.NotFound},
		"nobodyknows": {func(r *cri.CreateContainerRequest) {
			r.Config.Linux.SecurityContext.RunAsUsername = "nobodyknows"
		}, codes.InvalidArgument},
		"/dev/nosuch": {func(r *cri.CreateContainerRequest) {
			r.Config.Devices = []*cri.Device{{HostPath: "/dev/nosuch", ContainerPath: "/dev/x", Permissions: "r"}}
		}, codes.InvalidArgument},
		"log_path":   {func(r *cri.CreateContainerRequest) { r.Config.LogPath = "../../out" }, codes.InvalidArgument},
		"FROBNICATE": {func(r *cri.CreateContainerRequest) { capability(r, "FROBNICATE") }, codes.InvalidArgument},
		"target_id": {func(r *cri.CreateContainerRequest) {
			o := r.Config.Linux.SecurityContext.NamespaceOptions
			o.Pid, o.TargetId = cri.NamespaceMode_TARGET, "nosuch"
		}, codes.NotFound},
	} {
		request := n.container(pod, "c", forever)
		tc.spoil(request)
		_, err := n.CreateContainer(t.Context(), request)
		n.refused(word, err, tc.code, word)
		n.same(before, word)
	}
}

func capability(r *cri.CreateContainerRequest, name string) {
	r.Config.Linux.SecurityContext.Capabilities = &cri.Capability{AddCapabilities: []string{name}}
}

// An image may go between the moment it was found and the moment its layers
// are held.
func TestImageVanishesBeforeItsLayersAreHeld(t *testing.T) {
	n := newNode(t)
	img, err := n.Images.Resolve(n.image)
	must(t, err)
	must(t, n.Images.Remove(t.Context(), n.image))
	c := &sandbox.Container{ID: newID()}
	err = n.mountRootfs(&sandbox.Sandbox{}, c, img)
	if !errors.Is(err, image.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	n.refused("mount", err, codes.NotFound, img.ID)
	must(t, os.RemoveAll(n.bundleDir(c.ID)))
}

// A container keeps the layers of a removed image, also over a restart; with
// it they go.
func TestLayersOfARemovedImageStayForTheContainer(t *testing.T) {
	n := newNode(t)
	img, err := n.Images.Resolve(n.image)
	must(t, err)
	id := n.runContainer(n.runPod(n.hostPod("web")), "c", forever)
	must(t, n.Images.Remove(t.Context(), n.image))
	n.restart(nil)
	if got := n.exec(id, "cat /name"); got != "tiny" {
		t.Errorf("the container reads %q", got)
	}
	n.removeContainerOf(id)
	eventually(t, "the layers are gone", func() bool { _, err := os.Stat(img.Layers[0]); return errors.Is(err, os.ErrNotExist) })
}

// The daemon ends before the container's removal lets an image go: the next
// one finds that nobody holds it.
func TestImageNobodyHoldsGoesAtARestart(t *testing.T) {
	n := newNode(t)
	img, err := n.Images.Resolve(n.image)
	must(t, err)
	n.Images.Hold(img.ID, "a container whose record was removed")
	must(t, n.Images.Remove(t.Context(), n.image))
	n.restart(nil)
	eventually(t, "the layers are gone", func() bool { _, err := os.Stat(img.Layers[0]); return errors.Is(err, os.ErrNotExist) })
}

// Requests for one container at the same time, and with a caller that gives up
// while runc hangs, make one.
func TestCreateAndStartOutliveTheirCallers(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	request := n.container(pod, "c", forever)
	release := n.tell("hang-create")
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	_, err := n.CreateContainer(ctx, request)
	n.refused("create", err, codes.DeadlineExceeded, "still at step create in the OCI runtime, for ")
	if len(n.containers()) != 0 {
		t.Error("a container in the making is listed")
	}
	ids := n.atOnce(release, func() string { return n.create(request) })
	if len(n.containers()) != 1 || n.calls("create") != 1 {
		t.Errorf("containers %q, %d runs of create", n.containers(), n.calls("create"))
	}
	release = n.tell("hang-start")
	ctx, cancel = context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err = n.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: ids[0]})
	n.refused("start", err, codes.DeadlineExceeded, "still at step start in the OCI runtime, for ")
	if st := n.status(ids[0]).GetState(); st != cri.ContainerState_CONTAINER_CREATED {
		t.Errorf("state %v while the start hangs", st)
	}
	n.atOnce(release, func() string { n.start(ids[0]); return "" })
	if st := n.status(ids[0]).GetState(); st != cri.ContainerState_CONTAINER_RUNNING || n.calls("start") != 1 {
		t.Errorf("state %v after %d runs of start", st, n.calls("start"))
	}
	_, err = n.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: ids[0]})
	n.refused("second start", err, codes.FailedPrecondition, "RUNNING")
}

// atOnce makes a request eight times at once, and then releases what hangs.
// All must get the same answer.
func (n *node) atOnce(release func(), request func() string) []string {
	n.t.Helper()
	var wg sync.WaitGroup
	got := make([]string, 8)
	for i := range got {
		wg.Go(func() { got[i] = request() })
	}
	release()
	wg.Wait()
	for _, g := range got {
		if g != got[0] {
			n.t.Errorf("answers differ: %q", got)
		}
	}
	return got
}

// A start that is refused is an end: EXITED, 128, StartError, with its cause.
func TestFailedStart(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	for _, how := range []string{"fail-start", "late-start"} {
		id := n.create(n.container(pod, how, forever))
		mend := n.tell(how)
		_, err := n.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: id})
		n.refused(how, err, codes.Unknown, "start container "+id, how+" was told to")
		mend()
		st := n.exited(id)
		if st.GetExitCode() != 128 || st.GetReason() != "StartError" || !strings.Contains(st.GetMessage(), how) || st.GetStartedAt() == 0 || st.GetFinishedAt() == 0 {
			t.Errorf("%s: status %v", how, st)
		}
		_, err = n.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: id})
		n.refused("again", err, codes.FailedPrecondition, "EXITED")
		eventually(t, "its process is gone", func() bool { _, over := n.Handlers["runc"].Exited(id); return over })
		if again := n.status(id); again.GetExitCode() != 128 || again.GetReason() != "StartError" {
			t.Errorf("%s: the killed process changed the status to %v", how, again)
		}
		n.removeContainerOf(id)
	}
	n.removePod(pod)
	n.empty("removal")
}

// What could not be undone is not handed out as a container later on.
func TestRetryAfterAFailedUndo(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	mendCreate, mendDelete := n.tell("late-create"), n.tell("fail-delete")
	request := n.container(pod, "c", forever)
	_, err := n.CreateContainer(t.Context(), request)
	n.refused("create", err, codes.FailedPrecondition, "late-create was told to", "fail-delete was told to")
	if len(n.containers()) != 0 {
		t.Error("half a container is listed")
	}
	mendCreate()
	_, err = n.CreateContainer(t.Context(), request)
	n.refused("create while delete fails", err, codes.Unknown, "fail-delete was told to")
	n.restart(nil)
	if len(n.containers()) != 0 || len(n.Records.Containers.List()) != 1 {
		t.Errorf("after a restart: containers %q, records %v", n.containers(), n.Records.Containers.List())
	}
	mendDelete()
	id := n.create(request)
	n.start(id)
	if n.status(id).GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Error("the retry's container does not run")
	}
	n.removePod(pod)
	n.empty("removal")
}

// Creation and the end of the pod at the same time: whoever is first, nothing
// runs when both are done and the pod can be removed.
func TestCreateRacesWithTheEndOfItsPod(t *testing.T) {
	n := newNode(t)
	for _, end := range []string{"stop", "remove"} {
		for _, hold := range []bool{true, false} {
			pod := n.runPod(sharedPIDs(n.hostPod("web")))
			release := func() {}
			if hold {
				release = n.tell("hang-create")
			}
			runs := n.calls("create")
			var wg sync.WaitGroup
			for _, name := range []string{"a", "b", "c"} {
				request := n.container(pod, name, stubborn)
				wg.Go(func() {
					if reply, err := n.CreateContainer(t.Context(), request); err == nil {
						_, _ = n.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: reply.GetContainerId()})
					}
				})
			}
			if hold {
				n.waitCalls("create", runs+1)
			}
			wg.Go(func() {
				if end == "remove" {
					n.removePod(pod)
				} else if _, err := n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: pod}); err != nil {
					t.Errorf("stop: %v", err)
				}
			})
			release()
			wg.Wait()
			for _, c := range n.Records.ContainersOf(pod) {
				if st := c.State(n.bootID); st != cri.ContainerState_CONTAINER_EXITED {
					t.Errorf("%s, held %v: a container is %v", end, hold, st)
				}
			}
			if end == "remove" && len(n.Records.Containers.List()) > 0 {
				t.Errorf("held %v: %d containers without a pod", hold, len(n.Records.Containers.List()))
			}
			n.removePod(pod)
			n.empty(end)
		}
	}
}
