package spec

import (
	"errors"
	"path"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// ErrImageVolume marks every error about a mount whose source is an image
// (KEP-4639), beside the sentinel that says what is wrong; see ImageVolume. Its
// text is the word that such an error begins with towards the kubelet
// (k8s.io/cri-api/pkg/errors).
var ErrImageVolume = errors.New("ImageVolumeMountFailed")

// imageVolumeError reads like the error it marks.
type imageVolumeError struct{ error }

func (e imageVolumeError) Unwrap() error      { return e.error }
func (imageVolumeError) Is(target error) bool { return target == ErrImageVolume }

// ImageVolume marks an error with ErrImageVolume; nil stays nil.
func ImageVolume(err error) error {
	if err == nil {
		return nil
	}
	return imageVolumeError{err}
}

// checkImageMount refuses what has no meaning for an image. An image is only
// ever read, and nothing is mounted below it later on: so it needs readonly, as
// critest wants it, and takes no propagation, as no event could come or go.
func checkImageMount(field string, m *cri.Mount) error {
	switch {
	case m.GetHostPath() != "":
		return Invalid(field+".host_path", m.GetHostPath(), "image is given too; only one of them may be")
	case m.GetImage().GetImage() == "":
		return Invalid(field+".image.image", "", "missing")
	case !m.GetReadonly():
		return Invalid(field+".readonly", false, "an image is mounted read-only")
	case m.GetPropagation() != cri.MountPropagation_PROPAGATION_PRIVATE:
		return Invalid(field+".propagation", m.GetPropagation(), "must be PROPAGATION_PRIVATE for an image")
	}
	return checkSubPath(field+".image_sub_path", m.GetImageSubPath())
}

// checkImageMappings takes no mappings but those of the pod, with which its
// images are mounted in any case.
func checkImageMappings(field string, m *cri.Mount, ids *IDMap) error {
	if uids, _, ofPod := MountMappings(m, ids); len(uids) > 0 && !ofPod {
		return Unsupported(field+".uidMappings", "", "an image takes no mappings but those of its pod's user namespace")
	}
	return nil
}

// checkSubPath takes paths that stay inside an image by their text alone.
// Symlinks in the image are runtime/resolve's.
func checkSubPath(field, p string) error {
	switch {
	case path.IsAbs(p):
		return Invalid(field, p, "must be relative to the image's root")
	case slices.Contains(strings.Split(p, "/"), ".."):
		return Invalid(field, p, `must not contain ".."`)
	case strings.ContainsRune(p, 0):
		return Invalid(field, p, "contains a NUL byte")
	case len(p) > 4095:
		return Invalid(field, p, "is longer than 4095 bytes")
	}
	return nil
}

// StatusMounts are a container's mounts as ContainerStatus shows them: as they
// were asked for, in that order, each image mount with the id of its image
// (KEP-5365); images maps the index of a mount to it. The result shares no
// memory with the config.
func StatusMounts(config *cri.ContainerConfig, images map[int]string) []*cri.Mount {
	var list []*cri.Mount
	for i, m := range config.GetMounts() {
		m = proto.Clone(m).(*cri.Mount)
		if id := images[i]; id != "" {
			m.Image.ImageRef = id
		}
		list = append(list, m)
	}
	return list
}
