package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

func volumes(paths ...string) ispec.ImageConfig {
	c := ispec.ImageConfig{Cmd: []string{"sh"}, Volumes: map[string]struct{}{}}
	for _, p := range paths {
		c.Volumes[p] = struct{}{}
	}
	return c
}

// The volumes an image declares are there with the image's own content, each
// container's own, and can be written to also under a read-only root. A mount of
// the request goes before.
func TestVolumesOfAnImage(t *testing.T) {
	e := start(t, node.Options{})
	publish(t, "cases/volumes", "1", volumes("/data", "/made/here/", "/link", "/mnt/covered", "/mnt/parent/below"),
		layer(t, images.Dir("data", 0o1777), images.File("data/content", 0o644, "image's"), images.Dir("real", 0o755), images.Symlink("link", "/real")))
	id := e.pull("docker.io/cases/volumes:1")
	config := e.sandbox()
	pod := e.run(config)
	host := filepath.Join(e.Dir, "host")
	if err := os.MkdirAll(filepath.Join(host, "parent"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, readonly := range []bool{false, true} {
		for _, name := range []string{"first", "second"} {
			c := command(fmt.Sprint(name, readonly), `cat /data/content; stat -c ' %a' /data /made/here
				for d in data made/here link mnt/covered; do echo x >/$d/new || echo no $d; ls /$d; done
				echo x 2>/dev/null >/root-is-writable && ls -d /root-*; ls /mnt/parent; ls /real`)
			c.Image.Image = id
			c.Linux.SecurityContext.ReadonlyRootfs = readonly
			c.Mounts = []*cri.Mount{{HostPath: host, ContainerPath: "/mnt/covered"}, {HostPath: host + "/parent", ContainerPath: "/mnt/parent"}}
			want := "image's 1777\n 755\ncontent\nnew\nnew\nnew\nnew\nparent\n/root-is-writable\nnew\n"
			if readonly {
				want = strings.Replace(want, "/root-is-writable\n", "", 1)
			}
			if got := e.output(pod, c, config); got != want {
				t.Errorf("read-only %v, %s: %q, want %q", readonly, name, got, want)
			}
		}
	}
	if list, err := os.ReadDir(filepath.Join(host, "parent")); err != nil || len(list) != 0 {
		t.Errorf("a volume below a mount made %v there (%v)", list, err)
	}
}

// What is written to a volume counts as the container's.
func TestVolumesOfAnImageAreCounted(t *testing.T) {
	e := start(t, node.Options{})
	publish(t, "cases/counted", "1", volumes("/data"))
	config := e.sandbox()
	pod := e.run(config)
	c := command("c", "dd if=/dev/zero of=/data/big bs=1M count=5 2>/dev/null; sleep 1000")
	c.Image.Image = e.pull("docker.io/cases/counted:1")
	c.Linux.SecurityContext.ReadonlyRootfs = true
	id := e.startContainer(pod, c, config)
	e.eventually("5 MiB in the writable layer", func() bool {
		s, err := e.rt.ContainerStats(e.ctx, &cri.ContainerStatsRequest{ContainerId: id})
		return err == nil && s.GetStats().GetWritableLayer().GetUsedBytes().GetValue() >= 5<<20
	})
}

// B45: volumes that lead nowhere good are the image's fault, and harm nobody: nothing of
// the node is seen in the container, or changed, and nothing is left of them.
func TestB45VolumesOfAHostileImage(t *testing.T) {
	e := start(t, node.Options{})
	config := e.sandbox()
	pod := e.run(config)
	outside := filepath.Join(e.Dir, "outside")
	if err := os.Mkdir(outside, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(outside, "secret"), []byte("the node's"), 0o644); err != nil {
		t.Fatal(err)
	}
	links := layer(t, images.Symlink("out", outside), images.Symlink("up", "../../../../../../../.."+outside), images.Symlink("circle", "/circle"))
	for i, p := range []string{"/", "", "/circle/x", "/bin/busybox/x"} {
		tag := fmt.Sprint("bad", i)
		publish(t, "cases/hostile", tag, volumes(p), links)
		c := command(tag, "true")
		c.Image.Image = e.pull("docker.io/cases/hostile:" + tag)
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		e.refused(fmt.Sprintf("volume %q", p), err, codes.InvalidArgument, "config.Volumes")
	}
	publish(t, "cases/hostile", "out", volumes("/out/made", "/up", "../../"+outside+"/climbed", "/proc/x", "/sys", "/etc/hosts"), links)
	want := strings.Join([]string{outside, outside + "/climbed", outside + "/made", outside + "/made/x", outside + "/y"}, "\n") + "\n"
	for _, readonly := range []bool{false, true} {
		c := command(fmt.Sprint("c", readonly), "touch /out/made/x /up/y; find "+outside+" | sort")
		c.Image.Image = e.pull("docker.io/cases/hostile:out")
		c.Linux.SecurityContext.ReadonlyRootfs = readonly
		if got := e.output(pod, c, config); got != want {
			t.Errorf("read-only %v: in the container there is %q, want %q", readonly, got, want)
		}
	}
	if list, err := os.ReadDir(outside); err != nil || len(list) != 1 {
		t.Errorf("on the host there is %v, %v", list, err)
	}
	e.removePod(pod)
	if left, err := os.ReadDir(filepath.Join(e.Root(), "containers")); err != nil || len(left) != 0 {
		t.Errorf("of the containers there is %v, %v", left, err)
	}
}

// A host path that does not exist is made, or refused, as configured; a symlink
// to nothing is always refused.
func TestMissingHostPath(t *testing.T) {
	for _, value := range []string{"create", "refuse"} {
		t.Run(value, func(t *testing.T) {
			e := start(t, node.Options{Settings: map[string]string{"runtime": fmt.Sprintf("missing_host_path = %q", value)}})
			e.pull(images.Busybox)
			config := e.sandbox()
			pod := e.run(config)
			dangling, missing := filepath.Join(e.Dir, "dangling"), filepath.Join(e.Dir, "missing", "deep")
			if err := os.Symlink("nowhere", dangling); err != nil {
				t.Fatal(err)
			}
			create := func(path string) error {
				c := command("c", "true")
				c.Mounts = []*cri.Mount{{HostPath: path, ContainerPath: "/m"}}
				_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
				return err
			}
			e.refused("a dangling link", create(dangling), codes.InvalidArgument, "mounts[0].host_path", dangling)
			err := create(missing)
			info, statErr := os.Stat(missing)
			if value == "refuse" {
				e.refused("a missing path", err, codes.InvalidArgument, "mounts[0].host_path", missing)
				if statErr == nil {
					t.Error("it was made all the same")
				}
			} else if err != nil || statErr != nil || info.Mode() != os.ModeDir|0o755 {
				t.Errorf("%v; the path is %v, %v", err, info, statErr)
			}
		})
	}
}

// Mount points that the image does not have can be entered by every user, are
// found through the image's symlinks without leading out, and of two mounts on
// one place the later is seen. Files are mounted on files.
func TestMountPoints(t *testing.T) {
	e := start(t, node.Options{})
	outside := filepath.Join(e.Dir, "outside")
	source := func(name string) string {
		dir := filepath.Join(e.Dir, "sources", name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "name"), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	publish(t, "cases/points", "1", ispec.ImageConfig{Cmd: []string{"sh"}}, layer(t, images.Symlink("var", "run"), images.Dir("run", 0o755),
		images.Symlink("out", outside), images.Symlink("deep", "/out/../out/in")))
	config := e.sandbox()
	pod := e.run(config)
	c := command("c", `cd / && for f in new/made/name var/x/name run/x/name out/name deep/name twice/name afile; do cat $f; echo " $f"; done; stat -c %a /new /new/made`)
	c.Image.Image = e.pull("docker.io/cases/points:1")
	c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 4711}
	for at, from := range map[string]string{"/new/made": "a", "/var/x": "b", "/out": "c", "/deep": "d"} {
		c.Mounts = append(c.Mounts, &cri.Mount{ContainerPath: at, HostPath: source(from)})
	}
	c.Mounts = append(c.Mounts, &cri.Mount{ContainerPath: "/twice", HostPath: source("e")}, &cri.Mount{ContainerPath: "/twice/", HostPath: source("f")},
		&cri.Mount{ContainerPath: "/afile", HostPath: source("g") + "/name"})
	want := "a new/made/name\nb var/x/name\nb run/x/name\nc out/name\nd deep/name\nf twice/name\ng afile\n755\n755\n"
	if got := e.output(pod, c, config); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if _, err := os.Lstat(outside); err == nil {
		t.Error("a mount point was made on the host")
	}
}

// A file on a directory, a directory on a file, a place below a file or in an
// image that cannot hold it: said by field, before the OCI runtime is asked.
func TestMountsThatDoNotFit(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	id := e.volume()
	config := e.sandbox()
	pod := e.run(config)
	file := filepath.Join(e.Dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for what, mounts := range map[string][]*cri.Mount{
		"a file on a directory":   {{ContainerPath: "/etc", HostPath: file}},
		"a directory on a file":   {{ContainerPath: "/etc/passwd", HostPath: e.Dir}},
		"below a file":            {{ContainerPath: "/etc/passwd/x", HostPath: e.Dir}},
		"new in an image":         {{ContainerPath: "/vol/new", HostPath: e.Dir}, imageMount("/vol", id, "")},
		"a directory of /tmp":     {{ContainerPath: "/proc", HostPath: e.Dir}},
		"a file inside /proc":     {{ContainerPath: "/proc/version", HostPath: file}},
		"an image's file on /bin": {imageMount("/bin", id, "run")},
		"an image on a file":      {imageMount("/etc/passwd", id, "")},
	} {
		c := command("c", "true")
		c.Mounts = mounts
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		e.refused(what, err, codes.InvalidArgument, "mounts[0].container_path", mounts[0].GetContainerPath())
	}
	c := command("c", "cat /proc/uptime")
	c.Mounts = []*cri.Mount{{ContainerPath: "/proc/uptime", HostPath: file}}
	if got := e.output(pod, c, config); got != "" {
		t.Errorf("a file of lxcfs over /proc/uptime shows %q", got)
	}
}
