package runtime

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"berth/image"
	"berth/image/layer"
	"berth/image/rootfs"
	"berth/runtime/admin"
)

// checkImages compares what is stored with what came.
func (s *Service) checkImages(ctx context.Context, req *admin.CheckRequest) (*admin.CheckReply, error) {
	for _, ref := range req.Images {
		if err := checkReference(ref); err != nil {
			return nil, err
		}
	}
	r, err := s.Images.Check(ctx, req.Images, req.Repair)
	if err != nil {
		return nil, err
	}
	reply := &admin.CheckReply{Images: r.Images, Layers: r.Layers, Findings: []admin.Finding{}, Repairs: []admin.Repair{}}
	for _, f := range r.Findings {
		out := admin.Finding{Images: []string{}, Layer: f.Layer.String(), Where: f.Where, Path: f.Path, Problem: f.Problem}
		for _, id := range f.Images {
			out.Images = append(out.Images, s.nameOfImage(id))
		}
		reply.Findings = append(reply.Findings, out)
	}
	for _, id := range slices.Sorted(maps.Keys(r.Repairs)) {
		did := r.Repairs[id]
		out := admin.Repair{Done: did.Done, Message: did.Message}
		if id != "" {
			out.Image = s.nameOfImage(id)
		}
		reply.Repairs = append(reply.Repairs, out)
	}
	return reply, nil
}

// nameOfImage is a tag of an image, else a digest, else its id.
func (s *Service) nameOfImage(id string) string {
	r, err := s.Images.Resolve(id)
	if err != nil {
		return id
	}
	return slices.Concat(r.RepoTags, r.RepoDigests, []string{id})[0]
}

// diskUsage counts what images and containers take.
func (s *Service) diskUsage(ctx context.Context, _ *admin.DiskUsageRequest) (*admin.DiskUsageReply, error) {
	d, err := s.Images.DiskUsage(ctx)
	if err != nil {
		return nil, err
	}
	reply := &admin.DiskUsageReply{Root: d.Root, Total: usageOf(d.Total), Images: []admin.ImageDisk{}}
	for _, k := range []struct {
		name string
		u    layer.Usage
	}{
		{"layers", d.Layers}, {"blobs", d.Blobs}, {"records", d.Records}, {"partial", d.Partial},
		{"staging", d.Staging}, {"trash", d.Trash}, {"unknown", d.Unknown},
	} {
		reply.Kinds = append(reply.Kinds, admin.Kind{Name: k.name, Usage: usageOf(k.u)})
	}
	users := s.imageUsers()
	for _, i := range d.Images {
		reply.Images = append(reply.Images, diskOf(i, users[i.ID]))
	}
	dir := s.Records.Containers.Dir("")
	if reply.Containers.Bytes, reply.Containers.Inodes, err = rootfs.Usage(dir); err != nil {
		return nil, fmt.Errorf("count disk usage of containers: %w", err)
	}
	return reply, nil
}

func usageOf(u layer.Usage) admin.Usage { return admin.Usage{Bytes: u.Bytes, Inodes: u.Inodes} }

func diskOf(i image.ImageUsage, users []admin.User) admin.ImageDisk {
	return admin.ImageDisk{ID: i.ID, Names: slices.Concat([]string{}, i.Names), Total: usageOf(i.Total), Unique: usageOf(i.Unique),
		SharedWith: slices.Concat([]string{}, i.SharedWith), UsedBy: slices.Concat([]admin.User{}, users), Removed: i.Removed}
}
