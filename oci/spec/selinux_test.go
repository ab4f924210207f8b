package spec

import (
	"errors"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestSELinuxOptions(t *testing.T) {
	for name, o := range map[string]*cri.SELinuxOption{
		"nothing": nil, "all": {User: "system_u", Role: "system_r", Type: "container_t", Level: "s0-s15:c0.c1023,c5"}, "a type": {Type: "spc_t"},
	} {
		if err := checkSELinuxOptions(o); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for field, o := range map[string]*cri.SELinuxOption{
		"user": {User: "a:b"}, "role": {Role: "a b"}, "type": {Type: "a\n"}, "level": {Level: "s0:c1,c2/"},
	} {
		in := base()
		in.Config.Linux = &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{SelinuxOptions: o}}
		_, _, err := Container(in)
		sandbox := &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{SelinuxOptions: o}}}
		for _, err := range []error{err, CheckSandbox(sandbox)} {
			if !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), "linux.security_context.selinux_options."+field) {
				t.Errorf("%s: %v", field, err)
			}
		}
	}
	if err := checkSELinuxOptions(&cri.SELinuxOption{Type: strings.Repeat("a", 256)}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a long type: %v", err)
	}
}

func TestSELinuxLabels(t *testing.T) {
	labels := Labels{Process: "u:r:container_t:s0:c1,c2", Mount: "u:object_r:container_file_t:s0:c1,c2"}
	for name, tc := range map[string]struct {
		enabled, privileged bool
		labels              Labels
		o                   *cri.SELinuxOption
		refused             bool
	}{
		"a host without":              {o: &cri.SELinuxOption{Type: "t"}},
		"labels":                      {enabled: true, labels: labels, o: &cri.SELinuxOption{Type: "container_t"}},
		"silence, not used":           {enabled: true},
		"empty options, not used":     {enabled: true, o: &cri.SELinuxOption{}},
		"options, not used":           {enabled: true, o: &cri.SELinuxOption{Type: "t"}, refused: true},
		"privileged options, no used": {enabled: true, privileged: true, o: &cri.SELinuxOption{Type: "t"}},
		"privileged":                  {enabled: true, privileged: true, labels: Labels{Mount: labels.Mount}},
	} {
		in := base()
		in.Host.SELinuxEnabled, in.Labels = tc.enabled, tc.labels
		in.Sandbox.Linux = &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{Privileged: tc.privileged}}
		in.Config.Linux = &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{SelinuxOptions: tc.o, Privileged: tc.privileged}}
		in.Config.Mounts = []*cri.Mount{{ContainerPath: "/a", HostPath: "/b", SelinuxRelabel: true}}
		in.Resolved.MountSources = sources(in.Config)
		spec, warnings, err := Container(in)
		if tc.refused {
			if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "runtime.selinux") {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if spec.Process.SelinuxLabel != tc.labels.Process || spec.Linux.MountLabel != tc.labels.Mount {
			t.Errorf("%s: labels %q and %q", name, spec.Process.SelinuxLabel, spec.Linux.MountLabel)
		}
		if ignored := strings.Contains(strings.Join(warnings, ""), "not relabelled"); ignored != (tc.enabled && tc.labels.Mount == "") {
			t.Errorf("%s: warnings %q", name, warnings)
		}
	}
	in := base()
	sp, err := Pause(PauseInput{ID: "x", Sandbox: in.Sandbox, Host: in.Host, Labels: labels, Namespaces: in.Namespaces, Rootfs: "/r"})
	if err != nil || sp.Process.SelinuxLabel != labels.Process || sp.Linux.MountLabel != labels.Mount {
		t.Errorf("pause: %+v, %v", sp, err)
	}
}
