package spec

import (
	"bytes"
	"encoding/json"
	"errors"
	"math/rand"
	"path"
	"slices"
	"testing"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
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
	full.Config.Mounts = append(thirtyMounts(), imageMount(func(m *cri.Mount) { m.ImageSubPath = "a/b" }))
	full.Image.Config.Volumes = declares("/data", "/c/../d").Config.Volumes
	full.Config.Linux = &cri.LinuxContainerConfig{
		Resources: &cri.LinuxContainerResources{MemoryLimitInBytes: 5, CpusetCpus: "0-1", Unified: map[string]string{"a.b": "c"}},
		SecurityContext: &cri.LinuxContainerSecurityContext{
			Capabilities: &cri.Capability{AddCapabilities: []string{"ALL"}}, SeccompProfilePath: "localhost//x", RunAsUser: &cri.Int64Value{Value: 5},
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_TARGET, TargetId: "x"},
		},
	}
	full.Config.Envs = []*cri.KeyValue{{Key: "A", Value: []byte("b")}}
	seed(full)
	inside := base()
	mapped(func(in *ContainerInput) {
		in.Config.Mounts = []*cri.Mount{{ContainerPath: "/c", HostPath: "/h", UidMappings: []*cri.IDMapping{ids(0, 5, 5)}, GidMappings: []*cri.IDMapping{ids(0, 5, 5)}}}
	})(&inside)
	seed(inside)
	f.Fuzz(func(t *testing.T, config, sandbox, image, profile []byte, v2 bool) {
		in := base()
		in.Config, in.Sandbox, in.Image = &cri.ContainerConfig{}, &cri.PodSandboxConfig{}, &ispec.Image{}
		if proto.Unmarshal(config, in.Config) != nil || proto.Unmarshal(sandbox, in.Sandbox) != nil || json.Unmarshal(image, in.Image) != nil {
			t.Skip("the fuzzed bytes are no CRI messages or image config")
		}
		in.Host.CgroupV2, in.Namespaces.User = v2, "/ns/user"
		in.Resolved.MountSources = sources(in.Config)
		in.Resolved.SeccompProfile = profile
		volumes, err := DeclaredVolumes(in.Image, in.Config.GetMounts())
		if err != nil && !hasKind(err) {
			t.Fatalf("an error without a kind: %v", err)
		}
		for _, v := range volumes {
			if path.Clean(v) != v || !path.IsAbs(v) || v == "/" {
				t.Errorf("a volume at %q", v)
			}
			in.Resolved.Volumes = append(in.Resolved.Volumes, Volume{Path: v, Source: "/rootfs" + v})
		}
		translate(t, in)
	})
}

// translate makes the specification twice and checks all that must hold. It
// says whether the request was taken.
func translate(t *testing.T, in ContainerInput) bool {
	t.Helper()
	if _, err := Pause(PauseInput{Sandbox: in.Sandbox, Host: in.Host, SeccompProfile: in.Resolved.SeccompProfile}); err != nil && !hasKind(err) {
		t.Fatalf("an error without a kind: %v", err)
	}
	spec, warnings, err := Container(in)
	if err != nil {
		if !hasKind(err) {
			t.Fatalf("an error without a kind: %v", err)
		}
		return false
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
	return true
}

func hasKind(err error) bool { return errors.Is(err, ErrInvalid) || errors.Is(err, ErrUnsupported) }

// TestRandomRequests fills every field of requests from a small stock of right
// and wrong values, which byte-wise fuzzing seldom reaches.
func TestRandomRequests(t *testing.T) {
	taken := 0
	const rounds = 3000
	for seed := range int64(rounds) {
		g := generator{rand.New(rand.NewSource(seed))}
		in := base()
		in.Namespaces.User = "/ns/user"
		g.fill(in.Config.ProtoReflect(), 0)
		g.fill(in.Sandbox.ProtoReflect(), 0)
		in.Host.CgroupV2, in.Host.AppArmorEnabled, in.Host.SELinuxEnabled = g.Intn(2) == 0, g.Intn(2) == 0, g.Intn(2) == 0
		in.Options.AppArmorDefault = []string{"", "berth-default"}[g.Intn(2)]
		if g.Intn(2) == 0 {
			g.inUserNamespace(&in)
		}
		in.Resolved.MountSources = sources(in.Config)
		in.Resolved.SeccompProfile = []byte(`{"defaultAction":"SCMP_ACT_ALLOW"}`)
		if translate(t, in) {
			taken++
		}
	}
	if taken < rounds/100 {
		t.Errorf("only %d of %d requests were taken: the stock of values is too wrong", taken, rounds)
	}
}

// inUserNamespace puts a random request into a pod with a user namespace of 2000
// ids, where nothing else forbids it.
func (g generator) inUserNamespace(in *ContainerInput) {
	o := inUserNamespace(ids(0, 200000, 2000))
	o.Pid = cri.NamespaceMode_CONTAINER
	if in.Sandbox.Linux == nil {
		in.Sandbox.Linux = &cri.LinuxPodSandboxConfig{}
	}
	if in.Sandbox.Linux.SecurityContext == nil {
		in.Sandbox.Linux.SecurityContext = &cri.LinuxSandboxSecurityContext{}
	}
	in.Sandbox.Linux.SecurityContext.NamespaceOptions = o
	if sc := in.Config.GetLinux().GetSecurityContext(); sc != nil && g.Intn(4) > 0 {
		sc.NamespaceOptions = o
	}
}

// generator makes random messages.
type generator struct{ *rand.Rand }

var (
	stockStrings = []string{"", "/a", "/a/b", "/dev/x", "r", "KILL", "CAP_CHOWN", "0-1", "2MB", "memory.max", "runtime/default", "localhost//p", "v.test/c=d", "container_t", "noexec", "x\x00"}
	stockNumbers = []int64{0, 0, 0, 1, 2, 1000, 4096, 100000, -1, 1 << 31}
)

// fill sets about one field in six, lists and maps with up to two elements.
func (g generator) fill(m protoreflect.Message, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if g.Intn(6) > 0 || depth > 5 {
			continue
		}
		switch {
		case f.IsMap():
			m.Mutable(f).Map().Set(g.value(f.MapKey()).MapKey(), g.value(f.MapValue()))
		case f.IsList():
			list := m.Mutable(f).List()
			for range 1 + g.Intn(2) {
				if f.Message() != nil {
					g.fill(list.AppendMutable().Message(), depth+1)
				} else {
					list.Append(g.value(f))
				}
			}
		case f.Message() != nil:
			g.fill(m.Mutable(f).Message(), depth+1)
		default:
			m.Set(f, g.value(f))
		}
	}
}

func (g generator) value(f protoreflect.FieldDescriptor) protoreflect.Value {
	number := stockNumbers[g.Intn(len(stockNumbers))]
	text := stockStrings[g.Intn(len(stockStrings))]
	switch f.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(g.Intn(2) == 0)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(protoreflect.EnumNumber(g.Intn(4)))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(number)
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(number))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(number))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(uint64(number))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte(text))
	}
	return protoreflect.ValueOfString(text)
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
	ids, err := SandboxIDMap(in.Sandbox)
	if err != nil {
		t.Error(err)
	}
	checkUserNamespace(t, ids, spec)
	if len(spec.Linux.MaskedPaths)+len(spec.Linux.ReadonlyPaths) == 0 && !privileged && ids == nil {
		t.Error("/proc is not masked")
	}
	if profile := spec.Process.ApparmorProfile; profile != "" && (privileged || !in.Host.AppArmorEnabled) {
		t.Errorf("AppArmor profile %q", profile)
	}
	for _, c := range spec.Process.Capabilities.Inheritable {
		if !slices.Contains(spec.Process.Capabilities.Ambient, c) {
			t.Errorf("%s is inheritable", c)
		}
	}
}

// checkUserNamespace: a container is in its pod's user namespace or in none, and no
// id of its process is outside of it.
func checkUserNamespace(t *testing.T, ids *IDMap, spec *rspec.Spec) {
	t.Helper()
	joined := slices.Contains(spec.Linux.Namespaces, rspec.LinuxNamespace{Type: rspec.UserNamespace, Path: "/ns/user"})
	if joined != (ids != nil) {
		t.Errorf("user namespace joined: %v, wanted: %v", joined, ids != nil)
	}
	u := spec.Process.User
	for _, gid := range append(u.AdditionalGids, u.GID) {
		if ids.checkUserMapped("", int64(u.UID)) != nil || ids.checkGroupMapped("", int64(gid)) != nil {
			t.Errorf("user %d with group %d is not mapped", u.UID, gid)
		}
	}
	for _, m := range spec.Mounts {
		if len(m.UIDMappings)+len(m.GIDMappings) > 0 && !slices.Contains(m.Options, "idmap") {
			t.Errorf("mount %s has mappings and is not id-mapped", m.Destination)
		}
	}
}
