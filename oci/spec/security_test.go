package spec

import (
	"errors"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestAppArmor(t *testing.T) {
	kind := func(k cri.SecurityProfile_ProfileType, ref string) *cri.SecurityProfile {
		return &cri.SecurityProfile{ProfileType: k, LocalhostRef: ref}
	}
	const runtimeDefault, unconfined, local = cri.SecurityProfile_RuntimeDefault, cri.SecurityProfile_Unconfined, cri.SecurityProfile_Localhost
	without, loaded, failed := Host{}, Options{AppArmorDefault: "berth-default"}, Options{AppArmorProblem: "no apparmor_parser"}
	enabled := Host{AppArmorEnabled: true}
	for name, tc := range map[string]struct {
		host       Host
		options    Options
		profile    *cri.SecurityProfile
		old        string
		privileged bool
		want       string
		refused    string // words of the error
		kind       error
		warned     bool
	}{
		"nothing":                      {host: enabled, options: loaded, want: "berth-default"},
		"default":                      {host: enabled, options: loaded, profile: kind(runtimeDefault, ""), want: "berth-default"},
		"default, old form":            {host: enabled, options: loaded, old: "runtime/default", want: "berth-default"},
		"unconfined":                   {host: enabled, options: loaded, profile: kind(unconfined, "")},
		"unconfined, old form":         {host: enabled, options: loaded, old: "unconfined"},
		"by name":                      {host: enabled, options: loaded, profile: kind(local, "mine"), want: "mine"},
		"by name with prefix":          {host: enabled, options: loaded, profile: kind(local, "localhost/a b"), want: "a b"},
		"by name, old form":            {host: enabled, options: loaded, old: "localhost/mine", want: "mine"},
		"the new form wins":            {host: enabled, options: loaded, profile: kind(local, "new"), old: "localhost/old", want: "new"},
		"privileged":                   {host: enabled, options: loaded, privileged: true},
		"privileged by name":           {host: enabled, options: loaded, privileged: true, profile: kind(local, "mine")},
		"nothing, not loaded":          {host: enabled, options: failed, warned: true},
		"default, not loaded":          {host: enabled, options: failed, profile: kind(runtimeDefault, ""), refused: "no apparmor_parser", kind: ErrUnsupported},
		"by name, default not loaded":  {host: enabled, options: failed, profile: kind(local, "mine"), want: "mine"},
		"nothing, host without":        {host: without},
		"default, host without":        {host: without, profile: kind(runtimeDefault, "")},
		"unconfined, host without":     {host: without, old: "unconfined"},
		"by name, host without":        {host: without, profile: kind(local, "mine"), refused: "has no AppArmor", kind: ErrUnsupported},
		"old form, host without":       {host: without, old: "localhost/mine", refused: "has no AppArmor", kind: ErrUnsupported},
		"privileged, host without":     {host: without, privileged: true, profile: kind(local, "mine")},
		"prefix alone":                 {host: enabled, options: loaded, profile: kind(local, "localhost/"), refused: "names no profile", kind: ErrInvalid},
		"control character":            {host: enabled, options: loaded, profile: kind(local, "a\nb"), refused: "control character", kind: ErrInvalid},
		"a name with RuntimeDefault":   {host: enabled, options: loaded, profile: kind(runtimeDefault, "x"), refused: "goes only with", kind: ErrInvalid},
		"an unknown type of profile":   {host: enabled, options: loaded, profile: kind(7, ""), refused: "profile_type", kind: ErrInvalid},
		"an unknown form in old field": {host: enabled, options: loaded, old: "docker/default", refused: "docker/default", kind: ErrInvalid},
	} {
		in := base()
		in.Host.AppArmorEnabled, in.Options = tc.host.AppArmorEnabled, tc.options
		in.Sandbox.Linux = &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{Privileged: tc.privileged}}
		in.Config.Linux = &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			Apparmor: tc.profile, ApparmorProfile: tc.old, Privileged: tc.privileged}}
		spec, warnings, err := Container(in)
		if tc.refused != "" {
			if !errors.Is(err, tc.kind) || !strings.Contains(err.Error(), tc.refused) || !strings.HasPrefix(err.Error(), "linux.security_context.apparmor") {
				t.Errorf("%s: %v; want %v with %q", name, err, tc.kind, tc.refused)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := spec.Process.ApparmorProfile; got != tc.want || strings.Contains(strings.Join(warnings, ""), "AppArmor") != tc.warned {
			t.Errorf("%s: profile %q, want %q; warnings %q", name, got, tc.want, warnings)
		}
	}
}

// A pod's own process follows the same rules.
func TestSandboxAppArmor(t *testing.T) {
	pause := func(p *cri.SecurityProfile, host Host, o Options, privileged bool) (string, error) {
		in := base()
		in.Sandbox.Linux = &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{Apparmor: p, Privileged: privileged}}
		sp, err := Pause(PauseInput{ID: "x", Sandbox: in.Sandbox, Host: host, Options: o, Namespaces: in.Namespaces, Rootfs: "/r"})
		if err != nil {
			return "", err
		}
		return sp.Process.ApparmorProfile, nil
	}
	mine := &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "mine"}
	loaded := Options{AppArmorDefault: "berth-default"}
	for want, got := range map[string]func() (string, error){
		"berth-default": func() (string, error) { return pause(nil, Host{AppArmorEnabled: true}, loaded, false) },
		"mine":          func() (string, error) { return pause(mine, Host{AppArmorEnabled: true}, loaded, false) },
		"":              func() (string, error) { return pause(mine, Host{AppArmorEnabled: true}, loaded, true) },
	} {
		if name, err := got(); err != nil || name != want {
			t.Errorf("profile %q, %v; want %q", name, err, want)
		}
	}
	if _, err := pause(mine, Host{}, Options{}, false); !errors.Is(err, ErrUnsupported) {
		t.Errorf("by name on a host without: %v", err)
	}
	if _, err := pause(&cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost}, Host{AppArmorEnabled: true}, loaded, false); !errors.Is(err, ErrInvalid) {
		t.Errorf("without a name: %v", err)
	}
}
