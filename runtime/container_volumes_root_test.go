package runtime

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/image/rootfs"
	"berth/oci/spec"
	"berth/sandbox"
)

// withImage adds an image mount at /vol to a request.
func withImage(r *cri.CreateContainerRequest, reference, sub string) *cri.CreateContainerRequest {
	r.Config.Mounts = append(r.Config.Mounts, &cri.Mount{ContainerPath: "/vol", Readonly: true,
		Image: &cri.ImageSpec{Image: reference}, ImageSubPath: sub})
	return r
}

// runWithImage runs a container with an image at /vol.
func (n *node) runWithImage(pod, name, reference string) string {
	n.t.Helper()
	id := n.create(withImage(n.container(pod, name, forever), reference, ""))
	n.start(id)
	return id
}

// gone waits for the layers of an image to be deleted.
func (n *node) gone(img *image.Record) {
	n.t.Helper()
	eventually(n.t, "the layers of "+img.ID+" are gone", func() bool {
		_, err := os.Stat(img.Layers[0])
		return errors.Is(err, os.ErrNotExist)
	})
}

// Each step of a birth with an image volume fails once: nothing stays mounted
// or held, what concerns the volume begins with the kubelet's word, and the
// same request then succeeds.
func TestEachStepWithAnImageVolumeFails(t *testing.T) {
	n := newNode(t)
	name := n.importImage("vol")
	img, err := n.Images.Resolve(name)
	must(t, err)
	pod := n.runPod(n.hostPod("web"))
	before := n.left()
	away := func() func() {
		must(t, os.Rename(img.Layers[0], img.Layers[0]+".away"))
		return func() { must(t, os.Rename(img.Layers[0]+".away", img.Layers[0])) }
	}
	for what, tc := range map[string]struct {
		spoil  func() (mend func())
		sub    string
		code   codes.Code
		volume bool // the volume is to blame
		words  []string
	}{
		"layer":        {away, "", codes.Unknown, true, []string{"at step mount image volumes", "mounts[2].image", "no such file"}},
		"sub path":     {func() func() { return func() {} }, "etc/none", codes.InvalidArgument, true, []string{`mounts[2].image_sub_path "etc/none"`}},
		"runc":         {func() func() { return n.tell("fail-create") }, "", codes.FailedPrecondition, false, []string{"fail-create was told to"}},
		"runc at last": {func() func() { return n.tell("late-create") }, "etc", codes.FailedPrecondition, false, []string{"late-create was told to"}},
	} {
		t.Run(what, func(t *testing.T) {
			n := n.sub(t)
			mend := tc.spoil()
			_, err := n.CreateContainer(t.Context(), withImage(n.container(pod, "c", forever), name, tc.sub))
			n.refused(what, err, tc.code, tc.words...)
			if got := strings.HasPrefix(err.Error(), "ImageVolumeMountFailed: "); got != tc.volume {
				t.Errorf("blames the volume: %v in %v", got, err)
			}
			mend()
			n.same(before, "the failed create")
			n.removeContainerOf(n.runWithImage(pod, "c", name))
			n.same(before, "the retry")
		})
	}
	must(t, n.Images.Remove(t.Context(), name))
	n.gone(img)
}

// What is wrong with the request alone is told before anything is made.
func TestBadImageVolumesLeaveNothing(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	before := n.left()
	for words, tc := range map[string]struct {
		spoil func(m *cri.Mount)
		code  codes.Code
	}{
		"mounts[2].image.image: ... localhost/nosuch:1": {func(m *cri.Mount) { m.Image.Image = "localhost/nosuch:1" }, codes.NotFound},
		"mounts[2]: ... longer than":                    {func(m *cri.Mount) { m.Image.Image = strings.Repeat("x", 2000) }, codes.InvalidArgument},
		`mounts[2].readonly "false"`:                    {func(m *cri.Mount) { m.Readonly = false }, codes.InvalidArgument},
		`mounts[2].host_path "/usr"`:                    {func(m *cri.Mount) { m.HostPath = "/usr" }, codes.InvalidArgument},
		`mounts[2].image_sub_path "../x"`:               {func(m *cri.Mount) { m.ImageSubPath = "../x" }, codes.InvalidArgument},
		`mounts[2].propagation`:                         {func(m *cri.Mount) { m.Propagation = cri.MountPropagation_PROPAGATION_BIDIRECTIONAL }, codes.InvalidArgument},
	} {
		request := withImage(n.container(pod, "c", forever), n.image, "")
		tc.spoil(request.Config.Mounts[2])
		_, err := n.CreateContainer(t.Context(), request)
		n.refused(words, err, tc.code, append(strings.Split(words, " ... "), "ImageVolumeMountFailed: ")...)
		n.same(before, words)
	}
}

// The image may go between the moment it was found and the moment it is held.
func TestVolumeImageVanishesBeforeItIsHeld(t *testing.T) {
	n := newNode(t)
	name := n.importImage("vol")
	found, err := n.findImages(withImage(n.container(n.runPod(n.hostPod("web")), "c", forever), name, "").Config)
	must(t, err)
	must(t, n.Images.Remove(t.Context(), name))
	c := &sandbox.Container{ID: newID()}
	_, err = n.mountVolumes(&sandbox.Sandbox{}, c, found.volumes)
	if !errors.Is(err, image.ErrNotFound) || !errors.Is(err, spec.ErrImageVolume) {
		t.Errorf("got %v", err)
	}
	if list, err := os.ReadDir(n.bundleDir(c.ID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it made %v, %v", list, err)
	}
}

// Two containers share an image that is removed meanwhile: both read on, also
// after a restart, and the image goes with the last of them.
func TestImageVolumeOutlivesItsImage(t *testing.T) {
	n := newNode(t)
	name := n.importImage("vol")
	img, err := n.Images.Resolve(name)
	must(t, err)
	pod := n.runPod(n.hostPod("web"))
	before := n.left()
	ids := []string{n.runWithImage(pod, "a", name), n.runWithImage(pod, "b", img.ID)}
	must(t, n.Images.Remove(t.Context(), name))
	n.restart(nil)
	for i, id := range ids {
		if got := n.exec(id, "cat /vol/name; touch /vol/x 2>/dev/null || echo ' no'"); got != "vol no" {
			t.Errorf("container %d reads %q", i, got)
		}
		m := n.status(id).GetMounts()[2]
		if m.GetImage().GetImageRef() != img.ID || m.GetContainerPath() != "/vol" {
			t.Errorf("the status of %d tells %v", i, m)
		}
	}
	n.removeContainerOf(ids[0])
	if got := n.exec(ids[1], "cat /vol/name"); got != "vol" {
		t.Errorf("after the first is gone the other reads %q", got)
	}
	if _, err := os.Stat(img.Layers[0]); err != nil {
		t.Errorf("a held layer: %v", err)
	}
	n.removeContainerOf(ids[1])
	n.gone(img)
	n.same(before, "removal")
}

// A daemon that ended at any moment of a birth, or of a removal, leaves nothing
// of an image volume.
func TestRestartUnmountsImageVolumes(t *testing.T) {
	n := newNode(t)
	name := n.importImage("vol")
	pod := n.runPod(n.hostPod("web"))
	before := n.left()
	sb, err := n.Records.Sandboxes.Get(pod)
	must(t, err)
	for what, crash := range map[string]func(c *sandbox.Container, found containerImages){
		"recorded": func(*sandbox.Container, containerImages) {},
		"directory made": func(c *sandbox.Container, _ containerImages) {
			must(t, os.MkdirAll(filepath.Join(volumesDir(n.bundleDir(c.ID)), "2"), 0o711))
		},
		"mounted": func(c *sandbox.Container, found containerImages) {
			must(t, n.mountRootfs(sb, c, found.root))
			_, err := n.mountVolumes(sb, c, found.volumes)
			must(t, err)
		},
		"mounted, record lost": func(c *sandbox.Container, found containerImages) {
			_, err := n.mountVolumes(sb, c, found.volumes)
			must(t, err)
			must(t, os.WriteFile(n.Records.Containers.Dir(c.ID)+"/container.json", []byte("{"), 0o600))
		},
		"half unmounted": func(c *sandbox.Container, found containerImages) {
			at, err := n.mountVolumes(sb, c, found.volumes)
			must(t, err)
			must(t, rootfs.Unmount(at[2]))
		},
	} {
		config := withImage(n.container(pod, "c", forever), name, "").Config
		found, err := n.findImages(config)
		must(t, err)
		c, err := n.newContainer(sb, config, found)
		must(t, err)
		must(t, n.Records.Containers.Create(c))
		crash(c, found)
		n.restart(nil)
		n.same(before, what)
	}
	img, err := n.Images.Resolve(name)
	must(t, err)
	must(t, n.Images.Remove(t.Context(), name))
	n.gone(img)
}

// After a reboot nothing is mounted, and the record still lets go.
func TestImageVolumeAfterAReboot(t *testing.T) {
	n := newNode(t)
	name := n.importImage("vol")
	img, err := n.Images.Resolve(name)
	must(t, err)
	pod := n.runPod(n.hostPod("web"))
	id := n.runWithImage(pod, "c", name)
	must(t, n.Images.Remove(t.Context(), name))
	n.reboot(pod, func() {})
	if got := n.status(id).GetMounts()[2].GetImage().GetImageRef(); got != img.ID {
		t.Errorf("the status tells %q", got)
	}
	n.removePod(pod)
	n.empty("removal")
	n.gone(img)
}

// A process of the node that uses the mount does not keep the container from
// going.
func TestBusyImageVolumeGoes(t *testing.T) {
	n := newNode(t)
	pod := n.runPod(n.hostPod("web"))
	before := n.left()
	id := n.runWithImage(pod, "c", n.image)
	busy, err := os.Open(filepath.Join(volumesDir(n.bundleDir(id)), "2", "name"))
	must(t, err)
	defer busy.Close()
	began := time.Now()
	n.removeContainerOf(id)
	n.same(before, "removal")
	if took := time.Since(began); took > time.Minute {
		t.Errorf("it took %v", took)
	}
}
