package runtime

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/oci/checkpoint"
	"berth/runtime/operation"
	"berth/sandbox"
)

// CheckpointPod writes one consistent state of a pod's containers below
// output_path, see package checkpoint (KEP-5823): all are frozen before the
// first is written, and go on before it returns, whatever happens. On an error
// output_path is as empty as before.
func (s *Service) CheckpointPod(ctx context.Context, req *cri.CheckpointPodRequest) (*cri.CheckpointPodResponse, error) {
	left, err := deadlineOf(ctx)
	if err != nil {
		return nil, err
	}
	sb, err := s.readySandbox(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if err := checkOptions(req.GetOptions()); err != nil {
		return nil, err
	}
	served, err := s.checkOutput(ctx, req.GetOutputPath())
	if err != nil {
		return nil, err
	}
	containers, rt, err := s.selected(ctx, sb, req.GetContainerIds())
	if err != nil {
		return nil, err
	}
	_, err = s.operations.Do(ctx, operation.Request{
		Key: "checkpoint " + sb.ID + " " + req.GetOutputPath(), Verb: "CheckpointPod", Object: sb.Name, Limit: left,
	}, func(ctx context.Context, op *operation.Operation) (string, error) {
		open, err := s.lockAll(ctx, containers)
		if err != nil {
			return "", err
		}
		defer open()
		return "", s.checkpointPod(ctx, op, podCheckpoint{sb: sb, rt: rt, containers: containers, path: req.GetOutputPath(), served: served})
	})
	if err != nil {
		return nil, err
	}
	return &cri.CheckpointPodResponse{}, nil
}

// deadlineOf is how long a call may still take; it must say so.
func deadlineOf(ctx context.Context) (time.Duration, error) {
	end, ok := ctx.Deadline()
	if !ok {
		return 0, fmt.Errorf("%w: the call has no deadline", errInvalid)
	}
	return time.Until(end), nil
}

// checkOptions refuses all options: there are none.
func checkOptions(options map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(options)) {
		return fmt.Errorf("%w: options %q: there is no such option", errInvalid, key)
	}
	return nil
}

// checkOutput takes an empty directory, and tells whether it is served.
func (s *Service) checkOutput(ctx context.Context, path string) (served bool, err error) {
	if !filepath.IsAbs(path) {
		return false, fmt.Errorf("%w: output_path %q is not absolute", errInvalid, path)
	}
	if err := s.Outside.Answer(ctx, path); err != nil {
		return false, fmt.Errorf("output_path: %w", err)
	}
	info, err := os.Lstat(path)
	if err != nil || !info.IsDir() {
		return false, fmt.Errorf("%w: output_path %q is no directory", errInvalid, path)
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return false, fmt.Errorf("read output_path: %w", err)
	}
	if len(entries) > 0 {
		return false, fmt.Errorf("%w: output_path %q is not empty: it has %q", errInvalid, path, entries[0].Name())
	}
	f, err := s.Outside.For(ctx).Find(path)
	if err != nil {
		return false, fmt.Errorf("output_path: %w", err)
	}
	return f.Served, nil
}

// selected are the containers of a request: each of the pod, running, once.
func (s *Service) selected(ctx context.Context, sb *sandbox.Sandbox, ids []string) ([]*sandbox.Container, oci.Runtime, error) {
	if len(ids) == 0 {
		return nil, nil, fmt.Errorf("%w: container_ids is empty", errInvalid)
	}
	var containers []*sandbox.Container
	var rt oci.Runtime
	for i, id := range ids {
		c, err := s.runningContainer(id)
		if err != nil {
			return nil, nil, fmt.Errorf("container_ids[%d]: %w", i, err)
		}
		if c.SandboxID != sb.ID {
			return nil, nil, fmt.Errorf("%w: container_ids[%d] %q is in another pod", errInvalid, i, id)
		}
		if slices.ContainsFunc(containers, func(other *sandbox.Container) bool { return other.ID == c.ID }) {
			return nil, nil, fmt.Errorf("%w: container_ids[%d] %q is there twice", errInvalid, i, id)
		}
		containers = append(containers, c)
	}
	for _, c := range containers {
		var err error
		if rt, err = s.checkpointRuntime(ctx, c); err != nil {
			return nil, nil, err
		}
	}
	return containers, rt, nil
}

// lockAll takes the locks of containers, in the order of their ids.
func (s *Service) lockAll(ctx context.Context, containers []*sandbox.Container) (unlock func(), err error) {
	var opens []func()
	unlock = func() {
		for _, open := range opens {
			open()
		}
	}
	ids := []string{}
	for _, c := range containers {
		ids = append(ids, c.ID)
	}
	slices.Sort(ids)
	for _, id := range ids {
		open, err := s.locks.Lock(ctx, id)
		if err != nil {
			unlock()
			return nil, err
		}
		opens = append(opens, open)
	}
	return unlock, nil
}

// podCheckpoint is one checkpoint of a pod.
type podCheckpoint struct {
	sb         *sandbox.Sandbox
	rt         oci.Runtime
	containers []*sandbox.Container
	path       string
	served     bool // path is: what is captured goes there when the pod goes on
}

func (s *Service) checkpointPod(ctx context.Context, op *operation.Operation, p podCheckpoint) error {
	op.Step("write record")
	// Whatever kills the daemon now: the next one lets the pod go on.
	if _, err := s.Records.Sandboxes.Update(p.sb.ID, func(sb *sandbox.Sandbox) { sb.Checkpointing = p.path }); err != nil {
		return err
	}
	err := s.captureFrozen(ctx, op, p)
	if err == nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		tidy, cancel := context.WithTimeout(context.WithoutCancel(ctx), discardPatience)
		defer cancel()
		err = errors.Join(fmt.Errorf("checkpoint pod %s: %w", p.sb.ID, err), s.discardCheckpoint(tidy, p.path))
	}
	if _, uerr := s.Records.Sandboxes.Update(p.sb.ID, func(sb *sandbox.Sandbox) { sb.Checkpointing = "" }); uerr != nil {
		s.Log.WithError(uerr).WithField("sandbox", p.sb.ID).Warn("record of a checkpoint's end")
	}
	return err
}

// captureFrozen writes the state of a pod that is frozen meanwhile, and no longer than
// that takes: what does not answer keeps no pod from going on.
func (s *Service) captureFrozen(ctx context.Context, op *operation.Operation, p podCheckpoint) error {
	to := p
	if p.served {
		dir, err := s.Images.Scratch()
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		to.path = dir
	}
	op.Step("freeze the pod")
	err := s.frozen(ctx, p.rt, p.containers, func() error {
		op.Step("write its state")
		return s.capturePod(ctx, to)
	})
	if err != nil || !p.served {
		return err
	}
	op.Step("write the checkpoint")
	if err := s.Outside.Deliver(ctx, to.path, p.path); err != nil {
		return fmt.Errorf("output_path: %w", err)
	}
	return nil
}

// discardPatience is how long the removal of an unfinished checkpoint may take before
// it is left to the next start.
const discardPatience = 5 * time.Second

// discardCheckpoint removes what a checkpoint of a pod has written, and nothing else.
// Idempotent.
func (s *Service) discardCheckpoint(ctx context.Context, dir string) error {
	for _, path := range checkpoint.Made(dir) {
		if err := s.Outside.Remove(ctx, path); err != nil {
			return fmt.Errorf("discard checkpoint: %w", err)
		}
	}
	return nil
}

func (s *Service) capturePod(ctx context.Context, p podCheckpoint) error {
	if err := checkpoint.Begin(p.path, len(p.containers)); err != nil {
		return err
	}
	pod := checkpoint.Pod{Engine: s.Parts.Version, Handler: p.sb.Runtime, Namespaces: namespacesText(p.sb.Namespaces()), CheckpointedAt: time.Now().UTC()}
	for i, c := range p.containers {
		work := filepath.Join(s.bundleDir(c.ID), "checkpointing")
		defer os.RemoveAll(work)
		to := captured{images: checkpoint.Images(p.path, i), diff: checkpoint.RootfsDiff(p.path, i), work: work}
		if err := s.capture(ctx, p.rt, c, to); err != nil {
			return err
		}
		process, err := oci.ReadProcess(s.bundleDir(c.ID))
		if err != nil {
			return err
		}
		pod.Containers = append(pod.Containers, checkpoint.Container{
			Name: c.Config.Message.GetMetadata().GetName(), ImageID: c.ImageID, Process: checkpointProcess(process),
		})
	}
	return checkpoint.Finish(p.path, pod)
}

// namespacesText tells pods apart whose processes cannot move from one to the
// other.
func namespacesText(n *cri.NamespaceOption) string {
	return fmt.Sprintf("network=%s ipc=%s pid=%s", n.GetNetwork(), n.GetIpc(), n.GetPid())
}

// thaw lets pods go on whose checkpoint ended with the daemon, and removes what
// it had written.
func (s *Service) thaw() {
	for _, sb := range s.Records.Sandboxes.List() {
		if sb.Checkpointing == "" || sb.BootID != s.bootID {
			continue
		}
		var err error
		for _, c := range s.Records.ContainersOf(sb.ID) {
			rt, rerr := s.runtimeOf(c)
			if rerr == nil {
				rerr = rt.Resume(c.ID)
			}
			err = errors.Join(err, rerr)
		}
		tidy, cancel := context.WithTimeout(context.Background(), discardPatience)
		err = errors.Join(err, s.discardCheckpoint(tidy, sb.Checkpointing))
		cancel()
		if err == nil {
			_, err = s.Records.Sandboxes.Update(sb.ID, func(sb *sandbox.Sandbox) { sb.Checkpointing = "" })
		}
		if err != nil {
			s.Log.WithError(err).WithField("sandbox", sb.ID).Warn("end a checkpoint that was interrupted")
		}
	}
}
