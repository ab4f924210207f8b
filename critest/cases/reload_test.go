package cases

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// reload makes a drop-in the daemon's only one, sends SIGHUP and returns what the
// daemon logs about it.
func (e *env) reload(dropIn string) string {
	e.Helper()
	dir := filepath.Join(e.Dir, "config.toml.d")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		e.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "10-test.toml"), []byte(dropIn), 0o600); err != nil {
		e.Fatal(err)
	}
	before := e.log()
	if err := syscall.Kill(e.PID(), syscall.SIGHUP); err != nil {
		e.Fatal(err)
	}
	var said []byte
	e.eventually("the daemon has looked at its configuration", func() bool {
		said = e.log()[len(before):]
		return bytes.Contains(said, []byte("configuration reloaded")) || bytes.Contains(said, []byte("configuration is not reloaded"))
	})
	return string(said)
}

// log is all that the daemon has logged.
func (e *env) log() []byte {
	e.Helper()
	data, err := os.ReadFile(filepath.Join(e.Dir, "berth.log"))
	if err != nil {
		e.Fatal(err)
	}
	return data
}

// inForce is the configuration that crictl info shows.
func (e *env) inForce() string {
	e.Helper()
	res, err := e.rt.Status(e.ctx, &cri.StatusRequest{Verbose: true})
	if err != nil {
		e.Fatalf("status: %v", err)
	}
	var c struct{ Settings json.RawMessage }
	if err := json.Unmarshal([]byte(res.GetInfo()["config"]), &c); err != nil || len(c.Settings) == 0 {
		e.Fatalf("the configuration in the status is %q: %v", res.GetInfo()["config"], err)
	}
	return string(c.Settings)
}

const cdiFile = `{"cdiVersion": "0.5.0", "kind": "cases.example/dev", "devices": [{"name": "one", "containerEdits": {"env": ["FROM_CDI=yes"]}}]}`

// A SIGHUP puts new values of live keys in force for all that begins then, and
// disturbs nothing that runs.
func TestReload(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	old := e.startContainer(pod, command("old", "ulimit -n; exec sleep 1000"), config)
	e.said(old, "1024\n")
	cdi := filepath.Join(e.Dir, "cdi")
	if err := os.Mkdir(cdi, 0o755); err != nil {
		t.Fatal(err)
	}
	policy := filepath.Join(e.Dir, "policy.json")
	for file, text := range map[string]string{filepath.Join(cdi, "one.json"): cdiFile, policy: `{"default": [{"type": "reject"}]}`} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pid := e.PID()
	said := e.reload(fmt.Sprintf(`log_level = "info"
[image]
pinned = ["*busybox*"]
[runtime]
default_capabilities = ["CHOWN", "KILL"]
nofile_soft = 500
nofile_hard = 600
shm_size = 1048576
max_log_line = 256
missing_host_path = "refuse"
unprivileged_ports = false
cdi_dirs = [%q]
`, cdi))
	for _, key := range []string{"log_level", "image.pinned", "runtime.default_capabilities", "runtime.nofile_soft", "runtime.shm_size"} {
		if !strings.Contains(said, "key="+key) {
			t.Errorf("the log does not tell of %s:\n%s", key, said)
		}
	}
	if strings.Contains(said, "level=warning") || strings.Contains(said, "level=error") {
		t.Errorf("a reload of live keys is logged as\n%s", said)
	}

	if !e.image(images.Busybox).GetPinned() {
		t.Error("image.pinned: the image is not pinned")
	}
	before := len(e.log())
	_, err := e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: "none"})
	e.refused("a container that is not there", err, codes.NotFound)
	if more := e.log()[before:]; bytes.Contains(more, []byte("level=debug")) {
		t.Errorf("log_level: still logged is %s", more)
	}
	c := command("new", "ulimit -n; ulimit -Hn; grep CapEff /proc/self/status; df -k /dev/shm | tail -1 | awk '{print $2}'; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; echo $FROM_CDI")
	c.CDIDevices = []*cri.CDIDevice{{Name: "cases.example/dev=one"}}
	again := e.sandbox()
	second := e.run(again)
	want := "500\n600\nCapEff:\t0000000000000021\n1024\n1024\nyes\n"
	if out := e.output(second, c, again); out != want {
		t.Errorf("a new container says\n%swant\n%s", out, want)
	}
	long := e.startContainer(second, command("long", "head -c 600 /dev/zero | tr '\\0' x; echo"), again)
	e.exited(long)
	data, err := os.ReadFile(filepath.Join(again.GetLogDirectory(), "long.log"))
	if lines := bytes.Count(data, []byte("\n")); err != nil || lines != 3 {
		t.Errorf("max_log_line: 600 bytes are %d lines (%v), want 3", lines, err)
	}
	c = command("missing", "true")
	c.Mounts = []*cri.Mount{{HostPath: filepath.Join(e.Dir, "missing"), ContainerPath: "/m"}}
	_, err = e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: second, Config: c, SandboxConfig: again})
	e.refused("missing_host_path: a container", err, codes.InvalidArgument, "missing")

	if s := e.status(old); s.GetState() != cri.ContainerState_CONTAINER_RUNNING || e.exec(old, "ulimit -n") != "1024\n" || e.PID() != pid {
		t.Errorf("the container of before is %s, the daemon process %d was %d", s.GetState(), e.PID(), pid)
	}
	e.reload(fmt.Sprintf("[image]\npolicy = %q\n", policy))
	_, err = e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: images.Busybox}})
	e.refused("image.policy: a pull", err, codes.Unknown, "SignatureValidationFailed")
	e.reload("")
	if out := e.output(second, command("back", "ulimit -n"), again); out != "1024\n" {
		t.Errorf("without the drop-in a container has nofile %q", out)
	}
}

// What is wrong anywhere in the files is refused whole, in one line of the log;
// what needs a restart is named and not taken over.
func TestReloadRefused(t *testing.T) {
	e := start(t, node.Options{})
	before := e.inForce()
	for _, c := range []struct {
		dropIn string
		words  []string
	}{
		{"log_level = 'info'\nrot = 1\n", []string{"10-test.toml: line 2", "rot"}},
		{"log_level = 'info'\n[cni]\ntimeout = '5h'\n", []string{"10-test.toml: line 3", "cni.timeout", "5h is outside 1s to 1h"}},
		{"log_level = 'info'\n[image]\npolicy = '/none'\n", []string{"10-test.toml: line 3", "image.policy", "/none"}},
		{"log_level = 'info'\n[runtime]\ndefault_capabilities = ['FLY']\n", []string{"10-test.toml: line 3", "default_capabilities", "FLY"}},
		{"log_level = 'info\n", []string{"10-test.toml: line 1"}},
	} {
		said := e.reload(c.dropIn)
		if strings.Count(said, "level=error") != 1 || strings.Contains(said, "configuration reloaded") {
			t.Errorf("%q is logged as\n%s", c.dropIn, said)
		}
		for _, w := range c.words {
			if !strings.Contains(said, w) {
				t.Errorf("%q: the log does not say %q:\n%s", c.dropIn, w, said)
			}
		}
		if now := e.inForce(); now != before {
			t.Errorf("%q changed the configuration to\n%s\nfrom\n%s", c.dropIn, now, before)
		}
	}
	said := e.reload("socket = '" + e.Dir + "/other.sock'\nlog_level = 'trace'\n[cni]\ntimeout = '3m'\n[runtime.handlers.other]\npath = 'sh'\n")
	for _, key := range []string{"socket", "cni.timeout", "runtime.handlers.other.path"} {
		found := false
		for line := range strings.Lines(said) {
			found = found || strings.Contains(line, "level=warning") && strings.Contains(line, "key="+key+" ") && strings.Contains(line, "restart")
		}
		if !found {
			t.Errorf("no warning names %s:\n%s", key, said)
		}
	}
	now := e.inForce()
	if want := strings.Replace(before, `"LogLevel":"debug"`, `"LogLevel":"trace"`, 1); now != want || want == before {
		t.Errorf("in force is\n%s\nwant\n%s", now, want)
	}
	e.run(e.sandbox()) // on the old socket
}

// SIGHUP at any time, as often as anybody likes: while the daemon starts, works
// and stops.
func TestHangupsDoNotEndTheDaemon(t *testing.T) {
	storm := `trap '' HUP; (n=0; while [ $n -lt 200 ] && kill -HUP $$; do sleep 0.02; n=$((n+1)); done) & exec "$@"`
	e := start(t, node.Options{Wrap: []string{"sh", "-c", storm, "sh"}})
	e.pull(images.Busybox)
	for range 3 {
		config := e.sandbox()
		if out := e.output(e.run(config), command("c", "echo works"), config); out != "works\n" {
			t.Errorf("a container says %q", out)
		}
	}
	if !bytes.Contains(e.log(), []byte("configuration reloaded")) {
		t.Error("no SIGHUP was heard")
	}
	done := make(chan struct{})
	go func(pid int) {
		defer close(done)
		for syscall.Kill(pid, syscall.SIGHUP) == nil {
		}
	}(e.PID())
	if err := e.Terminate(); err != nil {
		t.Error(err)
	}
	<-done
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
}
