package smoke

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// needAppArmor skips where the kernel has none, and outside the guest: the tests
// unload profiles and hide the parser.
func needAppArmor(t *testing.T) {
	t.Helper()
	if os.Getenv("BERTH_GUEST") == "" {
		t.Skip("skipped: unloads AppArmor profiles of the machine, which only a guest can spare (BERTH_GUEST is not set)")
	}
	if text, err := os.ReadFile("/sys/module/apparmor/parameters/enabled"); err != nil || !strings.HasPrefix(string(text), "Y") {
		t.Skip("skipped: the kernel has no AppArmor (/sys/module/apparmor/parameters/enabled)")
	}
}

// profiled is a container's linux part with an AppArmor profile.
func profiled(profile object, privileged bool) object {
	return object{"security_context": object{"namespace_options": object{"pid": 1}, "apparmor": profile, "privileged": privileged}}
}

const confined = "berth-default (enforce)"

// TestAppArmorDefault looks at what confines containers, and that it confines.
func TestAppArmorDefault(t *testing.T) {
	needAppArmor(t)
	e := start(t)
	config := e.file("aa", object{
		"metadata": object{"name": "aa", "namespace": "smoke", "uid": "aa"}, "hostname": "aa", "log_directory": filepath.Join(e.LogDir(), "aa"),
		"linux": object{"security_context": object{"namespace_options": object{"pid": 0}, "privileged": true}},
	})
	pod := e.crictl("runp", config)
	shared := func(linux object) object {
		sc := linux["security_context"].(object)
		sc["namespace_options"], sc["capabilities"] = object{"pid": 0}, object{"add_capabilities": []string{"SYS_ADMIN"}}
		return linux
	}
	for name, tc := range map[string]struct {
		linux object
		want  string
	}{
		"silent":     {shared(object{"security_context": object{}}), confined},
		"default":    {shared(profiled(object{"profile_type": 0}, false)), confined},
		"unconfined": {shared(profiled(object{"profile_type": 1}, false)), "unconfined"},
		"privileged": {shared(profiled(object{"profile_type": 0}, true)), "unconfined"},
	} {
		id := e.container(pod, config, name, "exec sleep 1000", tc.linux)
		e.check(name+": the container's profile", e.exec(id, "cat /proc/self/attr/current"), tc.want)
		label, err := os.ReadFile("/proc/" + e.pid(id) + "/attr/current")
		e.check(name+": the first process's profile", strings.TrimSpace(string(label)), tc.want)
		if err != nil {
			t.Error(err)
		}
		// With CAP_SYS_ADMIN and without seccomp nothing but the profile forbids a mount.
		mounted := map[bool]string{true: "refused", false: "mounted"}[tc.want == confined]
		e.check(name+": a mount", e.exec(id, "mount -t tmpfs none /tmp 2>/dev/null && echo mounted || echo refused"), mounted)
		e.crictl("stop", "--timeout", "0", id) // a confined process takes the daemon's signals
	}
	// Somebody cleans profiles up: the next container has it again.
	if err := os.WriteFile("/sys/kernel/security/apparmor/.remove", []byte("berth-default"), 0o200); err != nil {
		t.Fatal(err)
	}
	id := e.container(pod, config, "again", "exec sleep 1000", shared(profiled(object{"profile_type": 0}, false)))
	e.check("after the profile was unloaded", e.exec(id, "cat /proc/self/attr/current"), confined)
	e.crictl("stopp", pod)
	e.crictl("rmp", pod)
}

// TestAppArmorNotLoadable takes apparmor_parser away from a new daemon.
func TestAppArmorNotLoadable(t *testing.T) {
	needAppArmor(t)
	parser, err := exec.LookPath("apparmor_parser")
	if err != nil {
		t.Skip("skipped: this machine has no apparmor_parser")
	}
	e := start(t)
	pod, config := e.pod("aa", "")
	// The first container waits until the daemon has loaded the profile.
	before := e.container(pod, config, "before", "exec sleep 1000", object{})
	e.check("with the parser", e.exec(before, "cat /proc/self/attr/current"), confined)
	hidden := parser + ".hidden"
	if err := os.Rename(parser, hidden); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := os.Rename(hidden, parser); err != nil {
			t.Error(err)
		}
	}()
	if err := os.WriteFile("/sys/kernel/security/apparmor/.remove", []byte("berth-default"), 0o200); err != nil {
		t.Fatal(err)
	}
	for name, profile := range map[string]object{"default": {"profile_type": 0}, "absent": {"profile_type": 2, "localhost_ref": "no-such-profile"}} {
		request := &cri.CreateContainerRequest{PodSandboxId: pod, Config: &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: "registry.k8s.io/e2e-test-images/busybox:1.29-2"}, Command: []string{"sh"},
			Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
				NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
				Apparmor:         &cri.SecurityProfile{ProfileType: cri.SecurityProfile_ProfileType(profile["profile_type"].(int))}}}}}
		want, word := codes.Unimplemented, "apparmor_parser"
		if ref, ok := profile["localhost_ref"].(string); ok {
			request.Config.Linux.SecurityContext.Apparmor.LocalhostRef = ref
			want, word = codes.InvalidArgument, ref
		}
		_, err := e.Runtime().CreateContainer(e.ctx, request)
		if status.Code(err) != want || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v; want %v with %s", name, err, want, word)
		}
	}
	id := e.container(pod, config, "silent", "exec sleep 1000", object{})
	e.check("a container that asked for nothing", e.exec(id, "cat /proc/self/attr/current"), "unconfined")
	res, err := e.Runtime().Status(e.ctx, &cri.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	told := false
	for _, c := range res.GetStatus().GetConditions() {
		told = told || c.GetType() == "AppArmorDefaultLoaded" && !c.GetStatus() && strings.Contains(c.GetMessage(), "apparmor_parser")
	}
	if !told {
		t.Errorf("the status does not tell that the profile is not loaded: %v", res.GetStatus())
	}
	e.crictl("stopp", pod)
	e.crictl("rmp", pod)
}
