package cases

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// berth runs the binary with arguments and returns its output and exit code.
func (e *env) berth(args ...string) (string, int) {
	e.Helper()
	cmd := exec.CommandContext(e.ctx, filepath.Join(e.Bin, "berth"), args...)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Join(e.Deps, "bin")+":"+os.Getenv("PATH")) // the default handler is just "runc"
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		e.Fatalf("run berth %v: %v", args, err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// A root has one daemon; its socket is root's; a stopped daemon leaves its
// containers running.
func TestDaemonAlone(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	id := e.startContainer(e.run(config), command("main", "i=0; while :; do i=$((i+1)); echo $i >/new; mv /new /now; sleep 0.05; done"), config)
	second := func(how string) {
		out, code := e.berth("serve", "--config", filepath.Join(e.Dir, "config.toml"))
		if code == 0 || !strings.Contains(out, e.Root()+": another berth daemon") {
			t.Errorf("a second daemon%s: exit code %d, %q; want a refusal that names %s", how, code, out, e.Root())
		}
	}
	second("")
	for _, dir := range []string{e.Root(), e.State()} { // as a cleaner of old files does
		if err := os.Remove(filepath.Join(dir, "lock")); err != nil {
			t.Fatal(err)
		}
	}
	second(" while the locks' files are gone")
	e.refusesAnotherRoot()
	socket, err := os.Stat(e.Socket)
	if err != nil || socket.Mode().Perm() != 0o660 || socket.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Errorf("the socket is %v (%v), want mode 0660 of root", socket, err)
	}
	for _, dir := range []string{e.Root(), e.State()} {
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm()&^0o711 != 0 {
			t.Errorf("%s is %v (%v), want mode 0711 or less", dir, info, err)
		}
	}
	if err := e.Terminate(); err != nil {
		t.Fatal(err)
	}
	if left := e.Processes(); len(left) == 0 {
		t.Error("stopping the daemon ended the container")
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	// Written by renaming, so that no half of it is ever read.
	first := e.exec(id, "cat /now")
	for end := time.Now().Add(5 * time.Second); e.exec(id, "cat /now") == first; {
		if time.Now().After(end) {
			t.Fatal("the container stands still after the daemon's restart")
		}
	}
	if s := e.status(id); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the container is %s, want running", s.GetState())
	}
}

// refusesAnotherRoot starts a daemon with the same state directory and another
// root, for which all pods would be leftovers, beside the running one and
// without it. A root that was moved is no other.
func (e *env) refusesAnotherRoot() {
	e.Helper()
	text, err := os.ReadFile(filepath.Join(e.Dir, "config.toml"))
	if err != nil {
		e.Fatal(err)
	}
	other := filepath.Join(e.TempDir(), "root")
	file := filepath.Join(e.TempDir(), "other.toml")
	changed := strings.NewReplacer(e.Root(), other, e.Socket, e.Socket+"2").Replace(string(text))
	if err := os.WriteFile(file, []byte(changed), 0o600); err != nil {
		e.Fatal(err)
	}
	refused := func(when string) {
		out, code := e.berth("serve", "--config", file)
		if code == 0 || !strings.Contains(out, e.State()) {
			e.Errorf("a daemon with another root %s: exit code %d, %q; want a refusal that names %s", when, code, out, e.State())
		}
	}
	refused("beside the first")
	if err := e.Terminate(); err != nil {
		e.Fatal(err)
	}
	refused("after the first")
	if err := e.Launch(e.ctx); err != nil {
		e.Fatal(err)
	}
}

// The configuration is strict: what is wrong is named by key and line.
func TestConfigurationIsStrict(t *testing.T) {
	e := start(t, node.Options{})
	text, code := e.berth("config", "default")
	file := filepath.Join(e.Dir, "default.toml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, checked := e.berth("config", "check", file); code != 0 || checked != 0 {
		t.Errorf("the default configuration: exit codes %d and %d: %s", code, checked, out)
	}
	packaged, err := os.ReadFile(filepath.Join("..", "..", "packaging", "config.toml"))
	if err != nil {
		t.Fatal(err)
	}
	if string(packaged) != text {
		t.Errorf("packaging/config.toml is not what `berth config default` prints; write it again:\n%s", text)
	}
	for _, c := range []struct {
		text  string
		words []string
	}{
		{"root = \"/x\"\ncolour = \"blue\"\n", []string{"colour", "line 2"}},
		{"[cni]\nconf_dir = 7\n", []string{"conf_dir", "line 2"}},
		{"[image]\nmax_concurrent_downloads = 0\n", []string{"max_concurrent_downloads", "0"}},
		{"log_level = \"loud\"\n", []string{"log_level", "loud"}},
		{"root = \n", []string{"line 1"}},
	} {
		if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, args := range [][]string{{"config", "check", file}, {"serve", "--config", file}} {
			out, code := e.berth(args...)
			if code == 0 {
				t.Errorf("berth %v accepts %q", args[0], c.text)
			}
			for _, w := range c.words {
				if !strings.Contains(out, w) {
					t.Errorf("berth %v on %q does not name %q: %s", args[0], c.text, w, out)
				}
			}
		}
	}
}

// The monitor is killed, again and again: the container runs on, no line of its
// log is lost or torn, and its exit code is known where the kernel can tell it.
func TestKilledMonitor(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	const lines = 4000
	id := e.startContainer(pod, command("count", fmt.Sprintf("i=0; while [ $i -lt %d ]; do echo line $i of the log; i=$((i+1)); [ $((i%%20)) = 0 ] && sleep 0.01; done; exit 7", lines)), config)
	for range 3 {
		time.Sleep(400 * time.Millisecond)
		for _, pid := range e.Monitors() {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	s := e.exitedIn(id, time.Minute)
	if known := kernelAtLeast(t, 6, 15); known && s.GetExitCode() != 7 || !known && s.GetExitCode() != 7 && s.GetMessage() == "" {
		t.Errorf("exit code %d, reason %q, message %q; want 7", s.GetExitCode(), s.GetReason(), s.GetMessage())
	}
	out, _ := e.logs(id)
	got := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if len(got) != lines {
		t.Errorf("the log has %d lines, want %d", len(got), lines)
	}
	for i, l := range got {
		if l != fmt.Sprintf("line %d of the log", i) {
			t.Errorf("line %d of the log is %q", i, l)
			break
		}
	}
	again := e.startContainer(pod, command("again", "echo hello; exit 3"), config)
	if s := e.exited(again); s.GetExitCode() != 3 {
		t.Errorf("a container of the new monitor ends with %d, want 3", s.GetExitCode())
	}
}

// kernelAtLeast compares the running kernel's version.
func kernelAtLeast(t *testing.T, major, minor int) bool {
	t.Helper()
	data, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	var a, b int
	if _, err := fmt.Sscanf(string(data), "%d.%d", &a, &b); err != nil {
		t.Fatal(err)
	}
	return slices.Compare([]int{a, b}, []int{major, minor}) >= 0
}

// berth image import takes both kinds of archive, and a broken one leaves nothing.
func TestImageImport(t *testing.T) {
	e := start(t, node.Options{})
	m := images.Image{Layers: []images.Layer{parts.Base}, Config: ispec.ImageConfig{Cmd: []string{"sh"}, Env: []string{"PATH=/bin"}}}
	for kind, archive := range map[string]func(images.Image, string) ([]byte, images.Published, error){"oci": images.Image.OCIArchive, "docker": images.Image.DockerArchive} {
		m.Stamp = kind
		name := "docker.io/cases/imported-" + kind + ":1"
		data, done, err := archive(m, name)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(e.Dir, kind+".tar")
		if err := os.WriteFile(file, data[:len(data)/2], 0o600); err != nil {
			t.Fatal(err)
		}
		if out, code := e.berth("image", "--socket", e.Socket, "import", file); code == 0 {
			t.Errorf("%s: half an archive is accepted: %s", kind, out)
		}
		if img := e.image(name); img != nil {
			t.Errorf("%s: half an archive left %v", kind, img)
		}
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if out, code := e.berth("image", "--socket", e.Socket, "import", file); code != 0 || !strings.Contains(out, name) {
			t.Errorf("%s: exit code %d, %q; want the name %s", kind, code, out, name)
			continue
		}
		if img := e.image(name); img.GetId() != done.Config.String() {
			t.Errorf("%s: the image has id %q, want %s", kind, img.GetId(), done.Config)
		}
		config := e.sandbox()
		c := command("c", "echo works")
		c.Image.Image = name
		if out := e.output(e.run(config), c, config); out != "works\n" {
			t.Errorf("%s: a container says %q", kind, out)
		}
	}
}
