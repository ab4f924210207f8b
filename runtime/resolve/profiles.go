package resolve

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
	"berth/sandbox/outside"
	"berth/sandbox/regular"
)

// profileMax bounds a seccomp profile's file; the default profile has 18 KiB.
const profileMax = 1 << 20

const profileField = "linux.security_context.seccomp.localhost_ref"

// readProfile reads a seccomp profile of the node; nothing for an empty path.
func readProfile(host outside.Host, path string) ([]byte, error) {
	if path == "" {
		return nil, nil
	}
	data, err := host.Read(path, profileMax)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, spec.Invalid(profileField, path, "no such file")
	case errors.Is(err, regular.ErrNot):
		return nil, spec.Invalid(profileField, path, strings.TrimPrefix(err.Error(), path+" "))
	case err != nil:
		return nil, fmt.Errorf("read seccomp profile %q: %w", path, err)
	}
	if !json.Valid(data) {
		return nil, spec.Invalid(profileField, path, "is not JSON")
	}
	return data, nil
}

// appArmor refuses a Localhost profile of a container that is not loaded: the OCI
// runtime would say so in words of its own. root is "/" but in tests.
func appArmor(sc *cri.LinuxContainerSecurityContext, host spec.Host, root string) error {
	p, err := spec.AppArmorProfile(sc)
	if err != nil || sc.GetPrivileged() {
		return err
	}
	return checkAppArmor(p, host, root)
}

// SandboxAppArmor is the same for a sandbox's own process. ErrInvalid.
func SandboxAppArmor(sandbox *cri.PodSandboxConfig, host spec.Host) error {
	sc := sandbox.GetLinux().GetSecurityContext()
	p, err := spec.SandboxAppArmorProfile(sc)
	if err != nil || sc.GetPrivileged() {
		return err
	}
	return checkAppArmor(p, host, "/")
}

func checkAppArmor(p *cri.SecurityProfile, host spec.Host, root string) error {
	if p.GetProfileType() != cri.SecurityProfile_Localhost || !host.AppArmorEnabled {
		return nil
	}
	data, err := os.ReadFile(filepath.Join(root, "sys/kernel/security/apparmor/profiles"))
	if err != nil {
		return fmt.Errorf("list AppArmor profiles: %w", err)
	}
	for line := range strings.Lines(string(data)) {
		// A line is "name (mode)"; a name may hold spaces.
		if i := strings.LastIndex(line, " ("); i >= 0 && line[:i] == p.GetLocalhostRef() {
			return nil
		}
	}
	return spec.Invalid("linux.security_context.apparmor.localhost_ref", p.GetLocalhostRef(), "no such profile is loaded")
}
