package runtime

import (
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/runtime/exporter"
	"berth/runtime/operation"
)

// Metrics are the daemon's own, to be served.
func (s *Service) Metrics() *exporter.Metrics { return s.metrics }

// quietAfter is how long no operation ends before the daemon gives memory back: what a
// burst has grown is not needed to wait.
const quietAfter = 5 * time.Second

func (s *Service) operationEnded(o *operation.Operation) {
	s.quiet.Reset(quietAfter)
	s.failures.note(o)
	for _, step := range o.Steps() {
		s.metrics.Step(o.Verb, step.Name, step.Took)
	}
}

func (s *Service) pullEnded(p image.Progress) {
	out := exporter.Pull{Op: p.Op, Reason: p.Reason(), Took: p.Ended.Sub(p.Began)}
	for _, l := range p.Layers {
		switch {
		case l.Stage == image.StageReused:
			out.Reused++
		case l.Resumed > 0:
			out.Resumed++
			out.ResumedBytes += l.Resumed
		default:
			out.Fetched++
		}
	}
	s.metrics.Pull(out)
}

// scraped is the state for a scrape, from memory.
func (s *Service) scraped() exporter.State {
	pulled, imported := s.Images.Fetched()
	usage := s.Images.Usage()
	st := exporter.State{
		Pulls: map[string]int{"pull": 0, "import": 0}, PullBytes: map[string]int64{"pull": pulled, "import": imported},
		Images: len(s.Images.List()), ImageBytes: map[string]uint64{"layers": usage.Layers, "resumable": usage.Left, "other": usage.Bytes - usage.Layers - usage.Left}, ImageFiles: usage.Inodes,
		Pods: map[string]int{"ready": 0, "notready": 0}, Containers: map[string]int{"created": 0, "running": 0, "exited": 0},
		Sessions: s.Streams.Sessions(), MonitorUp: s.MonitorPID != nil && s.MonitorPID() != 0,
	}
	for _, p := range s.Images.Progress() {
		if p.Ended.IsZero() {
			st.Pulls[p.Op]++
		}
	}
	for _, sb := range s.Records.Sandboxes.List() {
		if sb.Ready(s.bootID) {
			st.Pods["ready"]++
		} else {
			st.Pods["notready"]++
		}
	}
	for _, c := range s.Records.Containers.List() {
		if c.MadeAt == 0 {
			continue // no list shows it yet
		}
		switch c.State(s.bootID) {
		case cri.ContainerState_CONTAINER_CREATED:
			st.Containers["created"]++
		case cri.ContainerState_CONTAINER_RUNNING:
			st.Containers["running"]++
		default:
			st.Containers["exited"]++
		}
	}
	for _, o := range s.operations.Running() {
		if o.Tracked() {
			continue // it lasts as long as its caller likes
		}
		st.Operations = append(st.Operations, exporter.Operation{Verb: o.Verb, Began: o.Began})
	}
	return st
}
