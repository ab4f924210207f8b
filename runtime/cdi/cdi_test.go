package cdi

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	rspec "github.com/opencontainers/runtime-spec/specs-go"

	"berth/oci/spec"
)

const radio = `{"cdiVersion":"0.6.0","kind":"vendor.test/radio",
 "containerEdits":{"env":["RADIO=%s"]},
 "devices":[
  {"name":"null","containerEdits":{"deviceNodes":[{"path":"/dev/radio","hostPath":"/dev/null"}]}},
  {"name":"files","containerEdits":{"mounts":[{"hostPath":"/a/b","containerPath":"/z/z","options":["ro"]},{"hostPath":"/a","containerPath":"/z"}],
    "hooks":[{"hookName":"createContainer","path":"/bin/hook"}]}}]}`

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, dirs ...string) *Devices {
	t.Helper()
	return Open(dirs)
}

// A FIFO among the files is named; nothing waits for its writer.
func TestFIFOIsNoFile(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "a.json")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	err := open(t, dir).Inject(container(), []string{"vendor.test/gpu=0"})
	if !errors.Is(err, spec.ErrInvalid) || !strings.Contains(err.Error(), fifo) {
		t.Errorf("%v, want a refusal that names %s", err, fifo)
	}
}

func container() *rspec.Spec {
	return &rspec.Spec{
		Process: &rspec.Process{Env: []string{"A=b"}, User: rspec.User{UID: 7, GID: 8}},
		Linux:   &rspec.Linux{Resources: &rspec.LinuxResources{Devices: []rspec.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}}},
		Mounts:  []rspec.Mount{{Destination: "/proc"}, {Destination: "/z", Source: "/old"}},
	}
}

func env(t *testing.T, d *Devices, names ...string) []string {
	t.Helper()
	sp := container()
	if err := d.Inject(sp, names); err != nil {
		t.Fatal(err)
	}
	return sp.Process.Env
}

func TestInject(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "radio.json", strings.ReplaceAll(radio, "%s", "on"))
	d := open(t, filepath.Join(dir, "absent"), dir)
	sp := container()
	if err := d.Inject(sp, []string{"vendor.test/radio=null", "vendor.test/radio=files"}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(sp.Process.Env, []string{"A=b", "RADIO=on"}) {
		t.Errorf("environment %v", sp.Process.Env)
	}
	if n := sp.Linux.Devices; len(n) != 1 || n[0].Path != "/dev/radio" || n[0].Major != 1 || n[0].Minor != 3 || *n[0].UID != 7 || *n[0].GID != 8 {
		t.Errorf("devices %+v", n)
	}
	rules := sp.Linux.Resources.Devices
	if len(rules) != 2 || rules[0].Allow || !rules[1].Allow || *rules[1].Major != 1 || *rules[1].Minor != 3 || rules[1].Access != "rwm" {
		t.Errorf("rules %+v", rules)
	}
	var at []string
	for _, m := range sp.Mounts {
		at = append(at, m.Source+":"+m.Destination)
	}
	if !slices.Equal(at, []string{":/proc", "/a:/z", "/a/b:/z/z"}) {
		t.Errorf("mounts %v", at)
	}
	if h := sp.Hooks; h == nil || len(h.CreateContainer) != 1 || h.CreateContainer[0].Path != "/bin/hook" {
		t.Errorf("hooks %+v", h)
	}
	plain := container()
	if err := d.Inject(plain, nil); err != nil || len(plain.Process.Env) != 1 || plain.Hooks != nil {
		t.Errorf("no names: %+v, %v", plain, err)
	}
}

func TestFilesAreReadAnew(t *testing.T) {
	low, high := t.TempDir(), filepath.Join(t.TempDir(), "later")
	d := open(t, low, high)
	name := "vendor.test/radio=null"
	if err := d.Inject(container(), []string{name}); !errors.Is(err, spec.ErrInvalid) {
		t.Errorf("before there is a file: %v", err)
	}
	write(t, low, "radio.json", strings.ReplaceAll(radio, "%s", "low"))
	if got := env(t, d, name); !slices.Contains(got, "RADIO=low") {
		t.Errorf("environment %v", got)
	}
	write(t, high, "other.yaml", strings.ReplaceAll(radio, "%s", "high"))
	if got := env(t, d, name); !slices.Contains(got, "RADIO=high") || slices.Contains(got, "RADIO=low") {
		t.Errorf("environment %v; the later directory counts", got)
	}
	if err := os.RemoveAll(high); err != nil {
		t.Fatal(err)
	}
	if got := env(t, d, name); !slices.Contains(got, "RADIO=low") {
		t.Errorf("environment %v after the later file went", got)
	}
}

func TestBrokenFilesHurtOnlyTheirOwn(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "good.json", strings.ReplaceAll(radio, "%s", "on"))
	write(t, dir, "bad.json", `{"cdiVersion":"0.6.0","kind":"vendor.test/bad","devices":[{"name":"x"`)
	write(t, dir, "odd.json", `{"cdiVersion":"0.6.0","kind":"no-slash","devices":[{"name":"x","containerEdits":{"env":["A=1"]}}]}`)
	d := open(t, dir)
	if got := env(t, d, "vendor.test/radio=null"); !slices.Contains(got, "RADIO=on") {
		t.Errorf("environment %v", got)
	}
	err := d.Inject(container(), []string{"vendor.test/radio=null", "vendor.test/bad=x"})
	if !errors.Is(err, spec.ErrInvalid) {
		t.Fatalf("unknown device: %v", err)
	}
	for _, word := range []string{`CDI_devices "vendor.test/bad=x"`, dir, "bad.json", "odd.json"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not name %s", err, word)
		}
	}
	// Two files of one directory that define the same: neither counts.
	write(t, dir, "twice.json", strings.ReplaceAll(radio, "%s", "twice"))
	err = d.Inject(container(), []string{"vendor.test/radio=null"})
	if !errors.Is(err, spec.ErrInvalid) || !strings.Contains(err.Error(), "twice.json") {
		t.Errorf("two files for one device: %v", err)
	}
}

func TestMissingHostDevice(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "gone.json", `{"cdiVersion":"0.6.0","kind":"vendor.test/gone","devices":[{"name":"x","containerEdits":{"deviceNodes":[{"path":"/dev/no-such-device"}]}}]}`)
	err := open(t, dir).Inject(container(), []string{"vendor.test/gone=x"})
	if err == nil || !strings.Contains(err.Error(), "/dev/no-such-device") || !strings.Contains(err.Error(), "vendor.test/gone=x") {
		t.Errorf("a file whose device is not there: %v", err)
	}
}
