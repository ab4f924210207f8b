package smoke

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/node"
)

// underSystemd gives a test a node whose cgroup driver is systemd, which it is
// by itself where systemd runs.
func underSystemd(t *testing.T, settings map[string]string) *env {
	t.Helper()
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		t.Skip("skipped: needs systemd as PID 1")
	}
	e := startWith(t, node.Options{CgroupDriver: "auto", Settings: settings})
	res, err := e.Runtime().RuntimeConfig(e.ctx, &cri.RuntimeConfigRequest{})
	if err != nil {
		t.Fatal(err)
	}
	e.check("the cgroup driver", res.GetLinux().GetCgroupDriver(), cri.CgroupDriver_SYSTEMD)
	return e
}

// scope is the unit and directory of a container's cgroup.
func (e *env) scope(id string) (unit, dir string) {
	e.Helper()
	for line := range strings.Lines(readFile(e.T, "/proc/"+e.pid(id)+"/cgroup")) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return filepath.Base(path), path
		}
	}
	e.Fatalf("container %s is in no unified cgroup", id)
	return "", ""
}

// TestSystemdDriver has systemd make the cgroups of pods: where the kubelet's
// slice says, with the request's limits, known to systemd as scopes that go with
// their containers; also across a restart and a kill of the daemon.
func TestSystemdDriver(t *testing.T) {
	e := underSystemd(t, nil)
	const slice = "berthsmoke-burstable-pod1.slice"
	t.Cleanup(func() { systemctl(t, "stop", "berthsmoke.slice") })
	pod, config := e.pod("sliced", slice)
	id := e.container(pod, config, "main", "sleep 1000", limited(64*mib, 512))
	unit, dir := e.scope(id)
	e.check("the container's scope", unit, "berth-"+id+".scope")
	if unified() {
		e.check("its directory", dir, "/berthsmoke.slice/berthsmoke-burstable.slice/"+slice+"/"+unit)
		e.check("systemd's memory limit", systemctl(t, "show", "-P", "MemoryMax", unit), "67108864")
	}
	e.limits(id, 64*mib, "59", "512")
	e.crictl("update", "--memory", "134217728", "--cpu-share", "1024", id)
	systemctl(t, "daemon-reload")
	e.limits(id, 128*mib, "100", "1024")
	e.check("an exec", e.exec(id, "echo hello"), "hello")
	if _, err := e.Crictl(e.ctx, "runp", e.file("wrong", object{
		"metadata": object{"name": "wrong", "namespace": "smoke", "uid": "wrong"}, "linux": object{"cgroup_parent": "/kubepods/pod1"},
	})); err == nil || !strings.Contains(err.Error(), "cgroup_parent") {
		t.Errorf("a pod below a path of the other driver: %v; want a refusal that names cgroup_parent", err)
	}

	other := e.container(pod, config, "other", "sleep 1000 & sleep 1000", object{})
	left, _ := e.scope(other)
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	e.crictl("stop", "--timeout", "0", other)
	e.check("its exit code", e.status(other).GetExitCode(), int32(137))
	e.crictl("stopp", pod)
	e.crictl("rmp", pod)
	for _, unit := range []string{unit, left} {
		e.eventually("systemd knows "+unit+" no more", func() bool { return systemctl(t, "list-units", "--all", "--no-legend", unit) == "" })
	}
}

// TestSystemdDefaultSlice places pods that name no cgroup beside the services.
func TestSystemdDefaultSlice(t *testing.T) {
	e := underSystemd(t, nil)
	pod, config := e.pod("unplaced", "")
	id := e.container(pod, config, "main", "sleep 1000", object{})
	if _, dir := e.scope(id); unified() && !strings.HasPrefix(dir, "/system.slice/berth-") {
		t.Errorf("the container is in %s", dir)
	}
	e.crictl("rmp", "-f", pod)
}

// TestCrun runs a pod with the other OCI runtime of the field.
func TestCrun(t *testing.T) {
	needs(t, "crun", "crun", "--version")
	if !unified() {
		t.Skip("skipped: crun refuses the hybrid cgroup layout of this machine")
	}
	e := startWith(t, node.Options{Settings: map[string]string{"runtime.handlers.crun": `path = "crun"` + "\ncgroup_writable = true"}})
	config := e.file("crun", object{"metadata": object{"name": "crun", "namespace": "smoke", "uid": "crun"}, "hostname": "crun",
		"log_directory": filepath.Join(e.LogDir(), "crun"), "linux": object{"security_context": own}})
	pod := e.crictl("runp", "--runtime", "crun", config)
	id := e.container(pod, config, "main", "trap 'exit 7' TERM; echo begun; while :; do sleep 0.1; done", limited(64*mib, 512))
	e.eventually("the log says begun", func() bool { return e.crictl("logs", id) == "begun" })
	e.check("an exec", e.exec(id, "echo hello"), "hello")
	e.check("a cgroup made inside", e.exec(id, "mkdir /sys/fs/cgroup/x && rmdir /sys/fs/cgroup/x && echo made"), "made")
	e.check("memory limit", e.limit(id, "memory.max", "memory", "memory.limit_in_bytes"), "67108864")
	e.crictl("stop", "--timeout", "20", id)
	e.check("exit code", e.status(id).GetExitCode(), int32(7))
	e.crictl("rmp", "-f", pod)
}
