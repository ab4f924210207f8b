package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// another is the settings of a node with a second handler.
func another(t *testing.T, base string) map[string]string {
	t.Helper()
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "base.json")
	if err := os.WriteFile(file, []byte(base), 0o600); err != nil {
		t.Fatal(err)
	}
	return map[string]string{"runtime.handlers.other": fmt.Sprintf("path = %q\nbase_spec = %q\nprivileged_without_host_devices = true",
		filepath.Join(deps, "bin", "runc"), file)}
}

// runWith runs a pod with a runtime handler.
func (e *env) runWith(handler string, c *cri.PodSandboxConfig) string {
	e.Helper()
	res, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: c, RuntimeHandler: handler})
	if err != nil {
		e.Fatalf("run pod with handler %q: %v", handler, err)
	}
	return res.GetPodSandboxId()
}

// A handler's own settings reach its pods and no others.
func TestRuntimeHandlers(t *testing.T) {
	e := start(t, node.Options{Settings: another(t, `{
		"process": {"env": ["ZONE=north"], "rlimits": [{"type": "RLIMIT_CORE", "soft": 0, "hard": 4096}]},
		"linux": {"resources": {"pids": {"limit": 77}}}}`)})
	e.pull(images.Busybox)
	status, err := e.rt.Status(e.ctx, &cri.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, h := range status.GetRuntimeHandlers() {
		names = append(names, fmt.Sprintf("%q", h.GetName()))
		if !h.GetFeatures().GetRecursiveReadOnlyMounts() {
			t.Errorf("handler %q does not say that runc can mount read-only recursively", h.GetName())
		}
	}
	if got := strings.Join(names, " "); got != `"other" "runc" ""` {
		t.Errorf("Status names the handlers %s", got)
	}
	for handler, zone := range map[string]string{"other": "north", "runc": "", "": ""} {
		config := e.sandbox()
		config.Linux.SecurityContext.Privileged = true
		pod := e.runWith(handler, config)
		sb, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod})
		if err != nil || sb.GetStatus().GetRuntimeHandler() != handler {
			t.Errorf("the status of a pod of handler %q says %q (%v)", handler, sb.GetStatus().GetRuntimeHandler(), err)
		}
		ctr := command("main", "sleep 1000")
		ctr.Linux.SecurityContext.Privileged = true
		id := e.startContainer(pod, ctr, config)
		if got := e.exec(id, "echo -n $ZONE"); got != zone {
			t.Errorf("handler %q: ZONE is %q, want %q", handler, got, zone)
		}
		devices := e.exec(id, "test -e /dev/kmsg && echo -n yes || echo -n no")
		if want := map[bool]string{true: "no", false: "yes"}[handler == "other"]; devices != want {
			t.Errorf("handler %q: a privileged container sees the node's devices: %s, want %s", handler, devices, want)
		}
	}
	_, err = e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: e.sandbox(), RuntimeHandler: "nope"})
	e.refused("run a pod", err, codes.InvalidArgument, "runtime_handler", "nope")
}

// A handler that is taken out of the configuration leaves pods that can still
// be seen, stopped and removed; no new ones are run with it.
func TestRetiredHandler(t *testing.T) {
	e := start(t, node.Options{Settings: another(t, `{}`)})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.runWith("other", config)
	id := e.startContainer(pod, command("main", "sleep 1000"), config)
	if err := e.Terminate(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(e.Dir, "config.toml")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, _, _ := strings.Cut(string(text), "[runtime.handlers.other]")
	if err := os.WriteFile(path, []byte(before), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	if s := e.status(id); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("its container is %s, want running", s.GetState())
	}
	_, err = e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: e.sandbox(), RuntimeHandler: "other"})
	e.refused("run a pod", err, codes.InvalidArgument, "runtime_handler", "other")
	if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id}); err != nil {
		t.Errorf("stop its container: %v", err)
	}
	if s := e.status(id); s.GetExitCode() != 137 {
		t.Errorf("its container ended with %d, want 137", s.GetExitCode())
	}
	if _, err := e.rt.RemovePodSandbox(e.ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod}); err != nil {
		t.Errorf("remove its pod: %v", err)
	}
	if left, _ := os.ReadDir(filepath.Join(e.State(), "runc", "other")); len(left) > 0 {
		t.Errorf("the retired handler's state has %d entries left", len(left))
	}
}

// What a handler's configuration gets wrong keeps the daemon from starting, by
// the name of the key.
func TestWrongHandlers(t *testing.T) {
	e := start(t, node.Options{})
	text, err := os.ReadFile(filepath.Join(e.Dir, "config.toml"))
	if err != nil {
		t.Fatal(err)
	}
	base := filepath.Join(t.TempDir(), "base.json")
	if err := os.WriteFile(base, []byte(`{"process": {"args": ["sh"]}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := e.Terminate(); err != nil {
		t.Fatal(err)
	}
	for lines, want := range map[string]string{
		"path = \"" + filepath.Join(e.Deps, "bin", "runc") + "\"\nbase_spec = \"" + base + "\"": "process.args",
		"path = \"/no/such/binary\"":                                  "runtime.handlers.other.path",
		"path = \"runc\"\nbase_spec = \"base.json\"":                  "runtime.handlers.other.base_spec",
		"path = \"runc\"\nprivileged_all_devices_allowed = true":      "privileged_without_host_devices",
		"path = \"runc\"\ncni_conf_dir = \"net.d\"":                   "runtime.handlers.other.cni_conf_dir",
		"path = \"runc\"\n\n[runtime.handlers.\"a/b\"]\npath = \"x\"": "a/b",
	} {
		file := filepath.Join(e.Dir, "wrong.toml")
		if err := os.WriteFile(file, []byte(string(text)+"\n[runtime.handlers.other]\n"+lines+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		out, code := e.berth("serve", "--config", file)
		if code == 0 || !strings.Contains(out, want) {
			t.Errorf("%s: exit code %d, %q; want a refusal that names %s", lines, code, out, want)
		}
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
}
