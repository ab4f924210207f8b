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
	"berth/sandbox/outside/hung"
)

// What the node's files name in their turn: keys of a signature policy, certificates
// of a hosts.toml, credential helpers, the host's paths of CDI devices. Where that does
// not answer, whoever needs it is told so with the path and the file that names it.
func TestHungPathsThatFilesName(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"keys", "cas", "devs"} {
		put(t, filepath.Join(at(name), hung.File), "x", 0o644)
	}
	put(t, at("policy.json"), fmt.Sprintf(`{"default": [{"type": "insecureAcceptAnything"}], "transports": {"docker": {"registry.k8s.io/pause": [{"type": "reject"}], "other.test": [
		{"type": "signedBy", "keyType": "GPGKeys", "keyPath": %q}]}}}`, filepath.Join(at("keys"), hung.File)), 0o644)
	put(t, at("registries.d/all.yaml"), "default-docker:\n  lookaside: file://"+at("signatures")+"\n", 0o644)
	put(t, at("auth.json"), `{"credsStore": "far"}`, 0o600)
	put(t, at("helpers/docker-credential-far"), "#!/bin/sh\necho credentials not found in native keychain\nexit 1\n", 0o755)
	for _, name := range []string{"hosts", "cdi", "signatures"} {
		if err := os.Mkdir(at(name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", os.Getenv("PATH")+":"+at("helpers"))
	h := &hungFiles{dir: dir, env: start(t, node.Options{Settings: map[string]string{
		"runtime": fmt.Sprintf("host_path_timeout = \"1s\"\ncdi_dirs = [%q]", at("cdi")),
		"image":   fmt.Sprintf("auth_file = %q\npolicy = %q\nhosts_dir = %q\nregistries_dir = %q", at("auth.json"), at("policy.json"), at("hosts"), at("registries.d")),
	}})}
	h.pull(images.Busybox)
	h.config = h.sandbox()
	h.pod = h.run(h.config)
	h.neighbor = h.startContainer(h.pod, command("neighbour", "exec sleep 1000"), h.config)
	put(t, at("hosts/other.test/hosts.toml"), fmt.Sprintf("ca = %q\n", filepath.Join(at("cas"), hung.File)), 0o644) // no certificate: a start would refuse it
	put(t, at("cdi/far.json"), fmt.Sprintf(`{"cdiVersion": "0.6.0", "kind": "vendor.test/far", "devices": [
		{"name": "node", "containerEdits": {"deviceNodes": [{"path": "/dev/far", "hostPath": %[1]q, "type": "c", "major": 1, "minor": 3}]}},
		{"name": "mount", "containerEdits": {"mounts": [{"hostPath": %[1]q, "containerPath": "/far"}]}}]}`, filepath.Join(at("devs"), hung.File)), 0o644)
	pullOf := func(image string) func() error {
		return func() error {
			_, err := h.im.PullImage(h.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: image}})
			return err
		}
	}
	pull := pullOf(images.Busybox)
	create := func(device string) func() error {
		return func() error {
			c := command("c"+device, "true")
			if device != "" {
				c.CDIDevices = []*cri.CDIDevice{{Name: "vendor.test/far=" + device}}
			}
			_, err := h.rt.CreateContainer(h.ctx, &cri.CreateContainerRequest{PodSandboxId: h.pod, Config: c, SandboxConfig: h.config})
			return err
		}
	}
	for _, tc := range []struct {
		what, dir, file string
		ask             func() error
		needed          bool // by every create
	}{
		{"a pull, for a policy's key", "keys", at("policy.json"), pull, true},
		{"a create, for a policy's key", "keys", at("policy.json"), create(""), true},
		{"a pull, for a certificate of hosts.toml", "cas", at("hosts/other.test/hosts.toml"), pull, false},
		{"a pull, for a credential helper", "helpers", at("auth.json"), pull, false},
		{"a pull, for signatures beside a registry", "signatures", "image.registries_dir", pullOf(images.Pause), false},
		{"a create, for a device of CDI", "devs", "runtime.cdi_dirs", create("node"), false},
		{"a create, for a mount of CDI", "devs", "runtime.cdi_dirs", create("mount"), false},
	} {
		h.while(at(tc.dir), func() {
			h.refused(tc.what, tc.ask(), codes.DeadlineExceeded, at(tc.dir), tc.file, "does not answer", "runtime.host_path_timeout")
			if !tc.needed {
				h.others(h.pod, h.neighbor, h.config)
			}
		})
	}
	for _, name := range []string{"keys", "cas"} {
		h.while(at(name), func() {
			h.signal(syscall.SIGHUP)
			h.eventually("a reload names "+name, func() bool {
				for line := range strings.Lines(h.logged()) {
					if strings.Contains(line, "is not reloaded") && strings.Contains(line, "named in ") && strings.Contains(line, "path "+at(name)) {
						return true
					}
				}
				return false
			})
			if out := h.exec(h.neighbor, "echo alive"); out != "alive\n" {
				t.Errorf("exec while %s hangs: %q", name, out)
			}
		})
	}
	if err := pull(); err != nil {
		t.Errorf("when all answer again: %v", err)
	}
	h.removePod(h.pod)
}
