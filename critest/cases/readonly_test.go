package cases

import (
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// A node whose root filesystem is read-only, as that of a distribution that is
// replaced as a whole: the daemon writes to the directories that it is given, and
// nowhere else.
func TestReadOnlyNode(t *testing.T) {
	const mounts = "mount --bind /tmp /tmp && mount -o remount,bind,ro / && ! touch /readonly 2>/dev/null && exec \"$@\""
	e := start(t, node.Options{Wrap: []string{"unshare", "-m", "sh", "-c", mounts, "sh"}})
	e.pull(images.Busybox)
	for _, mode := range []cri.NamespaceMode{cri.NamespaceMode_CONTAINER, cri.NamespaceMode_POD} {
		config := pidMode(e.sandbox(), mode)
		pod := e.run(config)
		id := e.startContainer(pod, command("c", "echo runs; exec sleep 1000"), config)
		if out := e.exec(id, "echo alive"); out != "alive\n" {
			t.Errorf("exec: %q", out)
		}
		e.eventually("its log", func() bool { out, _ := e.logs(id); return out == "runs\n" })
		if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id}); err != nil {
			t.Error(err)
		}
		e.removePod(pod)
	}
	for line := range strings.Lines(e.logged()) {
		if strings.Contains(line, "read-only file system") {
			t.Errorf("the log tells of it: %s", line)
		}
	}
	e.empty("removal")
}
