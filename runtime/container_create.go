package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/sirupsen/logrus"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/image/rootfs"
	"berth/oci"
	"berth/oci/spec"
	"berth/runtime/config"
	"berth/runtime/operation"
	"berth/runtime/resolve"
	"berth/sandbox"
	"berth/sandbox/regular"
)

// CreateContainer makes a container up to the point where its process waits to
// be started. The same metadata again joins a running attempt or returns the
// container made; AlreadyExists when that is another one, see sameContainer.
func (s *Service) CreateContainer(ctx context.Context, req *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error) {
	if err := checkContainer(req.GetConfig()); err != nil {
		return nil, err
	}
	sb, err := s.readySandbox(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if err := s.checkPins(sb); err != nil {
		return nil, err
	}
	if err := spec.CheckContainer(req.GetConfig(), sb.Config.Message); err != nil {
		return nil, refused(err)
	}
	if err := s.checkAbilities(sb.Runtime, req.GetConfig()); err != nil {
		return nil, err
	}
	name := sandbox.ContainerName(req.GetConfig().GetMetadata(), sb.ID)
	id, err := s.operations.Do(ctx, operation.Request{
		Key: "create " + name, Verb: "CreateContainer", Object: name, Limit: operationLimit,
	}, func(ctx context.Context, op *operation.Operation) (string, error) {
		if old, err := s.Records.Containers.Named(name); err == nil {
			if old.MadeAt != 0 {
				return old.ID, nil
			}
			op.Step("remove what an earlier attempt left")
			if err := s.removeContainer(ctx, old.ID); err != nil {
				return "", fmt.Errorf("remove what an earlier attempt at %s left: %w", name, err)
			}
		}
		return s.createContainer(ctx, op, sb, req.GetConfig(), nil)
	})
	if err == nil {
		err = s.sameContainer(id, req.GetConfig())
	}
	if err != nil {
		return nil, refused(err)
	}
	return &cri.CreateContainerResponse{ContainerId: id}, nil
}

// refused lets an error begin with the word that the kubelet looks for.
func refused(err error) error {
	if errors.Is(err, image.ErrSignature) {
		return prefixed("SignatureValidationFailed", err)
	}
	if errors.Is(err, spec.ErrImageVolume) {
		return prefixed(spec.ErrImageVolume.Error(), err)
	}
	return err
}

// readySandbox finds a sandbox that takes containers.
func (s *Service) readySandbox(id string) (*sandbox.Sandbox, error) {
	sb, err := s.findSandbox(id)
	if err != nil {
		return nil, err
	}
	if !sb.Ready(s.bootID) {
		return nil, fmt.Errorf("%w: pod sandbox %s is not ready", errPrecondition, sb.ID)
	}
	return sb, nil
}

// createContainer is a container's birth, one step after the other. Whatever
// fails, removeContainer undoes it. from is the checkpoint it goes on from, or nil.
func (s *Service) createContainer(ctx context.Context, op *operation.Operation, sb *sandbox.Sandbox, config *cri.ContainerConfig, from *restored) (string, error) {
	op.Step("find image")
	images, err := s.findImages(config)
	if err != nil {
		return "", err
	}
	op.Step("ask the signature policy")
	if err := s.admitImages(ctx, sb, config, images); err != nil {
		return "", err
	}
	c, err := s.newContainer(sb, config, images)
	if err != nil {
		return "", err
	}
	open, err := s.locks.Lock(ctx, c.ID)
	if err != nil {
		return "", err
	}
	op.Step("write record")
	if err := s.Records.Containers.Create(c); err != nil {
		open()
		return "", err
	}
	err = func() error {
		defer open() // also when it panics: whoever removes the container waits for the lock
		err := s.make(ctx, op, c, images, from)
		if err == nil {
			s.plugins.Settled(c.ID)
			s.plugins.PostCreateContainer(ctx, c.ID)
		}
		return err
	}()
	if err != nil {
		err = fmt.Errorf("create container %s at step %s: %w", config.GetMetadata().GetName(), op.Broken(), err)
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), operationLimit)
		defer cancel()
		if uerr := s.removeContainer(undo, c.ID); uerr != nil {
			err = fmt.Errorf("%w; and undoing it: %w", err, uerr)
		}
		return "", err
	}
	return c.ID, nil
}

// make has every effect of a container; removeContainer undoes all of them.
// The record stands before the sandbox is asked once more whether it is ready:
// a stop that began meanwhile either sees the record or is seen here.
func (s *Service) make(ctx context.Context, op *operation.Operation, c *sandbox.Container, images containerImages, from *restored) error {
	sb, err := s.readySandbox(c.SandboxID)
	if err != nil {
		return err
	}
	rt, err := s.runtimeOfPod(sb)
	if err != nil {
		return err
	}
	if from != nil {
		op.Step("unpack files of the checkpoint")
		if err := s.fillUpper(ctx, c, from); err != nil {
			return err
		}
	}
	volumes, err := s.mountImages(op, sb, c, images)
	if err != nil {
		return err
	}
	op.Step("resolve users, devices, mounts")
	in, err := s.specInput(ctx, sb, c, images.root, volumes)
	if err != nil {
		return err
	}
	sp, err := s.specify(ctx, op, sb, c, in)
	if err != nil {
		return err
	}
	op.Step("write bundle")
	if err := oci.WriteBundle(s.bundleDir(c.ID), sp); err != nil {
		return err
	}
	if from != nil {
		op.Step("take over the checkpoint")
		return s.recordRestored(c, sp.Process, from)
	}
	op.Step("make the log's directory")
	req, err := s.createRequest(ctx, sb, c, sp.Process.User.UID, sp.Process.User.GID)
	if err != nil {
		return err
	}
	op.Step("create in the OCI runtime")
	p, err := s.createUnlessStopped(ctx, rt, sb.ID, req)
	if err != nil {
		return blameLimit(err, "config.linux.resources.", c.EffectiveResources())
	}
	op.Step("write created record")
	// Nobody shall see a container that is removed again because of its record.
	_, err = s.Records.Containers.TryUpdate(c.ID, func(c *sandbox.Container) {
		c.Process = &sandbox.Process{PID: p.PID, StartTime: p.StartTime}
		c.User = userOf(sp.Process.User)
		c.MadeAt = time.Now().UnixNano()
	})
	return err
}

// createUnlessStopped ends the OCI runtime's command when the pod is stopped: the
// stop waits for it, and the container would only be removed again.
func (s *Service) createUnlessStopped(ctx context.Context, rt oci.Runtime, pod string, req oci.CreateRequest) (oci.Process, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.podLife.of(pod), func() { cancel(errPodStopped) })()
	// Only now: a stop that marks the pod after this finds the life to end.
	if _, err := s.readySandbox(pod); err != nil {
		s.podLife.end(pod)
		return oci.Process{}, err
	}
	p, err := s.createInRuntime(ctx, rt, req)
	if err != nil && errors.Is(context.Cause(ctx), errPodStopped) {
		return p, fmt.Errorf("%w: %w: %v", errPrecondition, errPodStopped, err)
	}
	return p, err
}

// createRequest is what the OCI runtime is told of a container beside its bundle.
// It makes the directories of the log.
func (s *Service) createRequest(ctx context.Context, sb *sandbox.Sandbox, c *sandbox.Container, uid, gid uint32) (oci.CreateRequest, error) {
	config := c.Config.Message
	log, err := s.makeLog(ctx, sb, config.GetLogPath())
	if err != nil {
		return oci.CreateRequest{}, err
	}
	return oci.CreateRequest{ID: c.ID, Bundle: s.bundleDir(c.ID), SystemdCgroup: bySystemd(sb), IO: oci.IO{
		LogPath: log, Terminal: config.GetTty(), Stdin: config.GetStdin(), StdinOnce: config.GetStdinOnce(),
		MaxLine: s.Config().Runtime.MaxLogLine, UID: podIDs(sb).HostUID(uid), GID: podIDs(sb).HostGID(gid),
	}}, nil
}

// injectCDI adds the CDI devices that the request names.
func (s *Service) injectCDI(ctx context.Context, sp *rspec.Spec, config *cri.ContainerConfig) error {
	names, err := spec.CDIDevices(config)
	if err != nil {
		return err
	}
	return s.injectDevices(ctx, sp, names)
}

// specify makes a container's specification: what the request asks for, the CDI
// devices it names, and last what NRI plugins adjust.
func (s *Service) specify(ctx context.Context, op *operation.Operation, sb *sandbox.Sandbox, c *sandbox.Container, in spec.ContainerInput) (*rspec.Spec, error) {
	op.Step("relabel volumes")
	if err := s.relabelMounts(ctx, in); err != nil {
		return nil, err
	}
	op.Step("make spec")
	sp, warnings, err := spec.Container(in)
	if err != nil {
		return nil, err
	}
	for _, w := range warnings {
		s.warn(logrus.Fields{"container": c.ID, "sandbox": sb.ID}, w)
	}
	op.Step("look at CDI files")
	if err := s.injectCDI(ctx, sp, c.Config.Message); err != nil {
		return nil, err
	}
	op.Step("ask NRI plugins")
	return sp, s.adjustByPlugins(ctx, sb, c, sp)
}

func userOf(user rspec.User) sandbox.User {
	u := sandbox.User{UID: int64(user.UID), GID: int64(user.GID)}
	for _, g := range user.AdditionalGids {
		u.Groups = append(u.Groups, int64(g))
	}
	return u
}

// mountRootfs holds the image's layers, as they are by now, and mounts them.
// ErrNotFound of package image when the image was removed since it was found.
func (s *Service) mountRootfs(sb *sandbox.Sandbox, c *sandbox.Container, img *image.Record) error {
	labels, err := s.containerLabels(sb, c.Config.Message)
	if err != nil {
		return err
	}
	held := s.Images.Hold(img.ID, c.ID)
	if held == nil {
		return fmt.Errorf("hold layers of image %s: %w", img.ID, image.ErrNotFound)
	}
	if err := s.makeBundle(sb, c.ID); err != nil {
		return err
	}
	dir := s.Records.Containers.Dir(c.ID)
	return rootfs.Create(rootfs.Mount{
		Target: s.rootfsDir(c.ID), Upper: filepath.Join(dir, "upper"), Work: filepath.Join(dir, "work"), Layers: held.Layers,
		IDs: s.rootfsIDs(sb), Context: labels.Mount,
	})
}

// specInput gathers what the pure spec needs; resolve is its only look outside.
// volumes are where the images of the container's image mounts are.
func (s *Service) specInput(ctx context.Context, sb *sandbox.Sandbox, c *sandbox.Container, img *image.Record, volumes map[int]string) (spec.ContainerInput, error) {
	in := spec.ContainerInput{
		ID: c.ID, SandboxID: sb.ID, Config: c.Config.Message, Sandbox: sb.Config.Message, Image: &img.Config, Host: s.host(),
		CgroupsPath: cgroupsPath(sb, c.ID),
		Rootfs:      s.rootfsDir(c.ID),
		Files: spec.Files{
			Hosts: s.podFile(sb.ID, "hosts"), Hostname: s.podFile(sb.ID, "hostname"), ResolvConf: s.podFile(sb.ID, "resolv.conf"),
			Shm: s.shmPath(sb.ID),
		},
		Options:  s.specOptions(sb),
		Hostname: s.visibleHostname(sb),
	}
	if sb.Namespaces().GetIpc() == cri.NamespaceMode_NODE {
		in.Files.Shm = "/dev/shm"
	}
	var err error
	if in.Namespaces, err = s.containerNamespaces(sb, c.Config.Message); err != nil {
		return in, err
	}
	if in.Labels, err = s.containerLabels(sb, c.Config.Message); err != nil {
		return in, err
	}
	in.Resolved, err = resolve.Resolve(resolve.Request{
		Config: c.Config.Message, Sandbox: sb.Config.Message, Image: &img.Config, Rootfs: in.Rootfs, Host: s.host(),
		ImageRoots: volumes, StrictSources: s.Config().Runtime.MissingHostPath == config.Refuse,
		Outside: s.Outside.For(ctx),
	})
	if err != nil {
		return in, err
	}
	return in, s.checkMappedMounts(sb, in)
}

// visibleHostname is what HOSTNAME says in the pod's containers.
func (s *Service) visibleHostname(sb *sandbox.Sandbox) string {
	if sb.Namespaces().GetNetwork() == cri.NamespaceMode_NODE {
		if h, err := os.Hostname(); err == nil {
			return h
		}
	}
	return hostnameOf(sb)
}

// containerNamespaces are the pod's, with the PID namespace that the
// container's own mode asks for.
func (s *Service) containerNamespaces(sb *sandbox.Sandbox, config *cri.ContainerConfig) (spec.Namespaces, error) {
	ns := s.joinedNamespaces(sb)
	const field = "config.linux.security_context.namespace_options"
	pid, err := spec.PIDMode(config, sb.Config.Message)
	if err != nil {
		return ns, err
	}
	switch pid {
	case cri.NamespaceMode_POD:
		if sb.Pause == nil {
			return ns, fmt.Errorf("%w: pod sandbox %s has no pause process", errPrecondition, sb.ID)
		}
		ns.PID = fmt.Sprintf("/proc/%d/ns/pid", sb.Pause.PID)
	case cri.NamespaceMode_TARGET:
		target, err := s.runningContainer(config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetTargetId())
		if err != nil {
			return ns, fmt.Errorf("%s.target_id: %w", field, err)
		}
		if target.SandboxID != sb.ID {
			return ns, fmt.Errorf("%w: %s.target_id %s is in another pod", errInvalid, field, target.ID)
		}
		ns.PID = fmt.Sprintf("/proc/%d/ns/pid", target.Process.PID)
	}
	return ns, nil
}

func (s *Service) newContainer(sb *sandbox.Sandbox, config *cri.ContainerConfig, images containerImages) (*sandbox.Container, error) {
	img := images.root
	log, err := logPath(sb.Config.Message.GetLogDirectory(), config.GetLogPath())
	if err != nil {
		return nil, err
	}
	signal, err := stopSignal(config.GetStopSignal(), img.Config.Config.StopSignal)
	if err != nil {
		return nil, err
	}
	pid, err := spec.PIDMode(config, sb.Config.Message)
	if err != nil {
		return nil, err
	}
	return &sandbox.Container{
		ID:           newID(),
		Name:         sandbox.ContainerName(config.GetMetadata(), sb.ID),
		SandboxID:    sb.ID,
		Handler:      sb.Runtime,
		Config:       sandbox.Config[*cri.ContainerConfig]{Message: config},
		BootID:       s.bootID,
		ImageID:      img.ID,
		ImageRef:     imageRef(img, config.GetImage()),
		VolumeImages: images.volumeIDs(),
		CreatedAt:    time.Now().UnixNano(),
		LogPath:      log,
		StopSignal:   signal,
		SharedPIDs:   pid != cri.NamespaceMode_CONTAINER,
	}, nil
}

// findImage takes an image that the kubelet names, by id or reference; field is
// where it does.
func (s *Service) findImage(field string, i *cri.ImageSpec) (*image.Record, error) {
	if err := checkReference(i.GetImage()); err != nil {
		return nil, fmt.Errorf("%s: %w", strings.TrimSuffix(field, ".image"), err)
	}
	if _, err := s.handlerName(i.GetRuntimeHandler()); err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	img, err := s.Images.Resolve(i.GetImage())
	if err != nil {
		return nil, fmt.Errorf("%s.image: %w", field, err)
	}
	return img, nil
}

// imageRef is the digest reference of an image, in the repository the user
// named where that is known, else its id.
func imageRef(img *image.Record, i *cri.ImageSpec) string {
	for _, d := range img.RepoDigests {
		repo, _, _ := strings.Cut(d, "@")
		if u := i.GetUserSpecifiedImage(); u == repo || strings.HasPrefix(u, repo+":") || strings.HasPrefix(u, repo+"@") {
			return d
		}
	}
	if len(img.RepoDigests) > 0 {
		return img.RepoDigests[0]
	}
	return img.ID
}

// logPath joins a container's log path to its pod's directory, out of which
// it may not lead.
func logPath(dir, path string) (string, error) {
	if dir == "" || path == "" {
		return "", nil
	}
	if !filepath.IsLocal(path) {
		return "", fmt.Errorf("%w: config.log_path %q leads out of the pod's log directory", errInvalid, path)
	}
	return filepath.Join(dir, path), checkLength("config.log_path", path)
}

// makeLog makes what a container's log needs to be opened, and tells where it
// really is; empty for none. A pod that can write to the node's logs can put a
// symlink there at any time, so whoever opens the file is to insist on its absence.
func (s *Service) makeLog(ctx context.Context, sb *sandbox.Sandbox, path string) (string, error) {
	dir := sb.Config.Message.GetLogDirectory()
	if dir == "" || path == "" {
		return "", nil
	}
	log, err := s.Outside.For(ctx).MakeLog(dir, path)
	if errors.Is(err, regular.ErrNot) {
		return "", spec.Invalid("config.log_path", path, err.Error())
	}
	if err != nil {
		return "", fmt.Errorf("make log directory of config.log_path %q: %w", path, err)
	}
	return log, nil
}
