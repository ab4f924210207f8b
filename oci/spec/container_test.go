package spec

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand"
	"path"
	"reflect"
	"slices"
	"strings"
	"testing"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func encodeSpec(t testing.TB, in ContainerInput) []byte {
	t.Helper()
	spec, warnings, err := Container(in)
	if err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(map[string]any{"spec": spec, "warnings": warnings})
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// thirtyMounts has nested and equal destinations.
func thirtyMounts() []*cri.Mount {
	var list []*cri.Mount
	for i := range 10 {
		for _, p := range []string{"/a", "/a/b", "/a/b/c"} {
			at := p
			if i > 0 {
				at = fmt.Sprintf("/m%d%s", i, p)
			}
			list = append(list, &cri.Mount{ContainerPath: at, HostPath: "/h" + at})
		}
	}
	return list
}

// TestB87MountOrder shuffles a request: whatever its order, no mount comes
// before one that it lies on.
func TestB87MountOrder(t *testing.T) {
	random := rand.New(rand.NewSource(1))
	for range 20 {
		in := base()
		in.Config.Mounts = thirtyMounts()
		random.Shuffle(len(in.Config.Mounts), func(i, j int) {
			m := in.Config.Mounts
			m[i], m[j] = m[j], m[i]
		})
		in.Resolved.MountSources = sources(in.Config)
		spec, _, err := Container(in)
		if err != nil {
			t.Fatal(err)
		}
		at := map[string]int{}
		for i, m := range spec.Mounts {
			at[m.Destination] = i
		}
		for _, m := range in.Config.Mounts {
			for up := path.Dir(m.ContainerPath); up != "/"; up = path.Dir(up) {
				if i, ok := at[up]; ok && i > at[m.ContainerPath] {
					t.Fatalf("%s hides %s", up, m.ContainerPath)
				}
			}
		}
	}
}

// TestB87EqualPlaces wants two mounts on one place in the order of the request.
func TestB87EqualPlaces(t *testing.T) {
	for _, hosts := range [][]string{{"/1", "/2"}, {"/2", "/1"}} {
		in := base()
		in.Config.Mounts = []*cri.Mount{
			{ContainerPath: "/x/y", HostPath: hosts[0]}, {ContainerPath: "/z", HostPath: "/z"}, {ContainerPath: "/../x/./q/../y/", HostPath: hosts[1]},
		}
		in.Resolved.MountSources = sources(in.Config)
		spec, _, err := Container(in)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, m := range spec.Mounts {
			if m.Destination == "/x/y" {
				got = append(got, m.Source)
			}
		}
		if !slices.Equal(got, hosts) {
			t.Errorf("order %v, asked for %v", got, hosts)
		}
	}
}

func TestContainerIsDeterministic(t *testing.T) {
	in := base()
	in.Config.Linux = &cri.LinuxContainerConfig{
		SecurityContext: &cri.LinuxContainerSecurityContext{
			Capabilities: &cri.Capability{AddCapabilities: []string{"ALL"}, DropCapabilities: []string{"KILL", "CHOWN", "SYSLOG"}},
			Seccomp:      &cri.SecurityProfile{},
		},
		Resources: &cri.LinuxContainerResources{Unified: map[string]string{"a.a": "1", "b.b": "2", "c.c": "3"}},
	}
	in.Host.CgroupV2 = true
	in.Host.Capabilities = allCapabilities[5:20]
	first := encodeSpec(t, in)
	for range 20 {
		if !bytes.Equal(first, encodeSpec(t, in)) {
			t.Fatal("two results for one input")
		}
	}
}

// TestContainerSharesNothing writes over a result and wants the next unharmed.
func TestContainerSharesNothing(t *testing.T) {
	in := base()
	id := uint32(7)
	number := int64(8)
	in.Resolved.Devices = []rspec.LinuxDevice{{Path: "/dev/x", Type: "b", UID: &id, GID: &id}}
	in.Resolved.DeviceRules = []rspec.LinuxDeviceCgroup{{Major: &number, Minor: &number}}
	in.Resolved.User.AdditionalGIDs = []uint32{9, 3}
	in.Host.CgroupV2 = true
	in.Host.Rlimits = DefaultRlimits()
	in.Image.Config.Env = []string{"A=b"}
	in.Config.Linux = &cri.LinuxContainerConfig{
		SecurityContext: &cri.LinuxContainerSecurityContext{MaskedPaths: []string{"/m"}, ReadonlyPaths: []string{"/r"}},
		Resources:       &cri.LinuxContainerResources{Unified: map[string]string{"a.b": "c"}},
	}
	before := encodeSpec(t, in)
	spec, _, err := Container(in)
	if err != nil {
		t.Fatal(err)
	}
	scribble(reflect.ValueOf(spec))
	if after := encodeSpec(t, in); !bytes.Equal(before, after) {
		t.Errorf("the input changed with the result:\n%s\n%s", before, after)
	}
}

// scribble overwrites every string and number that can be reached.
func scribble(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			scribble(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			scribble(v.Field(i))
		}
	case reflect.Slice:
		for i := range v.Len() {
			scribble(v.Index(i))
		}
	case reflect.Map:
		for _, k := range v.MapKeys() {
			v.SetMapIndex(k, reflect.Zero(v.Type().Elem()))
		}
	case reflect.String:
		v.SetString("scribbled")
	case reflect.Uint32, reflect.Uint64:
		v.SetUint(4711)
	case reflect.Int, reflect.Int64:
		v.SetInt(4711)
	}
}

// TestContainerLeavesRequestAlone compares the messages before and after.
func TestContainerLeavesRequestAlone(t *testing.T) {
	in := base()
	in.Config.Mounts = thirtyMounts()
	in.Resolved.MountSources = sources(in.Config)
	config, sandbox := proto.Clone(in.Config), proto.Clone(in.Sandbox)
	encodeSpec(t, in)
	if !proto.Equal(config, in.Config) || !proto.Equal(sandbox, in.Sandbox) {
		t.Error("the request was changed")
	}
}

// TestUserAnnotationsStayOut: OCI runtimes act on some annotations.
func TestUserAnnotationsStayOut(t *testing.T) {
	in := base()
	in.Config.Annotations = map[string]string{"run.oci.handler": "krun", "org.systemd.property.X": "1"}
	in.Sandbox.Annotations = in.Config.Annotations
	spec, _, err := Container(in)
	if err != nil {
		t.Fatal(err)
	}
	for k := range spec.Annotations {
		if !strings.HasPrefix(k, "io.kubernetes.cri.") {
			t.Errorf("annotation %s got into the specification", k)
		}
	}
}

// TestPodModeFollowsPod: a POD mode means the pod's namespace, whatever that is.
func TestPodModeFollowsPod(t *testing.T) {
	node := cri.NamespaceMode_NODE
	host := &cri.NamespaceOption{Network: node, Ipc: node, Pid: node}
	for name, own := range map[string]*cri.NamespaceOption{"none": nil, "POD": {}, "NODE": host} {
		in := base()
		podModes(host, own)(&in)
		spec, _, err := Container(in)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, ns := range spec.Linux.Namespaces {
			if ns.Type != rspec.MountNamespace && ns.Type != rspec.UTSNamespace {
				t.Errorf("%s: %s namespace in a pod on the host's", name, ns.Type)
			}
		}
	}
}

func TestPIDMode(t *testing.T) {
	pod, own, node := cri.NamespaceMode_POD, cri.NamespaceMode_CONTAINER, cri.NamespaceMode_NODE
	option := func(m cri.NamespaceMode) *cri.NamespaceOption { return &cri.NamespaceOption{Pid: m} }
	for _, c := range []struct {
		sandbox   cri.NamespaceMode
		container *cri.NamespaceOption
		want      cri.NamespaceMode
	}{
		{pod, nil, pod}, {own, nil, own}, {node, nil, node},
		{pod, option(own), own}, {node, option(own), own}, {node, option(pod), node},
		{own, &cri.NamespaceOption{Pid: cri.NamespaceMode_TARGET, TargetId: "x"}, cri.NamespaceMode_TARGET},
	} {
		in := base()
		podModes(option(c.sandbox), c.container)(&in)
		got, err := PIDMode(in.Config, in.Sandbox)
		if err != nil || got != c.want {
			t.Errorf("sandbox %s, container %v: %s, %v; want %s", c.sandbox, c.container, got, err, c.want)
		}
	}
}

// TestB105Limits: the limits are the configured ones whatever the daemon's own
// soft limit is, and are cut only where the kernel would refuse.
func TestB105Limits(t *testing.T) {
	for _, c := range []struct {
		name     string
		set      []rspec.POSIXRlimit
		max      map[string]uint64
		want     []rspec.POSIXRlimit
		warnings int
	}{
		{"default", nil, nil, []rspec.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1024, Hard: 524288}}, 0},
		{"inherited", []rspec.POSIXRlimit{}, nil, []rspec.POSIXRlimit{}, 0},
		{"higher bound", nil, map[string]uint64{"RLIMIT_NOFILE": 1 << 20}, []rspec.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1024, Hard: 524288}}, 0},
		{"hard cut", nil, map[string]uint64{"RLIMIT_NOFILE": 20000}, []rspec.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1024, Hard: 20000}}, 1},
		{"both cut", nil, map[string]uint64{"RLIMIT_NOFILE": 256}, []rspec.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 256, Hard: 256}}, 1},
		{"other limit's bound", nil, map[string]uint64{"RLIMIT_CORE": 0}, []rspec.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1024, Hard: 524288}}, 0},
	} {
		in := base()
		in.Host.Rlimits, in.Host.RlimitMax = c.set, c.max
		spec, warnings, err := Container(in)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(spec.Process.Rlimits, c.want) || len(warnings) != c.warnings {
			t.Errorf("%s: %v, warnings %v; want %v", c.name, spec.Process.Rlimits, warnings, c.want)
		}
	}
}

func TestOOMScoreIsAlwaysWritten(t *testing.T) {
	for _, c := range []struct {
		wanted     int64
		own        int
		canLower   bool
		want, warn int
	}{
		{0, -999, true, 0, 0}, {-997, 0, true, -997, 0}, {-997, 0, false, 0, 1}, {-997, -999, false, -997, 0}, {500, 0, false, 500, 0}, {0, 100, false, 100, 1},
	} {
		in := base()
		in.Host.CanLowerOOM, in.Host.OOMScoreAdjMin = c.canLower, c.own
		res(&cri.LinuxContainerResources{OomScoreAdj: c.wanted})(&in)
		spec, warnings, err := Container(in)
		if err != nil {
			t.Fatal(err)
		}
		if got := spec.Process.OOMScoreAdj; got == nil || *got != c.want || len(warnings) != c.warn {
			t.Errorf("wanted %d with own %d: got %v, warnings %v", c.wanted, c.own, got, warnings)
		}
	}
}

// TestInheritableIsEmpty is CVE-2022-24769.
func TestInheritableIsEmpty(t *testing.T) {
	for _, privileged := range []bool{false, true} {
		in := base()
		in.Sandbox.Linux = &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{Privileged: privileged}}
		sc(func(s *cri.LinuxContainerSecurityContext) {
			s.Privileged = privileged
			s.Capabilities = &cri.Capability{AddCapabilities: []string{"ALL"}}
		})(&in)
		spec, _, err := Container(in)
		if err != nil {
			t.Fatal(err)
		}
		c := spec.Process.Capabilities
		if len(c.Inheritable) != 0 || len(c.Ambient) != 0 || len(c.Bounding) != len(allCapabilities) {
			t.Errorf("privileged %v: %+v", privileged, c)
		}
	}
}

func TestMaskedPaths(t *testing.T) {
	masked := func(m, r []string) (int, int) {
		in := base()
		sc(func(s *cri.LinuxContainerSecurityContext) { s.MaskedPaths, s.ReadonlyPaths = m, r })(&in)
		spec, _, err := Container(in)
		if err != nil {
			t.Fatal(err)
		}
		return len(spec.Linux.MaskedPaths), len(spec.Linux.ReadonlyPaths)
	}
	if m, r := masked(nil, nil); m != len(defaultMaskedPaths) || r != len(defaultReadonlyPaths) {
		t.Errorf("nothing sent: %d, %d", m, r)
	}
	if m, r := masked([]string{"/a"}, nil); m != 1 || r != 0 {
		t.Errorf("one masked: %d, %d", m, r)
	}
	if m, r := masked(nil, []string{"/a", "/b"}); m != 0 || r != 2 {
		t.Errorf("two read-only: %d, %d", m, r)
	}
	b := &builder{in: base(), security: &cri.LinuxContainerSecurityContext{}, modes: modes{userNS: &IDMap{}}}
	if m, r := b.hiddenPaths(); m != nil || r != nil {
		t.Errorf("nothing sent in a user namespace: %v, %v", m, r)
	}
}

func TestExecProcess(t *testing.T) {
	in := base()
	in.Config.Tty = true
	in.Resolved.User = User{UID: 5, GID: 6, AdditionalGIDs: []uint32{7}}
	spec, _, err := Container(in)
	if err != nil {
		t.Fatal(err)
	}
	init := spec.Process
	init.ConsoleSize = &rspec.Box{Height: 1, Width: 1}
	before, _ := json.Marshal(init)
	args := []string{"cat", "/x"}
	p := ExecProcess(init, args)
	if p.Terminal || p.ConsoleSize != nil || !slices.Equal(p.Args, args) {
		t.Errorf("terminal %v, console %v, args %v", p.Terminal, p.ConsoleSize, p.Args)
	}
	same := *p
	same.Terminal, same.ConsoleSize, same.Args = init.Terminal, init.ConsoleSize, init.Args
	if !reflect.DeepEqual(&same, init) {
		t.Errorf("more than the terminal differs:\n%+v\n%+v", same, init)
	}
	args[0] = "changed"
	scribble(reflect.ValueOf(p))
	if after, _ := json.Marshal(init); !bytes.Equal(before, after) {
		t.Error("the container's process changed with the exec's")
	}
}

func TestStatusUser(t *testing.T) {
	got := ToCRIUser(User{UID: 1000, GID: 1000, AdditionalGIDs: []uint32{50000, 1234}})
	want := &cri.ContainerUser{Linux: &cri.LinuxContainerUser{Uid: 1000, Gid: 1000, SupplementalGroups: []int64{1000, 1234, 50000}}}
	if !proto.Equal(got, want) {
		t.Errorf("user %v, want %v", got, want)
	}
}
