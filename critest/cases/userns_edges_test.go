package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// What cannot be is refused by name, and nothing is left.
func TestRefusedUserNamespaces(t *testing.T) {
	e := startMapped(t)
	one := []*cri.IDMapping{{HostId: 1000, Length: 65536}}
	pod := cri.NamespaceMode_POD
	for words, u := range map[string]*cri.UserNamespace{
		`userns_options.mode|"CONTAINER"`:            {Mode: cri.NamespaceMode_CONTAINER},
		`userns_options.mode|"TARGET"`:               {Mode: cri.NamespaceMode_TARGET},
		`userns_options.mode|"NODE"`:                 {Mode: cri.NamespaceMode_NODE, Uids: one},
		`userns_options.uids|"0 mappings"`:           {Mode: pod},
		`userns_options.gids|"0 mappings"`:           {Mode: pod, Uids: one},
		`userns_options.uids|"2 mappings"`:           {Mode: pod, Uids: append(one, one...), Gids: one},
		`userns_options.gids[0].container_id|"3"`:    {Mode: pod, Uids: one, Gids: []*cri.IDMapping{{ContainerId: 3, HostId: 1, Length: 9}}},
		`userns_options.uids[0].length|"0"`:          {Mode: pod, Uids: []*cri.IDMapping{{HostId: 1}}, Gids: one},
		`userns_options.uids[0].length|host_id 4294`: {Mode: pod, Uids: []*cri.IDMapping{{HostId: 1<<32 - 5, Length: 5}}, Gids: one},
	} {
		c := e.sandbox()
		c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = u
		_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: c})
		e.refused(words, err, codes.InvalidArgument, strings.Split(words, "|")...)
	}
	for _, spoil := range []func(o *cri.NamespaceOption){
		func(o *cri.NamespaceOption) { o.Pid = cri.NamespaceMode_NODE }, func(o *cri.NamespaceOption) { o.Ipc = cri.NamespaceMode_NODE },
	} {
		c := e.mapped(200000)
		spoil(c.Linux.SecurityContext.NamespaceOptions)
		_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: c})
		e.refused("with the node's", err, codes.InvalidArgument, "userns_options.mode", "NODE")
	}
	e.empty("refusals")
	config := e.mapped(200000)
	id := e.run(config)
	for words, spoil := range map[string]func(c *cri.ContainerConfig){
		`run_as_user|"65536"`:          func(c *cri.ContainerConfig) { c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 65536} },
		`supplemental_groups|"100000"`: func(c *cri.ContainerConfig) { c.Linux.SecurityContext.SupplementalGroups = []int64{100000} },
		`userns_options|missing`: func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}
		},
		`userns_options|differs`: func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.NamespaceOptions = e.mapped(7).Linux.SecurityContext.NamespaceOptions
		},
		`mounts[0].propagation|"PROPAGATION_BIDIRECTIONAL"`: func(c *cri.ContainerConfig) {
			c.Mounts = []*cri.Mount{{ContainerPath: "/m", HostPath: "/tmp", Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL}}
		},
		`mounts[0].gidMappings|missing`: func(c *cri.ContainerConfig) {
			c.Mounts = []*cri.Mount{{ContainerPath: "/m", HostPath: "/tmp", UidMappings: one}}
		},
	} {
		c := inPod(command("c", "true"), config)
		spoil(c)
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: id, Config: c, SandboxConfig: config})
		e.refused(words, err, codes.InvalidArgument, strings.Split(words, "|")...)
	}
	c := inPod(command("c", "true"), config)
	c.Mounts = []*cri.Mount{withIDs(&cri.Mount{ContainerPath: "/m", HostPath: "/proc/sys"}, shifted(200000))}
	_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: id, Config: c, SandboxConfig: config})
	e.refused("proc cannot be id-mapped", err, codes.Unimplemented, "mounts[0].host_path", "/proc/sys", "id-mapped")
}

// Mounts are id-mapped with the pod's ids or with others, on a disk and on a
// tmpfs, read-only all the way down or not, also where the pod has no user namespace.
func TestIDMappedMounts(t *testing.T) {
	e := startMapped(t)
	dir, memory := e.nodeVolume("volume"), e.nodeVolume("memory/below")
	for _, at := range []string{filepath.Dir(memory), memory} {
		if err := unix.Mount("t", at, "tmpfs", 0, "mode=755"); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		}()
		if err := os.MkdirAll(memory, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, config := range []*cri.PodSandboxConfig{e.sandbox(), e.mapped(200000)} {
		pod, id := e.run(config), uint32(0)
		if u := config.Linux.SecurityContext.NamespaceOptions.UsernsOptions; u != nil {
			id = u.Uids[0].HostId
		}
		other := &cri.UserNamespace{Uids: []*cri.IDMapping{{HostId: id + 3000, Length: 2000}}, Gids: []*cri.IDMapping{{HostId: id + 1000000, Length: 10}}}
		if id == 0 {
			other.Gids[0].HostId = 0
		}
		c := inPod(command("c", "sleep 1000"), config)
		deep := withIDs(&cri.Mount{ContainerPath: "/deep", HostPath: filepath.Dir(memory), Readonly: true, RecursiveReadOnly: true}, other)
		c.Mounts = []*cri.Mount{withIDs(&cri.Mount{ContainerPath: "/disk", HostPath: dir}, other),
			withIDs(&cri.Mount{ContainerPath: "/file", HostPath: dir + "/root"}, other),
			withIDs(&cri.Mount{ContainerPath: "/shallow", HostPath: filepath.Dir(memory), Readonly: true}, other), deep}
		inside := e.startContainer(pod, c, config)
		if got := e.exec(inside, "stat -c %u:%g /disk/root /disk/user /shallow /file"); strings.Join(strings.Fields(got), " ") != "3000:0 4000:65534 3000:0 3000:0" {
			t.Errorf("from %d: owners %q", id, got)
		}
		if got := e.exec(inside, "for d in /shallow /deep /deep/below; do touch $d/x 2>/dev/null && echo $d; done; true"); got != "" {
			t.Errorf("from %d: written to %q", id, got)
		}
	}
}

// An image volume belongs to the pod's root like everything else of the pod.
func TestUserNamespaceImageVolume(t *testing.T) {
	e := startMapped(t)
	id := e.volume()
	config := e.mapped(200000)
	u := config.Linux.SecurityContext.NamespaceOptions.UsernsOptions
	c := inPod(command("c", "stat -c %u:%g /vol /vol/conf/deep/b /part/b; cat /part/b"), config)
	c.Mounts = []*cri.Mount{imageMount("/vol", id, ""), withIDs(imageMount("/part", id, "conf/deep"), u)}
	if got := e.output(e.run(config), c, config); got != "0:0\n0:0\n0:0\ndeep" {
		t.Errorf("got %q", got)
	}
}

// A daemon that is killed finds its pods with user namespaces again, and takes
// them away without a trace.
func TestUserNamespaceOutlivesTheDaemon(t *testing.T) {
	e := startMapped(t)
	config := pidMode(e.mapped(200000), cri.NamespaceMode_POD)
	pod := e.run(config)
	id := e.startContainer(pod, inPod(command("c", "sleep 1000"), config), config)
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	e.rt, e.im = e.Runtime(), e.Images()
	if got := e.exec(id, "echo >/dev/stderr; cat /proc/self/uid_map"); strings.Join(strings.Fields(got), " ") != "0 200000 65536" {
		t.Errorf("mapping after the restart: %q", got)
	}
	second := e.startContainer(pod, inPod(command("d", "sleep 1000"), config), config)
	if got := e.exec(second, "test $(readlink /proc/self/ns/user) = $(readlink /proc/1/ns/user) && echo same"); got != "same\n" {
		t.Errorf("the new container has a user namespace of its own: %s", got)
	}
	stats, err := e.rt.ContainerStats(e.ctx, &cri.ContainerStatsRequest{ContainerId: second})
	if err != nil || stats.GetStats().GetWritableLayer().GetInodesUsed().GetValue() == 0 {
		t.Errorf("statistics: %v, %v", stats, err)
	}
	e.removePod(pod)
}

// A daemon that is killed at any moment of the birth of a pod and its container, or
// of their end, leaves nothing behind that the next one does not take away; the
// node's leak check has the last word.
func TestUserNamespaceAtAKilledDaemon(t *testing.T) {
	e := startMapped(t)
	for i := range 12 {
		config := pidMode(e.mapped(200000), []cri.NamespaceMode{cri.NamespaceMode_CONTAINER, cri.NamespaceMode_POD}[i%2])
		rt, over := e.rt, make(chan struct{})
		go func() {
			defer close(over)
			pod, err := rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: config})
			if err != nil {
				return // the daemon is dead
			}
			c := inPod(command("c", "sleep 1000"), config)
			_, _ = rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod.GetPodSandboxId(), Config: c, SandboxConfig: config})
			_, _ = rt.RemovePodSandbox(e.ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod.GetPodSandboxId()})
		}()
		time.Sleep(time.Duration(i) * 25 * time.Millisecond)
		if err := e.Kill(); err != nil {
			t.Fatal(err)
		}
		<-over
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
		e.rt, e.im = e.Runtime(), e.Images()
		if err := e.RemoveAll(e.ctx); err != nil {
			t.Fatal(err)
		}
		e.empty(fmt.Sprintf("kill %d", i))
		for _, dir := range []string{"namespaces", "sandboxes", "containers"} {
			if list, err := os.ReadDir(filepath.Join(e.State(), dir)); err == nil && len(list) != 0 {
				t.Errorf("after kill %d there is %v in %s", i, list, dir)
			}
		}
	}
}

// Users and groups up to the last that is mapped, and a device, which is the
// node's: it can be used as its mode says, and belongs to nobody.
func TestUserNamespaceUsersAndDevices(t *testing.T) {
	e := startMapped(t)
	config := e.mapped(200000)
	c := inPod(command("c", "id -u; id -G; head -c 3 /dev/mine/zero | wc -c; stat -c %u:%g:%t:%T /dev/mine/zero"), config)
	sc := c.Linux.SecurityContext
	sc.RunAsUser, sc.RunAsGroup, sc.SupplementalGroups = &cri.Int64Value{Value: 65535}, &cri.Int64Value{Value: 65534}, []int64{7, 65535}
	c.Devices = []*cri.Device{{ContainerPath: "/dev/mine/zero", HostPath: "/dev/zero", Permissions: "rw"}}
	pod := e.run(config)
	if got := strings.Join(strings.Fields(e.output(pod, c, config)), " "); got != "65535 65534 7 65535 3 65534:65534:1:5" {
		t.Errorf("got %q", got)
	}
	list, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{})
	if err != nil || len(list.GetContainers()) != 1 {
		t.Fatal(list, err)
	}
	user := e.status(list.GetContainers()[0].GetId()).GetUser().GetLinux()
	if user.GetUid() != 65535 || user.GetGid() != 65534 || fmt.Sprint(user.GetSupplementalGroups()) != "[7 65534 65535]" {
		t.Errorf("the status tells the user %v, want the container's own ids", user)
	}
}
