package cases

import (
	"encoding/json"
	"strings"
	"testing"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// published serves an image with annotations as repository:tag.
func published(t *testing.T, repository, tag string, config ispec.ImageConfig, annotations map[string]string) images.Published {
	t.Helper()
	done, err := images.Image{Config: config, Layers: []images.Layer{parts.Base}, Stamp: repository, Annotations: annotations}.Publish(reg, repository, tag)
	if err != nil {
		t.Fatal(err)
	}
	return done
}

// remove removes an image by whatever names it.
func (e *env) remove(reference string) {
	e.Helper()
	if _, err := e.im.RemoveImage(e.ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: reference}}); err != nil {
		e.Errorf("remove image %s: %v", reference, err)
	}
}

// What an image's answers say of it: user, annotations, config, and all of it
// again after a restart.
func TestImageAnswers(t *testing.T) {
	e := start(t, node.Options{})
	marks := map[string]string{"org.opencontainers.image.source": "https://example.org/x", "é": "ü"}
	done := published(t, "cases/answers", "1", ispec.ImageConfig{User: "1000:2000", Entrypoint: []string{"/bin/sh"}}, marks)
	const reference = "docker.io/cases/answers:1"
	if img := e.image(reference); img != nil {
		t.Errorf("an absent image: %v", img)
	}
	id := e.pull(reference)
	check := func(when string) {
		list, err := e.im.ListImages(e.ctx, &cri.ListImagesRequest{})
		if err != nil || len(list.GetImages()) != 1 {
			t.Fatalf("%s: images %v, error %v", when, list.GetImages(), err)
		}
		for _, img := range []*cri.Image{e.image(reference), list.GetImages()[0]} {
			if img.GetId() != id || img.GetId() != done.Config.String() || img.GetSize() == 0 || img.GetUid().GetValue() != 1000 || img.GetUsername() != "" ||
				strings.Join(img.GetRepoTags(), " ") != reference || strings.Join(img.GetRepoDigests(), " ") != "docker.io/cases/answers@"+done.Manifest.String() {
				t.Errorf("%s: %v", when, img)
			}
			for k, v := range marks {
				if img.GetSpec().GetAnnotations()[k] != v {
					t.Errorf("%s: annotations %v, want %v", when, img.GetSpec().GetAnnotations(), marks)
				}
			}
		}
		out, err := e.Crictl(e.ctx, "inspecti", reference)
		var told struct {
			Info struct {
				ID   string      `json:"id"`
				Spec ispec.Image `json:"imageSpec"`
			} `json:"info"`
		}
		if err == nil {
			err = json.Unmarshal([]byte(out), &told)
		}
		if s := told.Info.Spec; err != nil || told.Info.ID != id || s.Config.User != "1000:2000" || len(s.Config.Entrypoint) != 1 || len(s.History) != 1 {
			t.Errorf("%s: crictl inspecti: %v\n%s", when, err, out)
		}
	}
	check("pulled")
	if err := e.Terminate(); err != nil {
		t.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	check("after a restart")
	if out, err := e.Crictl(e.ctx, "imagefsinfo"); err != nil || !strings.Contains(out, e.Root()+"/images") {
		t.Errorf("crictl imagefsinfo: %v\n%s", err, out)
	}
}

// A filter names one image in any way an image can be named.
func TestImageFilters(t *testing.T) {
	e := start(t, node.Options{})
	done := published(t, "cases/filter", "1", ispec.ImageConfig{}, nil)
	published(t, "cases/filter", "2", ispec.ImageConfig{}, nil)
	id := e.pull("docker.io/cases/filter:1")
	e.pull("docker.io/cases/filter:2")
	e.pull(images.Pause)
	for reference, want := range map[string]int{
		id:                                     1,
		strings.TrimPrefix(id, "sha256:"):      1,
		strings.TrimPrefix(id, "sha256:")[:12]: 1,
		"cases/filter:1":                       1,
		"docker.io/cases/filter:2":             1,
		"docker.io/cases/filter@" + done.Manifest.String(): 1,
		"docker.io/cases/filter":                           0, // is :latest
		"docker.io/cases/other:1":                          0,
		"sha256:" + strings.Repeat("0", 64):                0,
	} {
		list, err := e.im.ListImages(e.ctx, &cri.ListImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{Image: reference}}})
		if err != nil || len(list.GetImages()) != want || want == 1 && list.GetImages()[0].GetId() != id {
			t.Errorf("filter %s: %v, error %v; want %d", reference, list.GetImages(), err, want)
		}
	}
	for name, reference := range map[string]string{"a reference": "a//b", "too long": strings.Repeat("x", 2000)} {
		_, err := e.im.ListImages(e.ctx, &cri.ListImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{Image: reference}}})
		e.refused(name, err, codes.InvalidArgument)
		_, err = e.im.ImageStatus(e.ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: reference}})
		e.refused(name, err, codes.InvalidArgument)
	}
}

// A handler that is not configured is refused wherever an image names it; an id
// is nothing to pull.
func TestImagesOfUnknownHandlers(t *testing.T) {
	e := start(t, node.Options{})
	pull := func(reference, handler string) error {
		_, err := e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: reference, RuntimeHandler: handler}})
		return err
	}
	e.refused("pull for an unknown handler", pull(images.Busybox, "nope"), codes.InvalidArgument, "image: ", "runtime_handler", `"nope"`)
	if img := e.image(images.Busybox); img != nil {
		t.Errorf("it was pulled: %v", img)
	}
	if err := pull(images.Busybox, "runc"); err != nil {
		t.Errorf("pull for a known handler: %v", err)
	}
	id := e.image(images.Busybox).GetId()
	e.refused("pull by id", pull(id, ""), codes.InvalidArgument, id)
	sandbox := e.sandbox()
	pod := e.run(sandbox)
	c := command("c", "exit 0")
	c.Image.RuntimeHandler = "nope"
	_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: sandbox})
	e.refused("a container with an unknown handler", err, codes.InvalidArgument, "config.image", "runtime_handler", `"nope"`)
	c.Image.RuntimeHandler = "runc"
	e.exited(e.startContainer(pod, c, sandbox))
	// The kubelet may clean up what a handler left that is configured no more.
	if _, err := e.im.RemoveImage(e.ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: id, RuntimeHandler: "nope"}}); err != nil {
		t.Errorf("remove for an unknown handler: %v", err)
	}
}

// Pinned by name, by beginning and by a part; removed on request all the same,
// with all names, whichever is given, and as often as is asked.
func TestPinnedAndRemovedImages(t *testing.T) {
	e := start(t, node.Options{Settings: map[string]string{"image": `pinned = ["docker.io/cases/exact:1", "docker.io/cases/begin*", "*art-o*"]`}})
	for repository, pinned := range map[string]bool{"cases/exact": true, "cases/begin-so": true, "cases/part-of": true, "cases/none": false} {
		done := published(t, repository, "1", ispec.ImageConfig{}, nil)
		published(t, repository, "2", ispec.ImageConfig{}, nil)
		names := []string{"docker.io/" + repository + ":1", "docker.io/" + repository + ":2"}
		for _, by := range []string{names[0], names[1], "docker.io/" + repository + "@" + done.Manifest.String(), done.Config.String(), done.Config.Encoded()[:16]} {
			for _, name := range names {
				e.pull(name)
			}
			if img := e.image(names[1]); img.GetPinned() != pinned || len(img.GetRepoTags()) != 2 {
				t.Errorf("%s: pinned %v, tags %v; want %v and two", repository, img.GetPinned(), img.GetRepoTags(), pinned)
			}
			e.remove(by)
			for _, name := range append(names, done.Config.String()) {
				if img := e.image(name); img != nil {
					t.Errorf("removed by %s, it is still there as %s: %v", by, name, img)
				}
			}
			e.remove(by)
		}
	}
	list, err := e.im.ListImages(e.ctx, &cri.ListImagesRequest{})
	if err != nil || len(list.GetImages()) != 0 {
		t.Errorf("left: %v, %v", list.GetImages(), err)
	}
}
