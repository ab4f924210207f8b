package cases

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"sigs.k8s.io/cri-tools/pkg/common"

	"berth/critest/images"
	"berth/critest/node"
)

// releases are directories with a daemon and a monitor each.
type releases struct {
	installed string // where the node's binaries are
	this      string // the one that is built
	next      string // one that speaks a later version of the monitor's protocol, too
}

// newReleases builds the next release from changed sources and installs this one
// in a place of the test's own.
func newReleases(t *testing.T) *releases {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("skipped: needs the go command, to build another release")
	}
	root, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	r := &releases{installed: t.TempDir(), next: t.TempDir(), this: os.Getenv("BERTH_BIN")}
	if r.this == "" {
		r.this = filepath.Join(root, "bin")
	}
	source := filepath.Join(root, "oci", "monitor", "version.go")
	text, err := os.ReadFile(source)
	if err != nil {
		t.Fatal(err)
	}
	const versions = "	Version = 1 // the newest\n"
	if !bytes.Contains(text, []byte(versions)) {
		t.Fatalf("%s has no %q", source, versions)
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {source: filepath.Join(r.next, "version.go")}})
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"version.go": bytes.Replace(text, []byte(versions), []byte("	Version = 2\n"), 1), "overlay.json": overlay} {
		if err := os.WriteFile(filepath.Join(r.next, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("go", "build", "-overlay", filepath.Join(r.next, "overlay.json"), "-ldflags", "-s -w -X main.version=next",
		"-o", r.next+"/", "./cmd/berth", "./cmd/berth-monitor")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build another release: %v: %s", err, out)
	}
	for _, name := range []string{"berth", "berth-monitor"} {
		r.install(t, r.this, name)
	}
	t.Setenv("BERTH_BIN", r.installed)
	return r
}

// install puts a binary of a release in place, as a package manager does.
func (r *releases) install(t *testing.T, from, name string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(from, name))
	if err == nil {
		err = os.WriteFile(filepath.Join(r.installed, name+".new"), data, 0o755)
	}
	if err == nil {
		err = os.Rename(filepath.Join(r.installed, name+".new"), filepath.Join(r.installed, name))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// monitorRuns tells whether the node's monitor is the binary of a release.
func (e *env) monitorRuns(release string) bool {
	e.Helper()
	pids := e.Monitors()
	if len(pids) != 1 {
		return false
	}
	running, err := os.ReadFile(fmt.Sprintf("/proc/%d/exe", pids[0]))
	if err != nil {
		e.Fatal(err)
	}
	want, err := os.ReadFile(filepath.Join(release, "berth-monitor"))
	if err != nil {
		e.Fatal(err)
	}
	return bytes.Equal(running, want)
}

// An upgrade is to replace the binaries and to restart the daemon, a downgrade as
// well: no pod is touched, the monitor stays the process that it is, logs have no
// gap. Daemons and monitors of different releases work together meanwhile.
func TestUpgradeAndDowngrade(t *testing.T) {
	r := newReleases(t)
	e := start(t, node.Options{LogLevel: "info"})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	signal := e.signals()
	writer := e.counting("writer", pod, config)
	c := command("talker", "while read -r l; do echo got $l; done")
	c.Stdin = true
	talker := e.startContainer(pod, c, config)
	pid := e.Monitors()[0]
	for _, step := range []struct {
		name, daemon, monitor string
	}{
		{"the upgrade", r.next, r.next},
		{"the downgrade", r.this, r.this},
		{"a daemon of the next release with the old monitor", r.next, r.this},
		{"the old daemon with a monitor of the next release", r.this, r.next},
	} {
		ends := e.startContainer(pod, command("ends-"+strings.ReplaceAll(step.name, " ", "-"), "sleep 1; exit 5"), config)
		r.install(t, step.daemon, "berth")
		r.install(t, step.monitor, "berth-monitor")
		if err := e.Terminate(); err != nil {
			t.Fatal(err)
		}
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
		if now := e.Monitors(); len(now) != 1 || now[0] != pid {
			t.Errorf("%s: the monitors are %v, it was %d", step.name, now, pid)
		}
		if !e.monitorRuns(step.monitor) {
			t.Errorf("%s: the monitor does not run the installed build", step.name)
		}
		if out := e.exec(talker, "echo well"); out != "well\n" {
			t.Errorf("%s: an exec says %q", step.name, out)
		}
		if s := e.exited(ends); s.GetExitCode() != 5 {
			t.Errorf("%s: what ended around it has code %d (%s)", step.name, s.GetExitCode(), s.GetMessage())
		}
		if s := e.exited(e.startContainer(pod, command("after-"+strings.ReplaceAll(step.name, " ", "-"), "exit 6"), config)); s.GetExitCode() != 6 {
			t.Errorf("%s: a container after it ends with %d (%s)", step.name, s.GetExitCode(), s.GetMessage())
		}
	}
	e.renewedByReload(r, talker)
	if now := e.Monitors(); len(now) != 1 || now[0] != pid {
		t.Errorf("the monitors are %v, it was %d", now, pid)
	}
	if err := os.WriteFile(filepath.Join(signal, "end"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if s := e.exited(writer); s.GetExitCode() != 7 {
		t.Errorf("the writer ended with code %d (%s: %s), want 7", s.GetExitCode(), s.GetReason(), s.GetMessage())
	}
	t.Logf("%d lines", e.counted(writer))
}

// renewedByReload has a reload make the monitor another build: sessions go on.
func (e *env) renewedByReload(r *releases, talker string) {
	e.Helper()
	attached := e.dial(common.TransportWebsocket, e.attachURL(talker, true, false), true, false)
	attached.types("before\n")
	attached.sees("got before\n")
	command := e.dial(common.TransportWebsocket, e.execURL(talker, true, false, "sh", "-c", "read x; echo read $x; exit 8"), true, false)
	r.install(e.T, r.this, "berth-monitor")
	if err := syscall.Kill(e.PID(), syscall.SIGHUP); err != nil {
		e.Fatal(err)
	}
	e.eventually("the monitor is the installed build", func() bool { return e.monitorRuns(r.this) })
	attached.types("after\n")
	attached.sees("got before\ngot after\n")
	attached.hangUp()
	_ = attached.end()
	command.types("hello\n")
	if err := command.end(); code(err) != 8 || command.out.String() != "read hello\n" {
		e.Errorf("a command that ran meanwhile: %v, %q", err, command.out.String())
	}
}
