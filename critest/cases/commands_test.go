package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// hangingRuntime is an OCI runtime that hangs over the command that ctl/hang names,
// while a child, in a session and with an environment of its own, is about to do it.
func hangingRuntime(t *testing.T) (path, ctl string) {
	t.Helper()
	path, ctl = filepath.Join(t.TempDir(), "runc"), t.TempDir()
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	put(t, path, fmt.Sprintf(`#!/bin/sh
CTL=%s REAL=%s/bin/runc
case "$* " in *"$(cat $CTL/hang 2>/dev/null || echo never)"\ *--help*) ;; *" $(cat $CTL/hang 2>/dev/null || echo never) "*)
	rm $CTL/hang
	setsid env -i CTL=$CTL REAL=$REAL PATH=$PATH sh -c '
		echo $$ > $CTL/pid.new; mv $CTL/pid.new $CTL/pid
		while [ ! -e $CTL/go ]; do sleep 0.02; done
		$REAL "$@"; touch $CTL/acted' sh "$@" < /dev/null > /dev/null 2>&1 &
	sleep 1000 ;;
esac
exec $REAL "$@"
`, ctl, deps), 0o755)
	return path, ctl
}

// hangs lets a call hang over a command of the OCI runtime and returns the pid of the
// child that would still act. What the call says does not matter: who it asks is
// about to be killed.
func (e *env) hangsOver(ctl, verb string, call func() error) int {
	e.Helper()
	for _, f := range []string{"pid", "go", "acted"} {
		_ = os.Remove(filepath.Join(ctl, f))
	}
	put(e.T, filepath.Join(ctl, "hang"), verb, 0o600)
	ended := make(chan error, 1)
	go func() { ended <- call() }()
	e.Cleanup(func() {
		if err := <-ended; err == nil {
			e.Errorf("%s was done although it hung", verb)
		}
	})
	pid := 0
	e.eventually("the OCI runtime hangs over "+verb, func() bool {
		text, err := os.ReadFile(filepath.Join(ctl, "pid"))
		pid, _ = strconv.Atoi(strings.TrimSpace(string(text)))
		return err == nil
	})
	return pid
}

// did fails where the child still runs, or does what it was about to do.
func (e *env) did(ctl, what string, pid int) {
	e.Helper()
	if runs(pid) {
		e.Errorf("%s: the command's child still runs", what)
	}
	put(e.T, filepath.Join(ctl, "go"), "", 0o600)
	e.eventually("it has ended", func() bool { return !runs(pid) })
	if _, err := os.Stat(filepath.Join(ctl, "acted")); err == nil {
		e.Errorf("%s: the command's child has done it after the restart", what)
	}
}

// A daemon is killed while a command of the OCI runtime hangs, its own or one that
// the monitor runs for it. The next daemon touches the container after the end of
// that command and of all that it has started.
func TestCommandsOfAKilledDaemon(t *testing.T) {
	path, ctl := hangingRuntime(t)
	e := start(t, node.Options{Runc: path})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	made := func(name string) string { return e.create(pod, command(name, "exec sleep 1000"), config) }
	running := func(name string) string {
		id := made(name)
		if _, err := e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: id}); err != nil {
			t.Fatal(err)
		}
		return id
	}
	for _, verb := range []string{"create", "start", "update", "exec", "delete"} {
		id := ""
		var call func() error
		switch verb {
		case "create":
			call = func() error {
				_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: command(verb, "exit"), SandboxConfig: config})
				return err
			}
		case "start":
			id = made(verb)
			call = func() error {
				_, err := e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: id})
				return err
			}
		case "update":
			id = running(verb)
			call = func() error {
				_, err := e.rt.UpdateContainerResources(e.ctx, &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: &cri.LinuxContainerResources{CpuShares: 512}})
				return err
			}
		case "exec":
			id = running(verb)
			call = func() error {
				_, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}})
				return err
			}
		case "delete":
			id = running(verb)
			call = func() error {
				_, err := e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: id})
				return err
			}
		}
		pid := e.hangsOver(ctl, verb, call)
		e.killDaemonOnce(ctl + "/pid")
		if id == "" {
			id = made(verb) // the kubelet asks again
		}
		if verb == "update" || verb == "exec" { // it has run on
			if out := e.exec(id, "echo well"); out != "well\n" {
				t.Errorf("%s: exec says %q", verb, out)
			}
		}
		if _, err := e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
			t.Errorf("%s: remove: %v", verb, err)
		}
		e.did(ctl, verb, pid)
	}
	e.removePod(pod)
	e.empty("the removal")
}

// The monitor is killed while a create hangs that it runs: the create fails, and what
// it has started has ended by then.
func TestCreateOfAKilledMonitor(t *testing.T) {
	path, ctl := hangingRuntime(t)
	e := start(t, node.Options{Runc: path})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	failed := make(chan error, 1)
	pid := e.hangsOver(ctl, "create", func() error {
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: command("c", "exit"), SandboxConfig: config})
		failed <- err
		return err
	})
	for _, monitor := range e.Monitors() {
		_ = syscall.Kill(monitor, syscall.SIGKILL)
	}
	if err := <-failed; err == nil {
		t.Error("the create has succeeded")
	}
	e.did(ctl, "create", pid)
	e.removePod(pod)
	e.empty("the removal")
}

// NRI plugins that the daemon has launched end with it, with what they have started: at
// once when it ends in order, before the next one launches its own when it was killed.
func TestLaunchedNRIPluginsOfAKilledDaemon(t *testing.T) {
	e := start(t, node.Options{Settings: map[string]string{"nri": `plugin_registration_timeout = "1s"`}})
	ctl := t.TempDir()
	plugin := filepath.Join(e.Dir, "nri", "plugins", "10-silent")
	put(t, plugin, fmt.Sprintf(`#!/bin/sh
setsid env -i PATH=$PATH sh -c 'sleep 0.2; echo $$ >> %s/pids; exec sleep 1000' < /dev/null > /dev/null 2>&1 &
exec sleep 1000
`, ctl), 0o755)
	launched := func(count int) (pids []int) {
		e.eventually("the plugin's child runs", func() bool {
			text, err := os.ReadFile(ctl + "/pids")
			pids = nil
			for _, f := range strings.Fields(string(text)) {
				pid, _ := strconv.Atoi(f)
				pids = append(pids, pid)
			}
			return err == nil && len(pids) == count
		})
		return pids
	}
	for round, end := range []func() error{e.Terminate, e.Kill, e.Kill, e.Terminate} {
		var before []int
		if round > 0 {
			before = launched(round)
		}
		if err := end(); err != nil {
			t.Fatal(err)
		}
		if round == 3 {
			if err := os.Remove(plugin); err != nil {
				t.Fatal(err)
			}
		}
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
		for _, pid := range before {
			if runs(pid) {
				t.Errorf("round %d: a child of an earlier daemon's plugin still runs", round)
			}
		}
	}
}
