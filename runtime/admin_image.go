package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"berth/image"
	"berth/runtime/admin"
	"berth/sandbox"
)

// listImages answers from memory.
func (s *Service) listImages(context.Context, *admin.ListImagesRequest) (*admin.ListImagesReply, error) {
	users := s.imageUsers()
	reply := &admin.ListImagesReply{Images: []admin.Image{}}
	for _, r := range s.Images.List() {
		reply.Images = append(reply.Images, adminImage(r, users[r.ID]))
	}
	slices.SortStableFunc(reply.Images, func(a, b admin.Image) int {
		x, y := slices.Concat(a.Tags, a.Digests), slices.Concat(b.Tags, b.Digests)
		if (len(x) == 0) != (len(y) == 0) {
			return len(y) - len(x)
		}
		return cmp.Or(slices.Compare(x, y), cmp.Compare(a.ID, b.ID))
	})
	return reply, nil
}

// imageUsers are the containers of each image, by its id.
func (s *Service) imageUsers() map[string][]admin.User {
	users := map[string][]admin.User{}
	for _, c := range s.Records.Containers.List() {
		u := admin.User{Container: c.ID, Name: c.Config.Message.GetMetadata().GetName(), Pod: s.podName(c)}
		ids := []string{c.ImageID}
		for _, id := range c.VolumeImages {
			if !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
		for _, id := range ids {
			users[id] = append(users[id], u)
		}
	}
	return users
}

// podName is namespace/name of a container's pod, or the pod's id.
func (s *Service) podName(c *sandbox.Container) string {
	sb, err := s.Records.Sandboxes.Get(c.SandboxID)
	if err != nil {
		return c.SandboxID
	}
	m := sb.Config.Message.GetMetadata()
	return m.GetNamespace() + "/" + m.GetName()
}

func adminImage(r *image.Record, users []admin.User) admin.Image {
	out := admin.Image{ID: r.ID, Tags: slices.Concat([]string{}, r.RepoTags), Digests: slices.Concat([]string{}, r.RepoDigests),
		Size: r.Size, Pinned: r.Pinned, Artifact: r.Artifact, PulledAt: r.PulledAt, UsedBy: slices.Concat([]admin.User{}, users)}
	if c := r.Config.Created; c != nil && !c.IsZero() {
		out.Created = c
	}
	return out
}

func (s *Service) inspectImage(_ context.Context, req *admin.InspectImageRequest) (*admin.InspectImageReply, error) {
	if err := checkReference(req.Image); err != nil {
		return nil, err
	}
	d, err := s.Images.Inspect(req.Image)
	if err != nil {
		return nil, err
	}
	reply := &admin.InspectImageReply{Image: adminImage(d.Record, s.imageUsers()[d.ID]), Manifest: adminManifest(d.Manifest),
		Others: []admin.Manifest{}, Config: d.Config, Layers: []admin.Layer{}}
	for _, m := range d.Others {
		reply.Others = append(reply.Others, adminManifest(m))
	}
	for _, l := range d.Layers {
		reply.Layers = append(reply.Layers, admin.Layer{DiffID: l.DiffID.String(), Blob: l.Blob.String(), MediaType: l.MediaType,
			BlobSize: l.Size, BlobKept: l.BlobKept, Size: l.Usage.Bytes, Inodes: l.Usage.Inodes, Dir: l.Dir, Durable: l.Durable,
			SharedBy: slices.Concat([]string{}, l.SharedBy)})
	}
	return reply, nil
}

func adminManifest(m image.ManifestDetails) admin.Manifest {
	out := admin.Manifest{Digest: m.Digest.String(), MediaType: m.MediaType, Content: m.Content, Signatures: []string{}}
	for _, d := range m.Signatures {
		out.Signatures = append(out.Signatures, d.String())
	}
	return out
}

// removeImage removes an image with all its names, as CRI's RemoveImage does, but
// one that is not there is an error: an operator's mistake should not pass.
func (s *Service) removeImage(ctx context.Context, req *admin.RemoveImageRequest) (*admin.RemoveImageReply, error) {
	if err := checkReference(req.Image); err != nil {
		return nil, err
	}
	r, err := s.Images.Resolve(req.Image)
	if err != nil {
		return nil, fmt.Errorf("remove image: %w", err)
	}
	d, err := s.Images.Inspect(r.ID)
	if err != nil {
		return nil, err
	}
	reply := &admin.RemoveImageReply{Image: adminImage(d.Record, s.imageUsers()[d.ID])}
	counted := map[string]bool{} // a layer may be there twice
	for _, l := range d.Layers {
		if len(l.SharedBy) == 0 && !counted[l.Dir] {
			counted[l.Dir] = true
			reply.Freed += l.Usage.Bytes
		}
	}
	if err := s.Images.Remove(ctx, d.ID); err != nil {
		return nil, err
	}
	return reply, nil
}

func (s *Service) pinImage(_ context.Context, req *admin.PinImageRequest) (*admin.Image, error) {
	if err := checkReference(req.Image); err != nil {
		return nil, err
	}
	r, err := s.Images.Pin(req.Image, req.Pinned)
	if err != nil {
		return nil, err
	}
	out := adminImage(r, s.imageUsers()[r.ID])
	return &out, nil
}

// importImage reads a docker or OCI archive that lies on the node.
func (s *Service) importImage(ctx context.Context, req *admin.ImportRequest) (*admin.ImportReply, error) {
	if !filepath.IsAbs(req.Path) {
		return nil, fmt.Errorf("%w: path %q is not absolute", errInvalid, req.Path)
	}
	if err := s.answerPolicy(ctx); err != nil {
		return nil, err
	}
	names, err := s.Images.Import(ctx, image.ImportRequest{File: req.Path, Pin: req.Pin, Bring: s.bringArchive})
	if err != nil {
		return nil, err
	}
	return &admin.ImportReply{Images: names}, nil
}

// exportImage writes an archive on the node.
func (s *Service) exportImage(ctx context.Context, req *admin.ExportRequest) (*admin.ExportReply, error) {
	if err := checkReference(req.Image); err != nil {
		return nil, err
	}
	if !filepath.IsAbs(req.Path) {
		return nil, fmt.Errorf("%w: path %q is not absolute", errInvalid, req.Path)
	}
	path := filepath.Clean(req.Path)
	served, err := s.checkExportPath(ctx, path)
	if err != nil {
		return nil, err
	}
	at := path
	if served {
		dir, err := s.Images.Scratch()
		if err != nil {
			return nil, err
		}
		defer os.RemoveAll(dir)
		at = filepath.Join(dir, filepath.Base(path)) // its end says how it is compressed
	}
	e, err := s.Images.Export(ctx, req.Image, at)
	if err == nil && served {
		err = s.Outside.Deliver(ctx, at, path)
	}
	if err != nil {
		return nil, err
	}
	return &admin.ExportReply{ID: e.ID, Names: slices.Concat([]string{}, e.Names), Bytes: e.Bytes, Exact: e.Exact}, nil
}

// bringArchive is an image.Bring.
func (s *Service) bringArchive(ctx context.Context, file string) (image.Brought, error) {
	b := image.Brought{Real: file}
	var err error
	if b.At, b.Done, err = s.brought(ctx, "archive", file); err != nil {
		return b, err
	}
	if f, err := s.Outside.For(ctx).Find(file); err == nil && f.Path != "" {
		b.Real = f.Path
	}
	return b, nil
}

// checkExportPath wants a new file in a directory that is there and not the daemon's
// own: whatever lies in those is a record or may be removed as nobody's. It tells
// whether the directory is served.
func (s *Service) checkExportPath(ctx context.Context, path string) (served bool, err error) {
	dir, err := s.placed(ctx, "path", path)
	if errors.Is(err, fs.ErrExist) {
		return false, fmt.Errorf("export image to %s: %w", path, image.ErrFileExists)
	}
	if err != nil {
		return false, err
	}
	for _, own := range []string{s.Config().Root, s.Config().State} {
		real, err := filepath.EvalSymlinks(own)
		if err != nil {
			return false, fmt.Errorf("resolve %s: %w", own, err)
		}
		if dir.Path == real || strings.HasPrefix(dir.Path, real+"/") {
			return false, fmt.Errorf("%w: path %q is in the daemon's own directory %s", errInvalid, path, own)
		}
	}
	return dir.Served, nil
}
