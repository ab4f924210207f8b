package runtime

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"unicode"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/network"
	"berth/oci/spec"
)

// What a request may hold, beyond what package spec checks of specifications.
// All of it is refused with ErrInvalid, by field, before anything is changed.
const (
	// maxMetadata bounds each part of an object's name; CNI plugins get them in
	// their environment. Kubernetes' own bound is 253.
	maxMetadata = 1024
	// maxLabels bounds the labels and annotations of one object together, which
	// every list repeats. Kubernetes' own bound for annotations is 256 KiB.
	maxLabels = 1 << 20
	// maxConfig bounds one object's configuration. Linux gives a program at most
	// 6 MiB of arguments and environment, the largest part of any.
	maxConfig = 8 << 20
)

// checkSandbox refuses what cannot be run, before anything is written.
func (s *Service) checkSandbox(req *cri.RunPodSandboxRequest) error {
	c := req.GetConfig()
	if c == nil {
		return fmt.Errorf("%w: config is missing", errInvalid)
	}
	m := c.GetMetadata()
	for _, f := range []struct{ field, value string }{{"name", m.GetName()}, {"namespace", m.GetNamespace()}, {"uid", m.GetUid()}} {
		if err := checkName("config.metadata."+f.field, f.value); err != nil {
			return err
		}
	}
	if err := checkSize(c); err != nil {
		return err
	}
	if _, err := s.handlerName(req.GetRuntimeHandler()); err != nil {
		return err
	}
	if err := checkLogDirectory(c.GetLogDirectory()); err != nil {
		return err
	}
	if _, _, err := s.cgroupParent("", c.GetLinux().GetCgroupParent()); err != nil {
		return err
	}
	if err := checkHostname(c); err != nil {
		return err
	}
	if err := checkDNS(c.GetDnsConfig()); err != nil {
		return err
	}
	if err := network.CheckPorts(c.GetPortMappings()); err != nil {
		return fmt.Errorf("config: %w", err)
	}
	if err := checkPodResources("config.linux.", c.GetLinux().GetOverhead(), c.GetLinux().GetResources()); err != nil {
		return err
	}
	if err := spec.CheckSandbox(c); err != nil {
		return err
	}
	return s.checkUserNamespace(req)
}

func checkContainer(c *cri.ContainerConfig) error {
	switch {
	case c == nil:
		return fmt.Errorf("%w: config is missing", errInvalid)
	case strings.ContainsFunc(c.GetLogPath(), unicode.IsControl):
		return fmt.Errorf("%w: config.log_path %q has a control character", errInvalid, c.GetLogPath())
	case c.GetImage().GetImage() == "":
		return fmt.Errorf("%w: config.image.image is empty", errInvalid)
	}
	if err := checkName("config.metadata.name", c.GetMetadata().GetName()); err != nil {
		return err
	}
	return checkSize(c)
}

// checkName takes one part of an object's name. It becomes part of keys, paths
// and messages.
func checkName(field, value string) error {
	switch {
	case value == "":
		return fmt.Errorf("%w: %s is empty", errInvalid, field)
	case len(value) > maxMetadata:
		return fmt.Errorf("%w: %s is longer than %d bytes", errInvalid, field, maxMetadata)
	case strings.Contains(value, "/") || strings.ContainsFunc(value, unprintable):
		return spec.Invalid(field, value, "has a slash, or a character that cannot be printed")
	}
	return nil
}

func unprintable(r rune) bool { return !unicode.IsPrint(r) }

// labelled is the configuration of a pod or a container.
type labelled interface {
	proto.Message
	GetLabels() map[string]string
	GetAnnotations() map[string]string
}

// checkSize keeps an object within what replies can tell of it.
func checkSize(c labelled) error {
	labels, annotations := lengthOf(c.GetLabels()), lengthOf(c.GetAnnotations())
	if labels+annotations > maxLabels {
		return fmt.Errorf("%w: config.labels (%d bytes) and config.annotations (%d bytes) together take more than %d bytes",
			errInvalid, labels, annotations, maxLabels)
	}
	if size := proto.Size(c); size > maxConfig {
		return fmt.Errorf("%w: config takes %d bytes, more than %d", errInvalid, size, maxConfig)
	}
	return nil
}

func lengthOf(pairs map[string]string) (n int) {
	for key, value := range pairs {
		n += len(key) + len(value)
	}
	return n
}

// checkLogDirectory takes a directory, or a path where one can be made.
func checkLogDirectory(dir string) error {
	if dir == "" {
		return nil
	}
	const field = "config.log_directory"
	if !strings.HasPrefix(dir, "/") || strings.ContainsFunc(dir, unicode.IsControl) {
		return spec.Invalid(field, dir, "is not absolute or has a control character")
	}
	if err := checkLength(field, dir); err != nil {
		return err
	}
	return nil
}

// makeLogDirectory makes the directory of a pod's logs; nothing when it has none.
func (s *Service) makeLogDirectory(ctx context.Context, dir string) error {
	if dir == "" {
		return nil
	}
	err := s.Outside.For(ctx).MakeDir(dir)
	switch {
	case errors.Is(err, syscall.ENOTDIR):
		return spec.Invalid("config.log_directory", dir, "is no directory, or a part of it is none")
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("config.log_directory %q: %w", dir, err)
	case err != nil:
		return fmt.Errorf("%w: config.log_directory %q: %w", errInvalid, dir, err)
	}
	return nil
}

// checkHostname takes what a DNS name may be made of, as long as the kernel
// allows: the name also stands in the pod's /etc/hosts. On the host's network
// the kubelet sends the node's name along, and the node keeps its own.
func checkHostname(c *cri.PodSandboxConfig) error {
	if c.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork() == cri.NamespaceMode_NODE {
		return nil
	}
	if len(c.GetHostname()) > 64 {
		return fmt.Errorf("%w: config.hostname %q is longer than 64 bytes", errInvalid, c.GetHostname())
	}
	for _, r := range c.GetHostname() {
		if r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("-._", r) {
			return fmt.Errorf("%w: config.hostname %q has %q, which no hostname has", errInvalid, c.GetHostname(), r)
		}
	}
	return nil
}

// checkDNS takes what stands in a resolv.conf word by word.
func checkDNS(d *cri.DNSConfig) error {
	for _, list := range []struct {
		field  string
		values []string
	}{{"servers", d.GetServers()}, {"searches", d.GetSearches()}, {"options", d.GetOptions()}} {
		for i, v := range list.values {
			if v == "" || strings.ContainsFunc(v, unprintable) {
				return spec.Invalid(fmt.Sprintf("config.dns_config.%s[%d]", list.field, i), v, "is empty, or has a character that cannot be printed")
			}
		}
	}
	return nil
}

// checkPodResources takes what a pod has as a whole, as a container's limits.
func checkPodResources(prefix string, overhead, resources *cri.LinuxContainerResources) error {
	if err := spec.CheckResources(prefix+"overhead", overhead); err != nil {
		return err
	}
	return spec.CheckResources(prefix+"resources", resources)
}

// checkCommand takes what exec runs.
func checkCommand(cmd []string) error {
	if len(cmd) == 0 {
		return fmt.Errorf("%w: cmd is empty", errInvalid)
	}
	if cmd[0] == "" {
		return fmt.Errorf("%w: cmd[0], the program, is empty", errInvalid)
	}
	for i, word := range cmd {
		if strings.ContainsRune(word, 0) {
			return spec.Invalid(fmt.Sprintf("cmd[%d]", i), word, "has a NUL byte")
		}
	}
	return nil
}

// checkLength refuses a path that no filesystem takes.
func checkLength(field, path string) error {
	const whole, part = 4095, 255 // PATH_MAX without its NUL, NAME_MAX
	if len(path) > whole {
		return fmt.Errorf("%w: %s is longer than %d bytes", errInvalid, field, whole)
	}
	for name := range strings.SplitSeq(path, "/") {
		if len(name) > part {
			return fmt.Errorf("%w: %s has a name of more than %d bytes, beginning %.40q", errInvalid, field, part, name)
		}
	}
	return nil
}

// maxReference is longer than any reference: a name has at most 255 bytes, a
// tag 128, a digest 136.
const maxReference = 1024

func checkReference(ref string) error {
	if ref == "" {
		return fmt.Errorf("%w: image.image is empty", errInvalid)
	}
	if len(ref) > maxReference {
		return fmt.Errorf("%w: image.image is longer than %d bytes", errInvalid, maxReference)
	}
	return nil
}
