package runtime

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/layer"
	"berth/oci"
	"berth/oci/checkpoint"
	"berth/runtime/operation"
	"berth/sandbox"
)

// CheckpointContainer writes an archive of a running container's processes and
// files, see package checkpoint (KEP-2008). The container goes on. A timeout of
// 0 is berth's own limit of an operation. On an error nothing is at location.
func (s *Service) CheckpointContainer(ctx context.Context, req *cri.CheckpointContainerRequest) (*cri.CheckpointContainerResponse, error) {
	c, err := s.runningContainer(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	served, err := s.checkLocation(ctx, req.GetLocation())
	if err != nil {
		return nil, err
	}
	limit := operationLimit
	if t := req.GetTimeout(); t < 0 {
		return nil, fmt.Errorf("%w: timeout %d is negative", errInvalid, t)
	} else if t > 0 {
		limit = time.Duration(min(t, int64(maxGrace/time.Second))) * time.Second
	}
	rt, err := s.checkpointRuntime(ctx, c)
	if err != nil {
		return nil, err
	}
	_, err = s.operations.Do(ctx, operation.Request{
		Key: "checkpoint " + c.ID + " " + req.GetLocation(), Verb: "CheckpointContainer", Object: c.Name, Limit: limit,
	}, func(ctx context.Context, op *operation.Operation) (string, error) {
		open, err := s.locks.Lock(ctx, c.ID)
		if err != nil {
			return "", err
		}
		defer open()
		return "", s.checkpointContainer(ctx, op, rt, c, placedFile{req.GetLocation(), served})
	})
	if err != nil {
		return nil, err
	}
	return &cri.CheckpointContainerResponse{}, nil
}

// placedFile is where an archive goes.
type placedFile struct {
	path   string
	served bool
}

// checkLocation refuses what cannot become a new file, and tells whether it is served.
func (s *Service) checkLocation(ctx context.Context, path string) (served bool, err error) {
	if !filepath.IsAbs(path) || strings.ContainsFunc(path, unicode.IsControl) || strings.HasSuffix(path, "/") {
		return false, fmt.Errorf("%w: location %q is no absolute path of a file", errInvalid, path)
	}
	dir, err := s.placed(ctx, "location", path)
	if errors.Is(err, fs.ErrExist) {
		err = fmt.Errorf("location %q: %w", path, checkpoint.ErrExists)
	}
	return dir.Served, err
}

// checkpointRuntime is the OCI runtime of a container that can be checkpointed.
// FailedPrecondition for one whose state no restore could take up again.
func (s *Service) checkpointRuntime(ctx context.Context, c *sandbox.Container) (oci.Runtime, error) {
	sb, err := s.Records.Sandboxes.Get(c.SandboxID)
	if err != nil {
		return nil, err
	}
	if c.SharedPIDs {
		return nil, fmt.Errorf("%w: container %s shares its PID namespace; only one with its own can be checkpointed", errPrecondition, c.ID)
	}
	if u := sb.Namespaces().GetUsernsOptions(); u != nil && u.GetMode() == cri.NamespaceMode_POD {
		return nil, fmt.Errorf("%w: pod %s has a user namespace; its containers cannot be checkpointed", errPrecondition, sb.ID)
	}
	rt, err := s.runtimeOf(c)
	if err != nil {
		return nil, err
	}
	return rt, rt.CanCheckpoint(ctx)
}

func (s *Service) checkpointContainer(ctx context.Context, op *operation.Operation, rt oci.Runtime, c *sandbox.Container, location placedFile) error {
	scratch := filepath.Join(s.Records.Containers.Dir(c.ID), "checkpointing")
	if err := os.RemoveAll(scratch); err != nil { // of a daemon that was killed
		return fmt.Errorf("remove an earlier attempt: %w", err)
	}
	if err := os.Mkdir(scratch, 0o700); err != nil {
		return fmt.Errorf("make directory for the checkpoint: %w", err)
	}
	defer os.RemoveAll(scratch)
	a := checkpoint.Archive{
		Config: s.checkpointConfig(c), Arch: s.Host.Arch, Scratch: scratch,
		Images: filepath.Join(scratch, "images"), Spec: filepath.Join(s.bundleDir(c.ID), "config.json"),
		RootfsDiff: filepath.Join(scratch, "rootfs-diff.tar"), Log: filepath.Join(scratch, "work", "dump.log"),
	}
	op.Step("freeze the container")
	err := s.frozen(ctx, rt, []*sandbox.Container{c}, func() error {
		op.Step("write its state")
		return s.capture(ctx, rt, c, captured{images: a.Images, diff: a.RootfsDiff, work: filepath.Join(scratch, "work")})
	})
	if err != nil {
		return err
	}
	op.Step("write the archive")
	if !location.served {
		return checkpoint.WriteArchive(ctx, location.path, a)
	}
	own := filepath.Join(scratch, "archive.tar")
	if err := checkpoint.WriteArchive(ctx, own, a); err != nil {
		return err
	}
	if err := s.Outside.Deliver(ctx, own, location.path); err != nil {
		return fmt.Errorf("write checkpoint: location: %w", err)
	}
	return nil
}

func (s *Service) checkpointConfig(c *sandbox.Container) checkpoint.Config {
	config := c.Config.Message
	name := config.GetImage().GetUserSpecifiedImage()
	if name == "" {
		name = config.GetImage().GetImage()
	}
	return checkpoint.Config{
		ID: c.ID, Name: config.GetMetadata().GetName(), ImageName: name, ImageRef: c.ImageID, Runtime: c.Handler,
		Version: s.Parts.Version, CreatedAt: time.Unix(0, c.CreatedAt).UTC(), CheckpointedAt: time.Now().UTC(),
	}
}

// captured says where a container's state is written.
type captured struct {
	images string // of CRIU
	diff   string // the writable layer's tar
	work   string // logs
}

// capture writes the state of a frozen container.
func (s *Service) capture(ctx context.Context, rt oci.Runtime, c *sandbox.Container, to captured) error {
	if err := rt.Checkpoint(ctx, c.ID, oci.Checkpoint{Images: to.images, Work: to.work}); err != nil {
		return err
	}
	f, err := os.OpenFile(to.diff, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write files of container %s: %w", c.ID, err)
	}
	err = layer.Pack(ctx, f, filepath.Join(s.Records.Containers.Dir(c.ID), "upper"))
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// frozen runs f while all the containers are frozen. They go on in any case, and
// before it returns.
func (s *Service) frozen(ctx context.Context, rt oci.Runtime, containers []*sandbox.Container, f func() error) (err error) {
	for _, c := range containers {
		defer func() {
			if rerr := rt.Resume(c.ID); rerr != nil && err == nil {
				err = rerr
			}
		}()
		if err := rt.Pause(ctx, c.ID); err != nil {
			return err
		}
	}
	return f()
}
