package spec

import (
	"encoding/json"
	"path"
	"slices"

	"github.com/moby/profiles/seccomp"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const seccompField = security + ".seccomp"

// seccompChoice is what a request asks for from either of its two fields; nil
// is unconfined.
func seccompChoice(p *cri.SecurityProfile, old string) (*cri.SecurityProfile, error) {
	p, err := profile(seccompField, p, old)
	if err != nil || p == nil || p.GetProfileType() == cri.SecurityProfile_Unconfined {
		return nil, err
	}
	if ref := p.GetLocalhostRef(); ref != "" && !path.IsAbs(ref) {
		return nil, Invalid(seccompField+".localhost_ref", ref, "must be absolute")
	}
	return p, nil
}

// LocalhostSeccomp is the host path of the profile that a container asks for,
// empty when it asks for none of that kind or is privileged. ErrInvalid.
func LocalhostSeccomp(sc *cri.LinuxContainerSecurityContext) (string, error) {
	p, err := seccompChoice(sc.GetSeccomp(), sc.GetSeccompProfilePath())
	if sc.GetPrivileged() {
		return "", err
	}
	return p.GetLocalhostRef(), err
}

// SandboxLocalhostSeccomp is LocalhostSeccomp for a sandbox's own process.
func SandboxLocalhostSeccomp(sc *cri.LinuxSandboxSecurityContext) (string, error) {
	p, err := seccompChoice(sc.GetSeccomp(), sc.GetSeccompProfilePath())
	if sc.GetPrivileged() {
		return "", err
	}
	return p.GetLocalhostRef(), err
}

func (b *builder) seccomp(bounding []string) (*rspec.LinuxSeccomp, error) {
	p, err := seccompChoice(b.security.GetSeccomp(), b.security.GetSeccompProfilePath())
	if err != nil || p == nil || b.privileged() {
		return nil, err
	}
	return filter(p, b.in.Resolved.SeccompProfile, bounding, b.in.Host)
}

// filter builds the seccomp part of a specification.
func filter(p *cri.SecurityProfile, content []byte, bounding []string, host Host) (*rspec.LinuxSeccomp, error) {
	if !host.SeccompSupported {
		return nil, Unsupported(seccompField, p.GetProfileType(), "this host has no seccomp")
	}
	source := seccomp.DefaultProfile()
	if p.GetProfileType() == cri.SecurityProfile_Localhost {
		source = &seccomp.Seccomp{}
		if err := json.Unmarshal(content, source); err != nil {
			return nil, Invalid(seccompField+".localhost_ref", p.GetLocalhostRef(), "not a seccomp profile: "+err.Error())
		}
		// A profile without a default action would mean "no filter" to some
		// readers; nobody writes a file for that.
		if source.DefaultAction == "" {
			return nil, Invalid(seccompField+".localhost_ref", p.GetLocalhostRef(), "not a seccomp profile: no defaultAction")
		}
	}
	return flatten(source, conditions{host: host, bounding: bounding}), nil
}

// conditions decide which of a profile's rules hold. The profiles package has
// a function for this, but it asks the running kernel and the build's
// architecture; here they are data, so that a specification depends on its
// input alone.
type conditions struct {
	host     Host
	bounding []string
}

func flatten(p *seccomp.Seccomp, c conditions) *rspec.LinuxSeccomp {
	out := p.LinuxSeccomp
	out.Architectures = slices.Clone(out.Architectures)
	for _, a := range p.ArchMap {
		if seccompArch[c.host.Arch] == a.Arch {
			out.Architectures = append(append(out.Architectures, a.Arch), a.SubArches...)
			break
		}
	}
	out.Syscalls = nil
	for _, rule := range p.Syscalls {
		if rule == nil || !c.hold(rule.Includes, true) || c.hold(rule.Excludes, false) {
			continue
		}
		call := rule.LinuxSyscall
		if rule.Name != "" {
			call.Names = append(slices.Clone(call.Names), rule.Name)
		}
		out.Syscalls = append(out.Syscalls, call)
	}
	return &out
}

// hold says whether a filter is met. "Includes" wants every condition it
// names; "excludes" is met by any one. An absent filter of the first kind is
// met, of the second is not.
func (c conditions) hold(f *seccomp.Filter, every bool) bool {
	if f == nil {
		return every
	}
	var results []bool
	if len(f.Arches) > 0 {
		results = append(results, slices.Contains(f.Arches, filterArch(c.host.Arch)))
	}
	for _, name := range f.Caps {
		results = append(results, slices.Contains(c.bounding, name))
	}
	if k := f.MinKernel; k != nil {
		kernel := c.host.Kernel
		results = append(results, kernel.Major > k.Kernel || kernel.Major == k.Kernel && kernel.Minor >= k.Major)
	}
	if every {
		return !slices.Contains(results, false)
	}
	return slices.Contains(results, true)
}

// seccompArch names Go's architectures as OCI does.
var seccompArch = map[string]rspec.Arch{
	"386": rspec.ArchX86, "amd64": rspec.ArchX86_64,
	"arm": rspec.ArchARM, "arm64": rspec.ArchAARCH64,
	"loong64": rspec.ArchLOONGARCH64,
	"mips64":  rspec.ArchMIPS64, "mips64le": rspec.ArchMIPSEL64, "mipsle": rspec.ArchMIPSEL,
	"ppc64": rspec.ArchPPC64, "ppc64le": rspec.ArchPPC64LE,
	"riscv64": rspec.ArchRISCV64, "s390x": rspec.ArchS390X,
}

// filterArch names Go's architectures as the conditions in profiles do.
func filterArch(arch string) string {
	switch arch {
	case "386":
		return "x86"
	case "loong64":
		return "loongarch64"
	case "mips64le":
		return "mipsel64"
	case "mipsle":
		return "mipsel"
	}
	return arch
}
