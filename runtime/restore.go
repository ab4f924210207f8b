package runtime

import (
	"context"
	"errors"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/runtime/operation"
	"berth/sandbox"
)

// Restore brings the records of an earlier daemon in line with the kernel:
// running containers are adopted, those that ended meanwhile get their exits, and
// pods that a reboot ended are not ready. It asks nothing that can hang for long, and
// must return before the service answers (see Starting): lists are true from then on. What was half
// made is removed and what no record names swept behind it (see tidy). Trouble
// with one object is logged, counted and shown by Status; it keeps nothing else
// from going on. ctx ends the watch it starts.
func (s *Service) Restore(ctx context.Context) error {
	s.behind(s.watchStuck)
	return s.operations.Track(ctx, operation.Request{Verb: "Restore", Object: "all"}, s.restore)
}

func (s *Service) restore(ctx context.Context, op *operation.Operation) error {
	began := time.Now()
	op.Step("look at records and images")
	s.noteRecords()
	for _, c := range s.Records.Containers.List() {
		s.holdImages(c)
	}
	if err := s.Images.Sweep(); err != nil {
		s.Log.WithError(err).Warn("sweep images that were removed while a container held them")
	}
	s.reserveLabels()
	op.Step("adopt containers")
	s.adopt(ctx)
	s.thaw()
	s.dropHalfRestored(ctx)
	op.Step("settle what a reboot ended")
	s.settleBoot()
	s.settleNamespaces()
	op.Step("restore host ports")
	s.restorePorts()
	op.Step("ask the OCI runtimes what they can do")
	s.readFeatures(ctx)
	s.behindRestore(ctx)
	s.behind(s.readCheckpoints)
	s.behind(s.watchPulls)
	s.behind(s.preload)
	s.events.serve(time.Now())
	go s.watchExits(ctx)
	s.beginning.took = time.Since(began)
	return nil
}

// noteRecords keeps what was found in the place of records, for Status: what is in
// quarantine, also of earlier starts, and what is no record and was not moved.
func (s *Service) noteRecords() {
	var err error
	if s.beginning.quarantined, err = sandbox.Quarantined(s.Config().Root); err != nil {
		s.troubled(nil, err, "find records in quarantine")
	}
	for _, p := range s.Problems {
		if p.Moved == "" {
			s.troubled(logrus.Fields{"path": p.Path}, errors.Join(p.Err, p.Move), "something among the records was passed over")
		}
	}
}

// restoreWorkers is how many objects are settled at the same time.
const restoreWorkers = 16

// each calls f for every object of a list, some at a time. A panic about one of
// them ends nothing else.
func each[T any](s *Service, list []T, f func(T)) {
	var g errgroup.Group
	g.SetLimit(restoreWorkers)
	for _, x := range list {
		g.Go(func() error {
			err := operation.Guarded(func() error { f(x); return nil })
			if p := (*operation.PanicError)(nil); errors.As(err, &p) {
				s.logPanic("restore", p)
			}
			return nil
		})
	}
	_ = g.Wait()
}

// adoptee is a container, or a pod's pause, that an earlier daemon left running.
type adoptee struct {
	handler string
	oci.Handle
}

// adopt takes over every container of this boot, and the exits that are known.
func (s *Service) adopt(ctx context.Context) {
	var all []adoptee
	for _, sb := range s.Records.Sandboxes.List() {
		if p := sb.Pause; p != nil && sb.BootID == s.bootID {
			all = append(all, adoptee{sb.Runtime, oci.Handle{ID: sb.ID, Bundle: s.bundleDir(sb.ID), Process: oci.Process(*p)}})
		}
	}
	for _, c := range s.Records.Containers.List() {
		if c.Process != nil && c.BootID == s.bootID {
			all = append(all, adoptee{c.Handler, oci.Handle{ID: c.ID, Bundle: s.bundleDir(c.ID), Process: oci.Process(*c.Process)}})
		}
	}
	each(s, all, func(a adoptee) { s.adoptOne(ctx, a) })
}

// adoptOne leaves an object that cannot be asked about as its record has it, to be
// asked about again.
func (s *Service) adoptOne(ctx context.Context, a adoptee) {
	rt, err := s.runtime(a.handler)
	var st oci.State
	if err == nil {
		st, err = rt.Restore(ctx, a.Handle)
	}
	s.beginning.wait(a, err != nil)
	if err != nil {
		s.troubled(logrus.Fields{"container": a.ID}, err, "a container of an earlier daemon cannot be adopted now; it stays as it was last seen")
		return
	}
	if st.Started {
		s.settleStart(a.ID)
	}
	if st.Exit != nil {
		s.Exited(*st.Exit)
	}
}

// adoptAgain asks about those that could not be adopted.
func (s *Service) adoptAgain(ctx context.Context) {
	for _, a := range s.beginning.left() {
		if _, err := s.Records.Containers.Get(a.ID); err != nil && !s.sandboxKnown(a.ID) {
			s.beginning.wait(a, false)
			continue
		}
		s.adoptOne(ctx, a)
	}
}

// settleStart records a start whose daemon ended before it could. It followed
// the creation closely, nobody knows when exactly.
func (s *Service) settleStart(id string) {
	c, err := s.Records.Containers.Get(id)
	if err != nil || c.MadeAt == 0 || c.StartedAt != 0 || c.FinishedAt != 0 {
		return
	}
	if _, err := s.Records.Containers.Update(id, func(c *sandbox.Container) { c.StartedAt = c.MadeAt }); err != nil {
		s.Log.WithError(err).WithField("container", id).Warn("record of a started container")
	}
}

// settleBoot says of containers of an earlier boot why they ended.
func (s *Service) settleBoot() {
	ended := s.Records.Containers.Select(func(c *sandbox.Container) bool {
		return c.BootID != s.bootID && c.FinishedAt == 0 && c.MadeAt != 0
	})
	each(s, ended, func(c *sandbox.Container) {
		_, err := s.Records.Containers.Update(c.ID, func(c *sandbox.Container) {
			c.FinishedAt, c.ExitCode = time.Now().UnixNano(), 255
			c.Reason, c.Message = reasonUnknown, "the node was restarted while the container ran"
		})
		if err != nil {
			s.troubled(logrus.Fields{"container": c.ID}, err, "record of a container of an earlier boot")
		}
	})
}

// settleNamespaces makes pods NotReady whose pinned namespaces are gone: the
// state directory was emptied, or somebody unmounted them.
func (s *Service) settleNamespaces() {
	ready := s.Records.Sandboxes.Select(func(sb *sandbox.Sandbox) bool { return sb.Ready(s.bootID) })
	each(s, ready, func(sb *sandbox.Sandbox) { _ = s.checkPins(sb) })
}

var _ cri.RuntimeServiceServer = (*Service)(nil)
