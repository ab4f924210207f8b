package runtime

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/runtime/metrics"
	"berth/runtime/stats"
)

// ListMetricDescriptors describes every metric that ListPodSandboxMetrics may
// have. It is always the same.
func (s *Service) ListMetricDescriptors(context.Context, *cri.ListMetricDescriptorsRequest) (*cri.ListMetricDescriptorsResponse, error) {
	return &cri.ListMetricDescriptorsResponse{Descriptors: metrics.Descriptors()}, nil
}

// ListPodSandboxMetrics measures every ready pod and its running containers. A
// container that ends meanwhile is left out.
func (s *Service) ListPodSandboxMetrics(ctx context.Context, _ *cri.ListPodSandboxMetricsRequest) (*cri.ListPodSandboxMetricsResponse, error) {
	all, err := s.listPodSandboxMetrics(ctx)
	if err != nil {
		return nil, err
	}
	return &cri.ListPodSandboxMetricsResponse{PodMetrics: all}, nil
}

// listPodSandboxMetrics measures everything there is to a pod and its containers.
func (s *Service) listPodSandboxMetrics(ctx context.Context) ([]*cri.PodSandboxMetrics, error) {
	pods, running := s.readySandboxes(), s.runningBySandbox()
	networks := s.startNetworks(pods)
	var targets []stats.Target
	for _, sb := range pods {
		for _, c := range running[sb.ID] {
			targets = append(targets, s.target(c))
		}
	}
	defer s.stats.Keep(s.alive)
	details, err := s.stats.Details(ctx, targets)
	if err != nil {
		return nil, fmt.Errorf("measure pod sandboxes: %w", err)
	}
	disk, err := stats.ReadFilesystem(filepath.Join(s.Config().Root, "containers"))
	if err != nil {
		return nil, err
	}
	nets, now := <-networks, time.Now()
	out := make([]*cri.PodSandboxMetrics, len(pods))
	for i, sb := range pods {
		m := sb.Config.Message.GetMetadata()
		pod := metrics.Pod{ID: sb.ID, Namespace: m.GetNamespace(), Name: m.GetName()}
		out[i] = &cri.PodSandboxMetrics{PodSandboxId: sb.ID, Metrics: metrics.OfNetwork(pod, nets[sb.ID])}
		for _, c := range running[sb.ID] {
			d := &details[0]
			details = details[1:]
			if !s.measured(c, d.Err) {
				continue
			}
			out[i].ContainerMetrics = append(out[i].ContainerMetrics, &cri.ContainerMetrics{ContainerId: c.ID, Metrics: metrics.OfContainer(pod, &metrics.Container{
				ID: c.ID, Image: s.imageSpec(c).GetImage(), Name: c.Config.Message.GetMetadata().GetName(), Started: time.Unix(0, c.StartedAt),
				Shares: uint64(max(0, c.EffectiveResources().GetCpuShares())), Detail: d, Disk: disk, Seen: now,
			})})
		}
	}
	return out, nil
}
