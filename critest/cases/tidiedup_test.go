package cases

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// The CRI socket's file is removed while the daemon runs: it comes back by itself,
// pods run on.
func TestSocketThatIsRemoved(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	if err := os.Remove(e.Socket); err != nil {
		t.Fatal(err)
	}
	e.eventually("the socket is there again", func() bool {
		_, err := os.Lstat(e.Socket)
		return err == nil
	})
	if out, err := e.Crictl(e.ctx, "pods", "-q"); err != nil || strings.TrimSpace(out) != pod {
		t.Errorf("crictl by the new socket: %q, %v", out, err)
	}
	if _, err := e.rt.Version(e.ctx, &cri.VersionRequest{}); err != nil {
		t.Errorf("a client that was connected: %v", err)
	}
	e.removePod(pod)
}

// What the daemon made as it started and needs later is removed by somebody who
// tidies up: it is made again. The cgroup of the node's plugins and commands is empty
// most of the time, the rootfs of pause containers is a file like others.
func TestWhatIsNeededLaterIsRemoved(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	leash, err := os.ReadFile(filepath.Join(e.State(), "leash"))
	if err != nil {
		t.Fatal(err)
	}
	for _, what := range []string{string(leash), filepath.Join(e.State(), "pause", "pause"), filepath.Join(e.State(), "pause", "proc"),
		filepath.Join(e.State(), "pause", "dev"), filepath.Join(e.State(), "pause", "sys"), filepath.Join(e.State(), "pause")} {
		e.eventually("remove "+what, func() bool { err := os.Remove(what); return err == nil || errors.Is(err, os.ErrNotExist) })
	}
	config := e.sandbox()
	config.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
	pod := e.run(config)
	if s := e.exited(e.startContainer(pod, command("c", "exit 3"), config)); s.GetExitCode() != 3 {
		t.Errorf("a container ended with %d: %s", s.GetExitCode(), s.GetMessage())
	}
	e.removePod(pod)
}
