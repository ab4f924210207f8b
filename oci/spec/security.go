package spec

import (
	"strings"

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

// apparmor is the profile's name for the process, empty for none.
func (b *builder) apparmor() (string, error) {
	p, err := AppArmorProfile(b.security)
	if err != nil {
		return "", err
	}
	wanted := p.GetProfileType()
	switch {
	case p != nil && wanted == cri.SecurityProfile_Localhost:
		if !b.in.Host.AppArmorEnabled {
			return "", Unsupported(security+".apparmor", p.GetLocalhostRef(), "this host has no AppArmor")
		}
		return p.GetLocalhostRef(), nil
	case p != nil && wanted == cri.SecurityProfile_Unconfined, b.privileged(), !b.in.Host.AppArmorEnabled:
		return "", nil
	}
	if b.in.Options.AppArmorDefault == "" && p != nil {
		b.warn("apparmor RuntimeDefault: no default profile is loaded, the container is not confined by AppArmor")
	}
	return b.in.Options.AppArmorDefault, nil
}

// AppArmorProfile is what a container's security context asks for, from either
// of its two fields; nil when it asks for nothing. A name loses its "localhost/"
// prefix. ErrInvalid.
func AppArmorProfile(sc *cri.LinuxContainerSecurityContext) (*cri.SecurityProfile, error) {
	p, err := profile(security+".apparmor", sc.GetApparmor(), sc.GetApparmorProfile())
	if err != nil || p == nil {
		return nil, err
	}
	return &cri.SecurityProfile{
		ProfileType:  p.GetProfileType(),
		LocalhostRef: strings.TrimPrefix(p.GetLocalhostRef(), localhost),
	}, nil
}

// checkSELinux refuses labels on a host where they would mean something: to
// start a container without the confinement it asks for is no answer.
func (b *builder) checkSELinux() error {
	o := b.security.GetSelinuxOptions()
	if o == nil || !b.in.Host.SELinuxEnabled || b.privileged() {
		return nil
	}
	label := strings.Join([]string{o.GetUser(), o.GetRole(), o.GetType(), o.GetLevel()}, ":")
	return Unsupported(security+".selinux_options", label, "this version of berth sets no SELinux labels")
}
