package smoke

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
)

// mapped is a pod with a user namespace, and the options that its containers send.
func (e *env) mapped(name string, change func(o *cri.NamespaceOption)) (*cri.RunPodSandboxRequest, *cri.NamespaceOption) {
	ids := []*cri.IDMapping{{HostId: 200000, Length: 65536}}
	o := &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER, UsernsOptions: &cri.UserNamespace{Uids: ids, Gids: ids}}
	change(o)
	return &cri.RunPodSandboxRequest{Config: &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: name, Namespace: "smoke", Uid: name + "-uid"}, Hostname: name,
		LogDirectory: filepath.Join(e.LogDir(), name),
		Linux:        &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: o, Privileged: true}},
	}}, o
}

// TestUserNamespaces runs pods with user namespaces on this kernel and its mounts:
// with their own network and the node's, ordinary and privileged. What the kernel
// cannot map is refused by name, and the feature is off then.
func TestUserNamespaces(t *testing.T) {
	e := start(t)
	for name, change := range map[string]func(o *cri.NamespaceOption){
		"own": func(*cri.NamespaceOption) {}, "shared": func(o *cri.NamespaceOption) { o.Pid = cri.NamespaceMode_POD },
		"host": func(o *cri.NamespaceOption) { o.Network = cri.NamespaceMode_NODE },
	} {
		request, o := e.mapped(name, change)
		pod, err := e.Runtime().RunPodSandbox(e.ctx, request)
		if status.Code(err) == codes.Unimplemented {
			t.Skipf("skipped: %v", err)
		}
		if err != nil {
			t.Fatalf("run pod %s: %v", name, err)
		}
		for _, privileged := range []bool{false, true} {
			c := &cri.ContainerConfig{
				Metadata: &cri.ContainerMetadata{Name: map[bool]string{false: "plain", true: "privileged"}[privileged]},
				Image:    &cri.ImageSpec{Image: images.Busybox}, Command: []string{"sleep", "1000"},
				Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: o, Privileged: privileged}},
			}
			id := e.run(pod.GetPodSandboxId(), c, request.GetConfig())
			e.check("the mapping", strings.Join(strings.Fields(e.exec(id, "cat /proc/self/uid_map")), " "), "0 200000 65536")
			e.check("owners", e.exec(id, "touch /new && stat -c %u / /bin /new /etc/hosts /dev/shm | uniq"), "0")
			e.check("the node's owner", readOwner(t, filepath.Join(e.Root(), "containers", id, "upper/new")), uint32(200000))
			e.check("the cgroup is shown", e.exec(id, "ls /sys/fs/cgroup | grep -q . && ls -d /sys/class/net/lo"), "/sys/class/net/lo")
		}
		e.crictl("stopp", pod.GetPodSandboxId())
		e.crictl("rmp", pod.GetPodSandboxId())
	}
}

// run makes and starts a container.
func (e *env) run(pod string, c *cri.ContainerConfig, config *cri.PodSandboxConfig) string {
	e.Helper()
	made, err := e.Runtime().CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
	if err == nil {
		_, err = e.Runtime().StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: made.GetContainerId()})
	}
	if err != nil {
		e.Fatalf("container %s: %v", c.GetMetadata().GetName(), err)
	}
	return made.GetContainerId()
}

func readOwner(t *testing.T, path string) uint32 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Error(err)
	}
	return st.Uid
}

// TestUserNamespaceVolumes mounts a directory on a disk and one on a tmpfs with a
// pod's ids. The node's features say whether the latter works.
func TestUserNamespaceVolumes(t *testing.T) {
	e := start(t)
	request, o := e.mapped("volumes", func(*cri.NamespaceOption) {})
	pod, err := e.Runtime().RunPodSandbox(e.ctx, request)
	if status.Code(err) == codes.Unimplemented {
		t.Skipf("skipped: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	told, err := e.Runtime().Status(e.ctx, &cri.StatusRequest{Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	whole := told.GetRuntimeHandlers()[0].GetFeatures().GetUserNamespaces()
	disk, memory := filepath.Join(e.Root(), "disk"), filepath.Join(e.Dir, "memory")
	for _, dir := range []string{disk, memory} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount("t", memory, "tmpfs", 0, "mode=755"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(memory, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	for dir, works := range map[string]bool{disk: true, memory: whole} {
		c := &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: filepath.Base(dir)}, Image: &cri.ImageSpec{Image: images.Busybox}, Command: []string{"sleep", "1000"},
			Mounts: []*cri.Mount{{ContainerPath: "/m", HostPath: dir, UidMappings: o.UsernsOptions.Uids, GidMappings: o.UsernsOptions.Gids}},
			Linux:  &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: o}},
		}
		if !works {
			_, err := e.Runtime().CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod.GetPodSandboxId(), Config: c, SandboxConfig: request.GetConfig()})
			if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), memory) || !strings.Contains(told.GetInfo()["host"], "tmpfs") {
				t.Errorf("a tmpfs that cannot be mapped: %v, and the node tells %s", err, told.GetInfo()["host"])
			}
			continue
		}
		id := e.run(pod.GetPodSandboxId(), c, request.GetConfig())
		e.check("owner inside", e.exec(id, "touch /m/new && stat -c %u /m /m/new | uniq"), "0")
		e.check("owner on the node", readOwner(t, dir+"/new"), uint32(0))
	}
}
