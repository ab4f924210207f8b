package cases

import (
	"archive/tar"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// TestB25B27SeenFromInside: directories without an entry can be entered by
// whoever may enter them below; set-uid bits and file capabilities of an image
// have their effect.
func TestB25B27SeenFromInside(t *testing.T) {
	e := start(t, node.Options{})
	binary := func(parts ...string) string {
		data, err := os.ReadFile(filepath.Join(append([]string{e.Deps, "images"}, parts...)...))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	private := images.Dir("d", 0o750)
	private.Uid, private.Gid = 7, 7
	suid := images.File("usr/local/nnp", 0o4755, binary("standin"))
	suid.Uid, suid.Gid = 1001, 1001
	capable := images.File("usr/local/cat", 0o755, binary("busybox", "bin", "busybox"))
	capable.Uid = 1001
	capable.PAXRecords = map[string]string{
		"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00", // cap_net_raw+ep
	}
	capable.Format = tar.FormatPAX
	image := images.Image{Layers: []images.Layer{parts.Base, layer(t, private), layer(t, images.File("d/e/f", 0o644, "seen"), images.File("i/j/f", 0o644, "seen"), suid, capable)}}
	if _, err := image.Publish(reg, "cases/inside", "1"); err != nil {
		t.Fatal(err)
	}
	e.pull("docker.io/cases/inside:1")
	config := e.sandbox()
	pod := e.run(config)
	for uid, want := range map[int64]string{7: "seen seen", 1000: "seen denied"} {
		c := command("c"+strings.Repeat("x", int(uid%10)), "cat /i/j/f; echo; cat /d/e/f 2>/dev/null || echo denied; /usr/local/nnp; /usr/local/cat /proc/self/status")
		c.Image.Image = "docker.io/cases/inside:1"
		c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: uid}
		out := e.output(pod, c, config)
		if words := strings.Join(strings.Fields(strings.SplitN(out, "Effective", 2)[0]), " "); words != want {
			t.Errorf("uid %d: %q, want %q", uid, words, want)
		}
		if !strings.Contains(out, "Effective uid: 1001") {
			t.Errorf("uid %d: a set-uid program does not have its owner's id: %q", uid, out)
		}
		if !strings.Contains(out, "CapEff:\t0000000000002000") {
			t.Errorf("uid %d: a program's capability has no effect: %q", uid, out)
		}
	}
}
