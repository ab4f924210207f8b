package cases

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/critest/registry"
)

// publish serves an image made of the busybox root and more layers.
func publish(t *testing.T, repository, tag string, config ispec.ImageConfig, more ...images.Layer) images.Published {
	t.Helper()
	if len(config.Env) == 0 {
		config.Env = []string{"PATH=/bin:/usr/bin"}
	}
	done, err := images.Image{
		Config: config, Layers: append([]images.Layer{parts.Base}, more...), Stamp: repository + ":" + tag,
	}.Publish(reg, repository, tag)
	if err != nil {
		t.Fatal(err)
	}
	return done
}

// layer makes a gzip layer.
func layer(t *testing.T, entries ...images.Entry) images.Layer {
	t.Helper()
	l, err := images.NewLayer(images.Gzip, entries...)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// image asks for an image's status.
func (e *env) image(reference string) *cri.Image {
	e.Helper()
	res, err := e.im.ImageStatus(e.ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: reference}})
	if err != nil {
		e.Fatalf("status of image %s: %v", reference, err)
	}
	return res.GetImage()
}

// B15: an image has one id, the digest of its config, in every answer, however
// it was pulled, and its containers keep it.
func TestB15OneIdentityEverywhere(t *testing.T) {
	e := start(t, node.Options{})
	config := ispec.ImageConfig{Cmd: []string{"sleep", "1000"}}
	amd := publish(t, "cases/b15", "single", config)
	index, err := images.Index(reg, "cases/b15", "multi", map[string]images.Published{"amd64": amd, "s390x": publish(t, "cases/b15", "other", config)}, []string{"s390x", "amd64"})
	if err != nil {
		t.Fatal(err)
	}
	id := amd.Config.String()
	byDigest := "docker.io/cases/b15@" + index.String()
	for _, reference := range []string{"docker.io/cases/b15:multi", byDigest, "docker.io/cases/b15:single"} {
		if got := e.pull(reference); got != id {
			t.Errorf("pulling %s gives id %s, want the config digest %s", reference, got, id)
		}
	}
	list, err := e.im.ListImages(e.ctx, &cri.ListImagesRequest{})
	if err != nil || len(list.GetImages()) != 1 || list.GetImages()[0].GetId() != id {
		t.Fatalf("images %v, error %v; want one with id %s", list.GetImages(), err, id)
	}
	if tags := strings.Join(list.GetImages()[0].GetRepoTags(), " "); tags != "docker.io/cases/b15:multi docker.io/cases/b15:single" {
		t.Errorf("tags %q, want multi and single", tags)
	}
	sandbox := e.sandbox()
	pod := e.run(sandbox)
	var containers []string
	for i, reference := range []string{"docker.io/cases/b15:multi", id, byDigest} {
		c := &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: fmt.Sprintf("c%d", i)},
			Image:    &cri.ImageSpec{Image: reference, UserSpecifiedImage: "docker.io/cases/b15:multi"},
		}
		containers = append(containers, e.startContainer(pod, c, sandbox))
	}
	check := func(when string) {
		for _, c := range containers {
			s := e.status(c)
			if s.GetImageId() != id || !strings.HasPrefix(s.GetImageRef(), "docker.io/cases/b15@sha256:") {
				t.Errorf("%s: container %s has image id %q and ref %q, want %s and a digest", when, s.GetMetadata().GetName(), s.GetImageId(), s.GetImageRef(), id)
			}
		}
		all, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range all.GetContainers() {
			if c.GetImageId() != id {
				t.Errorf("%s: the list gives container %s image id %q, want %s", when, c.GetMetadata().GetName(), c.GetImageId(), id)
			}
		}
	}
	check("all tags there")
	if _, err := e.im.RemoveImage(e.ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: "docker.io/cases/b15:single"}}); err != nil {
		t.Fatalf("remove by one tag: %v", err)
	}
	if img := e.image("docker.io/cases/b15:multi"); img != nil {
		t.Errorf("removing by one tag left the other: %v", img)
	}
	check("image removed")
	if out := e.exec(containers[0], "echo works"); out != "works\n" {
		t.Errorf("a container of the removed image says %q", out)
	}
	if got := e.pull("docker.io/cases/b15:multi"); got != id {
		t.Errorf("pulled again it has id %s, want %s", got, id)
	}
}

// B21: what a layer deletes stays deleted, whichever layer arrives first.
func TestB21WhiteoutsWhateverArrivesFirst(t *testing.T) {
	lower := layer(t, images.File("gone", 0o644, strings.Repeat("x", 60_000)), images.Dir("d", 0o755),
		images.File("d/a", 0o644, "a"), images.File("d/b", 0o644, "b"), images.File("kept", 0o644, "kept"))
	upper := layer(t, images.File(".wh.gone", 0o644, ""), images.Dir("d", 0o755),
		images.File("d/.wh..wh..opq", 0o644, ""), images.File("d/c", 0o644, "c"))
	again := layer(t, images.File("d/b", 0o644, "second"), images.File(".wh.kept", 0o644, ""))
	publish(t, "cases/b21", "1", ispec.ImageConfig{}, lower, upper, again)
	for _, slow := range []int{0, 1, 2} {
		for _, parallel := range []int{1, 2, 8} {
			t.Run(fmt.Sprintf("slow%d-parallel%d", slow, parallel), func(t *testing.T) {
				blob := reg.PutBlob([]images.Layer{lower, upper, again}[slow].Blob)
				defer reg.Script(registry.Fault{Path: blob.String(), Delay: 250 * time.Millisecond})()
				e := start(t, node.Options{Settings: map[string]string{"image": fmt.Sprintf("max_concurrent_downloads = %d", parallel)}})
				e.pull("docker.io/cases/b21:1")
				sandbox := e.sandbox()
				c := command("look", "ls /gone /kept 2>/dev/null; cd /d && for f in *; do echo $f $(cat $f); done")
				c.Image.Image = "docker.io/cases/b21:1"
				if got := e.output(e.run(sandbox), c, sandbox); got != "b second\nc c\n" {
					t.Errorf("the container sees %q, want d/b (second) and d/c alone", got)
				}
			})
		}
	}
}

// B41: no image is needed for a pod; one that is pinned says so always, and
// removing what is in use breaks nothing.
func TestB41NoPauseImageAndPinnedOnes(t *testing.T) {
	e := start(t, node.Options{Settings: map[string]string{"image": fmt.Sprintf("pinned = [%q]", images.Pause)}})
	defer reg.Script(registry.Fault{Status: http.StatusServiceUnavailable})()
	before := reg.Count(http.MethodGet, "/pause/")
	for _, mode := range []cri.NamespaceMode{cri.NamespaceMode_CONTAINER, cri.NamespaceMode_POD} {
		e.run(pidMode(e.sandbox(), mode))
	}
	list, err := e.im.ListImages(e.ctx, &cri.ListImagesRequest{})
	if err != nil || len(list.GetImages()) != 0 {
		t.Errorf("images %v, error %v; want none for two pods", list.GetImages(), err)
	}
	if n := reg.Count(http.MethodGet, "/pause/") - before; n != 0 {
		t.Errorf("%d requests for a pause image", n)
	}
}

// The second half of B41, with a registry that answers.
func TestB41PinnedIsSaidAlways(t *testing.T) {
	e := start(t, node.Options{Settings: map[string]string{"image": fmt.Sprintf("pinned = [%q]", images.Busybox)}})
	e.pull(images.Busybox)
	e.pull(images.Pause)
	check := func(when string) {
		if !e.image(images.Busybox).GetPinned() || e.image(images.Pause).GetPinned() {
			t.Errorf("%s: pinned is %v for the pinned image and %v for the other", when, e.image(images.Busybox).GetPinned(), e.image(images.Pause).GetPinned())
		}
	}
	check("after the pull")
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	check("after a restart")
	config := e.sandbox()
	pod := e.run(config)
	id := e.startContainer(pod, command("user", "sleep 1000"), config)
	if _, err := e.im.RemoveImage(e.ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: images.Busybox}}); err != nil {
		t.Errorf("remove a pinned image that is in use: %v; the proto obliges", err)
	}
	if out := e.exec(id, "cat /etc/passwd | head -n 1 | cut -d: -f1"); out != "root\n" {
		t.Errorf("after its image went the container reads %q", out)
	}
	e.run(e.sandbox())
}

// B43: a user that is a number is that number or an error, never root by wrap
// or by a look in the image's passwd; ImageStatus says the same.
func TestB43NumericUsersOfImages(t *testing.T) {
	passwd := "root:x:0:0:root:/root:/bin/sh\n99999999999:x:0:0::/:/bin/sh\n-1:x:0:0::/:/bin/sh\n4294967296:x:0:0::/:/bin/sh\n0x0:x:0:0::/:/bin/sh\nweb:x:33:34::/:/bin/sh\n"
	e := start(t, node.Options{})
	sandbox := e.sandbox()
	pod := e.run(sandbox)
	for i, c := range []struct {
		user     string
		want     string // of id -u and id -g; empty: an error before the start
		uid      int64
		username string
	}{
		{"", "0 0", 0, ""},
		{"1002", "1002 0", 1002, ""},
		{"01000", "1000 0", 1000, ""},
		{"1000:2000", "1000 2000", 1000, ""},
		{"web", "33 34", 0, "web"},
		{"web:7", "33 7", 0, "web"},
		{"4294967295", "", -1, ""},
		{"4294967296", "", -1, ""},
		{"99999999999", "", -1, ""},
		{"18446744073709551616", "", -1, ""},
		{"-1", "", -1, ""},
		{"1000:4294967296", "", -1, ""},
		{"1000:-1", "", -1, ""},
		{"nobody-here", "", 0, "nobody-here"},
	} {
		reference := fmt.Sprintf("docker.io/cases/b43:%d", i)
		publish(t, "cases/b43", fmt.Sprint(i), ispec.ImageConfig{User: c.user}, layer(t, images.File("etc/passwd", 0o644, passwd)))
		if _, err := e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: reference}}); err != nil {
			if c.want != "" {
				t.Errorf("user %q: pull: %v", c.user, err)
			}
			continue // refused with the image itself, which is as good
		}
		container := command(fmt.Sprintf("u%d", i), "echo $(id -u) $(id -g)")
		container.Image.Image = reference
		res, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: container, SandboxConfig: sandbox})
		if c.want == "" {
			if err == nil {
				t.Errorf("user %q: a container was made", c.user)
			} else if name := strings.SplitN(c.user, ":", 2); !strings.Contains(err.Error(), name[len(name)-1]) || strings.Contains(status.Convert(err).Message(), "panic") {
				t.Errorf("user %q: the error does not name it: %v", c.user, err)
			}
		} else {
			if err != nil {
				t.Errorf("user %q: %v", c.user, err)
				continue
			}
			id := res.GetContainerId()
			if _, err := e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: id}); err != nil {
				t.Errorf("user %q: start: %v", c.user, err)
				continue
			}
			e.exited(id)
			if out, _ := e.logs(id); strings.TrimSpace(out) != c.want {
				t.Errorf("user %q runs as %q, want %q", c.user, out, c.want)
			}
		}
		if img := e.image(reference); c.uid >= 0 && (img.GetUid().GetValue() != c.uid || img.GetUsername() != c.username) {
			t.Errorf("user %q: ImageStatus has uid %d and name %q, want %d and %q", c.user, img.GetUid().GetValue(), img.GetUsername(), c.uid, c.username)
		}
	}
}
