package cases

import (
	"os"
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
