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

// fifo puts a FIFO, which nobody writes to, in the place of a file.
func (e *env) fifo(path string) string {
	e.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		e.Fatal(err)
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		e.Fatal(err)
	}
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		e.Fatal(err)
	}
	return path
}

// A FIFO in place of a file that the daemon reads holds nothing up: the pull or the
// reload is refused with the file's name, and all goes on once it is gone.
func TestNoFileHoldsTheDaemonUp(t *testing.T) {
	dir := t.TempDir()
	set := fmt.Sprintf("hosts_dir = %q\ncerts_dir = %q\nauth_file = %q\n", dir+"/hosts", dir+"/certs", dir+"/auth.json")
	for _, err := range []error{os.MkdirAll(dir+"/hosts/held.example", 0o755), os.MkdirAll(dir+"/certs/held.example", 0o755),
		os.WriteFile(dir+"/auth.json", []byte("{}"), 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	e := start(t, node.Options{Settings: map[string]string{"image": set}})
	for _, name := range []string{"hosts/held.example/hosts.toml", "certs/held.example/ca.crt", "auth.json", "registries.conf.d/x.conf"} {
		path := filepath.Join(dir, name)
		if strings.HasPrefix(name, "registries.conf.d") {
			path = filepath.Join(e.Dir, name)
		}
		file := e.fifo(path)
		_, err := e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "held.example/a:1"}})
		e.refused(name+" is a FIFO: a pull", err, codes.FailedPrecondition, file+" is no regular file")
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		if name == "auth.json" {
			if err := os.WriteFile(file, []byte("{}"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	file := e.fifo(filepath.Join(e.Dir, "config.toml.d/20-held.toml"))
	if said := e.reload("log_level = 'trace'"); strings.Count(said, "level=error") != 1 || !strings.Contains(said, file+" is no regular file") {
		t.Errorf("a reload is logged as\n%s", said)
	}
	if out, code := e.berth("config", "check", filepath.Join(e.Dir, "config.toml")); code != 1 || !strings.Contains(out, file+" is no regular file") {
		t.Errorf("berth config check: exit code %d: %s", code, out)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if said := e.reload("log_level = 'trace'"); !strings.Contains(said, "configuration reloaded") {
		t.Errorf("the reload after it is logged as\n%s", said)
	}
	e.pull(images.Busybox)
	if err := e.Terminate(); err != nil {
		t.Error(err)
	}
	if log := string(e.log()); strings.Contains(log, "broken off") || strings.Contains(log, "just ends") {
		t.Error("something has held the daemon's end up; see its log")
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
}
