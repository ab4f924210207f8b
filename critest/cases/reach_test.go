package cases

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// someUser is a user of the node who is nobody special.
const someUser = 54321

// asUser runs a shell script as that user and returns what it prints.
func asUser(t *testing.T, script string) string {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: someUser, Gid: someUser}}
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		t.Fatalf("run a shell as user %d: %v", someUser, err)
	}
	return string(out)
}

// Users of the node reach nothing that is in a container, of which a setuid
// program would make them root of the node, nor its shared memory, records,
// logs' owners or sockets, even if they know all names.
func TestUsersOfTheNodeReachNoContainer(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	configs := []*cri.PodSandboxConfig{e.sandbox()}
	res, err := e.rt.Status(e.ctx, &cri.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(res.GetRuntimeHandlers(), func(h *cri.RuntimeHandler) bool { return h.GetFeatures().GetUserNamespaces() }) {
		configs = append(configs, e.mapped(300000))
	}
	for _, config := range configs {
		pod := e.run(config)
		c := inPod(command("main", "cp /bin/busybox /planted; chmod 4755 /planted; echo x >/dev/shm/secret; chmod 666 /dev/shm/secret; echo ready; exec sleep 1000"), config)
		id := e.startContainer(pod, c, config)
		e.said(id, "ready\n")
		for _, path := range []string{
			filepath.Join(e.State(), "containers", id, "rootfs", "planted"),
			filepath.Join(e.State(), "containers", id, "config.json"),
			filepath.Join(e.Root(), "containers", id, "upper", "planted"),
			filepath.Join(e.Root(), "containers", id, "container.json"),
			filepath.Join(e.Root(), "sandboxes", pod, "sandbox.json"),
			filepath.Join(e.State(), "sandboxes", pod, "shm", "secret"),
			filepath.Join(e.State(), "namespaces", pod, "net"),
		} {
			if _, err := os.Lstat(path); err != nil {
				t.Errorf("root itself does not find %s: %v", path, err)
			}
			if out := asUser(t, "ls -l "+path+" && echo seen"); strings.Contains(out, "seen") {
				t.Errorf("user %d reaches %s", someUser, path)
			}
		}
	}
	for _, dir := range []string{e.Root(), e.State(), e.Root() + "/images", e.State() + "/containers"} {
		if out := asUser(t, "ls "+dir+" && echo listed"); strings.Contains(out, "listed") {
			t.Errorf("user %d lists %s: %s", someUser, dir, out)
		}
	}
}

// Nothing of the daemon's own can be written by anybody but root, records,
// specifications and logs of the daemon cannot be read, and no socket can be
// connected to, also where the daemon was started with an open umask.
func TestModesOfFilesAndSockets(t *testing.T) {
	e := start(t, node.Options{Wrap: []string{"sh", "-c", `umask 0; exec "$@"`, "sh"}, Settings: map[string]string{"image": "keep_layer_blobs = true"}})
	e.pull(images.Busybox)
	config := e.sandbox()
	id := e.startContainer(e.run(config), command("main", "exec sleep 1000"), config)
	sockets := map[string]fs.FileMode{e.Socket: 0o660, filepath.Join(e.State(), "monitor.sock"): 0o600, e.NRISocket(): 0o755}
	for path, most := range sockets {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Type() != fs.ModeSocket || info.Mode().Perm()&^most != 0 {
			t.Errorf("%s: %v, %v; want a socket of mode %v or less", path, info, err, most)
		}
		if st, ok := info.Sys().(*syscall.Stat_t); !ok || st.Uid != 0 || st.Gid != 0 {
			t.Errorf("%s belongs to %+v, want root:root", path, info.Sys())
		}
	}
	foreign := []string{"upper", "diff", "rootfs", "work"} // modes there are the container's or image's; no user comes that far
	secret := []string{".json", ".log", ".sock", "lock"}
	for _, dir := range []string{e.Root(), e.State()} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if d.IsDir() && (slices.Contains(foreign, d.Name()) || d.Name() == "shm") {
				return filepath.SkipDir
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			if info.Mode().Perm()&0o022 != 0 {
				t.Errorf("%s has mode %v: others write it", path, info.Mode())
			}
			if slices.ContainsFunc(secret, func(end string) bool { return strings.HasSuffix(path, end) }) && info.Mode().Perm()&0o077 != 0 {
				t.Errorf("%s has mode %v: others read it", path, info.Mode())
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	log := filepath.Join(config.GetLogDirectory(), "main.log")
	if info, err := os.Stat(log); err != nil || info.Mode().Perm()&^0o640 != 0 {
		t.Errorf("the log of %s: %v, %v; want mode 0640 or less", id, info, err)
	}
	if out := asUser(t, fmt.Sprintf("%s/bin/crictl -r unix://%s version && echo answered", e.Deps, e.Socket)); strings.Contains(out, "answered") {
		t.Errorf("the daemon answers user %d: %s", someUser, out)
	}
	if c, err := net.Dial("unix", e.Socket); err != nil {
		t.Errorf("root cannot connect: %v", err)
	} else {
		_ = c.Close()
	}
}
