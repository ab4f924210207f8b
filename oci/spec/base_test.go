package spec

import (
	"errors"
	"slices"
	"strings"
	"testing"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const baseText = `{
 "ociVersion": "1.1.0",
 "hooks": {"createRuntime": [{"path": "/usr/bin/hook"}]},
 "annotations": {"example.org/zone": "a", "io.kubernetes.cri.container-name": "forged"},
 "process": {
  "env": ["ZONE=a", "PATH=/base"],
  "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 7, "hard": 9}, {"type": "RLIMIT_CORE", "soft": 0, "hard": 0}]
 },
 "mounts": [{"destination": "/dev/shm/", "type": "tmpfs", "source": "shm", "options": ["size=1m"]}, {"destination": "/extra", "type": "bind", "source": "/srv"}],
 "linux": {
  "devices": [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}],
  "resources": {"pids": {"limit": 99}, "cpu": {"shares": 3}, "devices": [{"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rw"}]},
  "intelRdt": {"closID": "gold"}
 }
}`

func TestBaseCompletesTheRequest(t *testing.T) {
	parsed, err := ParseBase([]byte(baseText))
	if err != nil {
		t.Fatal(err)
	}
	in := base()
	in.Options.Base = parsed
	in.Files.Shm = "/run/shm"
	in.Config.Linux = &cri.LinuxContainerConfig{Resources: &cri.LinuxContainerResources{CpuShares: 512}}
	in.Config.Envs = []*cri.KeyValue{{Key: "ZONE", Value: []byte("mine")}}
	for range 2 { // the base is not changed by its use
		sp, _, err := Container(in)
		if err != nil {
			t.Fatal(err)
		}
		if sp.Hooks == nil || sp.Hooks.CreateRuntime[0].Path != "/usr/bin/hook" {
			t.Errorf("hooks %+v", sp.Hooks)
		}
		if sp.Annotations["example.org/zone"] != "a" || sp.Annotations[AnnotationContainerName] == "forged" {
			t.Errorf("annotations %v", sp.Annotations)
		}
		if !slices.Contains(sp.Process.Env, "ZONE=mine") || !slices.Contains(sp.Process.Env, "PATH=/base") {
			t.Errorf("environment %q", sp.Process.Env)
		}
		want := []rspec.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 7, Hard: 9}, {Type: "RLIMIT_CORE"}}
		if !slices.Equal(sp.Process.Rlimits, want) {
			t.Errorf("rlimits %v", sp.Process.Rlimits)
		}
		shm := slices.IndexFunc(sp.Mounts, func(m rspec.Mount) bool { return m.Destination == "/dev/shm" })
		if shm < 0 || sp.Mounts[shm].Type != "tmpfs" || !slices.ContainsFunc(sp.Mounts, func(m rspec.Mount) bool { return m.Destination == "/extra" }) {
			t.Errorf("mounts %+v", sp.Mounts)
		}
		r := sp.Linux.Resources
		if *r.CPU.Shares != 512 || *r.Pids.Limit != 99 || !slices.ContainsFunc(r.Devices, func(d rspec.LinuxDeviceCgroup) bool { return d.Allow && *d.Minor == 229 }) {
			t.Errorf("resources %+v", r)
		}
		if len(sp.Linux.Devices) != 1 || sp.Linux.IntelRdt.ClosID != "gold" {
			t.Errorf("devices %v, intelRdt %v", sp.Linux.Devices, sp.Linux.IntelRdt)
		}
		sp.Mounts[shm].Options[0] = "changed"
		sp.Hooks.CreateRuntime[0].Path = "changed"
	}
}

func TestBaseRefusesWhatBerthDecides(t *testing.T) {
	for text, key := range map[string]string{
		`{"process": {"args": ["sh"]}}`:                          "process.args",
		`{"root": {"path": "rootfs"}}`:                           "root.path",
		`{"linux": {"namespaces": [{"type": "pid"}]}}`:           "linux.namespaces",
		`{"linux": {"seccomp": {"defaultAction": "x"}}}`:         "linux.seccomp.defaultAction",
		`{"process": {"user": {"uid": 3}}}`:                      "process.user.uid",
		`{"hostname": "x"}`:                                      "hostname",
		`{"mounts": [{"destination": "relative"}]}`:              "mounts[0].destination",
		`{"process": {"env": ["=x"]}}`:                           "process.env",
		`{"process": {"capabilities": {"bounding": ["CAP_X"]}}}`: "process.capabilities.bounding",
		`{`: "base specification",
	} {
		_, err := ParseBase([]byte(text))
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), key) {
			t.Errorf("ParseBase(%s): %v; want ErrInvalid naming %s", text, err, key)
		}
	}
}

func TestCgroupWritable(t *testing.T) {
	for _, c := range []struct{ writable, v2, want bool }{{true, true, true}, {true, false, false}, {false, true, false}} {
		in := base()
		in.Options.CgroupWritable, in.Host.CgroupV2 = c.writable, c.v2
		sp, _, err := Container(in)
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(sp.Mounts, func(m rspec.Mount) bool { return m.Destination == "/sys/fs/cgroup" })
		if got := slices.Contains(sp.Mounts[i].Options, "rw"); got != c.want {
			t.Errorf("writable %v, v2 %v: rw %v", c.writable, c.v2, got)
		}
	}
}
