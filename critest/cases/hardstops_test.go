package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/sandbox/leakcheck"
)

// cgroupOf is a container's cgroup in the hierarchy that has a file of this name.
func (e *env) cgroupOf(id, file string) string {
	e.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", e.pid(id)))
	if err != nil {
		e.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/" + part[1]} {
			if _, err := os.Stat(filepath.Join(root, part[2], file)); err == nil && part[2] != "/" {
				return filepath.Join(root, part[2])
			}
		}
	}
	e.Fatalf("no cgroup of container %s has a file %s", id, file)
	return ""
}

// writes puts text into the first of the files that is there.
func (e *env) writes(texts map[string]string) {
	e.Helper()
	for file, text := range texts {
		if _, err := os.Stat(file); err != nil {
			continue
		}
		if err := os.WriteFile(file, []byte(text), 0); err != nil {
			e.Fatal(err)
		}
		return
	}
	e.Fatalf("none of %v is there", texts)
}

// freezer is the file that freezes a cgroup, of whichever version.
func (e *env) freezer() string {
	e.Helper()
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return "cgroup.freeze"
	}
	return "freezer.state"
}

// freezeCgroup has somebody freeze a cgroup, who forgets about it.
func (e *env) freezeCgroup(dir string) {
	e.Helper()
	e.writes(map[string]string{filepath.Join(dir, "freezer.state"): "FROZEN", filepath.Join(dir, "cgroup.freeze"): "1"})
	e.eventually("the cgroup is frozen", func() bool { return isFrozen(dir) })
	e.Cleanup(func() { // a test that fails leaves nothing that cannot be killed
		_ = os.WriteFile(filepath.Join(dir, "freezer.state"), []byte("THAWED"), 0)
		_ = os.WriteFile(filepath.Join(dir, "cgroup.freeze"), []byte("0"), 0)
	})
}

func isFrozen(dir string) bool {
	state, err := os.ReadFile(filepath.Join(dir, "freezer.state"))
	if err != nil {
		state, err = os.ReadFile(filepath.Join(dir, "cgroup.events"))
	}
	return err == nil && (strings.Contains(string(state), "FROZEN") || strings.Contains(string(state), "frozen 1"))
}

// soon runs a request that must neither fail nor take long.
func (e *env) soon(what string, limit time.Duration, do func() error) {
	e.Helper()
	began := time.Now()
	if err := do(); err != nil {
		e.Errorf("%s: %v", what, err)
	}
	if took := time.Since(began); took > leakcheck.Patience(limit) {
		e.Errorf("%s took %v", what, took)
	}
}

// What somebody froze can be stopped and removed all the same, and stays as it is
// until then; who froze the whole pod does not see the rest of it thawed by that.
func TestFrozenContainersAreStopped(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	for what, whole := range map[string]bool{"a container": false, "the whole pod": true} {
		config := e.sandbox()
		pod := e.run(config)
		frozen := func(name string) (id, dir string) {
			id = e.startContainer(pod, command(name, "n=0; while :; do echo $n > /n; n=$((n+1)); sleep 0.05; done"), config)
			return id, e.cgroupOf(id, e.freezer())
		}
		stopped, dir := frozen("stopped")
		removed, other := frozen("removed")
		left, last := frozen("left")
		if whole {
			e.freezeCgroup(filepath.Dir(dir))
		} else {
			e.freezeCgroup(dir)
			e.freezeCgroup(other)
			e.freezeCgroup(last)
		}
		if s := e.status(stopped); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
			t.Errorf("%s: a frozen container is %s, want running", what, s.GetState())
		}
		if err := e.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
		e.soon(what+": stop", 20*time.Second, func() error {
			_, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: stopped, Timeout: 1})
			return err
		})
		if s := e.status(stopped); s.GetState() != cri.ContainerState_CONTAINER_EXITED || s.GetExitCode() != 137 {
			t.Errorf("%s: %s with code %d, want exited with 137", what, s.GetState(), s.GetExitCode())
		}
		e.soon(what+": removal without a stop", 20*time.Second, func() error {
			_, err := e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: removed})
			return err
		})
		if data, err := os.ReadFile(filepath.Join(last, "cgroup.procs")); err != nil || len(data) == 0 || e.status(left).GetState() != cri.ContainerState_CONTAINER_RUNNING {
			t.Errorf("%s: the stop of others ended a container (%q, %v)", what, data, err)
		}
		if !isFrozen(last) {
			t.Errorf("%s: the stop of others thawed a container", what)
		}
		e.soon(what+": the pod's end", 20*time.Second, func() error { e.removePod(pod); return nil })
	}
	e.empty("the removal of what was frozen")
}

// bomb forks until nothing more may be forked, and goes on trying; the first
// process, which does not fork, lives on.
const bomb = `bomb() { bomb | bomb & }; bomb; exec sleep 1000`

// A fork bomb within its limit of processes hurts nobody else, and dies whole.
func TestForkBombIsStopped(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	for _, mode := range []cri.NamespaceMode{cri.NamespaceMode_CONTAINER, cri.NamespaceMode_POD} {
		config := pidMode(e.sandbox(), mode)
		pod := e.run(config)
		neighbour := e.startContainer(pod, commandIn(mode, "neighbour", "exec sleep 1000"), config)
		id := e.startContainer(pod, commandIn(mode, "bomb", "trap '' TERM; while [ ! -e /go ]; do sleep 0.05; done; "+bomb), config)
		const limit = 120
		dir := e.cgroupOf(id, "pids.max")
		e.writes(map[string]string{filepath.Join(dir, "pids.max"): fmt.Sprint(limit)})
		e.exec(id, "echo > /go")
		e.eventually("the limit is reached", func() bool {
			data, err := os.ReadFile(filepath.Join(dir, "pids.events"))
			return err == nil && !strings.HasPrefix(string(data), "max 0\n")
		})
		if out := e.exec(neighbour, "echo alive"); out != "alive\n" {
			t.Errorf("%s: exec beside the bomb: %q", mode, out)
		}
		stats, err := e.rt.ContainerStats(e.ctx, &cri.ContainerStatsRequest{ContainerId: id})
		if err != nil || stats.GetStats().GetAttributes().GetId() != id {
			t.Errorf("%s: statistics of the bomb: %v, %v", mode, stats, err)
		}
		// There is no room for another process, or there just was: both are answers.
		_, _ = e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}, Timeout: 5})
		e.soon("stop of the bomb", 20*time.Second, func() error {
			_, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 1})
			return err
		})
		if s := e.status(id); s.GetState() != cri.ContainerState_CONTAINER_EXITED || s.GetExitCode() != 137 {
			t.Errorf("%s: the bomb is %s with code %d, want exited with 137", mode, s.GetState(), s.GetExitCode())
		}
		if data, err := os.ReadFile(filepath.Join(dir, "cgroup.procs")); err == nil && len(data) > 0 {
			t.Errorf("%s: processes are left of the bomb: %q", mode, data)
		}
		if out := e.exec(neighbour, "echo alive"); out != "alive\n" {
			t.Errorf("%s: exec after the bomb: %q", mode, out)
		}
		e.removePod(pod)
	}
}

// A container ends with its first process, whatever that leaves behind and in
// whatever PID namespace.
func TestChildrenDoNotOutliveTheInit(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	for i, mode := range []cri.NamespaceMode{cri.NamespaceMode_CONTAINER, cri.NamespaceMode_POD, cri.NamespaceMode_NODE} {
		config := pidMode(e.sandbox(), mode)
		pod := e.run(config)
		sibling := e.startContainer(pod, commandIn(mode, "sibling", "exec sleep 777"), config)
		mark := fmt.Sprintf("sleep 80%d", i)
		id := e.startContainer(pod, commandIn(mode, "leaves", fmt.Sprintf("trap '' TERM HUP; %[1]s1 & setsid %[1]s2 & (setsid sh -c 'trap \"\" TERM; %[1]s3; :' &); sleep 0.3; exit 3", mark)), config)
		if s := e.exited(id); s.GetExitCode() != 3 {
			t.Errorf("%s: exit code %d, want the first process's 3", mode, s.GetExitCode())
		}
		e.eventually(mode.String()+": the children end", func() bool { return !strings.Contains(strings.Join(e.Processes(), "\n"), mark) })
		if s := e.status(sibling); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
			t.Errorf("%s: the sibling is %s, want running", mode, s.GetState())
		}
		e.removePod(pod)
	}
}
