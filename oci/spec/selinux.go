package spec

import (
	"strings"
	"unicode"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Labels are the SELinux contexts of a pod or a container. Both are empty where
// SELinux is not used; Process alone is empty for what it does not confine.
type Labels struct {
	Process string // of its processes
	Mount   string // of its files
}

const selinuxField = security + ".selinux_options"

// checkSELinuxOptions refuses what no SELinux context can hold. It does not ask
// whether a policy knows the context. ErrInvalid.
func checkSELinuxOptions(o *cri.SELinuxOption) error {
	for _, part := range []struct{ name, value, allowed string }{
		{"user", o.GetUser(), "_-."}, {"role", o.GetRole(), "_-."}, {"type", o.GetType(), "_-."},
		{"level", o.GetLevel(), "_-.,:"}, // s0-s15:c0.c1023,c5
	} {
		for _, r := range part.value {
			if r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune(part.allowed, r) {
				return Invalid(selinuxField+"."+part.name, part.value, "has a character that no part of an SELinux context has")
			}
		}
		if len(part.value) > 255 {
			return Invalid(selinuxField+"."+part.name, part.value, "is longer than 255 bytes")
		}
	}
	return nil
}

// checkSELinux refuses options on a host where they would mean something but
// berth does not use SELinux: to start a container without the confinement it
// asks for is no answer.
func (b *builder) checkSELinux() error {
	o := b.security.GetSelinuxOptions()
	label := strings.Trim(strings.Join([]string{o.GetUser(), o.GetRole(), o.GetType(), o.GetLevel()}, ":"), ":")
	if label == "" || !b.in.Host.SELinuxEnabled || b.in.Labels.Process != "" || b.privileged() {
		return nil
	}
	return Unsupported(selinuxField, label, "this host has SELinux, but the key runtime.selinux is off")
}
