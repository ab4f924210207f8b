package smoke

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
)

const mib = 1 << 20

// limited is a container's share of the kubelet's making: memory in bytes, cpu in
// shares of 1024.
func limited(memory, shares int) object {
	return object{"resources": object{
		"memory_limit_in_bytes": memory, "cpu_shares": shares, "cpu_quota": 50000, "cpu_period": 100000, "oom_score_adj": 500,
	}}
}

// TestLifeOfAPod follows one pod from its image to its end.
func TestLifeOfAPod(t *testing.T) {
	e := start(t)
	pod, config := e.pod("life", "")
	id := e.container(pod, config, "main", "trap 'exit 7' TERM; echo begun; while :; do sleep 0.1; done", limited(64*mib, 512))
	inspect := func(field string) string {
		return e.crictl("inspect", "-o", "go-template", "--template", "{{.status."+field+"}}", id)
	}
	e.check("state", inspect("state"), "CONTAINER_RUNNING")
	e.limits(id, 64*mib, "59", "512")
	e.check("oom_score_adj", e.crictl("exec", "--sync", id, "cat", "/proc/1/oom_score_adj"), "500")
	if unified() {
		e.check("the container's view of its cgroup", e.exec(id, "cat /proc/1/cgroup"), "0::/")
		e.check("memory.max seen inside", e.exec(id, "cat /sys/fs/cgroup/memory.max"), "67108864")
		e.check("writable cgroup", e.exec(id, "mkdir /sys/fs/cgroup/x 2>/dev/null || echo refused"), "refused")
	}
	e.crictl("update", "--memory", "134217728", "--cpu-share", "1024", id)
	e.limits(id, 128*mib, "100", "1024")
	e.eventually("the log says begun", func() bool { return e.crictl("logs", id) == "begun" })

	e.crictl("stop", "--timeout", "20", id)
	e.check("exit code", inspect("exitCode"), "7")
	e.check("state", inspect("state"), "CONTAINER_EXITED")
	e.crictl("rm", id)
	e.crictl("stopp", pod)
	e.crictl("rmp", pod)
	e.check("containers", e.crictl("ps", "-a", "-q"), "")
	e.check("pods", e.crictl("pods", "-q"), "")
	e.crictl("rmi", images.Busybox)
	e.check("images", e.crictl("images", "-q"), "")
}

// limits checks memory and cpu of a container: bytes, v2's weight, v1's shares.
func (e *env) limits(id string, memory int, weight, shares string) {
	e.Helper()
	want := map[int]string{64 * mib: "67108864", 128 * mib: "134217728"}[memory]
	e.check("memory limit", e.limit(id, "memory.max", "memory", "memory.limit_in_bytes"), want)
	if unified() {
		e.check("cpu.weight", e.limit(id, "cpu.weight", "", ""), weight)
		e.check("cpu.max", e.limit(id, "cpu.max", "", ""), "50000 100000")
		return
	}
	e.check("cpu.shares", e.limit(id, "", "cpu", "cpu.shares"), shares)
	e.check("cpu quota", e.limit(id, "", "cpu", "cpu.cfs_quota_us"), "50000")
}

// TestOutOfMemory has one container exceed its limit and another live on.
func TestOutOfMemory(t *testing.T) {
	e := start(t)
	pod, config := e.pod("oom", "")
	calm := e.container(pod, config, "calm", "sleep 1000", object{})
	// One line without an end: busybox's tail keeps all of it.
	hungry := e.container(pod, config, "hungry", "tail /dev/zero & wait $!; exit 9", limited(24*mib, 1024))
	// The kernel kills one process; the container's own, a shell, sees that and goes on.
	e.check("exit code of a container whose child was killed", e.ended(hungry).GetExitCode(), int32(9))

	whole := e.ended(e.container(pod, config, "whole", "exec tail /dev/zero", limited(24*mib, 1024)))
	e.check("exit code", whole.GetExitCode(), int32(137))
	e.check("reason", whole.GetReason(), "OOMKilled")
	e.check("the neighbour", e.status(calm).GetState(), cri.ContainerState_CONTAINER_RUNNING)
}

// TestUnifiedSettings passes cgroup v2 files through, refuses unknown ones, and
// holds the container to them.
func TestUnifiedSettings(t *testing.T) {
	if !unified() {
		t.Skip("skipped: needs cgroup v2, this machine has v1")
	}
	e := start(t)
	pod, config := e.pod("unified", "")
	id := e.container(pod, config, "main", "sleep 1000", object{"resources": object{
		"unified": object{"pids.max": "12", "memory.high": "50331648", "memory.min": "1048576"},
	}})
	e.check("pids.max", e.limit(id, "pids.max", "", ""), "12")
	e.check("memory.high", e.limit(id, "memory.high", "", ""), "50331648")
	e.check("memory.min", e.limit(id, "memory.min", "", ""), "1048576")
	// The subshell ends when it can start no more; the shell around it does not.
	e.check("a shell over a subshell of 14 children", e.exec(id, "(for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14; do sleep 5 & done) 2>/dev/null; echo alive"), "alive")
	if text := e.limit(id, "pids.events", "", ""); text == "max 0" {
		t.Errorf("pids.events says %q after 14 children under a limit of 12", text)
	}
}

// TestCgroupParent puts a pod where a kubelet says, below a limit of the
// kubelet's own, and leaves that cgroup in its hands.
func TestCgroupParent(t *testing.T) {
	if !unified() {
		t.Skip("skipped: needs cgroup v2, this machine has v1")
	}
	e := start(t)
	above := filepath.Join("/sys/fs/cgroup", e.Bridge)
	parent := "/" + e.Bridge + "/pod-uid"
	t.Cleanup(func() {
		for _, dir := range []string{"/sys/fs/cgroup" + parent, above} {
			if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
				t.Errorf("remove the test's own cgroup: %v", err)
			}
		}
	})
	for _, dir := range []string{above, "/sys/fs/cgroup" + parent} {
		if err := os.WriteFile(filepath.Join(filepath.Dir(dir), "cgroup.subtree_control"), []byte("+cpu +memory +pids"), 0); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile("/sys/fs/cgroup"+parent+"/pids.max", []byte("77"), 0); err != nil {
		t.Fatal(err)
	}
	pod, config := e.pod("placed", parent)
	id := e.container(pod, config, "main", "sleep 1000", object{})
	data, err := os.ReadFile("/proc/" + e.pid(id) + "/cgroup")
	if path := strings.TrimSpace(string(data)); err != nil || !strings.HasPrefix(path, "0::"+parent+"/") {
		t.Errorf("the container is in %q, want below %s (%v)", path, parent, err)
	}
	e.check("pids.max of the pod", readFile(t, "/sys/fs/cgroup"+parent+"/pids.max"), "77")
	e.crictl("stopp", pod)
	e.crictl("rmp", pod)
	if entries, err := filepath.Glob("/sys/fs/cgroup" + parent + "/*/cgroup.procs"); err != nil || len(entries) != 0 {
		t.Errorf("cgroups left below the pod's: %q, %v", entries, err)
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Error(err)
	}
	return strings.TrimSpace(string(data))
}

// TestAppArmorProfile confines a container by a loaded profile, leaves an
// unconfined one free, and refuses a profile that is not loaded.
func TestAppArmorProfile(t *testing.T) {
	if readAll("/sys/module/apparmor/parameters/enabled") != "Y" {
		t.Skip("skipped: needs AppArmor, this kernel has it not or off")
	}
	needs(t, "AppArmor's parser", "apparmor_parser", "--version")
	profile := "profile berth-smoke flags=(attach_disconnected) {\n  file,\n  capability,\n  network,\n  mount,\n  signal,\n  ptrace,\n  unix,\n  deny /tmp/forbidden w,\n}\n"
	load := func(flag string) {
		cmd := exec.Command("apparmor_parser", flag, "-K")
		cmd.Stdin = strings.NewReader(profile)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("apparmor_parser %s: %v: %s", flag, err, out)
		}
	}
	load("-r")
	t.Cleanup(func() { load("-R") })
	e := start(t)
	pod, config := e.pod("apparmor", "")
	with := func(kind int, name string) object {
		return object{"security_context": object{"namespace_options": object{"pid": 1},
			"apparmor": object{"profile_type": kind, "localhost_ref": name}}}
	}
	try := "touch /tmp/allowed && touch /tmp/forbidden 2>&1; cat /proc/self/attr/current"
	confined := e.container(pod, config, "confined", "sleep 1000", with(2, "berth-smoke"))
	e.check("a confined exec", e.exec(confined, try), "touch: /tmp/forbidden: Permission denied\nberth-smoke (enforce)")
	e.check("the confined container", readFile(t, "/proc/"+e.pid(confined)+"/attr/current"), "berth-smoke (enforce)")
	free := e.container(pod, config, "free", "sleep 1000", with(1, ""))
	e.check("an unconfined exec", e.exec(free, try), "unconfined")
	bad := e.file("bad", object{"metadata": object{"name": "bad"}, "image": object{"image": images.Busybox},
		"command": []string{"sleep", "1"}, "linux": with(2, "berth-none")})
	if _, err := e.Crictl(e.ctx, "create", pod, bad, config); err == nil || !strings.Contains(err.Error(), "berth-none") {
		t.Errorf("a profile that is not loaded: %v, want an error that names it", err)
	}
}

func readAll(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}
