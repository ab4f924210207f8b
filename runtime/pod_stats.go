package runtime

import (
	"context"
	"fmt"
	"path"
	"path/filepath"
	"time"

	"github.com/sirupsen/logrus"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/network"
	"berth/runtime/stats"
	"berth/sandbox"
	"berth/sandbox/namespaces"
)

// PodSandboxStats measures one ready pod. NotFound for an unknown or empty id
// (the kubelet asks with none to see whether the call exists),
// FailedPrecondition for a pod that is not ready.
func (s *Service) PodSandboxStats(ctx context.Context, req *cri.PodSandboxStatsRequest) (*cri.PodSandboxStatsResponse, error) {
	sb, err := s.findSandbox(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if !sb.Ready(s.bootID) {
		return nil, fmt.Errorf("%w: pod sandbox %s is not ready", errPrecondition, sb.ID)
	}
	all, err := s.measurePods(ctx, []*sandbox.Sandbox{sb})
	if err != nil {
		return nil, fmt.Errorf("measure pod sandbox %s: %w", sb.ID, err)
	}
	return &cri.PodSandboxStatsResponse{Stats: s.podStats(all[0])}, nil
}

// ListPodSandboxStats measures the ready pods that fit all parts of the filter.
func (s *Service) ListPodSandboxStats(ctx context.Context, req *cri.ListPodSandboxStatsRequest) (*cri.ListPodSandboxStatsResponse, error) {
	all, err := s.listPodSandboxStats(ctx, req.GetFilter())
	if err != nil {
		return nil, err
	}
	return &cri.ListPodSandboxStatsResponse{Stats: all}, nil
}

// listPodSandboxStats measures the ready pods of a filter. What cannot be
// measured of one (it is being stopped) is missing from it alone.
func (s *Service) listPodSandboxStats(ctx context.Context, f *cri.PodSandboxStatsFilter) ([]*cri.PodSandboxStats, error) {
	pods := s.selectSandboxes(&cri.PodSandboxFilter{
		Id: f.GetId(), LabelSelector: f.GetLabelSelector(), State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY},
	})
	all, err := s.measurePods(ctx, pods)
	if err != nil {
		return nil, fmt.Errorf("measure pod sandboxes: %w", err)
	}
	out := make([]*cri.PodSandboxStats, len(all))
	for i, p := range all {
		out[i] = s.podStats(p)
	}
	return out, nil
}

func (s *Service) readySandboxes() []*sandbox.Sandbox {
	return s.Records.Sandboxes.Select(func(sb *sandbox.Sandbox) bool { return sb.Ready(s.bootID) })
}

// runningBySandbox are the running containers of each pod.
func (s *Service) runningBySandbox() map[string][]*sandbox.Container {
	out := map[string][]*sandbox.Container{}
	for _, c := range s.Records.Containers.Select(s.running) {
		out[c.SandboxID] = append(out[c.SandboxID], c)
	}
	return out
}

// podMeasure is what could be measured of a pod.
type podMeasure struct {
	sandbox    *sandbox.Sandbox
	own        *stats.Result // of its cgroup; nil when it shares that with other pods
	pause      *stats.Result // only in a pod without a cgroup for itself
	containers []*sandbox.Container
	results    []stats.Result // of containers, in their order
	network    *stats.Network // nil when its namespace is gone
}

// measurePods measures pods and their running containers: all cgroups in
// parallel, and the networks beside them.
func (s *Service) measurePods(ctx context.Context, pods []*sandbox.Sandbox) ([]podMeasure, error) {
	networks := s.startNetworks(pods)
	own, running := ownCgroups(s.readySandboxes()), s.runningBySandbox()
	all := make([]podMeasure, len(pods))
	var targets []stats.Target
	for i, sb := range pods {
		all[i] = podMeasure{sandbox: sb, containers: running[sb.ID]}
		targets = append(targets, s.podTarget(sb, own[sb.ID]))
		for _, c := range all[i].containers {
			t := s.target(c)
			t.Count = !own[sb.ID]
			targets = append(targets, t)
		}
	}
	results, err := s.collect(ctx, targets)
	if err != nil {
		return nil, err
	}
	nets := <-networks
	for i, sb := range pods {
		p, n := &all[i], len(all[i].containers)
		if own[sb.ID] {
			p.own = &results[0]
		} else {
			p.pause = &results[0]
		}
		p.results, p.network = results[1:1+n], nets[sb.ID]
		results = results[1+n:]
	}
	return all, nil
}

// podTarget is a pod's own cgroup, or else its pause container's.
func (s *Service) podTarget(sb *sandbox.Sandbox, own bool) stats.Target {
	if !own {
		return stats.Target{ID: sb.ID + pauseSuffix, Cgroup: cgroupDir(sb, sb.ID), Started: time.Unix(0, sb.ReadyAt), Count: true}
	}
	t := stats.Target{ID: sb.ID, Cgroup: sb.CgroupParent, Count: true}
	if sb.CgroupMade {
		t.Started = time.Unix(0, sb.CreatedAt)
	}
	return t
}

// pauseSuffix tells the pause container of a pod from the pod.
const pauseSuffix = "/pause"

// ownCgroups tells which of the ready pods have a cgroup for themselves: those
// whose cgroup_parent was made for them or asked for, where no other pod has the
// same and none lies below. Where pods without a wish end up with the systemd
// driver, the whole system does.
func ownCgroups(pods []*sandbox.Sandbox) map[string]bool {
	users := map[string]int{} // pods in a directory or below
	for _, sb := range pods {
		for dir := path.Clean(sb.CgroupParent); len(dir) > 1; dir = path.Dir(dir) {
			users[dir]++
		}
	}
	own := map[string]bool{}
	for _, sb := range pods {
		wished := sb.CgroupMade || sb.Config.Message.GetLinux().GetCgroupParent() != ""
		own[sb.ID] = wished && users[path.Clean(sb.CgroupParent)] == 1
	}
	return own
}

// startNetworks measures the networks of pods, on one thread that goes from
// namespace to namespace; the result comes once.
func (s *Service) startNetworks(pods []*sandbox.Sandbox) <-chan map[string]*stats.Network {
	done := make(chan map[string]*stats.Network, 1)
	go func() { done <- s.networks(pods) }()
	return done
}

func (s *Service) networks(pods []*sandbox.Sandbox) map[string]*stats.Network {
	out := map[string]*stats.Network{}
	var host []string
	var ids, paths []string
	for _, sb := range pods {
		if sb.Namespaces().GetNetwork() == cri.NamespaceMode_NODE {
			host = append(host, sb.ID)
			continue
		}
		ids, paths = append(ids, sb.ID), append(paths, namespaces.Path(s.namespaceDir(sb.ID), namespaces.Net))
	}
	namespaces.EnterEach(paths, func(i int, err error) {
		var n stats.Network
		if err == nil {
			n, err = stats.ReadNetwork(network.IfName)
		}
		switch {
		case err == nil:
			out[ids[i]] = &n
		case s.alive(ids[i]): // else it is being stopped
			s.warn(logrus.Fields{"sandbox": ids[i], logrus.ErrorKey: err}, "statistics leave out a network that cannot be measured")
		}
	})
	if len(host) == 0 {
		return out
	}
	n, err := stats.ReadHostNetwork()
	if err != nil {
		s.warn(logrus.Fields{logrus.ErrorKey: err}, "statistics leave out the host's network, which cannot be measured")
		return out
	}
	for _, id := range host {
		out[id] = &n
	}
	return out
}

// podStats is what CRI shows of a measurement.
func (s *Service) podStats(p podMeasure) *cri.PodSandboxStats {
	config := p.sandbox.Config.Message
	linux := &cri.LinuxPodSandboxStats{Network: criNetwork(p.network)}
	for i, c := range p.containers {
		if s.measured(c, p.results[i].Err) {
			linux.Containers = append(linux.Containers, s.containerStats(c, p.results[i]))
		}
	}
	sample, processes := p.whole()
	at := sample.At.UnixNano()
	linux.Cpu, linux.Memory = criCPU(sample.CPU, at), criMemory(sample.Memory, at)
	if sample.IO != nil {
		linux.Io = &cri.IoUsage{Timestamp: at, Psi: criPressure(sample.IO)}
	}
	if processes != nil {
		linux.Process = &cri.ProcessUsage{Timestamp: at, ProcessCount: criNumber(processes)}
	}
	return &cri.PodSandboxStats{
		Attributes: &cri.PodSandboxAttributes{Id: p.sandbox.ID, Metadata: config.GetMetadata(), Labels: config.GetLabels(), Annotations: config.GetAnnotations()},
		Linux:      linux,
	}
}

// whole is the pod's own cgroup; without one for itself, or when nothing has
// run in it yet, the sum of what its containers were.
func (p *podMeasure) whole() (stats.Sample, *uint64) {
	if p.own != nil && p.own.Err == nil {
		return p.own.Sample, p.own.Processes
	}
	results := p.results
	if p.pause != nil {
		results = append([]stats.Result{*p.pause}, results...)
	}
	var parts []stats.Sample
	var processes uint64
	for _, r := range results {
		if r.Err != nil {
			continue
		}
		parts = append(parts, r.Sample)
		if r.Processes != nil {
			processes += *r.Processes
		}
	}
	return stats.Sum(time.Now(), parts), &processes
}

// criNetwork sets the default interface apart.
func criNetwork(n *stats.Network) *cri.NetworkUsage {
	if n == nil {
		return nil
	}
	out := &cri.NetworkUsage{Timestamp: n.At.UnixNano()}
	for _, i := range n.Interfaces {
		usage := &cri.NetworkInterfaceUsage{
			Name: i.Name, RxBytes: criNumber(&i.Received.Bytes), RxErrors: criNumber(&i.Received.Errors),
			TxBytes: criNumber(&i.Sent.Bytes), TxErrors: criNumber(&i.Sent.Errors),
		}
		if i.Default {
			out.DefaultInterface = usage
		} else {
			out.Interfaces = append(out.Interfaces, usage)
		}
	}
	return out
}

// target is a container to measure.
func (s *Service) target(c *sandbox.Container) stats.Target {
	t := stats.Target{ID: c.ID, Layer: filepath.Join(s.Records.Containers.Dir(c.ID), "upper"), Started: time.Unix(0, c.StartedAt)}
	if c.Process != nil {
		t.PID = c.Process.PID
	}
	if sb, err := s.Records.Sandboxes.Get(c.SandboxID); err == nil {
		t.Cgroup = containerCgroup(sb, c)
	}
	return t
}
