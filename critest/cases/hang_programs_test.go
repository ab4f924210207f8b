package cases

import (
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/sandbox/outside/hung"
)

// copied makes an executable of another.
func (e *env) copied(from, to string) {
	e.Helper()
	data, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, data, 0o755)
	}
	if err != nil {
		e.Fatal(err)
	}
}

// The program of an OCI runtime or of a CNI plugin on a filesystem that answers no
// more: whoever executes one waits in the kernel, with all goroutines of a program in
// Go. So it is not executed; what wants it fails with its path, and pods that do not
// need it live on, with the daemon and the monitor.
func TestHungPrograms(t *testing.T) {
	dir := t.TempDir()
	far, plugins := filepath.Join(dir, "far"), filepath.Join(dir, "plugins")
	for _, d := range []string{far, plugins} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(far, hung.File)
	(&env{T: t}).copied(filepath.Join(deps, "bin", "runc"), program)
	(&env{T: t}).copied(filepath.Join(deps, "cni", "bridge"), filepath.Join(plugins, "bridge"))
	h := &hungFiles{env: start(t, node.Options{Plugins: plugins, Settings: map[string]string{
		"runtime": `host_path_timeout = "1s"`, "runtime.handlers.far": "path = \"" + program + "\"",
	}})}
	h.pull(images.Busybox)
	h.config = h.sandbox()
	h.pod = h.run(h.config)
	h.neighbor = h.startContainer(h.pod, command("neighbour", "exec sleep 1000"), h.config)
	config := h.sandbox()
	pod := h.runWith("far", config)
	there := h.startContainer(pod, command("there", "exec sleep 1000"), config)

	h.while(far, func() {
		_, err := h.rt.CreateContainer(h.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: command("new", "true"), SandboxConfig: config})
		h.refused("a create", err, codes.DeadlineExceeded, "OCI runtime", program, "does not answer")
		_, err = h.rt.ExecSync(h.ctx, &cri.ExecSyncRequest{ContainerId: there, Cmd: []string{"true"}})
		h.refused("an exec", err, codes.DeadlineExceeded, "OCI runtime", program, "does not answer")
		h.others(h.pod, h.neighbor, h.config)
	})
	h.exec(there, "true")

	h.while(plugins, func() {
		bridge := filepath.Join(plugins, "bridge")
		_, err := h.rt.RunPodSandbox(h.ctx, &cri.RunPodSandboxRequest{Config: h.sandbox()})
		h.refused("a pod", err, codes.DeadlineExceeded, "CNI plugin bridge", bridge, "does not answer")
		_, err = h.rt.StopPodSandbox(h.ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod})
		h.refused("a stop", err, codes.DeadlineExceeded, "CNI plugin bridge", bridge, "does not answer")
		if out := h.exec(h.neighbor, "echo alive"); out != "alive\n" {
			t.Errorf("exec while a plugin hangs: %q", out)
		}
		h.stopsInTime()
	})
	if err := h.Launch(h.ctx); err != nil {
		t.Fatal(err)
	}
	h.removePod(pod)
	h.others(h.pod, h.neighbor, h.config)
}
