package spec

import (
	"slices"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// pauseOOMScoreAdj is what kubelets expect of a pod's own process: it holds the
// pod together and has no memory to give back.
const pauseOOMScoreAdj = -998

// pauseShares is the kernel's least weight: the process sleeps.
const pauseShares = 2

// Pause returns the specification of the process that is PID 1 of a pod whose
// containers share a PID namespace. It reaps orphans and does nothing else, so
// it has no capability and cannot gain any. ErrInvalid or ErrUnsupported.
func Pause(in PauseInput) (*rspec.Spec, error) {
	if in.Sandbox == nil {
		return nil, Invalid("config", "", "missing")
	}
	if err := CheckSandbox(in.Sandbox); err != nil {
		return nil, err
	}
	sc := in.Sandbox.GetLinux().GetSecurityContext()
	score, _ := clampOOM(pauseOOMScoreAdj, in.Host)
	shares := uint64(pauseShares)
	spec := &rspec.Spec{
		Version:     Version,
		Root:        &rspec.Root{Path: in.Rootfs, Readonly: true},
		Annotations: sandboxAnnotations("sandbox", in.ID, in.Sandbox),
		Process: &rspec.Process{
			User:            pauseUser(sc),
			Args:            []string{"/pause", "pause"},
			Env:             []string{defaultPath},
			Cwd:             "/",
			Capabilities:    &rspec.LinuxCapabilities{},
			NoNewPrivileges: true,
			OOMScoreAdj:     &score,
			SelinuxLabel:    in.Labels.Process,
		},
		Mounts: []rspec.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		},
		Linux: &rspec.Linux{
			CgroupsPath:   in.CgroupsPath,
			MountLabel:    in.Labels.Mount,
			Namespaces:    pauseNamespaces(in),
			MaskedPaths:   slices.Clone(defaultMaskedPaths),
			ReadonlyPaths: slices.Clone(defaultReadonlyPaths),
			Resources: &rspec.LinuxResources{
				CPU:     &rspec.LinuxCPU{Shares: &shares},
				Devices: []rspec.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}},
			},
		},
	}
	var err error
	if spec.Linux.Seccomp, err = pauseSeccomp(in, sc); err != nil {
		return nil, err
	}
	if spec.Process.ApparmorProfile, err = pauseAppArmor(in, sc); err != nil {
		return nil, err
	}
	return spec, nil
}

func pauseUser(sc *cri.LinuxSandboxSecurityContext) rspec.User {
	gids := []uint32{}
	for _, g := range sc.GetSupplementalGroups() {
		gids = append(gids, uint32(g))
	}
	return rspecUser(User{
		UID:            uint32(sc.GetRunAsUser().GetValue()),
		GID:            uint32(sc.GetRunAsGroup().GetValue()),
		AdditionalGIDs: gids,
	})
}

func pauseNamespaces(in PauseInput) []rspec.LinuxNamespace {
	list := []rspec.LinuxNamespace{{Type: rspec.MountNamespace}, {Type: rspec.PIDNamespace}}
	for _, ns := range []rspec.LinuxNamespace{
		{Type: rspec.UserNamespace, Path: in.Namespaces.User},
		{Type: rspec.NetworkNamespace, Path: in.Namespaces.Net},
		{Type: rspec.IPCNamespace, Path: in.Namespaces.IPC},
		{Type: rspec.UTSNamespace, Path: in.Namespaces.UTS},
	} {
		if ns.Path != "" {
			list = append(list, ns)
		}
	}
	if in.Host.CgroupV2 {
		list = append(list, rspec.LinuxNamespace{Type: rspec.CgroupNamespace})
	}
	return list
}

func pauseSeccomp(in PauseInput, sc *cri.LinuxSandboxSecurityContext) (*rspec.LinuxSeccomp, error) {
	p, err := seccompChoice(sc.GetSeccomp(), sc.GetSeccompProfilePath())
	if err != nil || p == nil || sc.GetPrivileged() {
		return nil, err
	}
	return filter(p, in.SeccompProfile, nil, in.Host)
}

func pauseAppArmor(in PauseInput, sc *cri.LinuxSandboxSecurityContext) (string, error) {
	p, err := SandboxAppArmorProfile(sc)
	if err != nil || sc.GetPrivileged() {
		return "", err
	}
	return appArmorName(p, in.Host, in.Options)
}
