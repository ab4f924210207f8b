package cases

import (
	"archive/tar"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

const volumeImage = "docker.io/cases/volume:1"

// volume publishes and pulls an image without a shell: three layers that hide
// and replace each other's files, with symlinks out of it.
func (e *env) volume() string {
	e.Helper()
	layers := []images.Layer{
		layer(e.T, images.Dir("conf", 0o755), images.File("conf/a", 0o644, "old"), images.File("gone", 0o644, "x")),
		layer(e.T, images.File(".wh.gone", 0o644, ""), images.File("conf/a", 0o644, "new"), images.File("conf/deep/b", 0o600, "deep")),
		layer(e.T, images.Symlink("absolute", "/conf/deep"), images.Symlink("out", "/etc"), images.Symlink("up", "../../../../etc"),
			images.Symlink("circle", "circle"), images.File("run", 0o755, "#!/bin/sh\necho ran\n"),
			images.Entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: "null", Mode: 0o666, Devmajor: 1, Devminor: 3}}),
	}
	if _, err := (images.Image{Layers: layers}).Publish(reg, "cases/volume", "1"); err != nil {
		e.Fatal(err)
	}
	return e.pull(volumeImage)
}

func imageMount(at, reference, sub string) *cri.Mount {
	return &cri.Mount{ContainerPath: at, Readonly: true, Image: &cri.ImageSpec{Image: reference}, ImageSubPath: sub}
}

// An image is mounted as its layers say, whole or in part, never writable, not
// even for a privileged container.
func TestImageVolume(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	id := e.volume()
	config := e.sandbox()
	config.Linux.SecurityContext.Privileged = true
	pod := e.run(config)
	c := command("c", "sleep 1000")
	c.Linux.SecurityContext.Privileged = true
	noexec := imageMount("/noexec", id, "")
	noexec.MountOptions = []string{"noexec"}
	recursive := imageMount("/recursive", id, "")
	recursive.RecursiveReadOnly = true
	c.Mounts = []*cri.Mount{imageMount("/whole", volumeImage, ""), imageMount("/whole/conf/deep", id, "conf"), imageMount("/by/link", id, "absolute"),
		imageMount("/file", id, "absolute/b"), noexec, recursive}
	container := e.startContainer(pod, c, config)
	for script, want := range map[string]string{
		"cat /whole/conf/a":                           "new",
		"ls /whole":                                   "absolute\ncircle\nconf\nnull\nout\nrun\nup\n",
		"cat /whole/conf/deep/a":                      "new", // mounted below another
		"cat /by/link/b; cat /file; ls -l /file":      "deepdeep-rw-------",
		"/whole/run; /noexec/run 2>/dev/null || echo": "ran\n\n",
		"for d in whole by/link noexec recursive; do touch /$d/x 2>/dev/null && echo $d; mount -o remount,rw /$d 2>/dev/null; touch /$d/x 2>/dev/null && echo $d; done; true": "",
		"echo x 2>/dev/null >/file || echo refused": "refused\n",
	} {
		if got := e.exec(container, script); !strings.HasPrefix(got, want) || want == "" && got != "" {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	for i, m := range e.status(container).GetMounts() {
		if m.GetImage().GetImageRef() != id || m.GetImage().GetImage() != c.Mounts[i].GetImage().GetImage() || m.GetHostPath() != "" {
			t.Errorf("the status tells of mount %d %v, want the image %s", i, m, id)
		}
	}
}

// What cannot be mounted is refused with the kubelet's word first, and leaves
// nothing; the last container shows that the pod is none the worse.
func TestImageVolumeRefusals(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	id := e.volume()
	config := e.sandbox()
	pod := e.run(config)
	for name, c := range map[string]struct {
		change func(m *cri.Mount)
		code   codes.Code
		words  []string
	}{
		"no such sub path":   {func(m *cri.Mount) { m.ImageSubPath = "conf/none" }, codes.InvalidArgument, []string{"image_sub_path", `"conf/none"`, "does not exist"}},
		"link out":           {func(m *cri.Mount) { m.ImageSubPath = "out/passwd" }, codes.InvalidArgument, []string{`"out/passwd"`, "does not exist"}},
		"link up":            {func(m *cri.Mount) { m.ImageSubPath = "up" }, codes.InvalidArgument, []string{`"up"`, "does not exist"}},
		"circle":             {func(m *cri.Mount) { m.ImageSubPath = "circle" }, codes.InvalidArgument, []string{`"circle"`, "in a circle"}},
		"hidden file":        {func(m *cri.Mount) { m.ImageSubPath = "gone" }, codes.InvalidArgument, []string{`"gone"`}},
		"device":             {func(m *cri.Mount) { m.ImageSubPath = "null" }, codes.InvalidArgument, []string{`"null"`, "neither a file nor a directory"}},
		"file as folder":     {func(m *cri.Mount) { m.ImageSubPath = "run/x" }, codes.InvalidArgument, []string{`"run/x"`}},
		"climbing":           {func(m *cri.Mount) { m.ImageSubPath = "../../etc" }, codes.InvalidArgument, []string{`"../../etc"`}},
		"absolute":           {func(m *cri.Mount) { m.ImageSubPath = "/conf" }, codes.InvalidArgument, []string{`"/conf"`}},
		"writable":           {func(m *cri.Mount) { m.Readonly = false }, codes.InvalidArgument, []string{"readonly"}},
		"host path too":      {func(m *cri.Mount) { m.HostPath = "/tmp" }, codes.InvalidArgument, []string{"host_path", `"/tmp"`}},
		"shared":             {func(m *cri.Mount) { m.Propagation = cri.MountPropagation_PROPAGATION_BIDIRECTIONAL }, codes.InvalidArgument, []string{"propagation"}},
		"unknown option":     {func(m *cri.Mount) { m.MountOptions = []string{"suid"} }, codes.InvalidArgument, []string{"mount_options", `"suid"`}},
		"no name":            {func(m *cri.Mount) { m.Image.Image = "" }, codes.InvalidArgument, []string{"image.image"}},
		"not here":           {func(m *cri.Mount) { m.Image.Image = "docker.io/cases/absent:1" }, codes.NotFound, []string{"mounts[0].image", "docker.io/cases/absent:1"}},
		"unknown handler":    {func(m *cri.Mount) { m.Image.RuntimeHandler = "kata" }, codes.InvalidArgument, []string{"mounts[0].image", `"kata"`}},
		"over the root":      {func(m *cri.Mount) { m.ContainerPath = "/" }, codes.InvalidArgument, []string{"container_path"}},
		"inside /proc":       {func(m *cri.Mount) { m.ContainerPath = "/proc/sys" }, codes.InvalidArgument, []string{"container_path", "/proc"}},
		"another image's id": {func(m *cri.Mount) { m.Image.Image = "sha256:" + strings.Repeat("0", 64) }, codes.NotFound, []string{"0000"}},
	} {
		config, m := command("c", "true"), imageMount("/vol", id, "")
		c.change(m)
		config.Mounts = []*cri.Mount{m}
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: config})
		e.refused(name, err, c.code, append(c.words, "desc = ImageVolumeMountFailed: ")...)
	}
	list, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{})
	if err != nil || len(list.GetContainers()) != 0 {
		t.Errorf("containers %v, %v after the refusals", list.GetContainers(), err)
	}
	c := command("c", "cat /vol/a")
	c.Mounts = []*cri.Mount{imageMount("/vol", id, "conf")}
	if got := e.output(pod, c, config); got != "new" {
		t.Errorf("it reads %q", got)
	}
}

// Two containers read one image on when it is removed, pulled again as another,
// and the daemon is killed; its layers go with the last of them.
func TestImageVolumeSharedAndRemoved(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	id := e.volume()
	config := e.sandbox()
	pod := e.run(config)
	var ids []string
	for _, name := range []string{"a", "b"} {
		c := command(name, "sleep 1000")
		c.Mounts = []*cri.Mount{imageMount("/vol", volumeImage, "")}
		ids = append(ids, e.startContainer(pod, c, config))
	}
	used := e.layers()
	if _, err := e.im.RemoveImage(e.ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: id}}); err != nil {
		t.Fatal(err)
	}
	if e.image(volumeImage) != nil {
		t.Error("the removed image is listed")
	}
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	for i, container := range ids {
		if got := e.exec(container, "cat /vol/conf/a"); got != "new" {
			t.Errorf("container %d reads %q", i, got)
		}
		if got := e.status(container).GetMounts()[0].GetImage().GetImageRef(); got != id {
			t.Errorf("the status of %d tells %q, want %s", i, got, id)
		}
	}
	if got := e.layers(); got != used {
		t.Errorf("%d layers of %d are there while the image is mounted", got, used)
	}
	for _, container := range ids {
		if _, err := e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: container}); err != nil {
			t.Error(err)
		}
	}
	e.eventually("the three layers of the image are gone", func() bool { return e.layers() == used-3 })
}

// layers counts what is unpacked.
func (e *env) layers() int {
	e.Helper()
	list, err := os.ReadDir(filepath.Join(e.Root(), "images", "layers"))
	if err != nil {
		e.Fatal(err)
	}
	return len(list)
}

// The daemon is killed at every moment of a creation with image volumes: the
// retry gets its container, and nothing is left in the end.
func TestImageVolumeKilledDaemon(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	id := e.volume()
	config := e.sandbox()
	pod := e.run(config)
	for round := range 10 {
		c := command(fmt.Sprint("c", round), "cat /one/conf/a /two")
		c.Mounts = []*cri.Mount{imageMount("/one", id, ""), imageMount("/two", id, "conf/deep/b")}
		request := &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config}
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = e.rt.CreateContainer(e.ctx, request) // cut off, or done before
		}()
		time.Sleep(time.Duration(round*round) * time.Millisecond)
		if err := e.Kill(); err != nil {
			t.Fatal(err)
		}
		<-done
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
		if got := e.output(pod, c, config); got != "newdeep" {
			t.Errorf("round %d: the container reads %q", round, got)
		}
		if round%2 == 0 {
			continue // removed with the pod
		}
		list, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range list.GetContainers() {
			if _, err := e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: l.GetId()}); err != nil {
				t.Error(err)
			}
		}
	}
}

// In a pod with a user namespace images and their volumes belong to whom the
// image says, as the pod counts, beside a pod without that shares the layers.
func TestImageVolumeInAUserNamespace(t *testing.T) {
	e := start(t, node.Options{})
	publish(t, "cases/mapped", "1", volumes("/made/deep", "/own"), layer(t, images.Dir("own", 0o755),
		images.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "own/file", Mode: 0o600, Uid: 1000, Gid: 1000}, Data: []byte("x")}))
	id := e.pull("docker.io/cases/mapped:1")
	for _, mapped := range []bool{true, false} {
		config := e.sandbox()
		mapping := []*cri.IDMapping{{HostId: 1 << 20, Length: 65536}}
		c := command("c", `stat -c '%u:%g %n' /vol /vol/own/file /sub /sub/file /made /made/deep /own /own/file
			touch /vol/x 2>/dev/null || echo read-only; touch /made/deep/x /own/x && stat -c %u /made/deep/x`)
		c.Image.Image = id
		c.Mounts = []*cri.Mount{imageMount("/vol", id, ""), imageMount("/sub", id, "own")}
		c.Linux.SecurityContext.ReadonlyRootfs = true
		if mapped {
			options := &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: mapping, Gids: mapping}
			config.Linux.SecurityContext.NamespaceOptions.UsernsOptions = options
			c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = options
			c.Mounts[0].UidMappings, c.Mounts[0].GidMappings = mapping, mapping // as a kubelet may
		}
		want := "0:0 /vol\n1000:1000 /vol/own/file\n0:0 /sub\n1000:1000 /sub/file\n0:0 /made\n0:0 /made/deep\n0:0 /own\n1000:1000 /own/file\nread-only\n0\n"
		if got := e.output(e.run(config), c, config); got != want {
			t.Errorf("user namespace %v: %q, want %q", mapped, got, want)
		}
	}
}
