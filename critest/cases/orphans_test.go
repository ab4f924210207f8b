package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/node"
	"berth/sandbox/leakcheck"
)

// scripted puts a script before the bridge plugin; $REAL is the plugin, $CTL a
// directory of the test's.
func scripted(t *testing.T, script string) (plugins, ctl string) {
	t.Helper()
	plugins, ctl = t.TempDir(), t.TempDir()
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("#!/bin/sh\nREAL=%s/cni/bridge CTL=%s\n%s\nexec $REAL\n", deps, ctl, script)
	if err := os.WriteFile(filepath.Join(plugins, "bridge"), []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return plugins, ctl
}

// killDaemonOnce kills the daemon when a file appears, and starts another.
func (e *env) killDaemonOnce(file string) {
	e.Helper()
	e.eventually("the plugin runs", func() bool { _, err := os.Stat(file); return err == nil })
	if err := e.Kill(); err != nil {
		e.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		e.Fatal(err)
	}
}

// A daemon is killed while the child of a CNI plugin, in a session and with an
// environment of its own, is about to do an ADD. The next daemon's DEL comes after
// the end of that child.
func TestPluginsOfAKilledDaemon(t *testing.T) {
	plugins, ctl := scripted(t, `
[ $CNI_COMMAND = ADD ] && [ ! -e $CTL/pid ] || exec $REAL
cat > $CTL/input
env | grep ^CNI_ > $CTL/environment
setsid env -i REAL=$REAL CTL=$CTL PATH=$PATH sh -c '
	echo $$ > $CTL/pid
	while [ ! -e $CTL/go ]; do sleep 0.02; done
	set -a; . $CTL/environment
	$REAL < $CTL/input
	touch $CTL/added' > /dev/null &
sleep 1000`)
	e := start(t, node.Options{Plugins: plugins})
	config := e.sandbox()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: config})
		if err == nil {
			t.Error("the pod is ready although its daemon was killed")
		}
	}()
	e.killDaemonOnce(ctl + "/pid")
	<-ended
	if err := e.Tidied(e.ctx); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(ctl + "/pid")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	if runs(pid) {
		t.Error("the plugin's child still runs")
	}
	if err := os.WriteFile(ctl+"/go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	e.empty("the restart")
	if left := e.leases(); len(left) != 0 {
		t.Errorf("leases %v are left", left)
	}
	e.removePod(e.run(config))
	if _, err := os.Stat(ctl + "/added"); err == nil {
		t.Error("the plugin's child has done its ADD")
	}
}

// A DEL that was begun by a killed daemon is waited for, not overtaken; one that
// hangs ends with its time.
func TestDELOfAKilledDaemon(t *testing.T) {
	plugins, ctl := scripted(t, `
[ $CNI_COMMAND = DEL ] || exec $REAL
echo begins >> $CTL/calls
[ ! -e $CTL/hang ] || { rm $CTL/hang; touch $CTL/hangs; sleep 1000; }
[ ! -e $CTL/wait ] || { rm $CTL/wait; touch $CTL/waits; while [ ! -e $CTL/go ]; do sleep 0.02; done; }
$REAL; code=$?
echo ends >> $CTL/calls
exit $code`)
	e := start(t, node.Options{Plugins: plugins, Settings: map[string]string{"cni": fmt.Sprintf("timeout = %q", leakcheck.Patience(3e9))}})
	for _, how := range []string{"wait", "hang"} {
		for _, f := range []string{"go", "calls"} {
			_ = os.Remove(filepath.Join(ctl, f))
		}
		pod := e.run(e.sandbox())
		if err := os.WriteFile(filepath.Join(ctl, how), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			_, _ = e.rt.StopPodSandbox(e.ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod})
		}()
		e.killDaemonOnce(filepath.Join(ctl, how+"s"))
		<-stopped
		res, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod})
		if err != nil || res.GetStatus().GetState() != cri.PodSandboxState_SANDBOX_NOTREADY {
			t.Errorf("%s: the pod is %v, %v", how, res.GetStatus().GetState(), err)
		}
		if err := os.WriteFile(ctl+"/go", nil, 0o600); err != nil {
			t.Fatal(err)
		}
		e.removePod(pod)
		calls, err := os.ReadFile(ctl + "/calls")
		want := map[string]string{"wait": "begins ends begins ends", "hang": "begins begins ends"}[how]
		if got := strings.Join(strings.Fields(string(calls)), " "); err != nil || got != want {
			t.Errorf("%s: DEL %q (%v), want %q", how, got, err, want)
		}
		if left := e.leases(); len(left) != 0 {
			t.Errorf("%s: leases %v are left", how, left)
		}
	}
}

// runs: there is such a process, and it is no zombie.
func runs(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}
