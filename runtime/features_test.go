package runtime

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go/features"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/oci/spec"
	"berth/runtime/config"
)

func ownerOf(t *testing.T, path string) uint32 {
	t.Helper()
	st, err := os.Lstat(path)
	must(t, err)
	return st.Sys().(*syscall.Stat_t).Uid
}

func able(namespaces []string, idmap *bool, options ...string) *features.Features {
	return &features.Features{MountOptions: options, Linux: &features.Linux{Namespaces: namespaces,
		MountExtensions: &features.MountExtensions{IDMap: &features.IDMap{Enabled: idmap}}}}
}

// What a handler is said to do takes the kernel and the OCI runtime both.
func TestAbilities(t *testing.T) {
	yes, no := true, false
	user := []string{"pid", "user"}
	old, memory := errors.New("the kernel is old"), errors.New("no tmpfs")
	for name, c := range map[string]struct {
		kernel abilities
		has    *features.Features
		want   string // a letter for each that is there: recursive, idmap, user namespaces, volumes
		why    string // in the error of userVolumes
	}{
		"all":              {abilities{}, able(user, &yes, "rro"), "riuv", ""},
		"nothing known":    {abilities{}, &features.Features{}, "", "no user namespaces"},
		"no user":          {abilities{}, able([]string{"pid"}, &yes, "rro"), "ri", "no user namespaces"},
		"idmap is off":     {abilities{}, able(user, &no, "rro"), "r", "no id-mapped mounts"},
		"idmap is unknown": {abilities{}, able(user, nil, "rro"), "r", "no id-mapped mounts"},
		"no rro":           {abilities{}, able(user, &yes, "ro"), "iuv", ""},
		"tmpfs":            {abilities{userVolumes: memory}, able(user, &yes, "rro"), "riu", "no tmpfs"},
		"old kernel":       {abilities{old, old, old, old}, able(user, &yes, "rro"), "", "old"},
	} {
		a := c.kernel.with(c.has)
		got := ""
		for _, x := range []struct {
			err    error
			letter string
		}{{a.recursiveReadOnly, "r"}, {a.idMappedMounts, "i"}, {a.userNamespaces, "u"}, {a.userVolumes, "v"}} {
			if x.err == nil {
				got += x.letter
			}
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if c.why != "" && (a.userVolumes == nil || !strings.Contains(a.userVolumes.Error(), c.why)) {
			t.Errorf("%s: %v, want %q", name, a.userVolumes, c.why)
		}
	}
}

// lacking is a service whose one handler can do nothing.
func lacking() *Service {
	no := errors.New("because it is old")
	s := &Service{abilities: map[string]abilities{"old": {no, no, no, no}}}
	s.Handlers = map[string]oci.Runtime{"old": nil}
	s.Parts.Config.Runtime = config.Runtime{DefaultHandler: "old"}
	return s
}

func TestRefusalsOfAHandlerThatCannot(t *testing.T) {
	s := lacking()
	ids := []*cri.IDMapping{{HostId: 5, Length: 5}}
	run := &cri.RunPodSandboxRequest{Config: &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
		NamespaceOptions: &cri.NamespaceOption{}}}}}
	if err := s.checkUserNamespace(run); err != nil {
		t.Errorf("a pod without a user namespace is refused: %v", err)
	}
	nsOptions(run).UsernsOptions = &cri.UserNamespace{Uids: ids, Gids: ids}
	mount := func(m *cri.Mount) error {
		return s.checkAbilities("old", &cri.ContainerConfig{Mounts: []*cri.Mount{{}, m}})
	}
	for begins, err := range map[string]error{
		`config.linux.security_context.namespace_options.userns_options.mode "POD": because`: s.checkUserNamespace(run),
		`RROUnsupported: mounts[1].recursive_read_only "true": because`:                      mount(&cri.Mount{RecursiveReadOnly: true}),
		"mounts[1].uidMappings: because":                                                     mount(&cri.Mount{UidMappings: ids, GidMappings: ids}),
	} {
		if !errors.Is(err, spec.ErrUnsupported) || !strings.HasPrefix(err.Error(), begins) {
			t.Errorf("%v, want ErrUnsupported that begins with %q", err, begins)
		}
		if got := status.Code(statusOf(err)); got != codes.Unimplemented {
			t.Errorf("%v: code %v", err, got)
		}
	}
	if err := mount(&cri.Mount{Readonly: true}); err != nil {
		t.Errorf("an ordinary mount is refused: %v", err)
	}
}
