package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/sirupsen/logrus"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/runtime/config"
	"berth/runtime/nri"
	"berth/sandbox"
	"berth/sandbox/namespaces"
)

// evictionGrace is how long a container that an NRI plugin evicts has to end.
const evictionGrace = 30 * time.Second

// pluginUpdateLimit bounds one update of a container that an NRI plugin asks for.
const pluginUpdateLimit = 10 * time.Second

// newPlugins prepares NRI where the configuration has it on; nil where not.
func (s *Service) newPlugins() (*nri.Plugins, error) {
	c := s.Config().NRI
	if !WantsPlugins(c) {
		return nil, nil
	}
	inject := func(sp *rspec.Spec, names []string) error { return s.injectDevices(context.Background(), sp, names) }
	return nri.New(nri.Options{
		Node: pluginNode{s}, Version: s.Parts.Version, Socket: c.SocketPath, PluginDir: c.PluginPath, ConfigDir: c.PluginConfigPath,
		RegistrationTimeout: time.Duration(c.RegistrationTimeout), RequestTimeout: time.Duration(c.RequestTimeout),
		Log: s.logPlugins, InjectCDI: inject,
	})
}

// StartPlugins opens NRI where it is on: plugins learn what Restore found. To be
// called after Restore and before the service is served; Close ends it. A socket
// that another process listens on is refused.
func (s *Service) StartPlugins() error {
	if s.plugins == nil {
		s.Log.WithFields(logrus.Fields{"enable": s.Config().NRI.Enable, "socket": s.Config().NRI.SocketPath}).Info("NRI is off")
		return nil
	}
	err := s.launchPlugins(s.plugins.Start)
	if err != nil {
		s.plugins.Stop()
	}
	if errors.Is(err, nri.ErrSocketInUse) {
		return fmt.Errorf("%w; set nri.socket_path to another path or nri.enable to %q", err, config.NRIOff)
	}
	return err
}

// WantsPlugins tells whether NRI is on: "auto" follows the socket's directory,
// which whoever installs plugins makes.
func WantsPlugins(c config.NRI) bool {
	if c.Enable != config.NRIAuto {
		return c.Enable == config.NRIOn
	}
	info, err := os.Stat(filepath.Dir(c.SocketPath))
	return err == nil && info.IsDir()
}

func (s *Service) logPlugins(level nri.Level, text string) {
	s.Log.WithField("from", "nri").Log(map[nri.Level]logrus.Level{
		nri.Debug: logrus.DebugLevel, nri.Info: logrus.InfoLevel, nri.Warning: logrus.WarnLevel}[level], text)
}

// adjustByPlugins has NRI plugins change the specification of a container that
// is being made, and records what of it berth must know later.
func (s *Service) adjustByPlugins(ctx context.Context, sb *sandbox.Sandbox, c *sandbox.Container, sp *rspec.Spec) error {
	before := sp.Linux.CgroupsPath
	adjusted, err := s.plugins.CreateContainer(ctx, c.ID, sp)
	if err != nil || !adjusted.Any {
		return err
	}
	cgroup := ""
	if sp.Linux.CgroupsPath != before {
		if cgroup, err = movedCgroup(sb, sp.Linux.CgroupsPath); err != nil {
			return fmt.Errorf("%w: linux.cgroups_path %w", nri.ErrRefused, err)
		}
	}
	for _, text := range s.fitHost(sp) {
		s.warn(logrus.Fields{"container": c.ID, "sandbox": c.SandboxID}, text)
	}
	_, err = s.Records.Containers.Update(c.ID, func(c *sandbox.Container) {
		c.Cgroup = cgroup
		c.SharedPIDs = !slices.ContainsFunc(sp.Linux.Namespaces, func(n rspec.LinuxNamespace) bool {
			return n.Type == rspec.PIDNamespace && n.Path == ""
		})
		if adjusted.Resources != nil {
			c.Resources = &sandbox.Config[*cri.LinuxContainerResources]{Message: mergeResources(c.EffectiveResources(), adjusted.Resources)}
		}
	})
	return err
}

// fitHost gives up what plugins set and this host cannot do, as package spec
// does for what a request sets.
func (s *Service) fitHost(sp *rspec.Spec) (warnings []string) {
	if score := sp.Process.OOMScoreAdj; score != nil && !s.Host.CanLowerOOM && *score < s.Host.OOMScoreAdjMin {
		warnings = append(warnings, fmt.Sprintf("oom_score_adj %d of an NRI plugin raised to %d: the daemon lacks CAP_SYS_RESOURCE", *score, s.Host.OOMScoreAdjMin))
		lowest := s.Host.OOMScoreAdjMin
		sp.Process.OOMScoreAdj = &lowest
	}
	r := sp.Linux.Resources
	if r.Memory != nil && !s.Host.SwapControl {
		r.Memory.Swap = nil
	}
	if len(r.HugepageLimits) > 0 && !s.Host.HugetlbControl {
		warnings = append(warnings, "hugepage_limits of an NRI plugin ignored: this host has no hugetlb controller")
		r.HugepageLimits = nil
	}
	return warnings
}

// tellStopped tells NRI plugins, once, that a container has ended. It waits for
// an operation on the container, so that plugins hear of its start first.
func (s *Service) tellStopped(ctx context.Context, id string) {
	if s.plugins == nil {
		return
	}
	limited, cancel := context.WithTimeout(ctx, operationLimit)
	defer cancel()
	open, err := s.locks.Lock(limited, id)
	if err != nil {
		s.Log.WithError(err).WithField("container", id).Warn("tell NRI plugins that a container has ended")
		return
	}
	defer open()
	s.plugins.StopContainer(limited, id)
}

// pluginNode is what NRI plugins see and change of the service.
type pluginNode struct{ s *Service }

func (n pluginNode) Pod(id string) (nri.Pod, error) {
	sb, err := n.s.Records.Sandboxes.Get(id)
	if err != nil {
		return nri.Pod{}, err
	}
	pod := nri.Pod{ID: sb.ID, Config: sb.Config.Message, Handler: sb.Handler, Cgroup: sb.CgroupParent, IPs: sb.IPs,
		Overhead: sb.EffectiveOverhead(), Resources: sb.EffectiveResources(), Ready: sb.ReadyAt != 0}
	if sb.Pause != nil && sb.BootID == n.s.bootID {
		pod.PID = sb.Pause.PID
	}
	joined := n.s.joinedNamespaces(sb)
	for _, ns := range []rspec.LinuxNamespace{{Type: rspec.NetworkNamespace, Path: joined.Net}, {Type: rspec.IPCNamespace, Path: joined.IPC},
		{Type: rspec.UTSNamespace, Path: joined.UTS}, {Type: rspec.UserNamespace, Path: joined.User}} {
		if ns.Path != "" && namespaces.Pinned(ns.Path) {
			pod.Namespaces = append(pod.Namespaces, ns)
		}
	}
	return pod, nil
}

// Container reads the specification back from the bundle, for plugins to look
// at; berth itself learns nothing from it.
func (n pluginNode) Container(id string) (nri.Container, error) {
	c, err := n.s.Records.Containers.Get(id)
	if err != nil {
		return nri.Container{}, err
	}
	out := nri.Container{
		ID: c.ID, PodID: c.SandboxID, Config: c.Config.Message, Made: c.MadeAt != 0, State: c.State(n.s.bootID),
		Created: moment(c.CreatedAt), Started: moment(c.StartedAt), Finished: moment(c.FinishedAt),
		ExitCode: c.ExitCode, Reason: c.Reason, Message: c.Message,
		ImageID: c.ImageID, ImageRef: c.ImageRef, Resources: c.EffectiveResources(), UID: uint32(c.User.UID), GID: uint32(c.User.GID),
	}
	for _, g := range c.User.Groups {
		out.Groups = append(out.Groups, uint32(g))
	}
	if c.Process != nil && out.State != cri.ContainerState_CONTAINER_EXITED {
		out.PID = c.Process.PID
	}
	out.Spec, err = oci.ReadSpec(n.s.bundleDir(id))
	if errors.Is(err, oci.ErrNotFound) { // not written yet, or a reboot was between
		err = nil
	}
	return out, err
}

func moment(nanoseconds int64) time.Time {
	if nanoseconds == 0 {
		return time.Time{}
	}
	return time.Unix(0, nanoseconds)
}

func (n pluginNode) List() (pods, containers []string) {
	for _, sb := range n.s.Records.Sandboxes.List() {
		if sb.ReadyAt != 0 {
			pods = append(pods, sb.ID)
		}
	}
	for _, c := range n.s.Records.Containers.List() {
		if c.MadeAt != 0 {
			containers = append(containers, c.ID)
		}
	}
	return pods, containers
}

// UpdateContainer waits for the container's lock no longer than a plugin may
// take: whoever asked for the update holds up a pod meanwhile.
func (n pluginNode) UpdateContainer(ctx context.Context, u nri.Update) error {
	c, err := n.s.findContainer(u.ID)
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, time.Duration(n.s.Config().NRI.RequestTimeout))
	defer cancel()
	open, err := n.s.locks.Lock(limited, c.ID)
	if err != nil {
		return err
	}
	defer open()
	bounded, cancel := context.WithTimeout(ctx, pluginUpdateLimit)
	defer cancel()
	return n.s.updateResources(bounded, u)
}

func (n pluginNode) Evict(id, reason string) {
	log := n.s.Log.WithFields(logrus.Fields{"container": id, "reason": reason})
	c, err := n.s.findContainer(id)
	if err != nil {
		log.WithError(err).Warn("an NRI plugin evicts a container that is not there")
		return
	}
	log.Warn("an NRI plugin evicts a container")
	n.s.behind(func() {
		if err := n.s.stopContainer(context.Background(), c.ID, evictionGrace); err != nil {
			log.WithError(err).Warn("evict a container")
		}
	})
}
