package runtime

import (
	"fmt"
	"slices"

	"github.com/sirupsen/logrus"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox"
)

// A request for a name that is there already gives what is there, as after a
// call that ran out of time; see docs/decisions/0019-the-same-name.md. What its
// caller cannot have changed meanwhile must agree; the rest may differ: the
// kubelet's own retry has another file for the termination message, and labels,
// annotations, limits, environment and DNS change under it.

// agreement is one field that must be the same.
type agreement struct {
	field string
	same  bool
}

// samePod refuses a request for which another pod has the name.
func (s *Service) samePod(id string, req *cri.RunPodSandboxRequest) error {
	sb, err := s.Records.Sandboxes.Get(id)
	if err != nil {
		return err
	}
	old, now := sb.Config.Message, req.GetConfig()
	oldSC, nowSC := old.GetLinux().GetSecurityContext(), now.GetLinux().GetSecurityContext()
	return s.agree("pod sandbox", sb.ID, old, now, []agreement{
		{"config.metadata", proto.Equal(old.GetMetadata(), now.GetMetadata())},
		{"runtime_handler", sb.Handler == req.GetRuntimeHandler()},
		{"config.hostname", old.GetHostname() == now.GetHostname()},
		{"config.port_mappings", slices.EqualFunc(old.GetPortMappings(), now.GetPortMappings(), func(a, b *cri.PortMapping) bool { return proto.Equal(a, b) })},
		{"config.linux.security_context.namespace_options", proto.Equal(oldSC.GetNamespaceOptions(), nowSC.GetNamespaceOptions())},
		{"config.linux.security_context.privileged", oldSC.GetPrivileged() == nowSC.GetPrivileged()},
	})
}

// sameContainer refuses a request for which another container has the name.
func (s *Service) sameContainer(id string, now *cri.ContainerConfig) error {
	c, err := s.Records.Containers.Get(id)
	if err != nil {
		return err
	}
	old := c.Config.Message
	return s.agree("container", c.ID, old, now, []agreement{
		{"config.image.image", old.GetImage().GetImage() == now.GetImage().GetImage()},
		{"config.command", slices.Equal(old.GetCommand(), now.GetCommand())},
		{"config.args", slices.Equal(old.GetArgs(), now.GetArgs())},
		{"config.working_dir", old.GetWorkingDir() == now.GetWorkingDir()},
		{"config.tty", old.GetTty() == now.GetTty()},
		{"config.stdin", old.GetStdin() == now.GetStdin() && old.GetStdinOnce() == now.GetStdinOnce()},
	})
}

func (s *Service) agree(kind, id string, old, now proto.Message, fields []agreement) error {
	for _, f := range fields {
		if !f.same {
			return fmt.Errorf("%w: the name belongs to %s %s, which was made with another %s; remove it first, or ask for another attempt",
				sandbox.ErrNameInUse, kind, id, f.field)
		}
	}
	if !proto.Equal(old, now) {
		s.Log.WithFields(logrus.Fields{"id": id}).Infof("a request for the name of this %s, with another configuration, is answered with it", kind)
	}
	return nil
}
