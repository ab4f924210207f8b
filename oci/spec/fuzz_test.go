package spec

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"testing"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// FuzzContainer feeds wire bytes of requests and JSON of images. Nothing may
// panic, errors have a kind, the same input gives the same bytes, and every
// specification keeps the rules that nothing may break.
func FuzzContainer(f *testing.F) {
	seed := func(in ContainerInput) {
		config, err := proto.Marshal(in.Config)
		if err != nil {
			f.Fatal(err)
		}
		sandbox, err := proto.Marshal(in.Sandbox)
		if err != nil {
			f.Fatal(err)
		}
		image, err := json.Marshal(in.Image)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(config, sandbox, image, []byte(nil), false)
		f.Add(config, sandbox, image, []byte(`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[null,{"names":["x"]}]}`), true)
	}
	plain := base()
	seed(plain)
	full := base()
	full.Config.Mounts = thirtyMounts()
	full.Config.Linux = &cri.LinuxContainerConfig{
		Resources: &cri.LinuxContainerResources{MemoryLimitInBytes: 5, CpusetCpus: "0-1", Unified: map[string]string{"a.b": "c"}},
		SecurityContext: &cri.LinuxContainerSecurityContext{
			Capabilities: &cri.Capability{AddCapabilities: []string{"ALL"}}, SeccompProfilePath: "localhost//x", RunAsUser: &cri.Int64Value{Value: 5},
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_TARGET, TargetId: "x"},
		},
	}
	full.Config.Envs = []*cri.KeyValue{{Key: "A", Value: []byte("b")}}
	seed(full)
	f.Fuzz(func(t *testing.T, config, sandbox, image, profile []byte, v2 bool) {
		in := base()
		in.Config, in.Sandbox, in.Image = &cri.ContainerConfig{}, &cri.PodSandboxConfig{}, &ispec.Image{}
		if proto.Unmarshal(config, in.Config) != nil || proto.Unmarshal(sandbox, in.Sandbox) != nil || json.Unmarshal(image, in.Image) != nil {
			t.Skip()
		}
		in.Host.CgroupV2 = v2
		in.Resolved.MountSources = sources(in.Config)
		in.Resolved.SeccompProfile = profile
		spec, warnings, err := Container(in)
		if err != nil {
			if !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrUnsupported) {
				t.Fatalf("an error without a kind: %v", err)
			}
			return
		}
		first, err := json.Marshal(spec)
		if err != nil {
			t.Fatal(err)
		}
		again, againWarnings, err := Container(in)
		if err != nil {
			t.Fatal(err)
		}
		if second, _ := json.Marshal(again); !bytes.Equal(first, second) || !slices.Equal(warnings, againWarnings) {
			t.Fatal("two results for one input")
		}
		checkRules(t, in, spec)
		if _, err := Pause(PauseInput{Sandbox: in.Sandbox, Host: in.Host, SeccompProfile: profile}); err != nil && !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrUnsupported) {
			t.Fatalf("an error without a kind: %v", err)
		}
	})
}

// checkRules holds for every specification, whatever was asked for.
func checkRules(t *testing.T, in ContainerInput, spec *rspec.Spec) {
	t.Helper()
	privileged := in.Config.GetLinux().GetSecurityContext().GetPrivileged()
	if privileged && !in.Sandbox.GetLinux().GetSecurityContext().GetPrivileged() {
		t.Error("a privileged container in a sandbox that is not")
	}
	if len(spec.Process.Args) == 0 || spec.Process.Args[0] == "" {
		t.Errorf("args %q", spec.Process.Args)
	}
	if _, err := checkCwd("", spec.Process.Cwd); err != nil {
		t.Errorf("cwd %q", spec.Process.Cwd)
	}
	if !slices.IsSortedFunc(spec.Mounts, func(a, b rspec.Mount) int { return depth(a.Destination) - depth(b.Destination) }) {
		t.Error("mounts are not in the order of their depth")
	}
	if spec.Linux.Resources.Devices[0].Allow && !privileged {
		t.Error("all devices are allowed")
	}
	if len(spec.Linux.MaskedPaths)+len(spec.Linux.ReadonlyPaths) == 0 && !privileged {
		t.Error("/proc is not masked")
	}
	for _, c := range spec.Process.Capabilities.Inheritable {
		if !slices.Contains(spec.Process.Capabilities.Ambient, c) {
			t.Errorf("%s is inheritable", c)
		}
	}
}
