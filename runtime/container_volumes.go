package runtime

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/image/rootfs"
	"berth/oci/spec"
	"berth/runtime/operation"
	"berth/sandbox"
)

// Images that are mounted into containers (KEP-4639). Each mount is an overlay
// of the image's layers below the container's bundle, where the OCI runtime
// binds it, or a part of it, from. The record names the images before anything
// is mounted; the container holds them as it does its own.

// containerImages are the images a container needs.
type containerImages struct {
	root    *image.Record
	volumes map[int]*image.Record // by the index of the mount
}

// volumeIDs is what a record keeps of the mounted images.
func (c containerImages) volumeIDs() map[int]string {
	ids := map[int]string{}
	for i, img := range c.volumes {
		ids[i] = img.ID
	}
	return ids
}

// findImages looks up all images that a container's configuration names.
func (s *Service) findImages(config *cri.ContainerConfig) (containerImages, error) {
	found := containerImages{volumes: map[int]*image.Record{}}
	var err error
	if found.root, err = s.findImage("config.image", config.GetImage()); err != nil {
		return found, err
	}
	if kind := found.root.Artifact; kind != "" {
		return found, fmt.Errorf("%w: config.image.image %q is no container image but an artifact of type %q, which can be mounted only", errInvalid, config.GetImage().GetImage(), kind)
	}
	for i, m := range config.GetMounts() {
		if m.GetImage() == nil {
			continue
		}
		field := fmt.Sprintf("mounts[%d].image", i)
		if found.volumes[i], err = s.findImage(field, m.GetImage()); err != nil {
			return found, spec.ImageVolume(err)
		}
	}
	return found, nil
}

// admitImages asks the signature policy of the pod's namespace about each image
// that a container needs, also those that it admitted when they were pulled.
func (s *Service) admitImages(ctx context.Context, sb *sandbox.Sandbox, config *cri.ContainerConfig, images containerImages) error {
	if err := s.answerPolicy(ctx); err != nil {
		return err
	}
	ask := func(field string, i *cri.ImageSpec, img *image.Record) error {
		name := i.GetUserSpecifiedImage()
		if name == "" {
			name = i.GetImage()
		}
		use := image.Use{Image: img, Name: name, Namespace: sb.Config.Message.GetMetadata().GetNamespace()}
		if err := s.Images.Admit(ctx, use); err != nil {
			return fmt.Errorf("%s: %w", field, err)
		}
		return nil
	}
	if err := ask("config.image", config.GetImage(), images.root); err != nil {
		return err
	}
	for i, img := range images.volumes {
		if err := ask(fmt.Sprintf("mounts[%d].image", i), config.GetMounts()[i].GetImage(), img); err != nil {
			return err
		}
	}
	return nil
}

// mountImages mounts a container's root filesystem and its image volumes, and
// tells where each of those is.
func (s *Service) mountImages(op *operation.Operation, sb *sandbox.Sandbox, c *sandbox.Container, images containerImages) (map[int]string, error) {
	op.Step("mount rootfs")
	if err := s.mountRootfs(sb, c, images.root); err != nil {
		return nil, err
	}
	op.Step("mount image volumes")
	return s.mountVolumes(sb, c, images.volumes)
}

// mountVolumes mounts the images of a container's image mounts and tells where
// each is. ErrNotFound of package image when one was removed since it was found.
func (s *Service) mountVolumes(sb *sandbox.Sandbox, c *sandbox.Container, volumes map[int]*image.Record) (map[int]string, error) {
	labels, err := s.containerLabels(sb, c.Config.Message)
	if err != nil {
		return nil, err
	}
	at := map[int]string{}
	for _, i := range slices.Sorted(maps.Keys(volumes)) {
		img := volumes[i]
		held := s.Images.Hold(img.ID, c.ID)
		if held == nil {
			return nil, spec.ImageVolume(fmt.Errorf("mounts[%d].image: hold layers of image %s: %w", i, img.ID, image.ErrNotFound))
		}
		if err := s.makeBundle(sb, c.ID); err != nil {
			return nil, err
		}
		if err := os.MkdirAll(volumesDir(s.bundleDir(c.ID)), 0o711); err != nil {
			return nil, fmt.Errorf("make directory of image volumes: %w", err)
		}
		name := strconv.Itoa(i)
		own := filepath.Join(s.Records.Containers.Dir(c.ID), "volumes", name)
		at[i] = filepath.Join(volumesDir(s.bundleDir(c.ID)), name)
		err := rootfs.Create(rootfs.Mount{
			Target: at[i], Upper: filepath.Join(own, "root"), Work: filepath.Join(own, "work"), Layers: held.Layers, ReadOnly: true,
			IDs: s.rootfsIDs(sb), Context: labels.Mount,
		})
		if err != nil {
			return nil, spec.ImageVolume(fmt.Errorf("mounts[%d].image: %w", i, err))
		}
	}
	return at, nil
}

// volumesDir is where a bundle's image volumes are mounted.
func volumesDir(bundle string) string { return filepath.Join(bundle, "volumes") }

// unmountVolumes undoes mountVolumes, whether or not there still is a record.
// Idempotent.
func unmountVolumes(bundle string) error {
	dir := volumesDir(bundle)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read directory of image volumes: %w", err)
	}
	for _, e := range entries {
		if err := rootfs.Unmount(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove directory of image volumes: %w", err)
	}
	return nil
}

// holdImages repeats a container's holds after a restart.
func (s *Service) holdImages(c *sandbox.Container) {
	s.Images.Hold(c.ImageID, c.ID)
	for _, id := range c.VolumeImages {
		s.Images.Hold(id, c.ID)
	}
}
