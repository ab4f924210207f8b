package cases

import (
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

// wrapped is an OCI runtime: a script before the real one, which is "$RUNC". For each
// verb that is wanted the script runs lines of its own first.
func wrapped(t *testing.T, verbs map[string]string) string {
	t.Helper()
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\nRUNC=%s/bin/runc\nfor a; do case $a in\n", deps)
	for verb, lines := range verbs {
		script += fmt.Sprintf("%s)\n%s\nbreak;;\n", verb, lines)
	}
	path := filepath.Join(t.TempDir(), "runc")
	if err := os.WriteFile(path, []byte(script+"esac; done\nexec $RUNC \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// An OCI runtime that says more than a pipe holds waits for no reader; what it said
// last is in the error of a create that fails.
func TestTalkativeOCIRuntime(t *testing.T) {
	flag := filepath.Join(t.TempDir(), "fail")
	much := "head -c 300000 /dev/zero | tr '\\0' x >&2; head -c 300000 /dev/zero | tr '\\0' y"
	e := start(t, node.Options{Runc: wrapped(t, map[string]string{"create": much + "; [ -e " + flag + " ] && { echo at the very end >&2; exit 3; }"})})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	id := e.startContainer(pod, command("c", "echo its own"), config)
	e.exited(id)
	if out, _ := e.logs(id); !strings.HasSuffix(out, "its own\n") {
		t.Errorf("the container's log ends with %q", out[max(0, len(out)-100):])
	}
	for _, tty := range []bool{false, true} {
		c := command(fmt.Sprint("tty", tty), "true")
		c.Tty = tty
		if err := os.RemoveAll(flag); err != nil {
			t.Fatal(err)
		}
		e.exited(e.startContainer(pod, c, config))
		put(t, flag, "", 0o600)
		c.Metadata.Attempt++
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		e.refused(fmt.Sprint("a create that fails, terminal ", tty), err, codes.FailedPrecondition, "the very end")
	}
}

// A pod's pause process that dies makes the pod NotReady: with an event, and a line in
// the log that says of which pod, and how it died.
func TestPauseThatDies(t *testing.T) {
	e := start(t, node.Options{})
	config := pidMode(e.sandbox(), cri.NamespaceMode_POD)
	pod := e.run(config)
	heard := e.listen(e.ctx)
	pid := e.pausePID(pod)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e.eventually("the pod is not ready", func() bool {
		res, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod})
		return err == nil && res.GetStatus().GetState() == cri.PodSandboxState_SANDBOX_NOTREADY
	})
	e.eventually("an event tells of it", func() bool { return strings.Contains(heard.of(pod), "STOPPED") })
	lines := 0
	for line := range strings.Lines(e.logged()) {
		if !strings.Contains(line, "pause process has ended") {
			continue
		}
		lines++
		for _, want := range []string{"level=warning", "sandbox=" + pod, "pod=" + config.GetMetadata().GetNamespace() + "/" + config.GetMetadata().GetName(),
			fmt.Sprint("pid=", pid), "code=137", "signal=killed", "oom=false"} {
			if !strings.Contains(line, want) {
				t.Errorf("%s lacks %s", line, want)
			}
		}
	}
	if lines != 1 {
		t.Errorf("%d lines of the log tell of it", lines)
	}
	e.removePod(pod)
	// A pod that is stopped says nothing of its pause.
	e.removePod(e.run(pidMode(e.sandbox(), cri.NamespaceMode_POD)))
	if n := strings.Count(e.logged(), "pause process has ended"); n != 1 {
		t.Errorf("%d lines after a pod was stopped", n)
	}
}
