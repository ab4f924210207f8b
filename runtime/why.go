package runtime

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/monitor"
	"berth/runtime/admin"
	"berth/runtime/operation"
	"berth/sandbox"
)

// stuckAfter is when the log tells of an operation that has not ended.
const stuckAfter = 10 * time.Second

// failures keeps the last failed operation of each object, of the latest ones.
type failures struct {
	mu    sync.Mutex
	last  map[string]admin.WhyFailure // by the object's name, guarded by mu
	order []string                    // names, the oldest first, guarded by mu
}

// maxFailures bounds how many objects' failures are kept.
const maxFailures = 256

// note keeps an operation that has failed, and forgets the failure before it when
// it has succeeded. That a container could be stopped says nothing of what failed
// before.
func (f *failures) note(o *operation.Operation) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if o.Err() == nil && o.Verb == "StopContainer" && f.last[o.Object].Verb != o.Verb {
		return
	}
	f.order = slices.DeleteFunc(f.order, func(name string) bool { return name == o.Object })
	delete(f.last, o.Object)
	if o.Err() == nil {
		return
	}
	if len(f.order) >= maxFailures {
		delete(f.last, f.order[0])
		f.order = f.order[1:]
	}
	f.order = append(f.order, o.Object)
	f.last[o.Object] = admin.WhyFailure{Verb: o.Verb, Step: o.Failed(), Error: readable(o.Err().Error()), At: time.Now()}
}

func (f *failures) of(name string) *admin.WhyFailure {
	f.mu.Lock()
	defer f.mu.Unlock()
	if w, ok := f.last[name]; ok {
		return &w
	}
	return nil
}

// gone are objects that answer to a name and of which nothing but a failure is left.
func (f *failures) gone(name string) []admin.WhyObject {
	return f.without("object", "gone", func(full string) bool {
		parts := strings.Split(full, "_") // name, namespace, … of a pod; pod's id, name, … of a container
		return strings.HasPrefix(full, name) || slices.Contains(parts[:min(2, len(parts))], name)
	})
}

// unmade are the containers of a pod that could not be made.
func (f *failures) unmade(pod string) []admin.WhyObject {
	return f.without("container", "not made", func(full string) bool { return strings.HasPrefix(full, pod+"_") })
}

func (f *failures) without(kind, state string, is func(full string) bool) (list []admin.WhyObject) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, full := range f.order {
		if is(full) {
			w := f.last[full]
			list = append(list, admin.WhyObject{Kind: kind, Name: full, State: state, Failed: &w})
		}
	}
	return list
}

// why answers from memory and /proc.
func (s *Service) why(_ context.Context, req *admin.WhyRequest) (*admin.WhyReply, error) {
	reply := &admin.WhyReply{Operations: []admin.WhyOperation{}, Objects: []admin.WhyObject{}}
	var names []string
	if req.Object != "" {
		var err error
		if reply.Objects, names, err = s.whyObjects(req.Object); err != nil {
			return nil, err
		}
	}
	for _, o := range s.operations.Running() {
		if req.Object == "" || slices.Contains(names, o.Object) || strings.HasPrefix(o.Object, req.Object) {
			reply.Operations = append(reply.Operations, s.whyOperation(o))
		}
	}
	reply.Operations = append(reply.Operations, s.whyPulls(req.Object)...)
	if req.Object != "" && len(reply.Objects) == 0 && len(reply.Operations) == 0 {
		reply.Objects = s.failures.gone(req.Object)
	}
	if req.Object != "" && len(reply.Objects) == 0 && len(reply.Operations) == 0 {
		return nil, fmt.Errorf("pod or container: %w: %q", sandbox.ErrNotFound, req.Object)
	}
	return reply, nil
}

// maxMatches bounds how many pods, or containers, one question is answered for.
const maxMatches = 20

// whyObjects finds pods, each with its containers, and containers, by name or the
// beginning of an id, also those that are not visible yet. None is no error: an
// operation may go by that name.
func (s *Service) whyObjects(query string) (list []admin.WhyObject, names []string, err error) {
	pods := s.Records.Sandboxes.Select(func(sb *sandbox.Sandbox) bool {
		m := sb.Config.Message.GetMetadata()
		return strings.HasPrefix(sb.ID, query) || strings.HasPrefix(sb.Name, query) ||
			slices.Contains([]string{m.GetName(), m.GetNamespace() + "/" + m.GetName(), m.GetUid()}, query)
	})
	containers := s.Records.Containers.Select(func(c *sandbox.Container) bool {
		return strings.HasPrefix(c.ID, query) || c.Name == query || c.Config.Message.GetMetadata().GetName() == query
	})
	if max(len(pods), len(containers)) > maxMatches {
		return nil, nil, fmt.Errorf("%w: %q: %d pods and %d containers answer to it", sandbox.ErrAmbiguous, query, len(pods), len(containers))
	}
	for _, sb := range pods {
		list, names = append(list, s.whyPod(sb)), append(names, sb.Name)
		of := s.Records.ContainersOf(sb.ID)
		for _, c := range of {
			list, names = append(list, s.whyContainer(c)), append(names, c.Name)
		}
		for _, o := range s.failures.unmade(sb.ID) {
			if !slices.ContainsFunc(of, func(c *sandbox.Container) bool { return c.Name == o.Name }) {
				list = append(list, o)
			}
		}
	}
	for _, c := range containers {
		if !slices.ContainsFunc(pods, func(sb *sandbox.Sandbox) bool { return sb.ID == c.SandboxID }) {
			list, names = append(list, s.whyContainer(c)), append(names, c.Name)
		}
	}
	return list, names, nil
}

func (s *Service) whyPod(sb *sandbox.Sandbox) admin.WhyObject {
	o := admin.WhyObject{Kind: "pod", ID: sb.ID, Name: sb.Name, State: "not ready", Failed: s.failures.of(sb.Name)}
	switch {
	case sb.Ready(s.bootID):
		o.State = "ready"
	case sb.ReadyAt == 0 && sb.StoppedAt == 0:
		o.State, o.Reason = "being made", "RunPodSandbox has not ended"
	case sb.BootID != s.bootID:
		o.Reason = "the node was restarted while the pod was there"
	default:
		o.Reason = "it was stopped, or its pause process or a namespace of its went, at " + time.Unix(0, sb.StoppedAt).Format(time.RFC3339)
	}
	if o.State == "not ready" && sb.Network != nil {
		o.Reason += "; its network is not given back yet (CNI DEL)"
	}
	return o
}

func (s *Service) whyContainer(c *sandbox.Container) admin.WhyObject {
	o := admin.WhyObject{Kind: "container", ID: c.ID, Name: c.Name, Failed: s.failures.of(c.Name)}
	st := c.State(s.bootID)
	o.State = strings.ToLower(strings.TrimPrefix(st.String(), "CONTAINER_"))
	switch {
	case c.MadeAt == 0:
		o.State, o.Reason = "being made", "CreateContainer has not ended"
	case st == cri.ContainerState_CONTAINER_EXITED:
		o.Log = c.LogPath
		o.Reason = fmt.Sprintf("%s, exit code %d, at %s", c.Reason, c.ExitCode, time.Unix(0, c.FinishedAt).Format(time.RFC3339))
		if c.Message != "" {
			o.Reason += ": " + c.Message
		}
	case st == cri.ContainerState_CONTAINER_CREATED:
		o.Reason = "StartContainer has not been called, or has not ended"
	}
	if s.LogTrouble != nil {
		if text := s.LogTrouble(c.ID); text != "" {
			o.Reason = strings.TrimPrefix(o.Reason+"; "+text, "; ")
		}
	}
	return o
}

func (s *Service) whyOperation(o *operation.Operation) admin.WhyOperation {
	step, since := o.Current()
	waits := s.waitsOf(o)
	for now, at := o.Current(); at != since; now, at = o.Current() { // what it waits for is that step's
		step, since, waits = now, at, s.waitsOf(o)
	}
	if step == "" {
		step = "waiting"
	}
	w := admin.WhyOperation{Verb: o.Verb, Object: readable(o.Object), Began: o.Began, Seconds: time.Since(o.Began).Seconds(),
		Step: step, StepSeconds: time.Since(since).Seconds(), Waits: waits}
	if ids, _ := s.objectsOf(o.Object); len(ids) > 0 {
		w.ID = ids[0]
	}
	if w.Waits == nil {
		w.Waits = []admin.WhyWait{}
	}
	return w
}

// whyPulls are the running pulls and imports whose image begins so.
func (s *Service) whyPulls(query string) (list []admin.WhyOperation) {
	for _, p := range s.Images.Progress() {
		if !p.Ended.IsZero() || !strings.HasPrefix(p.Image, query) {
			continue
		}
		age := time.Since(p.Began).Seconds()
		w := admin.WhyOperation{Verb: p.Op, Object: readable(p.Image), Began: p.Began, Seconds: age, Step: string(p.Stage), StepSeconds: age, Waits: []admin.WhyWait{}}
		if l := slowestLayer(p.Layers); l != nil {
			w.Waits = append(w.Waits, admin.WhyWait{What: fmt.Sprintf("layer %s, %s, %d of %d bytes, %d bytes a second", l.Blob, l.Stage, l.Bytes, l.Total, int64(l.Rate))})
		}
		list = append(list, w)
	}
	return list
}

// objectsOf are the ids behind an operation's name, its own first: a pod's
// containers belong to it. living are the pod's inits that a stop waits for.
func (s *Service) objectsOf(name string) (ids []string, living map[int]string) {
	living = map[int]string{}
	var containers []*sandbox.Container
	if sb, err := s.Records.Sandboxes.Named(name); err == nil {
		ids = append(ids, sb.ID)
		containers = s.Records.ContainersOf(sb.ID)
	} else if c, err := s.Records.Containers.Named(name); err == nil {
		containers = append(containers, c)
	}
	for _, c := range containers {
		ids = append(ids, c.ID)
		if c.Process != nil && c.MadeAt != 0 && c.State(s.bootID) != cri.ContainerState_CONTAINER_EXITED {
			living[c.Process.PID] = "init of container " + c.Config.Message.GetMetadata().GetName()
		}
	}
	return ids, living
}

// waitsOf is what an operation may wait for: what it says itself, and the processes
// that run for its object; a container's own only where it is to end.
func (s *Service) waitsOf(o *operation.Operation) []admin.WhyWait {
	var list []admin.WhyWait
	for _, w := range o.Waits() {
		out := admin.WhyWait{What: readable(w.Text()), Seconds: time.Since(w.Since).Seconds()}
		if at, ok := monitor.Look(w.PID); ok && w.PID != 0 {
			out.PID, out.State, out.Channel = w.PID, at.State, at.Channel
		}
		list = append(list, out)
	}
	ids, living := s.objectsOf(o.Object)
	if !strings.HasPrefix(o.Verb, "Stop") && !strings.HasPrefix(o.Verb, "Remove") {
		living = nil
	}
	parents := []int{os.Getpid()}
	pid := 0
	if s.MonitorPID != nil {
		pid = s.MonitorPID()
	}
	if pid > 1 {
		parents = append(parents, pid)
	}
	found := waitsFor(parents, ids, living)
	return append(withMonitor(list, pid, len(found) > len(living), len(living) > 0), found...)
}

// withMonitor leaves out a request to the monitor that it is at work on, for what it
// runs says more, and names a stopped monitor where an end is waited for: nobody else
// tells of one.
func withMonitor(list []admin.WhyWait, pid int, atWork, ending bool) []admin.WhyWait {
	at, ok := monitor.Look(pid)
	if !ok || pid <= 1 {
		return list
	}
	asked := func(w admin.WhyWait) bool { return w.PID == pid }
	stopped := strings.EqualFold(at.State, "T")
	switch {
	case !stopped && atWork:
		return slices.DeleteFunc(list, asked)
	case stopped && ending && !slices.ContainsFunc(list, asked):
		return append(list, admin.WhyWait{What: "berth-monitor", PID: pid, State: at.State, Channel: at.Channel})
	}
	return list
}

// watchStuck logs once of each operation that takes long, until Close.
func (s *Service) watchStuck() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	logged := map[*operation.Operation]bool{}
	for {
		select {
		case <-tick.C:
		case <-s.closing:
			return
		}
		running := s.operations.Running()
		for _, o := range running {
			if !logged[o] && time.Since(o.Began)-o.Quiet > stuckAfter {
				logged[o] = true
				s.logStuck(o)
			}
		}
		for o := range logged {
			if !slices.Contains(running, o) {
				delete(logged, o)
			}
		}
	}
}

func (s *Service) logStuck(o *operation.Operation) {
	log := s.Log.WithFields(logrus.Fields{"operation": o.Verb, "object": readable(o.Object), "step": o.Where(), "for": time.Since(o.Began).Round(time.Second)})
	if text := waitsText(s.waitsOf(o)); text != "" {
		log = log.WithField("waiting for", text)
	}
	log.Warn("an operation takes long")
}
