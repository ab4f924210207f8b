package runtime

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/oci/monitor"
	"berth/sandbox"
)

// Reasons of an exit, as kubectl shows them.
const (
	reasonCompleted = "Completed"
	reasonError     = "Error"
	reasonOOM       = "OOMKilled" // the kubelet knows this word
	reasonUnknown   = "Unknown"
	reasonStart     = "StartError" // the OCI runtime refused the start: nothing ever ran
)

// Exited records the end of an init: a container's, or a sandbox's pause.
// Idempotent: the first report counts. It may be called from any goroutine.
func (s *Service) Exited(e oci.Exit) {
	if s.starts.hold(e) {
		return
	}
	defer s.exits.tell(e.ID)
	if sb, err := s.Records.Sandboxes.Get(e.ID); err == nil {
		s.pauseEnded(sb, e)
		s.markStopped(e.ID)
		return
	}
	c, err := s.Records.Containers.Get(e.ID)
	if err != nil || c.FinishedAt != 0 {
		return
	}
	c, err = s.Records.Containers.Update(e.ID, func(c *sandbox.Container) {
		if c.FinishedAt != 0 {
			return
		}
		c.FinishedAt, c.ExitCode = e.At.UnixNano(), e.Code
		c.Reason, c.Message = exitReason(e), exitMessage(e)
	})
	if err != nil {
		s.Log.WithError(err).WithField("container", e.ID).Warn("record of an exit")
	}
	if c != nil && c.SharedPIDs {
		s.behind(func() { s.killRest(c) })
	}
	if s.plugins != nil {
		s.behind(func() { s.tellStopped(context.Background(), e.ID) })
	}
}

// pauseEnded tells the log of a pod whose first process went although nobody has
// stopped the pod: it is not ready any more, and the kubelet makes it anew.
func (s *Service) pauseEnded(sb *sandbox.Sandbox, e oci.Exit) {
	if sb.StoppedAt != 0 || !visibleSandbox(sb) {
		return
	}
	m := sb.Config.Message.GetMetadata()
	log := s.Log.WithFields(logrus.Fields{"sandbox": sb.ID, "pod": m.GetNamespace() + "/" + m.GetName(), "code": e.Code, "oom": e.OOMKilled})
	if sb.Pause != nil {
		log = log.WithField("pid", sb.Pause.PID)
	}
	if e.Code > 128 {
		log = log.WithField("signal", syscall.Signal(e.Code-128).String())
	}
	if e.Unknown != "" {
		log = log.WithField("unknown", e.Unknown)
	}
	log.Warn("the pod's pause process has ended, so the pod is not ready")
}

// starts are the running starts by container id. An end that is reported while
// its start is not recorded yet waits for that: who follows the record, or the
// events made of it, sees every container start before it stops.
type starts struct {
	mu      sync.Mutex
	running map[string]*oci.Exit // guarded by mu; nil while nothing is reported
}

func (st *starts) begin(id string) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.running[id] = nil
}

// hold keeps an exit and reports true while the start runs.
func (st *starts) hold(e oci.Exit) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	first, ok := st.running[e.ID]
	if ok && first == nil {
		st.running[e.ID] = &e
	}
	return ok
}

// end gives back what was held; nil when the container lives.
func (st *starts) end(id string) *oci.Exit {
	st.mu.Lock()
	defer st.mu.Unlock()
	e := st.running[id]
	delete(st.running, id)
	return e
}

func exitReason(e oci.Exit) string {
	switch {
	case e.Unknown != "":
		return reasonUnknown
	case e.OOMKilled:
		return reasonOOM
	case e.Code == 0:
		return reasonCompleted
	default:
		return reasonError
	}
}

// exitMessage says what is not as it should be.
func exitMessage(e oci.Exit) string {
	if e.Dropped == 0 {
		return e.Unknown
	}
	lost := fmt.Sprintf("about %d bytes of its output are in no log: the log could not be written", e.Dropped)
	if e.Unknown == "" {
		return lost
	}
	return e.Unknown + "; " + lost
}

// killRest ends what outlives a container's init in a shared PID namespace;
// in one of its own the kernel has done it.
func (s *Service) killRest(c *sandbox.Container) {
	ctx, cancel := context.WithTimeout(context.Background(), killPatience)
	defer cancel()
	rt, err := s.runtimeOf(c)
	if err == nil {
		err = rt.KillAll(ctx, c.ID)
	}
	if err != nil {
		s.Log.WithError(err).WithField("container", c.ID).Warn("kill the rest of an exited container")
	}
}

// watchExits asks the kernel again, slowly, about every init that should be
// alive, until ctx ends: a notice that was lost cannot wedge a pod. It also looks
// after the pins of namespaces, the rules of host ports and what disks have refused.
func (s *Service) watchExits(ctx context.Context) {
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s.repairPorts()
		s.adoptAgain(ctx)
		_ = s.Records.Save() // whoever changed them has told why the disk did not take it
		for _, c := range s.Records.Containers.List() {
			if c.MadeAt == 0 || c.State(s.bootID) == cri.ContainerState_CONTAINER_EXITED {
				continue
			}
			if rt, err := s.runtimeOf(c); err == nil {
				if e, ok := rt.Exited(c.ID); ok {
					s.Exited(e)
				}
			}
		}
		for _, sb := range s.Records.Sandboxes.List() {
			if !sb.Ready(s.bootID) || s.checkPins(sb) != nil || sb.Pause == nil {
				continue
			}
			if rt, err := s.runtimeOfPod(sb); err == nil {
				if e, ok := rt.Exited(sb.ID); ok {
					s.Exited(e)
				}
			}
		}
	}
}

// unkillable says why an init outlives SIGKILL, as far as the kernel tells.
func (s *Service) unkillable(id string) error {
	pid := 0
	if c, err := s.Records.Containers.Get(id); err == nil && c.Process != nil {
		pid = c.Process.PID
	} else if sb, err := s.Records.Sandboxes.Get(id); err == nil && sb.Pause != nil {
		pid = sb.Pause.PID
	}
	return fmt.Errorf("%s still runs after SIGKILL: %s: %w", id, monitor.Whereabouts(pid), context.DeadlineExceeded)
}
