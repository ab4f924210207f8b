package spec

import (
	"fmt"
	"slices"
	"strconv"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// builder carries one translation. Its nested structures are never nil, so
// that the rules need not ask.
type builder struct {
	in       ContainerInput
	config   *cri.ContainerConfig
	security *cri.LinuxContainerSecurityContext
	image    *ispec.Image
	modes    modes
	base     *rspec.Spec // of the runtime handler
	warnings []string
}

// Container returns the specification of a container and, in plain words, what
// it had to leave out because this host cannot do it. The result shares no
// memory with the input. Errors are *FieldError of kind ErrInvalid or
// ErrUnsupported.
func Container(in ContainerInput) (*rspec.Spec, []string, error) {
	b, err := newBuilder(in)
	if err != nil {
		return nil, nil, err
	}
	spec := &rspec.Spec{
		Version:     Version,
		Root:        &rspec.Root{Path: in.Rootfs, Readonly: b.security.GetReadonlyRootfs()},
		Annotations: b.annotations(),
	}
	if spec.Process, err = b.process(); err != nil {
		return nil, nil, err
	}
	if spec.Mounts, err = b.mounts(); err != nil {
		return nil, nil, err
	}
	if spec.Linux, err = b.linux(spec); err != nil {
		return nil, nil, err
	}
	b.addBase(spec)
	return spec, b.warnings, nil
}

func newBuilder(in ContainerInput) (*builder, error) {
	b := &builder{in: in, config: in.Config, image: in.Image}
	if b.config == nil {
		return nil, Invalid("config", "", "missing")
	}
	if in.Sandbox == nil {
		return nil, Invalid("sandbox_config", "", "missing")
	}
	if b.image == nil {
		b.image = &ispec.Image{}
	}
	b.security = b.config.GetLinux().GetSecurityContext()
	if b.security == nil {
		b.security = &cri.LinuxContainerSecurityContext{}
	}
	if err := CheckContainer(in.Config, in.Sandbox); err != nil {
		return nil, err
	}
	var err error
	if b.modes, err = containerModes(in.Config, in.Sandbox); err != nil {
		return nil, err
	}
	b.base = b.baseSpec()
	return b, b.checkResolvedUser()
}

func (b *builder) warn(format string, args ...any) {
	b.warnings = append(b.warnings, fmt.Sprintf(format, args...))
}

func (b *builder) privileged() bool { return b.security.GetPrivileged() }

func (b *builder) linux(spec *rspec.Spec) (*rspec.Linux, error) {
	var err error
	linux := &rspec.Linux{
		CgroupsPath:       b.in.CgroupsPath,
		RootfsPropagation: b.rootfsPropagation(),
		MountLabel:        b.in.Labels.Mount,
	}
	if linux.Namespaces, err = b.namespaces(); err != nil {
		return nil, err
	}
	if linux.Resources, err = b.resources(); err != nil {
		return nil, err
	}
	linux.Devices, linux.Resources.Devices = b.devices()
	if linux.Seccomp, err = b.seccomp(spec.Process.Capabilities.Bounding); err != nil {
		return nil, err
	}
	linux.MaskedPaths, linux.ReadonlyPaths = b.hiddenPaths()
	return linux, nil
}

// Annotations written into each specification, with the names that kata and
// cAdvisor look for. None of the request's own gets in: OCI runtimes act on
// some of them (org.systemd.property.*, run.oci.*), which would hand a pod's
// author a way round the API.
const (
	AnnotationContainerType    = "io.kubernetes.cri.container-type" // "sandbox" or "container"
	AnnotationSandboxID        = "io.kubernetes.cri.sandbox-id"
	AnnotationSandboxName      = "io.kubernetes.cri.sandbox-name"
	AnnotationSandboxNamespace = "io.kubernetes.cri.sandbox-namespace"
	AnnotationSandboxUID       = "io.kubernetes.cri.sandbox-uid"
	AnnotationContainerName    = "io.kubernetes.cri.container-name"
	AnnotationContainerAttempt = "io.kubernetes.cri.container-attempt"
	AnnotationImageName        = "io.kubernetes.cri.image-name"
)

func (b *builder) annotations() map[string]string {
	a := sandboxAnnotations("container", b.in.SandboxID, b.in.Sandbox)
	a[AnnotationContainerName] = b.config.GetMetadata().GetName()
	a[AnnotationContainerAttempt] = strconv.FormatUint(uint64(b.config.GetMetadata().GetAttempt()), 10)
	name := b.config.GetImage().GetUserSpecifiedImage()
	if name == "" {
		name = b.config.GetImage().GetImage()
	}
	if name != "" {
		a[AnnotationImageName] = name
	}
	return a
}

func sandboxAnnotations(kind, id string, sandbox *cri.PodSandboxConfig) map[string]string {
	meta := sandbox.GetMetadata()
	return map[string]string{
		AnnotationContainerType:    kind,
		AnnotationSandboxID:        id,
		AnnotationSandboxName:      meta.GetName(),
		AnnotationSandboxNamespace: meta.GetNamespace(),
		AnnotationSandboxUID:       meta.GetUid(),
	}
}

// defaultMaskedPaths and defaultReadonlyPaths are the OCI community's lists:
// what would tell a container about, or let it change, the host through /proc
// and /sys.
var (
	defaultMaskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys",
		"/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list",
		"/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware",
	}
	defaultReadonlyPaths = []string{
		"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger",
	}
)

// hiddenPaths follows the rule in the package's doc.
func (b *builder) hiddenPaths() (masked, readonly []string) {
	masked, readonly = b.security.GetMaskedPaths(), b.security.GetReadonlyPaths()
	switch {
	case b.privileged():
		return nil, nil
	case len(masked) > 0 || len(readonly) > 0, b.modes.userNS != nil:
		return slices.Clone(masked), slices.Clone(readonly)
	}
	return slices.Clone(defaultMaskedPaths), slices.Clone(defaultReadonlyPaths)
}
