package cases

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/sandbox/outside/hung"
)

// hungFiles is a node whose configuration names a directory for each key, and files
// called hung.File in it where a key wants a file.
type hungFiles struct {
	*env
	dir           string
	config        *cri.PodSandboxConfig
	pod, neighbor string
}

func startHungFiles(t *testing.T) *hungFiles {
	dir := t.TempDir()
	for name, text := range map[string]string{"auth": "{}", "policy": `{"default": [{"type": "insecureAcceptAnything"}]}`,
		"hosts": "", "certs": "", "policies": "", "registries.d": "", "cdi": "", "out": ""} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if text == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, name, hung.File), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	h := &hungFiles{dir: dir, env: start(t, node.Options{Settings: map[string]string{
		"runtime": fmt.Sprintf("host_path_timeout = \"1s\"\ncdi_dirs = [%q]", at("cdi")),
		"image": fmt.Sprintf("auth_file = %q\npolicy = %q\npolicy_dir = %q\nhosts_dir = %q\ncerts_dir = %q\nregistries_dir = %q",
			at("auth/file"), at("policy/file"), at("policies"), at("hosts"), at("certs"), at("registries.d")),
	}})}
	for _, own := range []string{filepath.Join(h.Dir, "registries.conf.d"), filepath.Join(h.Root(), "preload")} {
		if err := os.MkdirAll(own, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	h.pull(images.Busybox)
	h.config = h.sandbox()
	h.pod = h.run(h.config)
	h.neighbor = h.startContainer(h.pod, command("neighbour", "exec sleep 1000"), h.config)
	return h
}

// while runs f with a directory that answers nobody.
func (h *hungFiles) while(dir string, f func()) {
	h.Helper()
	fs, err := hung.Mount(dir)
	if errors.Is(err, hung.ErrNoFUSE) {
		h.Skipf("skipped: %v", err)
	}
	if err != nil {
		h.Fatal(err)
	}
	defer func() { // also when f gives up: whoever cleans up would hang
		if err := fs.Release(); err != nil {
			h.Error(err)
		}
	}()
	fs.Hang()
	f()
}

// Whatever of the node's own files the daemon wants for an operation, or is told to
// read or write: where their filesystem answers nobody, the operation says so in its
// time, with the path and what names it. Nobody else waits, and once the filesystem
// answers again the same request succeeds.
func TestHungFilesOfTheNode(t *testing.T) {
	h := startHungFiles(t)
	pull := func() error {
		_, err := h.im.PullImage(h.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: images.Busybox}})
		return err
	}
	n := 0
	create := func(change func(*cri.ContainerConfig)) error {
		c := command(fmt.Sprintf("c%d", n), "true")
		n++
		change(c)
		_, err := h.rt.CreateContainer(h.ctx, &cri.CreateContainerRequest{PodSandboxId: h.pod, Config: c, SandboxConfig: h.config})
		return err
	}
	within := func(f func(context.Context) error) func() error {
		return func() error {
			ctx, cancel := context.WithTimeout(h.ctx, time.Minute)
			defer cancel()
			return f(ctx)
		}
	}
	out := filepath.Join(h.dir, "out")
	for _, tc := range []struct {
		key, dir string
		ask      func() error
	}{
		{"image.registries_conf", filepath.Join(h.Dir, "registries.conf.d"), pull},
		{"image.hosts_dir", filepath.Join(h.dir, "hosts"), pull},
		{"image.certs_dir", filepath.Join(h.dir, "certs"), pull},
		{"image.auth_file", filepath.Join(h.dir, "auth"), pull},
		{"image.registries_dir", filepath.Join(h.dir, "registries.d"), pull},
		{"image.policy", filepath.Join(h.dir, "policy"), pull},
		{"image.policy_dir", filepath.Join(h.dir, "policies"), func() error { return create(func(*cri.ContainerConfig) {}) }},
		{"runtime.cdi_dirs", filepath.Join(h.dir, "cdi"), func() error {
			return create(func(c *cri.ContainerConfig) { c.CDIDevices = []*cri.CDIDevice{{Name: "vendor.test/x=y"}} })
		}},
		{"location", out, func() error {
			_, err := h.rt.CheckpointContainer(h.ctx, &cri.CheckpointContainerRequest{ContainerId: h.neighbor, Location: filepath.Join(out, "new.tar")})
			return err
		}},
		{"output_path", out, within(func(ctx context.Context) error {
			_, err := h.rt.CheckpointPod(ctx, &cri.CheckpointPodRequest{PodSandboxId: h.pod, ContainerIds: []string{h.neighbor}, OutputPath: out})
			return err
		})},
		{"checkpoint_path", out, within(func(ctx context.Context) error {
			_, err := h.rt.RestorePod(ctx, &cri.RestorePodRequest{CheckpointPath: out, Config: h.sandbox(), ContainerConfigs: []*cri.ContainerConfig{command("c", "true")}})
			return err
		})},
	} {
		h.while(tc.dir, func() {
			again := make(chan error, 1)
			go func() { again <- tc.ask() }()
			h.eventually("berth why names "+tc.dir, func() bool {
				said, code := h.berth("why", "--socket", h.Socket)
				return code == 0 && strings.Contains(said, "path "+tc.dir)
			})
			h.refused(tc.key, <-again, codes.DeadlineExceeded, tc.key, tc.dir, "does not answer", "runtime.host_path_timeout", "(berth-monitor) in state")
			h.others(h.pod, h.neighbor, h.config)
		})
	}
	if err := pull(); err != nil {
		t.Errorf("when all answer again: %v", err)
	}
}

// An operator's archives: a file that is read or written where nothing answers.
func TestHungArchives(t *testing.T) {
	h := startHungFiles(t)
	out := filepath.Join(h.dir, "out")
	h.while(out, func() {
		for _, args := range [][]string{{"image", "import", filepath.Join(out, hung.File)}, {"image", "export", images.Busybox, filepath.Join(out, "new.tar")}} {
			said, code := h.berth(append(args, "--socket", h.Socket)...)
			if code == 0 || !strings.Contains(said, "path "+out) || !strings.Contains(said, "does not answer") {
				t.Errorf("%v: code %d: %s", args, code, said)
			}
		}
		h.others(h.pod, h.neighbor, h.config)
	})
	preload := filepath.Join(h.Root(), "preload")
	h.while(preload, func() {
		h.signal(syscall.SIGHUP)
		h.eventually("the log names the preload directory", func() bool { return strings.Contains(h.logged(), "path "+preload+" does not answer") })
		h.others(h.pod, h.neighbor, h.config)
	})
	// A reload that cannot read what it is to check changes nothing, and however often
	// it is tried the daemon can be ended.
	h.while(filepath.Join(h.dir, "auth"), func() {
		for range 3 {
			before := strings.Count(h.logged(), "is not reloaded")
			h.signal(syscall.SIGHUP)
			h.eventually("the reload is refused", func() bool { return strings.Count(h.logged(), "is not reloaded") > before })
		}
		if n := lookers(t, h.env); n > 6 {
			t.Errorf("%d processes look at paths", n)
		}
		h.stopsInTime()
	})
	if err := h.Launch(h.ctx); err != nil {
		t.Fatal(err)
	}
	h.others(h.pod, h.neighbor, h.config)
}

func (h *hungFiles) signal(s syscall.Signal) {
	h.Helper()
	if err := syscall.Kill(h.PID(), s); err != nil {
		h.Fatal(err)
	}
}
