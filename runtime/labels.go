package runtime

import (
	"context"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
	"berth/sandbox"
)

// labelSandbox picks a pod's SELinux contexts. removeSandbox gives them back;
// who calls it before there is a record does so himself.
func (s *Service) labelSandbox(sb *sandbox.Sandbox) error {
	if s.SELinux == nil {
		return nil
	}
	l, err := s.SELinux.Pod(sb.Config.Message.GetLinux().GetSecurityContext().GetSelinuxOptions())
	if err != nil {
		return err
	}
	sb.SELinux = &sandbox.SELinux{Process: l.Process, Mount: l.Mount}
	return nil
}

// releaseLabels gives a pod's contexts back.
func (s *Service) releaseLabels(sb *sandbox.Sandbox) {
	if s.SELinux != nil && sb.SELinux != nil {
		s.SELinux.Release(podLabels(sb))
	}
}

// reserveLabels takes the contexts that pods have from an earlier daemon.
func (s *Service) reserveLabels() {
	for _, sb := range s.Records.Sandboxes.List() {
		if s.SELinux != nil && sb.SELinux != nil {
			s.SELinux.Reserve(podLabels(sb))
		}
	}
}

// podLabels are empty for a pod that was made without SELinux.
func podLabels(sb *sandbox.Sandbox) spec.Labels {
	if sb.SELinux == nil {
		return spec.Labels{}
	}
	return spec.Labels{Process: sb.SELinux.Process, Mount: sb.SELinux.Mount}
}

// pauseLabels are those of the pod's own process.
func pauseLabels(sb *sandbox.Sandbox) spec.Labels {
	if sb.Config.Message.GetLinux().GetSecurityContext().GetPrivileged() {
		return spec.Labels{}
	}
	return podLabels(sb)
}

// containerLabels are a container's contexts in its pod.
func (s *Service) containerLabels(sb *sandbox.Sandbox, config *cri.ContainerConfig) (spec.Labels, error) {
	sc := config.GetLinux().GetSecurityContext()
	switch {
	case s.SELinux == nil || sb.SELinux == nil:
		return spec.Labels{}, nil
	case sc.GetPrivileged():
		return s.SELinux.Privileged(), nil
	}
	return s.SELinux.Container(podLabels(sb), sc.GetSelinuxOptions())
}

// labelFile gives a file of berth's own to a pod.
func (s *Service) labelFile(sb *sandbox.Sandbox, path string) error {
	if s.SELinux == nil || sb.SELinux == nil {
		return nil
	}
	return s.SELinux.Label(path, podLabels(sb))
}

// relabelMounts gives the volumes that ask for it to the container.
func (s *Service) relabelMounts(ctx context.Context, in spec.ContainerInput) error {
	if s.SELinux == nil || in.Labels.Mount == "" {
		return nil
	}
	for i, m := range in.Config.GetMounts() {
		if !m.GetSelinuxRelabel() || m.GetImage() != nil {
			continue
		}
		field := fmt.Sprintf("mounts[%d].host_path", i)
		source := in.Resolved.MountSources[i]
		if wanted, err := s.SELinux.Relabels(field, source, in.Labels, s.Config().Root, s.Config().State); err != nil {
			return err
		} else if !wanted {
			continue
		}
		if err := s.Outside.Relabel(ctx, source, in.Labels.Mount); err != nil {
			return fmt.Errorf("relabel %s %q as %s: %w", field, source, in.Labels.Mount, err)
		}
	}
	return nil
}
