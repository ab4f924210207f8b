package spec

import (
	"fmt"
	"math"
	"path"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// MaxID is the highest user or group id that berth gives to a process: the
// kernel's type is wider, but Kubernetes validates against this bound, and ids
// above it have wrapped to 0 in other runtimes.
const MaxID = math.MaxInt32

const security = "linux.security_context"

// CheckContainer refuses malformed and contradictory requests without looking
// at the image or the machine, so that a flow may call it before it has any
// effect. Container calls it too. ErrInvalid or ErrUnsupported.
func CheckContainer(config *cri.ContainerConfig, sandbox *cri.PodSandboxConfig) error {
	sc := config.GetLinux().GetSecurityContext()
	if sc.GetPrivileged() && !sandbox.GetLinux().GetSecurityContext().GetPrivileged() {
		return Invalid(security+".privileged", true, "the sandbox is not privileged")
	}
	modes, err := containerModes(config, sandbox)
	if err != nil {
		return err
	}
	if err := checkUser(sc); err != nil {
		return err
	}
	if err := modes.userNS.checkMapped(sc); err != nil {
		return err
	}
	if err := checkMounts(config.GetMounts(), modes.userNS); err != nil {
		return err
	}
	if err := modes.userNS.checkPropagation(config.GetMounts()); err != nil {
		return err
	}
	if err := checkDevices(config.GetDevices()); err != nil {
		return err
	}
	if _, err := CDIDevices(config); err != nil {
		return err
	}
	if err := checkProcess(config); err != nil {
		return err
	}
	if err := checkSecurity(sc); err != nil {
		return err
	}
	return CheckResources("linux.resources", config.GetLinux().GetResources())
}

func checkProcess(config *cri.ContainerConfig) error {
	for i, kv := range config.GetEnvs() {
		if err := checkEnv(fmt.Sprintf("envs[%d]", i), kv.GetKey(), string(kv.GetValue())); err != nil {
			return err
		}
	}
	if dir := config.GetWorkingDir(); dir != "" {
		if _, err := checkCwd("working_dir", dir); err != nil {
			return err
		}
	}
	return nil
}

func checkSecurity(sc *cri.LinuxContainerSecurityContext) error {
	caps := sc.GetCapabilities()
	for _, list := range []struct {
		name  string
		names []string
	}{
		{"add_capabilities", caps.GetAddCapabilities()},
		{"drop_capabilities", caps.GetDropCapabilities()},
		{"add_ambient_capabilities", caps.GetAddAmbientCapabilities()},
	} {
		if _, _, err := parseCapabilities(capabilityFields+list.name, list.names); err != nil {
			return err
		}
	}
	if _, err := seccompChoice(sc.GetSeccomp(), sc.GetSeccompProfilePath()); err != nil {
		return err
	}
	if _, err := AppArmorProfile(sc); err != nil {
		return err
	}
	if err := checkSELinuxOptions(sc.GetSelinuxOptions()); err != nil {
		return err
	}
	if err := checkPaths(security+".masked_paths", sc.GetMaskedPaths()); err != nil {
		return err
	}
	return checkPaths(security+".readonly_paths", sc.GetReadonlyPaths())
}

// CheckSandbox refuses malformed and contradictory sandbox requests in the
// fields that specifications depend on. ErrInvalid or ErrUnsupported.
func CheckSandbox(sandbox *cri.PodSandboxConfig) error {
	if err := SandboxModes(sandbox); err != nil {
		return err
	}
	sc := sandbox.GetLinux().GetSecurityContext()
	if sc.GetRunAsGroup() != nil && sc.GetRunAsUser() == nil {
		return Invalid(security+".run_as_group", sc.GetRunAsGroup().GetValue(), "needs run_as_user")
	}
	if err := checkID(security+".run_as_user", sc.GetRunAsUser()); err != nil {
		return err
	}
	if err := checkID(security+".run_as_group", sc.GetRunAsGroup()); err != nil {
		return err
	}
	if err := checkGroups(sc.GetSupplementalGroups(), sc.GetSupplementalGroupsPolicy()); err != nil {
		return err
	}
	ids, err := SandboxIDMap(sandbox)
	if err != nil {
		return err
	}
	if err := ids.checkMapped(sc); err != nil {
		return err
	}
	if _, err := seccompChoice(sc.GetSeccomp(), sc.GetSeccompProfilePath()); err != nil {
		return err
	}
	if _, err := SandboxAppArmorProfile(sc); err != nil {
		return err
	}
	return checkSELinuxOptions(sc.GetSelinuxOptions())
}

func checkUser(sc *cri.LinuxContainerSecurityContext) error {
	if sc.GetRunAsUser() != nil && sc.GetRunAsUsername() != "" {
		return Invalid(security+".run_as_username", sc.GetRunAsUsername(), "run_as_user is given too; only one of them may be")
	}
	if sc.GetRunAsGroup() != nil && sc.GetRunAsUser() == nil && sc.GetRunAsUsername() == "" {
		return Invalid(security+".run_as_group", sc.GetRunAsGroup().GetValue(), "needs run_as_user or run_as_username")
	}
	if err := checkID(security+".run_as_user", sc.GetRunAsUser()); err != nil {
		return err
	}
	if err := checkID(security+".run_as_group", sc.GetRunAsGroup()); err != nil {
		return err
	}
	return checkGroups(sc.GetSupplementalGroups(), sc.GetSupplementalGroupsPolicy())
}

func checkID(field string, v *cri.Int64Value) error {
	if v != nil && (v.GetValue() < 0 || v.GetValue() > MaxID) {
		return Invalid(field, v.GetValue(), "must be between 0 and 2147483647")
	}
	return nil
}

func checkGroups(groups []int64, policy cri.SupplementalGroupsPolicy) error {
	for _, g := range groups {
		if g < 0 || g > MaxID {
			return Invalid(security+".supplemental_groups", g, "must be between 0 and 2147483647")
		}
	}
	if policy != cri.SupplementalGroupsPolicy_Merge && policy != cri.SupplementalGroupsPolicy_Strict {
		return Invalid(security+".supplemental_groups_policy", policy, "must be Merge or Strict")
	}
	return nil
}

func checkPaths(field string, paths []string) error {
	for _, p := range paths {
		if err := checkAbsolute(field, p); err != nil {
			return err
		}
	}
	return nil
}

func checkAbsolute(field, p string) error {
	switch {
	case p == "":
		return Invalid(field, "", "missing")
	case !path.IsAbs(p):
		return Invalid(field, p, "must be absolute")
	case strings.ContainsRune(p, 0):
		return Invalid(field, p, "contains a NUL byte")
	case len(p) > 4095:
		return Invalid(field, p, "is longer than 4095 bytes")
	}
	return nil
}
