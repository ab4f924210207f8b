package smoke

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const service = "berth-smoke.service"

func systemctl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("systemctl", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("systemctl %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// packaged installs the project's unit under another name for the node's
// configuration, until the end of the test.
func (e *env) packaged() {
	e.Helper()
	unit, err := os.ReadFile(filepath.Join(filepath.Dir(e.Bin), "packaging", "berth.service"))
	if err != nil {
		e.Fatal(err)
	}
	var text strings.Builder
	for line := range strings.Lines(string(unit)) {
		if strings.HasPrefix(line, "ExecStart=") {
			line = fmt.Sprintf("ExecStart=%s/berth serve --config %s/config.toml\n", e.Bin, e.Dir)
		}
		text.WriteString(line)
	}
	path := "/run/systemd/system/" + service
	if err := os.WriteFile(path, []byte(text.String()), 0o644); err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() {
		systemctl(e.T, "stop", service)
		if err := os.Remove(path); err != nil {
			e.Error(err)
		}
		systemctl(e.T, "daemon-reload")
		// The node's own daemon takes over again, to be closed by the harness.
		if err := e.Launch(e.ctx); err != nil {
			e.Error(err)
		}
	})
	systemctl(e.T, "daemon-reload")
}

// TestSystemdService runs the daemon by the packaged unit: start waits for READY;
// containers outlive stop and restart, also a reload of systemd, with their
// limits and their exit codes.
func TestSystemdService(t *testing.T) {
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		t.Skip("skipped: needs systemd as PID 1")
	}
	if os.Getenv("BERTH_GUEST") == "" {
		t.Skip("skipped: installs a unit, which only the guest should get")
	}
	e := start(t)
	if err := e.Terminate(); err != nil {
		t.Fatal(err)
	}
	e.packaged()
	systemctl(t, "start", service)
	e.crictl("version") // answered at once: start has waited for READY
	pod, config := e.pod("service", "")
	id := e.container(pod, config, "main", "sleep 1000", limited(64*mib, 512))
	short := e.container(pod, config, "short", "while [ ! -e /tmp/go ]; do sleep 0.1; done; exit 5", object{})
	pid := e.pid(id)
	main := systemctl(t, "show", "-P", "MainPID", service)

	systemctl(t, "daemon-reload")
	e.limits(id, 64*mib, "59", "512")
	e.exec(short, "touch /tmp/go")
	systemctl(t, "restart", service)
	if again := systemctl(t, "show", "-P", "MainPID", service); again == main || again == "0" {
		t.Errorf("the daemon is process %s after a restart, before it was %s", again, main)
	}
	e.check("the container's process", e.pid(id), pid)
	e.check("exit code from around the restart", e.ended(short).GetExitCode(), int32(5))

	systemctl(t, "stop", service)
	if _, err := os.Stat("/proc/" + pid); err != nil {
		t.Errorf("stopping the service ended the container: %v", err)
	}
	systemctl(t, "start", service)
	e.check("state", e.status(id).GetState(), cri.ContainerState_CONTAINER_RUNNING)
	e.limits(id, 64*mib, "59", "512")
	e.check("an exec", e.exec(id, "echo hello"), "hello")
	e.bothKilled(pod, config, pid)
	for _, log := range strings.Split(journal(t), "\n") {
		if strings.Contains(log, "level=error") || strings.Contains(log, "level=fatal") {
			t.Errorf("the service's journal: %s", log)
		}
	}
}

// bothKilled kills the daemon and the monitor at once: with the descriptors that systemd keeps nothing of any container is lost.
// pid is that of a running container.
func (e *env) bothKilled(pod, config, pid string) {
	e.Helper()
	writer := e.container(pod, config, "writer", "i=0; while [ ! -e /tmp/go ]; do echo line $i; i=$((i+1)); sleep 0.01; done; exit 3", object{})
	dying := e.container(pod, config, "dying", "printf begin; sleep 1; echo; echo the last word; exit 4", object{})
	monitors := e.Monitors()
	main := systemctl(e.T, "show", "-P", "MainPID", service)
	if stored := systemctl(e.T, "show", "-P", "NFileDescriptorStore", service); stored == "0" {
		e.Error("systemd keeps no descriptor")
	}
	daemon, err := strconv.Atoi(main)
	if err != nil {
		e.Fatal(err)
	}
	for _, pid := range append([]int{daemon}, monitors...) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	e.eventually("the daemon is started again and answers", func() bool {
		now := systemctl(e.T, "show", "-P", "MainPID", service)
		return now != main && now != "0" && systemctl(e.T, "show", "-P", "ActiveState", service) == "active"
	})
	if now := e.Monitors(); len(now) != 1 || len(monitors) != 1 || now[0] == monitors[0] {
		e.Errorf("the monitors are %v, they were %v", now, monitors)
	}
	if _, err := os.Stat("/proc/" + pid); err != nil {
		e.Errorf("a container has ended: %v", err)
	}
	// Systemd has inherited the containers, and before Linux 6.15 only a parent learns
	// the code.
	coded := func(id string, want int32) {
		e.Helper()
		if s := e.ended(id); s.GetExitCode() != want && (s.GetReason() != "Unknown" || s.GetMessage() == "") {
			e.Errorf("what outlived both ended with code %d (%s: %s), want %d", s.GetExitCode(), s.GetReason(), s.GetMessage(), want)
		}
	}
	coded(dying, 4)
	e.check("its log", e.crictl("logs", dying), "begin\nthe last word")
	e.exec(writer, "touch /tmp/go")
	coded(writer, 3)
	for i, l := range strings.Split(e.crictl("logs", writer), "\n") {
		if l != fmt.Sprintf("line %d", i) {
			e.Fatalf("line %d of the writer's log is %q", i, l)
		}
	}
	for _, id := range []string{dying, writer} {
		e.crictl("rm", id)
	}
	e.eventually("systemd keeps descriptors of the one that runs only", func() bool {
		return systemctl(e.T, "show", "-P", "NFileDescriptorStore", service) == "1"
	})
}

func journal(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("journalctl", "-u", service, "-o", "cat", "--no-pager").CombinedOutput()
	if err != nil {
		t.Fatalf("journalctl: %v: %s", err, out)
	}
	return string(out)
}
