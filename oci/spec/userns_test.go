package spec

import (
	"errors"
	"strings"
	"testing"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func ids(container, host, length uint32) *cri.IDMapping {
	return &cri.IDMapping{ContainerId: container, HostId: host, Length: length}
}

// inUserNamespace is a pod whose users and groups have these mappings.
func inUserNamespace(list ...*cri.IDMapping) *cri.NamespaceOption {
	return &cri.NamespaceOption{UsernsOptions: &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: list, Gids: list}}
}

// mapped puts a request into a pod with a user namespace of 1000 users and 500 groups.
func mapped(change func(in *ContainerInput)) func(*ContainerInput) {
	return func(in *ContainerInput) {
		o := inUserNamespace(ids(0, 200000, 1000))
		o.UsernsOptions.Gids = []*cri.IDMapping{ids(0, 300000, 500)}
		in.Namespaces.User = "/ns/user"
		in.Config.Linux = &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{}}
		in.Sandbox.Linux = &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: o}}
		change(in)
	}
}

func TestRefusedUserNamespaces(t *testing.T) {
	node, both := cri.NamespaceMode_NODE, inUserNamespace
	const f = modeFields + ".userns_options"
	mode := func(m cri.NamespaceMode, list ...*cri.IDMapping) *cri.NamespaceOption {
		return &cri.NamespaceOption{UsernsOptions: &cri.UserNamespace{Mode: m, Uids: list}}
	}
	with := func(change func(o *cri.NamespaceOption)) *cri.NamespaceOption {
		o := both(ids(0, 1, 1))
		change(o)
		return o
	}
	var refusals []refusal
	for _, c := range []struct {
		name   string
		pod    *cri.NamespaceOption
		begins string
	}{
		{"CONTAINER", mode(cri.NamespaceMode_CONTAINER), `.mode "CONTAINER": must be POD or NODE`},
		{"TARGET", mode(cri.NamespaceMode_TARGET), `.mode "TARGET": must be POD or NODE`},
		{"unknown", mode(7), `.mode "7": must be POD or NODE`},
		{"NODE with a mapping", mode(node, ids(0, 1, 1)), `.mode "NODE": NODE goes with`},
		{"nothing mapped", both(), `.uids "0 mappings": must be exactly one`},
		{"two mappings", both(ids(0, 1000, 10), ids(10, 2000, 10)), `.uids "2 mappings": must be exactly one`},
		{"no groups", mode(cri.NamespaceMode_POD, ids(0, 1, 1)), `.gids "0 mappings": must be exactly one`},
		{"no root", both(ids(1, 1000, 100000)), `.uids[0].container_id "1": must be 0`},
		{"no length", both(ids(0, 1000, 0)), `.uids[0].length "0": must be at least 1`},
		{"beyond the last user of the node", both(ids(0, 1<<32-10, 10)), `.uids[0].length "10": with host_id 4294967286 it reaches beyond the last id, 4294967294`},
		{"beyond the last user of the pod", both(ids(9, 0, 1<<32-9)), `.uids[0].length "4294967287": with container_id 9`},
		{"overflow", both(ids(0, 1<<32-1, 1<<32-1)), `.uids[0].length "4294967295"`},
		{"host's PIDs", with(func(o *cri.NamespaceOption) { o.Pid = node }), `.mode "POD": does not go with pid NODE`},
		{"host's IPC", with(func(o *cri.NamespaceOption) { o.Ipc = node }), `.mode "POD": does not go with ipc NODE`},
	} {
		refusals = append(refusals, refusal{c.name, podModes(c.pod, nil), f + c.begins, nil})
	}
	runRefusals(t, append(refusals,
		refusal{"container alone", podModes(nil, both(ids(0, 1, 1))), f + `.mode "POD": differs from the sandbox's`, nil},
		refusal{"container without", podModes(both(ids(0, 1, 1)), &cri.NamespaceOption{}), f + ": missing, but the sandbox has", nil},
		refusal{"container on the node's", podModes(both(ids(0, 1, 1)), mode(node)), f + `.mode "NODE": differs`, nil},
		refusal{"container elsewhere", podModes(both(ids(0, 1, 1)), both(ids(0, 2, 1))), f + ` "uids 2:1, gids 2:1": differs`, nil},
	))
}

func TestUserNamespacesThatAreNone(t *testing.T) {
	node := &cri.NamespaceOption{UsernsOptions: &cri.UserNamespace{Mode: cri.NamespaceMode_NODE}}
	for name, c := range map[string]struct{ pod, container *cri.NamespaceOption }{
		"NODE": {node, node}, "NODE in the pod": {node, &cri.NamespaceOption{}}, "NODE in the container": {nil, node}, "nothing": {nil, nil},
	} {
		in := base()
		podModes(c.pod, c.container)(&in)
		spec, _, err := Container(in)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, ns := range spec.Linux.Namespaces {
			if ns.Type == rspec.UserNamespace {
				t.Errorf("%s: the container gets a user namespace", name)
			}
		}
	}
}

// TestContainersJoinThePodsUserNamespace: one without namespace options, and one
// that sends the pod's.
func TestContainersJoinThePodsUserNamespace(t *testing.T) {
	for _, own := range []*cri.NamespaceOption{nil, inUserNamespace(ids(0, 7, 70000))} {
		in := base()
		podModes(inUserNamespace(ids(0, 7, 70000)), own)(&in)
		if _, _, err := Container(in); err == nil || err.Error() != "join the pod's user namespace: it has none" {
			t.Errorf("without a path: %v", err)
		}
		in.Namespaces.User = "/ns/user"
		spec, _, err := Container(in)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, ns := range spec.Linux.Namespaces {
			found = found || ns == rspec.LinuxNamespace{Type: rspec.UserNamespace, Path: "/ns/user"}
		}
		if !found || spec.Linux.UIDMappings != nil {
			t.Errorf("namespaces %v, mappings %v", spec.Linux.Namespaces, spec.Linux.UIDMappings)
		}
	}
}

func TestRefusedIDsOfAUserNamespace(t *testing.T) {
	security := func(change func(s *cri.LinuxContainerSecurityContext)) func(*ContainerInput) {
		return mapped(func(in *ContainerInput) { change(in.Config.Linux.SecurityContext) })
	}
	const f = "linux.security_context."
	runRefusals(t, []refusal{
		{"user", security(func(s *cri.LinuxContainerSecurityContext) { s.RunAsUser = &cri.Int64Value{Value: 1000} }),
			f + `run_as_user "1000": is not mapped in the pod's user namespace, which has users 0 to 999`, nil},
		{"group", security(func(s *cri.LinuxContainerSecurityContext) {
			s.RunAsUser, s.RunAsGroup = &cri.Int64Value{Value: 999}, &cri.Int64Value{Value: 500}
		}), f + `run_as_group "500": is not mapped`, nil},
		{"supplemental group", security(func(s *cri.LinuxContainerSecurityContext) { s.SupplementalGroups = []int64{1, 501} }),
			f + `supplemental_groups "501": is not mapped`, nil},
		{"user of the image", mapped(func(in *ContainerInput) { in.Resolved.User.UID = 5000 }), `image User "5000": is not mapped`, nil},
		{"user by name", mapped(func(in *ContainerInput) {
			in.Config.Linux.SecurityContext.RunAsUsername, in.Resolved.User.UID = "www", 5000
		}), f + `run_as_username "5000": is not mapped`, nil},
		{"propagation to the node", mapped(func(in *ContainerInput) {
			in.Config.Mounts = []*cri.Mount{{ContainerPath: "/c", HostPath: "/h", Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL}}
		}), `mounts[0].propagation "PROPAGATION_BIDIRECTIONAL": what is mounted`, nil},
		{"group of the image", mapped(func(in *ContainerInput) { in.Resolved.User.AdditionalGIDs = []uint32{0, 600} }), `group of image User "600"`, nil},
	})
	in := base()
	mapped(func(in *ContainerInput) { in.Sandbox.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1000} })(&in)
	if err := CheckSandbox(in.Sandbox); !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), f+`run_as_user "1000": is not mapped`) {
		t.Errorf("user of the sandbox: %v", err)
	}
	mapped(func(in *ContainerInput) {
		in.Config.Linux.SecurityContext.RunAsUser, in.Config.Linux.SecurityContext.SupplementalGroups = &cri.Int64Value{Value: 999}, []int64{499}
		in.Resolved.User = User{UID: 999, AdditionalGIDs: []uint32{499}}
	})(&in)
	if _, _, err := Container(in); err != nil {
		t.Errorf("the last ids are refused: %v", err)
	}
}

func TestRefusedMountMappings(t *testing.T) {
	with := func(uids, gids []*cri.IDMapping) func(*ContainerInput) {
		return mount(&cri.Mount{ContainerPath: "/c", HostPath: "/h", UidMappings: uids, GidMappings: gids})
	}
	one := []*cri.IDMapping{ids(0, 1000, 10)}
	var many []*cri.IDMapping
	for i := range uint32(341) {
		many = append(many, ids(2*i, 2*i, 1))
	}
	runRefusals(t, []refusal{
		{"users alone", with(one, nil), "mounts[0].gidMappings: missing", nil},
		{"groups alone", with(nil, one), "mounts[0].uidMappings: missing", nil},
		{"no length", with(one, []*cri.IDMapping{ids(0, 1, 0)}), `mounts[0].gidMappings[0].length "0"`, nil},
		{"pod's ids overlap", with([]*cri.IDMapping{ids(0, 1000, 10), ids(9, 2000, 10)}, one), `mounts[0].uidMappings[1] "9:2000:10": overlaps with mapping 0`, nil},
		{"node's ids overlap", with([]*cri.IDMapping{ids(0, 1000, 10), ids(10, 991, 10)}, one), `mounts[0].uidMappings[1] "10:991:10": overlaps`, nil},
		{"too many", with(many, one), `mounts[0].uidMappings "341 mappings": the kernel takes 340`, nil},
	})
}

// TestHostIDs counts as the node does.
func TestHostIDs(t *testing.T) {
	var none *IDMap
	in := base()
	mapped(func(*ContainerInput) {})(&in)
	m, err := SandboxIDMap(in.Sandbox)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ got, want uint32 }{
		{none.HostUID(5), 5}, {none.HostGID(5), 5}, {m.HostUID(0), 200000}, {m.HostUID(5), 200005}, {m.HostGID(499), 300499},
	} {
		if c.got != c.want {
			t.Errorf("%d, want %d", c.got, c.want)
		}
	}
}
