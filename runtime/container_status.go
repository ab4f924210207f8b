package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/oci/spec"
	"berth/sandbox"
)

func (s *Service) findContainer(id string) (*sandbox.Container, error) {
	c, err := s.Records.Containers.Find(id)
	if err == nil && c.MadeAt == 0 {
		err = fmt.Errorf("%w: %q", sandbox.ErrNotFound, id)
	}
	if err != nil {
		return nil, fmt.Errorf("container: %w", err)
	}
	return c, nil
}

func (s *Service) runningContainer(id string) (*sandbox.Container, error) {
	c, err := s.findContainer(id)
	if err != nil {
		return nil, err
	}
	if st := c.State(s.bootID); st != cri.ContainerState_CONTAINER_RUNNING {
		return nil, fmt.Errorf("%w: container %s is %s", errPrecondition, c.ID, st)
	}
	return c, nil
}

// visibleContainersOf are the containers of a pod that callers may see, newest
// first: not those that are being made.
func (s *Service) visibleContainersOf(sandboxID string) []*sandbox.Container {
	return s.Records.Containers.Select(func(c *sandbox.Container) bool { return c.SandboxID == sandboxID && c.MadeAt != 0 })
}

func (s *Service) containerStatuses(containers []*sandbox.Container) []*cri.ContainerStatus {
	var out []*cri.ContainerStatus
	for _, c := range containers {
		out = append(out, s.containerStatus(c))
	}
	return out
}

// ContainerStatus answers from memory. NotFound for an unknown id.
func (s *Service) ContainerStatus(_ context.Context, req *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
	c, err := s.findContainer(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	reply := &cri.ContainerStatusResponse{Status: s.containerStatus(c)}
	if req.GetVerbose() {
		reply.Info, err = s.containerInfo(c)
	}
	return reply, err
}

func (s *Service) containerStatus(c *sandbox.Container) *cri.ContainerStatus {
	config := c.Config.Message
	st := &cri.ContainerStatus{
		Id: c.ID, Metadata: config.GetMetadata(), State: c.State(s.bootID),
		CreatedAt: c.CreatedAt, StartedAt: c.StartedAt, FinishedAt: c.FinishedAt,
		Image:    s.imageSpec(c),
		ImageRef: c.ImageRef, ImageId: c.ImageID,
		Labels: config.GetLabels(), Annotations: config.GetAnnotations(), Mounts: spec.StatusMounts(config, c.VolumeImages), LogPath: c.LogPath,
		Resources:  &cri.ContainerResources{Linux: c.EffectiveResources()},
		User:       &cri.ContainerUser{Linux: &cri.LinuxContainerUser{Uid: c.User.UID, Gid: c.User.GID, SupplementalGroups: c.User.Groups}},
		StopSignal: criSignal(c.StopSignal),
	}
	if st.State == cri.ContainerState_CONTAINER_EXITED {
		st.ExitCode, st.Reason, st.Message = c.ExitCode, c.Reason, c.Message
	}
	return st
}

// imageSpec echoes the image as the container's maker named it.
func (s *Service) imageSpec(c *sandbox.Container) *cri.ImageSpec {
	i := c.Config.Message.GetImage()
	name := i.GetUserSpecifiedImage()
	if name == "" {
		name = i.GetImage()
	}
	return &cri.ImageSpec{Image: name, UserSpecifiedImage: i.GetUserSpecifiedImage(), RuntimeHandler: i.GetRuntimeHandler(), Annotations: i.GetAnnotations()}
}

// containerInfo is what operators see with crictl inspect; tools look for the
// keys pid, sandboxID and runtimeSpec.
func (s *Service) containerInfo(c *sandbox.Container) (map[string]string, error) {
	info := struct {
		SandboxID string                               `json:"sandboxID"`
		PID       int                                  `json:"pid"`
		Rootfs    string                               `json:"rootfs"`
		Config    sandbox.Config[*cri.ContainerConfig] `json:"config"`
		Spec      json.RawMessage                      `json:"runtimeSpec,omitempty"`
		Omitted   []string                             `json:"omitted,omitempty"` // for their length
	}{SandboxID: c.SandboxID, Rootfs: s.rootfsDir(c.ID), Config: c.Config}
	if c.Process != nil && c.State(s.bootID) != cri.ContainerState_CONTAINER_EXITED {
		info.PID = c.Process.PID
	}
	if b, err := oci.ReadRaw(s.bundleDir(c.ID)); err == nil {
		info.Spec = b
	}
	return describe("container "+c.ID, &info,
		func() { info.Spec, info.Omitted = nil, []string{"runtimeSpec"} },
		func() { info.Config.Message, info.Omitted = nil, append(info.Omitted, "config") })
}

// ReopenContainerLog makes a new log file after the old one was moved away, and
// the directory if that is gone too.
// A container that does not run is refused, and no file is made.
func (s *Service) ReopenContainerLog(ctx context.Context, req *cri.ReopenContainerLogRequest) (*cri.ReopenContainerLogResponse, error) {
	c, err := s.runningContainer(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	rt, err := s.runtimeOf(c)
	if err != nil {
		return nil, err
	}
	if err := s.checkReopen(ctx, c); err != nil {
		return nil, fmt.Errorf("reopen log of container %s: %w", c.ID, err)
	}
	if err := rt.ReopenLog(ctx, c.ID); err != nil {
		return nil, fmt.Errorf("reopen log of container %s: %w", c.ID, err)
	}
	return &cri.ReopenContainerLogResponse{}, nil
}

// checkReopen makes what the log file needs to be made anew.
func (s *Service) checkReopen(ctx context.Context, c *sandbox.Container) error {
	sb, err := s.Records.Sandboxes.Get(c.SandboxID)
	if err != nil {
		return err
	}
	_, err = s.makeLog(ctx, sb, c.Config.Message.GetLogPath())
	if errors.Is(err, errInvalid) { // the request did not name it
		return fmt.Errorf("%w: %v", errPrecondition, err)
	}
	return err
}
