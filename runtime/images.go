package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/oci/spec"
)

// imageService is CRI's ImageService.
type imageService struct {
	cri.UnimplementedImageServiceServer
	service *Service
}

// maxReference is longer than any reference: a name has at most 255 bytes, a
// tag 128, a digest 136.
const maxReference = 1024

func checkReference(ref string) error {
	if ref == "" {
		return fmt.Errorf("%w: image.image is empty", errInvalid)
	}
	if len(ref) > maxReference {
		return fmt.Errorf("%w: image.image is longer than %d bytes", errInvalid, maxReference)
	}
	return nil
}

// PullImage fetches an image and returns its id, the config digest. A caller
// that gives up ends a pull nobody else waits for.
func (i *imageService) PullImage(ctx context.Context, req *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	ref := req.GetImage().GetImage()
	if err := checkReference(ref); err != nil {
		return nil, err
	}
	if _, err := i.service.handlerName(req.GetImage().GetRuntimeHandler()); err != nil {
		return nil, err
	}
	pull := image.PullRequest{Reference: ref}
	if a := req.GetAuth(); a != nil {
		pull.Credentials = &image.Credentials{
			Username: a.GetUsername(), Password: a.GetPassword(), Auth: a.GetAuth(), ServerAddress: a.GetServerAddress(),
			IdentityToken: a.GetIdentityToken(), RegistryToken: a.GetRegistryToken(),
		}
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

// ImageStatus answers from memory; an absent image is no error but an empty reply.
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
		b, err := json.Marshal(struct {
			ID     string   `json:"id"`
			Layers []string `json:"layers"`
			Spec   any      `json:"imageSpec"`
		}{r.ID, r.Layers, r.Config})
		if err != nil {
			return nil, fmt.Errorf("describe image %s: %w", r.ID, err)
		}
		reply.Info = map[string]string{"info": string(b)}
	}
	return reply, nil
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
// were unpacked.
func (i *imageService) ImageFsInfo(context.Context, *cri.ImageFsInfoRequest) (*cri.ImageFsInfoResponse, error) {
	u := i.service.Images.Usage()
	fs := &cri.FilesystemUsage{
		Timestamp: time.Now().UnixNano(), FsId: &cri.FilesystemIdentifier{Mountpoint: u.Mountpoint},
		UsedBytes: &cri.UInt64Value{Value: u.Bytes}, InodesUsed: &cri.UInt64Value{Value: u.Inodes},
	}
	return &cri.ImageFsInfoResponse{ImageFilesystems: []*cri.FilesystemUsage{fs}, ContainerFilesystems: []*cri.FilesystemUsage{fs}}, nil
}

// criImage shows a record to the kubelet: with a uid or with a username, never both.
func criImage(r *image.Record) *cri.Image {
	out := &cri.Image{Id: r.ID, RepoTags: r.RepoTags, RepoDigests: r.RepoDigests, Size: r.Size, Pinned: r.Pinned}
	out.Uid, out.Username = spec.ImageUser(r.Config.Config.User)
	return out
}
