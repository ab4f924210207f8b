package cases

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// An OCI artifact is pulled, listed, mounted and removed like an image, and
// cannot be run.
func TestArtifacts(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	const (
		ref  = "docker.io/cases/model:1"
		kind = "application/vnd.example.model.v1"
	)
	want, err := images.Artifact(reg, "cases/model", "1", kind,
		images.Blob{Title: "weights/model.bin", Data: []byte("weights")}, images.Blob{Title: "card.md", Data: []byte("card")})
	if err != nil {
		t.Fatal(err)
	}
	id := e.pull(ref)
	if id != want.String() {
		t.Errorf("the pull answers %s, want the manifest's digest %s", id, want)
	}
	img := e.image(ref)
	if img.GetId() != id || img.GetSize() == 0 || len(img.GetRepoTags()) != 1 {
		t.Errorf("image status %v", img)
	}
	list, err := e.im.ListImages(e.ctx, &cri.ListImagesRequest{})
	if err != nil || !strings.Contains(list.String(), id) {
		t.Errorf("not listed: %v %v", list, err)
	}
	verbose, err := e.im.ImageStatus(e.ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: id}, Verbose: true})
	if err != nil || !strings.Contains(verbose.GetInfo()["info"], kind) {
		t.Errorf("verbose status: %v %v, want the type", verbose, err)
	}

	config := e.sandbox()
	pod := e.run(config)
	c := command("run", "true")
	c.Image = &cri.ImageSpec{Image: id, UserSpecifiedImage: ref}
	_, err = e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
	e.refused("container of an artifact", err, codes.InvalidArgument, "config.image", kind)

	c = command("c", "sleep 1000")
	c.Mounts = []*cri.Mount{imageMount("/model", id, ""), imageMount("/one.bin", id, "weights/model.bin"), imageMount("/dir", ref, "weights")}
	container := e.startContainer(pod, c, config)
	if out := e.exec(container, "cd /model; find . | sort; cat card.md /one.bin /dir/model.bin; touch x 2>/dev/null || echo refused"); out != ".\n./card.md\n./weights\n./weights/model.bin\ncardweightsweightsrefused\n" {
		t.Errorf("in the container: %q", out)
	}
	for i, m := range e.status(container).GetMounts() {
		if m.GetImage().GetImageRef() != id {
			t.Errorf("the status tells of mount %d %v, want the artifact %s", i, m, id)
		}
	}
	c = command("absent", "true")
	c.Mounts = []*cri.Mount{imageMount("/model", id, "weights/none")}
	_, err = e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
	e.refused("sub path that is not there", err, codes.InvalidArgument, "image_sub_path", `"weights/none"`)

	if _, err := e.im.RemoveImage(e.ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: id}}); err != nil {
		t.Fatal(err)
	}
	if img := e.image(ref); img != nil {
		t.Errorf("still there after its removal: %v", img)
	}
	if out := e.exec(container, "cat /model/card.md"); out != "card" {
		t.Errorf("a mounted artifact after its removal: %q", out)
	}
}
