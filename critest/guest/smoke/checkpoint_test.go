package smoke

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
)

// canCheckpoint skips the test where the daemon says that CRIU does not run.
func (e *env) canCheckpoint() {
	e.Helper()
	e.eventually("the status tells whether checkpoints are possible", func() bool {
		res, err := e.Runtime().Status(e.ctx, &cri.StatusRequest{Verbose: true})
		if err != nil {
			e.Fatal(err)
		}
		var reasons map[string]string
		if json.Unmarshal([]byte(res.GetInfo()["checkpoint"]), &reasons) != nil {
			return false
		}
		if reasons["runc"] != "" {
			e.Skip("skipped: needs CRIU on a kernel it knows: " + reasons["runc"])
		}
		return true
	})
}

// counts counts up in a file, twice a second, and says so in the log.
const counts = "echo begun; i=0; while :; do i=$((i+1)); echo $i >/tmp/new; mv /tmp/new /tmp/count; sleep 0.5; done"

// counting waits until the container's counter moves, and returns it.
func (e *env) counting(id string) string {
	e.Helper()
	first := ""
	e.eventually("the first count", func() bool {
		first = e.exec(id, "cat /tmp/count 2>/dev/null || true")
		return first != ""
	})
	e.eventually("the next count", func() bool { return e.exec(id, "cat /tmp/count") != first })
	return first
}

// requests are the messages that the kubelet would send of a pod.
func (e *env) requests(names ...string) (*cri.PodSandboxConfig, []*cri.ContainerConfig) {
	e.Helper()
	own := &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}
	pod := &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: "frozen", Namespace: "smoke", Uid: "frozen"}, Hostname: "frozen",
		LogDirectory: filepath.Join(e.LogDir(), "frozen"),
		Linux:        &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: own}},
	}
	var containers []*cri.ContainerConfig
	for _, name := range names {
		containers = append(containers, &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: images.Busybox},
			Command: []string{"sh", "-c", counts}, LogPath: name + ".log",
			Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: own}},
		})
	}
	return pod, containers
}

// TestCheckpointContainer takes an archive of a running container, which goes on.
func TestCheckpointContainer(t *testing.T) {
	e := start(t)
	e.canCheckpoint()
	pod, config := e.pod("checkpoint", "")
	id := e.container(pod, config, "main", counts, object{})
	before := e.counting(id)
	location := filepath.Join(t.TempDir(), "checkpoint.tar")
	e.crictl("checkpoint", "--export", location, id)
	info, err := os.Stat(location)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("the archive is %v, %v; want mode 0600", info, err)
	}
	names := archived(t, location)
	for _, want := range []string{"spec.dump", "config.dump", "rootfs-diff.tar", "checkpoint/inventory.img", "dump.log"} {
		if !slices.Contains(names, want) {
			t.Errorf("the archive has no %s: %q", want, names)
		}
	}
	if now := e.counting(id); now == before {
		t.Errorf("the container stands still at %s", now)
	}
	if left, _ := filepath.Glob(filepath.Join(e.Root(), "containers", "*", "checkpointing")); len(left) != 0 {
		t.Errorf("left behind: %q", left)
	}
}

// archived lists what is in the one layer of an OCI archive.
func archived(t *testing.T, path string) []string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var names []string
	for outer := tar.NewReader(f); ; {
		h, err := outer.Next()
		if errors.Is(err, io.EOF) {
			return names
		}
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(h.Name, "blobs/") {
			continue
		}
		for inner := tar.NewReader(outer); ; {
			h, err := inner.Next()
			if err != nil { // a blob that is no tar, or its end
				break
			}
			names = append(names, h.Name)
		}
	}
}

// TestCheckpointPod takes one state of a pod of two containers, removes the pod,
// and makes it again from there: its processes go on where they were, in a pod of
// the request's making. A request for something else is refused and leaves nothing.
func TestCheckpointPod(t *testing.T) {
	e := start(t)
	e.canCheckpoint()
	config, containers := e.requests("one", "two")
	ctx, cancel := context.WithTimeout(e.ctx, time.Duration(slow)*30*time.Second)
	defer cancel()
	run, err := e.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, c := range containers {
		res, err := e.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: run.GetPodSandboxId(), Config: c, SandboxConfig: config})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, res.GetContainerId())
		e.crictl("start", res.GetContainerId())
		e.counting(res.GetContainerId())
		e.exec(res.GetContainerId(), "echo kept >/kept; rm /bin/brctl")
	}
	out := t.TempDir()
	if _, err := e.Runtime().CheckpointPod(ctx, &cri.CheckpointPodRequest{PodSandboxId: run.GetPodSandboxId(), OutputPath: out, ContainerIds: ids}); err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		e.counting(id)
	}
	e.crictl("rmp", "-f", run.GetPodSandboxId())

	restore := func(change func(*cri.RestorePodRequest)) (*cri.RestorePodResponse, error) {
		r := &cri.RestorePodRequest{CheckpointPath: out, Config: config}
		for _, c := range containers {
			text, err := protojson.Marshal(c)
			copied := &cri.ContainerConfig{}
			if err == nil {
				err = protojson.Unmarshal(text, copied)
			}
			if err != nil {
				t.Fatal(err)
			}
			copied.Labels = map[string]string{"restored": "yes"}
			r.ContainerConfigs = append(r.ContainerConfigs, copied)
		}
		if change != nil {
			change(r)
		}
		ctx, cancel := context.WithTimeout(e.ctx, time.Duration(slow)*30*time.Second)
		defer cancel()
		return e.Runtime().RestorePod(ctx, r)
	}
	if _, err := restore(func(r *cri.RestorePodRequest) { r.ContainerConfigs[1].Command[2] = "sleep 1" }); err == nil || !strings.Contains(err.Error(), "command and args") {
		t.Errorf("a restore with another command: %v; want a refusal that names it", err)
	}
	e.check("pods after a refused restore", e.crictl("pods", "-q"), "")
	e.check("containers after a refused restore", e.crictl("ps", "-a", "-q"), "")
	res, err := restore(nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(res.GetRestoredContainers()) != 2 {
		t.Fatalf("restored %v, want two containers", res)
	}
	if err := e.Kill(); err != nil { // what is restored outlives the daemon
		t.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	for _, c := range res.GetRestoredContainers() {
		id := c.GetContainerId()
		e.check("state before the start", e.status(id).GetState(), cri.ContainerState_CONTAINER_CREATED)
		e.crictl("start", id)
		e.check("state", e.status(id).GetState(), cri.ContainerState_CONTAINER_RUNNING)
		if e.counting(id) == "1" {
			t.Errorf("container %s began again instead of going on", c.GetName())
		}
		e.check("a file made before", e.exec(id, "cat /kept; test -e /bin/brctl || echo removed"), "kept\nremoved")
		e.check("its labels", e.status(id).GetLabels()["restored"], "yes")
	}
	e.crictl("stop", "--timeout", "0", res.GetRestoredContainers()[0].GetContainerId())
	e.check("exit code", e.status(res.GetRestoredContainers()[0].GetContainerId()).GetExitCode(), int32(137))
}
