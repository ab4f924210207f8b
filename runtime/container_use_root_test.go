package runtime

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestExecSync(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	id := n.runContainer(pod, "c", forever)
	exec := func(ctx context.Context, container string, timeout int64, cmd ...string) (*cri.ExecSyncResponse, error) {
		return n.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: container, Cmd: cmd, Timeout: timeout})
	}
	r, err := exec(t.Context(), id[:12], 0, "/bin/sh", "-c", "echo out; echo err >&2; exit 5")
	must(t, err)
	if string(r.GetStdout()) != "out\n" || string(r.GetStderr()) != "err\n" || r.GetExitCode() != 5 {
		t.Errorf("got %v", r)
	}
	began := time.Now()
	_, err = exec(t.Context(), id, 1, "/bin/sh", "-c", "sleep 600 & sleep 600")
	n.refused("timeout", err, codes.DeadlineExceeded, "timed out after 1 s", id)
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("the timeout took %v", took)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	_, err = exec(ctx, id, 0, "/bin/sh", "-c", "sleep 700")
	n.refused("caller gave up", err, codes.DeadlineExceeded, id)
	if got := n.exec(id, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"); strings.Contains(got, "sleep 600") || strings.Contains(got, "sleep 700") {
		t.Errorf("there is still: %s", got)
	}
	_, err = exec(t.Context(), id, 0, "/nosuch")
	n.refused("no such command", err, codes.InvalidArgument, "/nosuch", id)
	_, err = exec(t.Context(), id, 0)
	n.refused("no command", err, codes.InvalidArgument, "cmd")
	_, err = exec(t.Context(), id, -1, "true")
	n.refused("negative timeout", err, codes.InvalidArgument, "timeout -1")
	_, err = exec(t.Context(), "nosuch", 0, "true")
	n.refused("unknown container", err, codes.NotFound, "nosuch")
	created := n.create(n.container(pod, "created", forever))
	_, err = exec(t.Context(), created, 0, "true")
	n.refused("created container", err, codes.FailedPrecondition, "CREATED")
	must(t, n.stop(t.Context(), id, 0))
	_, err = exec(t.Context(), id, 0, "true")
	n.refused("ended container", err, codes.FailedPrecondition, "EXITED")
}

// cgroupValue reads a file of a container's cgroup, whatever the version.
func (n *node) cgroupValue(id, v1, v2 string) string {
	n.t.Helper()
	for _, file := range []string{v1, "/" + v2} {
		controller, name, _ := strings.Cut(file, "/")
		b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", controller, n.parent, id, name))
		if err == nil {
			return strings.TrimSpace(string(b))
		}
	}
	n.t.Fatalf("container %s has neither %s nor %s", id, v1, v2)
	return ""
}

// limits reads what the update test changes.
func (n *node) limits(id string) string {
	return fmt.Sprintf("memory %s shares %s quota %s", n.cgroupValue(id, "memory/memory.limit_in_bytes", "memory.max"),
		n.cgroupValue(id, "cpu/cpu.shares", "cpu.weight"), n.cgroupValue(id, "cpu/cpu.cfs_quota_us", "cpu.max"))
}

func TestUpdateContainerResources(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	request := n.container(pod, "c", forever)
	request.Config.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuShares: 512, CpuPeriod: 100000, CpuQuota: 50000}
	id := n.create(request)
	update := func(r *cri.LinuxContainerResources) error {
		_, err := n.UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: r})
		return err
	}
	must(t, update(&cri.LinuxContainerResources{MemoryLimitInBytes: 96 << 20})) // also before the start
	n.start(id)
	if got := n.cgroupValue(id, "memory/memory.limit_in_bytes", "memory.max"); got != strconv.Itoa(96<<20) {
		t.Errorf("memory limit %s", got)
	}
	was := n.limits(id)
	must(t, update(&cri.LinuxContainerResources{CpuShares: 1024, CpuQuota: 80000, CpuPeriod: 100000}))
	now := n.limits(id)
	if now == was || !strings.Contains(now, "quota 80000") || !strings.Contains(now, strconv.Itoa(96<<20)) {
		t.Errorf("limits were %s and are %s", was, now)
	}
	told := n.status(id).GetResources().GetLinux()
	if told.GetCpuShares() != 1024 || told.GetCpuQuota() != 80000 || told.GetMemoryLimitInBytes() != 96<<20 {
		t.Errorf("the status tells %v", told)
	}
	for word, bad := range map[string]*cri.LinuxContainerResources{
		`linux.cpuset_cpus "9999"`:         {CpuShares: 2048, CpusetCpus: "9999"},
		`linux.cpu_quota "5"`:              {CpuShares: 2048, CpuQuota: 5, CpuPeriod: 100000},
		"linux.memory_limit_in_bytes 4096": {CpuShares: 2048, MemoryLimitInBytes: 4096},
	} {
		n.refused(word, update(bad), codes.InvalidArgument, word)
		if got := n.limits(id); got != now {
			t.Errorf("a refused update of %s changed %s to %s", word, now, got)
		}
		if got := n.status(id).GetResources().GetLinux(); got.String() != told.String() {
			t.Errorf("after a refused update of %s the status tells %v", word, got)
		}
	}
	n.restart(nil)
	if got := n.status(id).GetResources().GetLinux(); got.String() != told.String() {
		t.Errorf("after a restart the status tells %v", got)
	}
	n.refused("nothing", update(nil), codes.InvalidArgument, "linux is missing")
	must(t, n.stop(t.Context(), id, 0))
	n.refused("ended container", update(&cri.LinuxContainerResources{CpuShares: 100}), codes.FailedPrecondition, "EXITED")
}

func TestReopenContainerLog(t *testing.T) {
	n := newNode(t)
	id := n.runContainer(n.runPod(n.hostPod("web")), "c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done")
	log := n.status(id).GetLogPath()
	size := func(path string) int64 {
		st, err := os.Stat(path)
		if err != nil {
			return 0
		}
		return st.Size()
	}
	eventually(t, "output", func() bool { return size(log) > 0 })
	must(t, os.Rename(log, log+".1"))
	_, err := n.ReopenContainerLog(t.Context(), &cri.ReopenContainerLogRequest{ContainerId: id})
	must(t, err)
	eventually(t, "output in the new file", func() bool { return size(log) > 0 })
	must(t, n.stop(t.Context(), id, 0))
	eventually(t, "both files have every line once", func() bool { return consecutive(t, log+".1", log) })
	must(t, os.Rename(log, log+".2"))
	_, err = n.ReopenContainerLog(t.Context(), &cri.ReopenContainerLogRequest{ContainerId: id})
	n.refused("ended container", err, codes.FailedPrecondition, "EXITED")
	if size(log) != 0 {
		t.Error("a log of an ended container was made")
	}
}

// consecutive tells whether the files hold the lines 1, 2, 3, … in order.
func consecutive(t *testing.T, files ...string) bool {
	t.Helper()
	want := 0
	for _, f := range files {
		b, err := os.ReadFile(f)
		must(t, err)
		for line := range strings.Lines(string(b)) {
			want++
			if fields := strings.Fields(line); len(fields) != 4 || fields[3] != strconv.Itoa(want) {
				return false
			}
		}
	}
	return want > 1
}

// link is what a namespace of a process is, of the test's own for "self".
func link(t *testing.T, pid, kind string) string {
	t.Helper()
	l, err := os.Readlink("/proc/" + pid + "/ns/" + kind)
	must(t, err)
	return l
}

// The PID namespace is the container's, the pod's, a target's or the node's.
func TestPIDModes(t *testing.T) {
	n := newNode(t)
	shared := n.runPod(sharedPIDs(n.hostPod("shared")))
	a := n.runContainer(shared, "a", forever)
	b := n.runContainer(shared, "b", forever)
	if got := n.exec(a, "tr '\\0' ' ' < /proc/1/cmdline"); !strings.HasPrefix(got, "/pause pause") {
		t.Errorf("PID 1 of a shared namespace is %q", got)
	}
	if x, y := n.exec(a, "readlink /proc/self/ns/pid"), n.exec(b, "readlink /proc/self/ns/pid"); x != y || x == link(t, "self", "pid") {
		t.Errorf("PID namespaces %s and %s", x, y)
	}
	own := n.runPod(n.hostPod("own"))
	target := n.runContainer(own, "target", "exec sleep 600")
	request := n.container(own, "debug", forever)
	o := request.Config.Linux.SecurityContext.NamespaceOptions
	o.Pid, o.TargetId = cri.NamespaceMode_TARGET, target
	debug := n.create(request)
	n.start(debug)
	if got := n.exec(debug, "tr '\\0' ' ' < /proc/1/cmdline"); !strings.Contains(got, "600") {
		t.Errorf("PID 1 of the target's namespace is %q", got)
	}
	request = n.container(shared, "elsewhere", forever)
	request.Config.Linux.SecurityContext.NamespaceOptions = o
	_, err := n.CreateContainer(t.Context(), request)
	n.refused("target in another pod", err, codes.InvalidArgument, target)
	must(t, n.stop(t.Context(), target, 0))
	eventually(t, "the one in its namespace has ended", func() bool {
		return n.status(debug).GetState() == cri.ContainerState_CONTAINER_EXITED
	})
	request = n.container(own, "late", forever)
	request.Config.Linux.SecurityContext.NamespaceOptions = o
	_, err = n.CreateContainer(t.Context(), request)
	n.refused("target that has ended", err, codes.FailedPrecondition, target, "EXITED")
}

func TestHostNamespaces(t *testing.T) {
	n := newNode(t)
	r := n.hostPod("host")
	nsOptions(r).Pid, nsOptions(r).Ipc = cri.NamespaceMode_NODE, cri.NamespaceMode_NODE
	pod := n.runPod(r)
	id := n.runContainer(pod, "c", stubborn+" & "+stubborn)
	for _, kind := range []string{"pid", "ipc", "net", "uts"} {
		if got := n.exec(id, "readlink /proc/self/ns/"+kind); got != link(t, "self", kind) {
			t.Errorf("%s namespace is %s, the node's %s", kind, got, link(t, "self", kind))
		}
	}
	if len(n.mounts(n.cfg.State+"/namespaces")) != 0 || len(n.mounts(n.cfg.State+"/sandboxes")) != 0 {
		t.Errorf("a pod without namespaces has mounts %q", n.mounts(n.cfg.State))
	}
	host, err := os.Hostname()
	must(t, err)
	if got := n.exec(id, "cat /etc/hostname; echo $HOSTNAME"); got != host+"\n"+host {
		t.Errorf("hostname %q, the node's is %q", got, host)
	}
	must(t, n.stop(t.Context(), id, 0))
	n.removePod(pod)
	n.empty("removal") // also of the second process, which no namespace took along
}
