package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/image/rootfs"
	"berth/oci/spec"
	"berth/runtime/stats"
)

// imageService is CRI's ImageService.
type imageService struct {
	cri.UnimplementedImageServiceServer
	service *Service
}

// PullImage fetches an image and returns its id, the config digest. A caller
// that gives up ends a pull nobody else waits for.
func (i *imageService) PullImage(ctx context.Context, req *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	ref := req.GetImage().GetImage()
	if err := checkReference(ref); err != nil {
		return nil, err
	}
	if _, err := i.service.handlerName(req.GetImage().GetRuntimeHandler()); err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	pull := image.PullRequest{Reference: ref, Namespace: req.GetSandboxConfig().GetMetadata().GetNamespace(),
		Answer: i.service.Outside.Answer}
	if a := req.GetAuth(); a != nil {
		pull.Credentials = &image.Credentials{
			Username: a.GetUsername(), Password: a.GetPassword(), Auth: a.GetAuth(), ServerAddress: a.GetServerAddress(),
			IdentityToken: a.GetIdentityToken(), RegistryToken: a.GetRegistryToken(),
		}
	}
	if err := i.service.answerRegistries(ctx, ref); err != nil {
		return nil, fmt.Errorf("pull image %q: %w", ref, err)
	}
	id, err := i.service.Images.Pull(ctx, pull)
	switch {
	case errors.Is(err, image.ErrRegistryUnavailable): // the kubelet reads the first word
		return nil, prefixed("RegistryUnavailable", err)
	case errors.Is(err, image.ErrSignature):
		return nil, prefixed("SignatureValidationFailed", err)
	case err != nil:
		return nil, fmt.Errorf("pull image %q: %w", ref, err)
	}
	return &cri.PullImageResponse{ImageRef: id}, nil
}

func prefixed(word string, err error) error {
	if strings.HasPrefix(err.Error(), word) {
		return err
	}
	return fmt.Errorf("%s: %w", word, err)
}

// ListImages answers from memory. A filter names one image.
func (i *imageService) ListImages(_ context.Context, req *cri.ListImagesRequest) (*cri.ListImagesResponse, error) {
	list, err := i.list(req.GetFilter())
	if err != nil {
		return nil, err
	}
	return &cri.ListImagesResponse{Images: list}, nil
}

// StreamImages is ListImages in parts.
func (i *imageService) StreamImages(req *cri.StreamImagesRequest, stream grpc.ServerStreamingServer[cri.StreamImagesResponse]) error {
	list, err := i.list(req.GetFilter())
	if err != nil {
		return err
	}
	return inParts(list, func(part []*cri.Image) error {
		return stream.Send(&cri.StreamImagesResponse{Images: part})
	})
}

func (i *imageService) list(f *cri.ImageFilter) ([]*cri.Image, error) {
	records := i.service.Images.List()
	if ref := f.GetImage().GetImage(); ref != "" {
		if err := checkReference(ref); err != nil {
			return nil, err
		}
		r, err := i.service.Images.Resolve(ref)
		if errors.Is(err, image.ErrNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		records = []*image.Record{r}
	}
	out := make([]*cri.Image, 0, len(records))
	for _, r := range records {
		out = append(out, criImage(r))
	}
	return out, nil
}

// ImageStatus answers from memory, but for verbose; an absent image is no error
// but an empty reply.
func (i *imageService) ImageStatus(_ context.Context, req *cri.ImageStatusRequest) (*cri.ImageStatusResponse, error) {
	ref := req.GetImage().GetImage()
	if err := checkReference(ref); err != nil {
		return nil, err
	}
	r, err := i.service.Images.Resolve(ref)
	if errors.Is(err, image.ErrNotFound) {
		return &cri.ImageStatusResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	reply := &cri.ImageStatusResponse{Image: criImage(r)}
	if req.GetVerbose() {
		reply.Info, err = i.info(r)
		if errors.Is(err, image.ErrNotFound) { // removed since
			return &cri.ImageStatusResponse{}, nil
		}
	}
	return reply, err
}

// info is what operators see with crictl inspecti; tools look for the key
// imageSpec, which is the image's config as it came.
func (i *imageService) info(r *image.Record) (map[string]string, error) {
	config, err := i.service.Images.RawConfig(r.ID)
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(struct {
		ID       string          `json:"id"`
		PulledAt time.Time       `json:"pulledAt"`
		Layers   []string        `json:"layers"`
		Artifact string          `json:"artifactType,omitempty"`
		Spec     json.RawMessage `json:"imageSpec"`
	}{r.ID, r.PulledAt, r.Layers, r.Artifact, config})
	if err != nil {
		return nil, fmt.Errorf("describe image %s: %w", r.ID, err)
	}
	return map[string]string{"info": string(b)}, nil
}

// RemoveImage removes an image with all its names; nil for one that is gone.
func (i *imageService) RemoveImage(ctx context.Context, req *cri.RemoveImageRequest) (*cri.RemoveImageResponse, error) {
	ref := req.GetImage().GetImage()
	if err := checkReference(ref); err != nil {
		return nil, err
	}
	if err := i.service.Images.Remove(ctx, ref); err != nil && !errors.Is(err, image.ErrNotFound) {
		return nil, fmt.Errorf("remove image %q: %w", ref, err)
	}
	return &cri.RemoveImageResponse{}, nil
}

// ImageFsInfo tells what images take of their filesystem, counted while they
// were unpacked; and, only when writable layers lie on another filesystem, what
// the containers' directory takes of that.
func (i *imageService) ImageFsInfo(ctx context.Context, _ *cri.ImageFsInfoRequest) (*cri.ImageFsInfoResponse, error) {
	u := i.service.Images.Usage()
	usage := func(at time.Time, dir string, bytes, inodes uint64) []*cri.FilesystemUsage {
		return []*cri.FilesystemUsage{{
			Timestamp: at.UnixNano(), FsId: &cri.FilesystemIdentifier{Mountpoint: dir},
			UsedBytes: &cri.UInt64Value{Value: bytes}, InodesUsed: &cri.UInt64Value{Value: inodes},
		}}
	}
	reply := &cri.ImageFsInfoResponse{ImageFilesystems: usage(time.Now(), u.Mountpoint, u.Bytes, u.Inodes)}
	if d := i.service.writable; d != nil {
		size, err := d.Size(ctx)
		if err != nil {
			return nil, err
		}
		reply.ContainerFilesystems = usage(size.At, d.Path(), size.Bytes, size.Inodes)
	}
	return reply, nil
}

// containerDisk is the containers' directory when it lies on another filesystem
// than the images, else nil. Both exist since records and images were opened.
func containerDisk(root string) (*stats.Directory, error) {
	dir := filepath.Join(root, "containers")
	same, err := stats.SameFilesystem(dir, filepath.Join(root, "images"))
	if err != nil || same {
		return nil, err
	}
	return stats.NewDirectory(dir, rootfs.Usage), nil
}

// layerMountpoint names the filesystem of writable layers as ImageFsInfo does.
func (s *Service) layerMountpoint() string {
	if s.writable != nil {
		return s.writable.Path()
	}
	return s.Images.Usage().Mountpoint
}

// criImage shows a record to the kubelet: with a uid or with a username, never
// both. Every handler uses the same images, so none is named.
func criImage(r *image.Record) *cri.Image {
	out := &cri.Image{Id: r.ID, RepoTags: r.RepoTags, RepoDigests: r.RepoDigests, Size: r.Size, Pinned: r.Pinned,
		Spec: &cri.ImageSpec{Image: r.ID, Annotations: r.Annotations}}
	out.Uid, out.Username = spec.ImageUser(r.Config.Config.User)
	return out
}
