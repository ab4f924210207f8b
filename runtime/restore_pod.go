package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/layer"
	"berth/oci"
	"berth/oci/checkpoint"
	"berth/runtime/operation"
	"berth/sandbox"
)

// RestorePod makes a pod and its containers from a checkpoint of CheckpointPod
// (KEP-5823). The containers are CREATED; StartContainer lets their processes go
// on. The checkpoint gives the state of processes and files and nothing else:
// mounts, devices, names, limits, labels are the request's. It is copied, never
// changed. On an error nothing is left.
func (s *Service) RestorePod(ctx context.Context, req *cri.RestorePodRequest) (*cri.RestorePodResponse, error) {
	left, err := deadlineOf(ctx)
	if err != nil {
		return nil, err
	}
	run := &cri.RunPodSandboxRequest{Config: req.GetConfig(), RuntimeHandler: req.GetRuntimeHandler()}
	if err := s.checkSandbox(run); err != nil {
		return nil, err
	}
	if err := checkOptions(req.GetOptions()); err != nil {
		return nil, err
	}
	at, done, err := s.broughtCheckpoint(ctx, req.GetCheckpointPath())
	if err != nil {
		return nil, err
	}
	pod, err := s.readCheckpoint(ctx, req, at)
	if err != nil {
		done()
		return nil, err
	}
	var begun atomic.Bool // a call that joins another one does not restore
	name := sandbox.SandboxName(req.GetConfig().GetMetadata())
	id, err := s.operations.Do(ctx, operation.Request{
		Key: "run " + name, Verb: "RestorePod", Object: name, Limit: left,
	}, func(ctx context.Context, op *operation.Operation) (string, error) {
		if begun.Swap(true) {
			return "", context.Canceled // its caller has gone before
		}
		defer done()
		if old, err := s.Records.Sandboxes.Named(name); err == nil {
			return "", fmt.Errorf("%w: %q is %s; a pod is restored only anew", sandbox.ErrNameInUse, name, old.ID)
		}
		return s.restorePod(ctx, op, run, restoring{req, at, pod})
	})
	if !begun.Swap(true) {
		done()
	}
	if err != nil {
		return nil, refused(err)
	}
	reply := &cri.RestorePodResponse{PodSandboxId: id}
	for _, c := range s.Records.ContainersOf(id) {
		reply.RestoredContainers = append(reply.RestoredContainers, &cri.RestoredContainer{Name: c.Config.Message.GetMetadata().GetName(), ContainerId: c.ID})
	}
	return reply, nil
}

// broughtCheckpoint is a checkpoint that the daemon may read; see brought.
func (s *Service) broughtCheckpoint(ctx context.Context, path string) (at string, done func(), err error) {
	if !filepath.IsAbs(path) {
		return "", nil, fmt.Errorf("%w: checkpoint_path %q is not absolute", errInvalid, path)
	}
	return s.brought(ctx, "checkpoint_path", path)
}

// readCheckpoint reads the checkpoint, which is at a path of the daemon's choice, and compares it to the request as far as
// that is possible before anything is made.
func (s *Service) readCheckpoint(ctx context.Context, req *cri.RestorePodRequest, at string) (*checkpoint.Pod, error) {
	if len(req.GetContainerConfigs()) == 0 {
		return nil, fmt.Errorf("%w: container_configs is empty", errInvalid)
	}
	for i, c := range req.GetContainerConfigs() {
		if err := checkContainer(c); err != nil {
			return nil, fmt.Errorf("container_configs[%d]: %w", i, err)
		}
	}
	pod, err := checkpoint.Read(at)
	if err != nil {
		return nil, fmt.Errorf("checkpoint_path %q: %w", req.GetCheckpointPath(), err)
	}
	if err := sameContainers(pod, req.GetContainerConfigs()); err != nil {
		return nil, err
	}
	handler, err := s.handlerName(req.GetRuntimeHandler())
	if err != nil {
		return nil, err
	}
	if pod.Handler != handler {
		return nil, fmt.Errorf("%w: runtime_handler %q: the checkpoint was made with %q", errInvalid, req.GetRuntimeHandler(), pod.Handler)
	}
	for i, c := range req.GetContainerConfigs() {
		if err := s.checkAbilities(handler, c); err != nil {
			return nil, fmt.Errorf("container_configs[%d]: %w", i, err)
		}
	}
	wanted := &sandbox.Sandbox{Config: sandbox.Config[*cri.PodSandboxConfig]{Message: req.GetConfig()}}
	if podIDs(wanted) != nil {
		return nil, fmt.Errorf("%w: config.linux.security_context.namespace_options.userns_options.mode %q: no checkpoint is made in a user namespace", errInvalid, cri.NamespaceMode_POD)
	}
	if text := namespacesText(wanted.Namespaces()); text != pod.Namespaces {
		return nil, fmt.Errorf("%w: config.linux.security_context.namespace_options: %s, but the checkpoint was made with %s", errInvalid, text, pod.Namespaces)
	}
	return pod, s.Handlers[handler].CanCheckpoint(ctx)
}

// sameContainers wants the same names in the request as in the checkpoint.
func sameContainers(pod *checkpoint.Pod, configs []*cri.ContainerConfig) error {
	var have, want []string
	for _, c := range pod.Containers {
		have = append(have, c.Name)
	}
	for i, c := range configs {
		name := c.GetMetadata().GetName()
		if slices.Contains(want, name) {
			return fmt.Errorf("%w: container_configs[%d].metadata.name %q is there twice", errInvalid, i, name)
		}
		want = append(want, name)
	}
	slices.Sort(have)
	slices.Sort(want)
	if !slices.Equal(have, want) {
		return fmt.Errorf("%w: container_configs name %q, the checkpoint has %q", errInvalid, want, have)
	}
	return nil
}

// restoring is a request with its checkpoint.
type restoring struct {
	*cri.RestorePodRequest
	at  string // where the checkpoint is read
	pod *checkpoint.Pod
}

// restorePod runs the pod and makes its containers; what fails removes it all.
func (s *Service) restorePod(ctx context.Context, op *operation.Operation, run *cri.RunPodSandboxRequest, r restoring) (string, error) {
	id, err := s.runSandbox(ctx, op, run)
	if err != nil {
		return "", err
	}
	err = s.restoreContainers(ctx, op, id, r)
	if err == nil {
		return id, nil
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), operationLimit)
	defer cancel()
	open, lerr := s.locks.Lock(undo, id)
	if lerr != nil {
		return "", errors.Join(err, lerr)
	}
	defer open()
	if uerr := s.removeSandbox(undo, id); uerr != nil {
		s.markStopped(id)
		err = fmt.Errorf("%w; and undoing it: %w", err, uerr)
	}
	return "", err
}

func (s *Service) restoreContainers(ctx context.Context, op *operation.Operation, id string, r restoring) error {
	sb, err := s.readySandbox(id)
	if err != nil {
		return err
	}
	for i, had := range r.pod.Containers {
		n := slices.IndexFunc(r.GetContainerConfigs(), func(c *cri.ContainerConfig) bool { return c.GetMetadata().GetName() == had.Name })
		from := &restored{dir: r.at, index: i, had: had}
		if _, err := s.createContainer(ctx, op, sb, r.GetContainerConfigs()[n], from); err != nil {
			return fmt.Errorf("container_configs[%d]: %w", n, err)
		}
	}
	return nil
}

// restored is one container of a checkpoint.
type restored struct {
	dir   string // of the pod's checkpoint
	index int
	had   checkpoint.Container
}

// restoredImages is where a restored container keeps CRIU's images until it is
// started.
func (s *Service) restoredImages(id string) string {
	return filepath.Join(s.Records.Containers.Dir(id), "checkpoint")
}

// fillUpper puts the checkpoint's files into the container's writable layer,
// before that is mounted. They are unpacked as those of any strange image.
func (s *Service) fillUpper(ctx context.Context, c *sandbox.Container, from *restored) error {
	if c.ImageID != from.had.ImageID {
		return fmt.Errorf("%w: config.image is %s, the checkpoint was made of %s", errInvalid, c.ImageID, from.had.ImageID)
	}
	upper := filepath.Join(s.Records.Containers.Dir(c.ID), "upper")
	if err := os.Mkdir(upper, 0o755); err != nil {
		return fmt.Errorf("make writable layer: %w", err)
	}
	path := checkpoint.RootfsDiff(from.dir, from.index)
	f, err := checkpoint.Open(from.dir, path)
	if err != nil {
		return fmt.Errorf("read files of the checkpoint: %w", err)
	}
	defer f.Close()
	if _, err := layer.Unpack(ctx, upper, f, layer.Limits{}); err != nil {
		return fmt.Errorf("unpack files of the checkpoint: %w", err)
	}
	return nil
}

// recordRestored ends the making of a restored container: its process is that of
// the checkpoint if the request describes the same one.
func (s *Service) recordRestored(c *sandbox.Container, process *rspec.Process, from *restored) error {
	want, had := checkpointProcess(process), from.had.Process
	for _, f := range []struct {
		field     string
		want, had any
	}{
		{"command and args", want.Args, had.Args}, {"envs", want.Env, had.Env}, {"working_dir", want.Cwd, had.Cwd},
		{"linux.security_context user", [2]uint32{want.UID, want.GID}, [2]uint32{had.UID, had.GID}},
	} {
		if !reflect.DeepEqual(f.want, f.had) {
			return fmt.Errorf("%w: %s: the request makes them %q, the checkpointed process has %q", errInvalid, f.field, fmt.Sprint(f.want), fmt.Sprint(f.had))
		}
	}
	if err := checkpoint.CopyImages(from.dir, from.index, s.restoredImages(c.ID)); err != nil {
		return err
	}
	_, err := s.Records.Containers.TryUpdate(c.ID, func(c *sandbox.Container) {
		c.Restore, c.User, c.MadeAt = true, userOf(process.User), time.Now().UnixNano()
	})
	return err
}

func checkpointProcess(p *rspec.Process) checkpoint.Process {
	return checkpoint.Process{Args: p.Args, Env: p.Env, Cwd: p.Cwd, UID: p.User.UID, GID: p.User.GID}
}

// startRestored lets the processes of a checkpoint go on as a container's.
func (s *Service) startRestored(ctx context.Context, rt oci.Runtime, sb *sandbox.Sandbox, c *sandbox.Container) error {
	r, err := s.createRequest(ctx, sb, c, uint32(c.User.UID), uint32(c.User.GID))
	if err != nil {
		return err
	}
	r.Restore = s.restoredImages(c.ID)
	p, err := s.createInRuntime(ctx, rt, r)
	if err != nil {
		return err
	}
	_, err = s.Records.Containers.Update(c.ID, func(c *sandbox.Container) {
		c.Process = &sandbox.Process{PID: p.PID, StartTime: p.StartTime}
	})
	if err != nil {
		return err
	}
	return os.RemoveAll(r.Restore)
}

// dropHalfRestored ends processes of a restored container whose record a killed
// daemon could not write; it can be started again.
func (s *Service) dropHalfRestored(ctx context.Context) {
	for _, c := range s.Records.Containers.List() {
		if !c.Restore || c.Process != nil || c.FinishedAt != 0 || c.BootID != s.bootID {
			continue
		}
		rt, err := s.runtimeOf(c)
		if err == nil {
			err = rt.Delete(ctx, c.ID)
		}
		if err != nil {
			s.Log.WithError(err).WithField("container", c.ID).Warn("end a restore that was interrupted")
		}
	}
}
