package cases

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/sandbox/leakcheck"
)

// group is the cgroup directory of a container by which it can be frozen, the
// file that does it and what is to be written there.
func (e *env) group(id string) (dir, file, text string) {
	e.Helper()
	r, err := e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		e.Fatal(err)
	}
	pid, _ := info(e.T, r.GetInfo())["pid"].(float64)
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", int(pid)))
	if err != nil {
		e.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch part[1] {
		case "freezer":
			return "/sys/fs/cgroup/freezer" + part[2], "freezer.state", "FROZEN"
		case "":
			dir, file, text = "/sys/fs/cgroup"+part[2], "cgroup.freeze", "1"
		}
	}
	return dir, file, text
}

// Somebody has frozen a container, or it has frozen a part of itself: a stop
// still gives it its signal, and a kill leaves nothing (siblings of B65 and B81:
// runc#2105, containerd#8102).
func TestFrozenContainers(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	id := e.startContainer(pod, command("whole", "trap 'exit 5' TERM; echo ready; while :; do sleep 0.1; done"), config)
	e.said(id, "ready\n")
	dir, file, frozen := e.group(id)
	put(t, filepath.Join(dir, file), frozen, 0o644)
	_, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}, Timeout: 2})
	e.refused("exec in a frozen container", err, codes.FailedPrecondition, "paused")
	if _, err := e.rt.ContainerStats(e.ctx, &cri.ContainerStatsRequest{ContainerId: id}); err != nil {
		t.Errorf("stats of a frozen container: %v", err)
	}
	if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 60}); err != nil {
		t.Errorf("stop: %v", err)
	}
	if s := e.status(id); s.GetExitCode() != 5 {
		t.Errorf("exit code %d of a container that was frozen when it was stopped, want its own 5", s.GetExitCode())
	}
	id = e.startContainer(pod, command("part", "trap '' TERM; sleep 3001 & echo ready; wait"), config)
	e.said(id, "ready\n")
	dir, file, frozen = e.group(id)
	part := filepath.Join(dir, "part")
	if err := os.Mkdir(part, 0o755); err != nil {
		t.Fatal(err)
	}
	pids, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Fields(string(pids))
	put(t, filepath.Join(part, "cgroup.procs"), all[len(all)-1], 0o644)
	put(t, filepath.Join(part, file), frozen, 0o644)
	if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 1}); err != nil {
		t.Errorf("stop of a container with a frozen part: %v", err)
	}
	e.removePod(pod)
	if _, err := os.Stat(dir); err == nil {
		t.Errorf("the cgroup %s is left", dir)
	}
}

// Somebody has unmounted a namespace of a pod: no container can be made in it
// any more, so it is not ready, and goes as any other (siblings of B49 and B85).
func TestPodWhoseNamespaceIsGone(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	id := e.startContainer(pod, command("main", "sleep 1000"), config)
	if out, err := exec.Command("umount", filepath.Join(e.State(), "namespaces", pod, "net")).CombinedOutput(); err != nil {
		t.Fatalf("umount: %v: %s", err, out)
	}
	_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: command("next", "true"), SandboxConfig: config})
	e.refused("create in a pod without its network", err, codes.FailedPrecondition, pod, "net namespace")
	s, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod})
	if err != nil || s.GetStatus().GetState() != cri.PodSandboxState_SANDBOX_NOTREADY {
		t.Errorf("the pod is %s (%v), want not ready", s.GetStatus().GetState(), err)
	}
	if out := e.exec(id, "echo still here"); out != "still here\n" {
		t.Errorf("its container says %q", out)
	}
	e.removePod(pod)
	if left := e.leases(); len(left) != 0 {
		t.Errorf("leases %q are left", left)
	}
}

// A seccomp profile that kills threads kills the OCI runtime's own, which then
// waits for ever: the container is refused, at its creation or at its start, and
// nothing is left (siblings of B63 and B65).
func TestSeccompThatKillsTheRuntime(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	file := filepath.Join(t.TempDir(), "profile.json")
	for _, action := range []string{"SCMP_ACT_KILL", "SCMP_ACT_KILL_THREAD", "SCMP_ACT_KILL_PROCESS"} {
		for _, late := range []bool{false, true} { // with no_new_privs the profile comes when the container starts
			put(t, file, fmt.Sprintf(`{"defaultAction":%q}`, action), 0o644)
			c := command(fmt.Sprint("c", action, late), "echo runs")
			c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: file}
			c.Linux.SecurityContext.NoNewPrivs = late
			began := time.Now()
			res, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
			if err == nil {
				id := res.GetContainerId()
				_, err = e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: id})
				if s := e.exited(id); s.GetExitCode() == 0 {
					t.Errorf("%s, %v: it ended with 0", action, late)
				}
			}
			// Where each thread of the init has made a call, all of it is dead before the start.
			if err != nil && !strings.Contains(err.Error(), "CONTAINER_EXITED") {
				e.refused(fmt.Sprint(action, late), err, codes.FailedPrecondition, "seccomp")
			}
			if took := time.Since(began); took > leakcheck.Patience(15*time.Second) {
				t.Errorf("%s, %v: it took %v", action, late, took)
			}
		}
	}
}

// Timeouts that no clock can add up are long ones, and a container that dies
// takes its commands along (siblings of B65, B73 and B79).
func TestOddTimeoutsAndDyingContainers(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	stop := func(id string, timeout int64) error {
		_, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: timeout})
		return err
	}
	for _, timeout := range []int64{math.MaxInt64, math.MaxInt64 / int64(time.Second), math.MaxInt64/int64(time.Second) + 1} {
		id := e.startContainer(pod, command(fmt.Sprint("c", timeout), "trap 'sleep 0.3; exit 5' TERM; echo ready; while :; do sleep 0.1; done"), config)
		e.said(id, "ready\n")
		res, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "sleep 0.2; echo hi"}, Timeout: timeout})
		if err != nil || string(res.GetStdout()) != "hi\n" {
			t.Errorf("exec with a timeout of %d: %v, %v", timeout, res, err)
		}
		if err := stop(id, timeout); err != nil {
			t.Errorf("stop with %d: %v", timeout, err)
		}
		if s := e.status(id); s.GetExitCode() != 5 || s.GetReason() != "Error" {
			t.Errorf("stop with %d: it ended with %d (%s), want its own 5", timeout, s.GetExitCode(), s.GetReason())
		}
	}
	id := e.startContainer(pod, command("dies", "sleep 1000"), config)
	for _, timeout := range []int64{-1, math.MinInt64} {
		e.refused("stop", stop(id, timeout), codes.InvalidArgument, "timeout", fmt.Sprint(timeout))
		_, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}, Timeout: timeout})
		e.refused("exec", err, codes.InvalidArgument, "timeout", fmt.Sprint(timeout))
	}
	ctx, cancel := context.WithTimeout(e.ctx, 500*time.Millisecond)
	_, err := e.rt.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "sleep 4441 & sleep 4442"}})
	cancel()
	e.refused("an exec whose caller has gone", err, codes.DeadlineExceeded)
	e.eventually("it goes with its caller", func() bool { return !strings.Contains(e.processes(id), "sleep 444") })
	var group sync.WaitGroup
	for range 3 {
		group.Go(func() {
			res, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "echo begun; sleep 4443"}, Timeout: 120})
			if err != nil || res.GetExitCode() != 137 || string(res.GetStdout()) != "begun\n" {
				t.Errorf("an exec in a container that dies: %v, %v; want its output and 137", res, err)
			}
		})
	}
	e.eventually("three commands have begun", func() bool { return strings.Count("\n"+e.processes(id), "\nsleep 4443") == 3 })
	if err := stop(id, 0); err != nil {
		t.Error(err)
	}
	group.Wait()
}
