package runtime

import (
	"context"
	"errors"
	"fmt"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/sirupsen/logrus"

	"berth/runtime/stats"
	"berth/sandbox"
)

// ContainerStats measures one running container. NotFound for an unknown id,
// FailedPrecondition for one that does not run or ends meanwhile.
func (s *Service) ContainerStats(ctx context.Context, req *cri.ContainerStatsRequest) (*cri.ContainerStatsResponse, error) {
	c, err := s.runningContainer(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	all, err := s.measure(ctx, []*sandbox.Container{c})
	if err != nil {
		return nil, fmt.Errorf("measure container %s: %w", c.ID, err)
	}
	switch err := all[0].Err; {
	case errors.Is(err, stats.ErrGone):
		return nil, fmt.Errorf("%w: container %s has just ended", errPrecondition, c.ID)
	case err != nil:
		return nil, fmt.Errorf("measure container %s: %w", c.ID, err)
	}
	return &cri.ContainerStatsResponse{Stats: s.containerStats(c, all[0])}, nil
}

// ListContainerStats measures the running containers that fit all parts of the
// filter. One that ends meanwhile is left out.
func (s *Service) ListContainerStats(ctx context.Context, req *cri.ListContainerStatsRequest) (*cri.ListContainerStatsResponse, error) {
	all, err := s.listContainerStats(ctx, req.GetFilter())
	if err != nil {
		return nil, err
	}
	return &cri.ListContainerStatsResponse{Stats: all}, nil
}

// listContainerStats measures the running containers of a filter, without those
// that cannot be measured.
func (s *Service) listContainerStats(ctx context.Context, f *cri.ContainerStatsFilter) ([]*cri.ContainerStats, error) {
	running := s.selectContainers(&cri.ContainerFilter{
		Id: f.GetId(), PodSandboxId: f.GetPodSandboxId(), LabelSelector: f.GetLabelSelector(),
		State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING},
	})
	all, err := s.measure(ctx, running)
	if err != nil {
		return nil, fmt.Errorf("measure containers: %w", err)
	}
	out := make([]*cri.ContainerStats, 0, len(running))
	for i, c := range running {
		if s.measured(c, all[i].Err) {
			out = append(out, s.containerStats(c, all[i]))
		}
	}
	return out, nil
}

// measured tells whether a container could be measured. One that has ended
// meanwhile is nothing to warn of.
func (s *Service) measured(c *sandbox.Container, err error) bool {
	if err != nil && !errors.Is(err, stats.ErrGone) {
		s.warn(logrus.Fields{"container": c.ID, logrus.ErrorKey: err}, "statistics leave out a container that cannot be measured")
	}
	return err == nil
}

func (s *Service) running(c *sandbox.Container) bool {
	return c.MadeAt != 0 && c.State(s.bootID) == cri.ContainerState_CONTAINER_RUNNING
}

func (s *Service) measure(ctx context.Context, containers []*sandbox.Container) ([]stats.Result, error) {
	targets := make([]stats.Target, len(containers))
	for i, c := range containers {
		targets[i] = s.target(c)
	}
	return s.collect(ctx, targets)
}

// collect measures, and lets the collector forget who runs no more.
func (s *Service) collect(ctx context.Context, targets []stats.Target) ([]stats.Result, error) {
	defer s.stats.Keep(s.alive)
	return s.stats.Collect(ctx, targets)
}

// alive tells whether the target of an id can still be measured.
func (s *Service) alive(id string) bool {
	if c, err := s.Records.Containers.Get(id); err == nil {
		return s.running(c)
	}
	sb, err := s.Records.Sandboxes.Get(strings.TrimSuffix(id, pauseSuffix))
	return err == nil && sb.Ready(s.bootID)
}

// containerStats is what CRI shows of a measurement.
func (s *Service) containerStats(c *sandbox.Container, r stats.Result) *cri.ContainerStats {
	config, at := c.Config.Message, r.At.UnixNano()
	out := &cri.ContainerStats{
		Attributes: &cri.ContainerAttributes{Id: c.ID, Metadata: config.GetMetadata(), Labels: config.GetLabels(), Annotations: config.GetAnnotations()},
		Cpu:        criCPU(r.CPU, at), Memory: criMemory(r.Memory, at),
	}
	if r.Swap != nil {
		out.Swap = &cri.SwapUsage{Timestamp: at, SwapUsageBytes: criNumber(&r.Swap.Usage), SwapAvailableBytes: criNumber(r.Swap.Available)}
	}
	if r.IO != nil {
		out.Io = &cri.IoUsage{Timestamp: at, Psi: criPressure(r.IO)}
	}
	if l := r.Layer; l != nil {
		out.WritableLayer = &cri.FilesystemUsage{
			Timestamp: l.At.UnixNano(), FsId: &cri.FilesystemIdentifier{Mountpoint: s.layerMountpoint()},
			UsedBytes: criNumber(&l.Bytes), InodesUsed: criNumber(&l.Inodes),
		}
	}
	return out
}

func criCPU(c *stats.CPU, at int64) *cri.CpuUsage {
	if c == nil {
		return nil
	}
	return &cri.CpuUsage{Timestamp: at, UsageCoreNanoSeconds: criNumber(&c.Usage), UsageNanoCores: criNumber(c.Rate), Psi: criPressure(c.Pressure)}
}

func criMemory(m *stats.Memory, at int64) *cri.MemoryUsage {
	if m == nil {
		return nil
	}
	return &cri.MemoryUsage{
		Timestamp: at, WorkingSetBytes: criNumber(&m.WorkingSet), AvailableBytes: criNumber(m.Available), UsageBytes: criNumber(&m.Usage),
		RssBytes: criNumber(&m.RSS), PageFaults: criNumber(&m.Faults), MajorPageFaults: criNumber(&m.Major), Psi: criPressure(m.Pressure),
	}
}

func criPressure(p *stats.Pressure) *cri.PsiStats {
	if p == nil {
		return nil
	}
	data := func(s stats.Stall) *cri.PsiData {
		return &cri.PsiData{Total: s.Total, Avg10: s.Avg10, Avg60: s.Avg60, Avg300: s.Avg300}
	}
	return &cri.PsiStats{Some: data(p.Some), Full: data(p.Full)}
}

func criNumber(n *uint64) *cri.UInt64Value {
	if n == nil {
		return nil
	}
	return &cri.UInt64Value{Value: *n}
}
