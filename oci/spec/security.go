package spec

import (
	"strings"
	"unicode"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The deprecated string forms of profiles, and the type each stands for.
const (
	runtimeDefault = "runtime/default"
	unconfined     = "unconfined"
	localhost      = "localhost/"
)

// profile turns the deprecated string form into a SecurityProfile; the newer
// form wins when both are given, as a kubelet sends the same in both. nil means
// that nothing was asked for.
func profile(field string, p *cri.SecurityProfile, old string) (*cri.SecurityProfile, error) {
	if p != nil {
		switch p.GetProfileType() {
		case cri.SecurityProfile_Localhost:
			if p.GetLocalhostRef() == "" {
				return nil, Invalid(field+".localhost_ref", "", "needed by profile_type Localhost")
			}
		case cri.SecurityProfile_RuntimeDefault, cri.SecurityProfile_Unconfined:
			if p.GetLocalhostRef() != "" {
				return nil, Invalid(field+".localhost_ref", p.GetLocalhostRef(), "goes only with profile_type Localhost")
			}
		default:
			return nil, Invalid(field+".profile_type", p.GetProfileType(), "must be RuntimeDefault, Unconfined or Localhost")
		}
		return p, nil
	}
	switch {
	case old == "":
		return nil, nil
	case old == runtimeDefault:
		return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}, nil
	case old == unconfined:
		return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined}, nil
	case strings.HasPrefix(old, localhost) && old != localhost:
		return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: old[len(localhost):]}, nil
	}
	return nil, Invalid(field, old, "must be runtime/default, unconfined or localhost/ and a profile")
}

const appArmorField = security + ".apparmor"

// apparmor is the profile's name for the process, empty for none. Privileged
// means unconfined, whatever else is asked for, as the CRI says.
func (b *builder) apparmor() (string, error) {
	p, err := AppArmorProfile(b.security)
	if err != nil || b.privileged() {
		return "", err
	}
	name, err := appArmorName(p, b.in.Host, b.in.Options)
	if err == nil && name == "" && b.in.Host.AppArmorEnabled && p == nil {
		b.warn("no AppArmor profile was asked for, and the default one is not loaded: the container is not confined by AppArmor (%s)", b.in.Options.AppArmorProblem)
	}
	return name, err
}

// appArmorName follows the rule in the package's doc; p is nil when nothing was
// asked for.
func appArmorName(p *cri.SecurityProfile, host Host, options Options) (string, error) {
	switch {
	case p != nil && p.GetProfileType() == cri.SecurityProfile_Localhost:
		if !host.AppArmorEnabled {
			return "", Unsupported(appArmorField, p.GetLocalhostRef(), "this host has no AppArmor")
		}
		return p.GetLocalhostRef(), nil
	case p != nil && p.GetProfileType() == cri.SecurityProfile_Unconfined, !host.AppArmorEnabled:
		return "", nil
	case p != nil && options.AppArmorDefault == "":
		return "", Unsupported(appArmorField, p.GetProfileType(), "the default profile is not loaded: "+options.AppArmorProblem)
	}
	return options.AppArmorDefault, nil
}

// AppArmorProfile is what a container's security context asks for, from either
// of its two fields; nil when it asks for nothing. A name loses its "localhost/"
// prefix. ErrInvalid.
func AppArmorProfile(sc *cri.LinuxContainerSecurityContext) (*cri.SecurityProfile, error) {
	return appArmorProfile(sc.GetApparmor(), sc.GetApparmorProfile())
}

// SandboxAppArmorProfile is AppArmorProfile for a sandbox's own process.
func SandboxAppArmorProfile(sc *cri.LinuxSandboxSecurityContext) (*cri.SecurityProfile, error) {
	return appArmorProfile(sc.GetApparmor(), "")
}

func appArmorProfile(p *cri.SecurityProfile, old string) (*cri.SecurityProfile, error) {
	p, err := profile(appArmorField, p, old)
	if err != nil || p == nil {
		return nil, err
	}
	name := strings.TrimPrefix(p.GetLocalhostRef(), localhost)
	switch {
	case p.GetProfileType() != cri.SecurityProfile_Localhost:
	case name == "":
		return nil, Invalid(appArmorField+".localhost_ref", p.GetLocalhostRef(), "names no profile")
	case strings.ContainsFunc(name, unicode.IsControl):
		return nil, Invalid(appArmorField+".localhost_ref", name, "has a control character")
	}
	return &cri.SecurityProfile{ProfileType: p.GetProfileType(), LocalhostRef: name}, nil
}
