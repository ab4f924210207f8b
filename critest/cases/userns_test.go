package cases

import (
	"archive/tar"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// startMapped is start for tests of user namespaces, on nodes that have them.
func startMapped(t *testing.T) *env {
	t.Helper()
	e := start(t, node.Options{})
	res, err := e.rt.Status(e.ctx, &cri.StatusRequest{Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	if !res.GetFeatures().GetUserNamespacesHostNetwork() {
		t.Error("user_namespaces_host_network is off")
	}
	for _, h := range res.GetRuntimeHandlers() {
		if !h.GetFeatures().GetUserNamespaces() {
			t.Skipf("skipped: the node says why it has no user namespaces for Kubernetes: %s", res.GetInfo()["host"])
		}
	}
	e.pull(images.Busybox)
	return e
}

// shifted is a user namespace whose ids begin at host and host+1000000.
func shifted(host uint32) *cri.UserNamespace {
	return &cri.UserNamespace{
		Mode: cri.NamespaceMode_POD,
		Uids: []*cri.IDMapping{{HostId: host, Length: 65536}},
		Gids: []*cri.IDMapping{{HostId: host + 1000000, Length: 65536}},
	}
}

// mapped is the configuration of a pod with a user namespace.
func (e *env) mapped(host uint32) *cri.PodSandboxConfig {
	c := e.sandbox()
	c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = shifted(host)
	return c
}

// inPod gives a container the namespace options of its pod.
func inPod(c *cri.ContainerConfig, pod *cri.PodSandboxConfig) *cri.ContainerConfig {
	c.Linux.SecurityContext.NamespaceOptions = pod.GetLinux().GetSecurityContext().GetNamespaceOptions()
	return c
}

// withIDs maps a mount as the kubelet does for a pod's volumes.
func withIDs(m *cri.Mount, u *cri.UserNamespace) *cri.Mount {
	m.UidMappings, m.GidMappings = u.GetUids(), u.GetGids()
	return m
}

// owner is a file's as the node sees it.
func owner(t *testing.T, path string) string {
	t.Helper()
	st, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	sys := st.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d:%d", sys.Uid, sys.Gid)
}

// volume is a directory on the node with a file of root's and one of uid 1000's.
func (e *env) nodeVolume(name string) string {
	e.Helper()
	dir := filepath.Join(e.Dir, name)
	for _, err := range []error{
		os.MkdirAll(dir, 0o755), os.WriteFile(dir+"/root", []byte("r"), 0o600), os.WriteFile(dir+"/user", []byte("u"), 0o600),
		os.Chown(dir+"/user", 1000, 1000),
	} {
		if err != nil {
			e.Fatal(err)
		}
	}
	return dir
}

// A pod with a user namespace of its own: it is root inside and nobody outside,
// and all that it has to do with belongs to it.
func TestUserNamespace(t *testing.T) {
	e := startMapped(t)
	dir := e.nodeVolume("volume")
	for name, pid := range map[string]cri.NamespaceMode{"own": cri.NamespaceMode_CONTAINER, "shared": cri.NamespaceMode_POD} {
		config := pidMode(e.mapped(200000), pid)
		config.Linux.Sysctls = map[string]string{"kernel.sem": "250 32000 32 100", "net.ipv4.ip_local_port_range": "2000 3000", "net.ipv4.ping_group_range": "0 2147483647"}
		pod := e.run(config)
		u := config.Linux.SecurityContext.NamespaceOptions.UsernsOptions
		c := inPod(command(name, "sleep 1000"), config)
		c.Mounts = []*cri.Mount{withIDs(&cri.Mount{ContainerPath: "/mapped", HostPath: dir}, u), {ContainerPath: "/plain", HostPath: dir}}
		id := e.startContainer(pod, c, config)
		for script, want := range map[string]string{
			"cat /proc/self/uid_map": "0 200000 65536",
			"cat /proc/self/gid_map": "0 1200000 65536",
			"stat -c %u:%g / /bin /etc /etc/hosts /etc/resolv.conf /dev/shm":  strings.Repeat("0:0 ", 6),
			"cat /mapped/root; stat -c %u:%g /mapped /mapped/root":            "r0:0 0:0",
			"stat -c %u:%g /mapped/user /plain/root":                          "1000:1000 65534:65534",
			"cat /plain/root 2>&1 || true":                                    "cat: can't open '/plain/root': Permission denied",
			"touch /mapped/made /new /dev/shm/x; chown 7:8 /new; ls /dev/shm": "x",
			"echo more >>/etc/hosts; tail -n 1 /etc/hosts; hostname":          "more " + config.Hostname,
			"cat /proc/sys/kernel/sem /proc/sys/net/ipv4/ip_local_port_range": "250 32000 32 100 2000 3000",
			"cat /proc/sys/net/ipv4/ping_group_range":                         "0 65535",
			"ping -c 1 -w 5 127.0.0.1 >/dev/null && echo pong":                "pong",
			"mount | grep -c '^mqueue on /dev/mqueue'":                        "1",
		} {
			if got := strings.Join(strings.Fields(e.exec(id, script)), " "); got != strings.TrimSpace(want) {
				t.Errorf("%s PIDs: %s: %q, want %q", name, script, got, want)
			}
		}
		upper := filepath.Join(e.Root(), "containers", id, "upper")
		for path, want := range map[string]string{
			dir + "/made": "0:0", upper + "/new": "200007:1200008", upper: "200000:1200000", e.processDir("sleep 1000"): "200000:1200000",
		} {
			if got := owner(t, path); got != want {
				t.Errorf("%s PIDs: on the node %s belongs to %s, want %s", name, path, got, want)
			}
		}
		st, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod})
		if err != nil {
			t.Fatal(err)
		}
		told := st.GetStatus().GetLinux().GetNamespaces().GetOptions().GetUsernsOptions()
		if told.GetMode() != cri.NamespaceMode_POD || told.GetUids()[0].GetHostId() != 200000 || told.GetGids()[0].GetLength() != 65536 {
			t.Errorf("the pod's status tells %v", told)
		}
		if m := e.status(id).GetMounts(); m[0].GetUidMappings()[0].GetHostId() != 200000 || m[0].GetGidMappings()[0].GetHostId() != 1200000 || len(m[1].GetUidMappings()) != 0 {
			t.Errorf("the container's status tells the mounts %v", m)
		}
		e.removePod(pod)
	}
}

// processDir is the directory in /proc of a process of the node's containers.
func (e *env) processDir(command string) string {
	e.Helper()
	for _, text := range e.Processes() {
		var pid int
		if strings.Contains(text, command) {
			if _, err := fmt.Sscanf(text, "process %d", &pid); err != nil {
				e.Fatal(err)
			}
			return fmt.Sprintf("/proc/%d", pid)
		}
	}
	e.Fatalf("no process %q in %q", command, e.Processes())
	return ""
}

// The usual confinement holds in a user namespace too.
func TestUserNamespaceConfined(t *testing.T) {
	e := startMapped(t)
	config := e.mapped(200000)
	c := inPod(command("c", "sleep 1000"), config)
	sc := c.Linux.SecurityContext
	sc.ReadonlyRootfs, sc.NoNewPrivs = true, true
	sc.Capabilities = &cri.Capability{DropCapabilities: []string{"ALL"}}
	sc.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
	sc.MaskedPaths, sc.ReadonlyPaths = []string{"/proc/timer_list", "/sys/firmware"}, []string{"/proc/sys"}
	id := e.startContainer(e.run(config), c, config)
	for script, want := range map[string]string{
		"touch /x 2>/dev/null || echo no; cat /proc/timer_list":                            "no",
		"grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status":                           "CapEff: 0000000000000000 NoNewPrivs: 1 Seccomp: 2",
		"grep -c ' /proc/sys .* ro,' /proc/mounts; ls /sys/firmware":                       "1",
		"echo x >/dev/shm/x && cat /dev/shm/x; echo y >>/etc/hosts 2>/dev/null || echo no": "x no",
	} {
		if got := strings.Join(strings.Fields(e.exec(id, script)), " "); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
}

// A debug container sees the processes of the one that it is to look at.
func TestUserNamespaceDebugContainer(t *testing.T) {
	e := startMapped(t)
	config := e.mapped(200000)
	pod := e.run(config)
	target := e.startContainer(pod, inPod(command("c", "exec sleep 4242"), config), config)
	c := command("debug", "cat /proc/*/cmdline | tr '\\0' ' '")
	c.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{
		Pid: cri.NamespaceMode_TARGET, TargetId: target, UsernsOptions: config.Linux.SecurityContext.NamespaceOptions.UsernsOptions,
	}
	e.eventually("the program of the target runs", func() bool {
		return strings.Contains(strings.Join(e.Processes(), " "), "sleep 4242")
	})
	if got := e.output(pod, c, config); !strings.Contains(got, "sleep 4242") {
		t.Errorf("the debug container sees %q", got)
	}
}

// What berth does in a pod's network from outside works on one that belongs to a
// user namespace: host ports, statistics.
func TestUserNamespaceNetwork(t *testing.T) {
	e := startMapped(t)
	e.pull(images.Nginx)
	config := e.mapped(200000)
	config.PortMappings = []*cri.PortMapping{{HostPort: 18083, ContainerPort: 80}}
	pod := e.run(config)
	c := inPod(command("c", "true"), config)
	c.Image.Image, c.Command = images.Nginx, nil
	e.startContainer(pod, c, config)
	e.eventually("an answer at the host port", func() bool {
		res, err := http.Get("http://127.0.0.1:18083/")
		if err != nil {
			return false
		}
		defer res.Body.Close()
		return res.StatusCode == http.StatusOK
	})
	s, err := e.rt.PodSandboxStats(e.ctx, &cri.PodSandboxStatsRequest{PodSandboxId: pod})
	if err != nil || s.GetStats().GetLinux().GetNetwork().GetDefaultInterface().GetRxBytes().GetValue() == 0 {
		t.Errorf("statistics of the pod's network: %v, %v", s.GetStats().GetLinux().GetNetwork(), err)
	}
}

// A user of the pod who is not root owns the streams, also of an exec.
func TestUserNamespaceStreams(t *testing.T) {
	e := startMapped(t)
	config := e.mapped(200000)
	pod := e.run(config)
	for _, tty := range []bool{false, true} {
		c := inPod(command(fmt.Sprint("tty", tty), "echo first >/dev/stderr; id -u; exec sleep 1000"), config)
		c.Tty = tty
		c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1000}
		id := e.startContainer(pod, c, config)
		e.eventually("the program runs, no longer the OCI runtime's init", func() bool {
			stdout, stderr := e.logs(id)
			return strings.Contains(stdout+stderr, "first")
		})
		if got := e.exec(id, "echo there >/dev/stdout; echo here >/dev/stderr; echo seen >/proc/1/fd/1"); got != "there\n" {
			t.Errorf("tty %v: exec says %q", tty, got)
		}
		for _, want := range []string{"1000", "seen"} {
			e.eventually(fmt.Sprintf("tty %v: %q in the log", tty, want), func() bool {
				stdout, stderr := e.logs(id)
				return strings.Contains(stdout+stderr, want)
			})
		}
	}
}

// Pods with different user namespaces, and one with none, share an image's files.
func TestUserNamespacesShareLayers(t *testing.T) {
	e := startMapped(t)
	publish(t, "cases/owners", "1", volumes("/data/made"),
		layer(t, images.Dir("own", 0o755), ownedBy(images.File("own/five", 0o640, "5"), 5, 6), ownedBy(images.File("own/far", 0o644, "f"), 70000, 70000)))
	image := e.pull("docker.io/cases/owners:1")
	plain := e.sandbox()
	var ids []string
	for i, config := range []*cri.PodSandboxConfig{plain, e.mapped(200000), e.mapped(400000)} {
		c := inPod(command(fmt.Sprint("c", i), "sleep 1000"), config)
		c.Image.Image = image
		ids = append(ids, e.startContainer(e.run(config), c, config))
	}
	for i, id := range ids {
		far := "65534:65534"
		if i == 0 {
			far = "70000:70000"
		}
		want := "0:0 5:6 " + far + " 0:0"
		got := e.exec(id, "stat -c %u:%g /own /own/five /own/far /data/made")
		if strings.Join(strings.Fields(got), " ") != want {
			t.Errorf("container %d sees owners %q, want %q", i, got, want)
		}
		e.exec(id, "echo x >>/own/five; mkdir /data/made/dir")
	}
	for i, id := range ids {
		upper := filepath.Join(e.Root(), "containers", id, "upper")
		want := []string{"5:6", "200005:1200006", "400005:1400006"}[i]
		if got := owner(t, upper+"/own/five"); got != want {
			t.Errorf("container %d's copy belongs to %s on the node, want %s", i, got, want)
		}
	}
	layers, err := filepath.Glob(filepath.Join(e.Root(), "images/layers/*/diff/own/five"))
	if err != nil || len(layers) != 1 {
		t.Fatalf("the file is in layers %q, want in one (%v)", layers, err)
	}
	if got := owner(t, layers[0]); got != "5:6" {
		t.Errorf("in the layer it belongs to %s", got)
	}
}

// A pod with a user namespace has no copy of the layers: the images take what they
// took before, while it runs and after it.
func TestUserNamespaceCopiesNoLayers(t *testing.T) {
	e := startMapped(t)
	before := e.usesAsDu().Total
	config := e.mapped(200000)
	pod := e.run(config)
	e.exec(e.startContainer(pod, inPod(command("c", "sleep 1000"), config), config), "echo x >>/etc/passwd")
	if during := e.usesAsDu().Total; during != before {
		t.Errorf("with a pod in a user namespace the images take %+v, before %+v", during, before)
	}
	e.removePod(pod)
	if after := e.usesAsDu().Total; after != before {
		t.Errorf("after the pod the images take %+v, before %+v", after, before)
	}
}

func ownedBy(e images.Entry, uid, gid int) images.Entry {
	e.Uid, e.Gid = uid, gid
	return e
}

// The capabilities of a file count in the user namespace, as on the node.
func TestUserNamespaceFileCapabilities(t *testing.T) {
	e := startMapped(t)
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	busybox, err := os.ReadFile(filepath.Join(deps, "images/busybox/bin/busybox"))
	if err != nil {
		t.Fatal(err)
	}
	able := images.File("able/cat", 0o755, string(busybox))
	able.Format = tar.FormatPAX
	// Version 2 with the effective bit: CAP_NET_RAW (13) permitted.
	able.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"}
	publish(t, "cases/able", "1", volumes(), layer(t, able))
	image := e.pull("docker.io/cases/able:1")
	for _, config := range []*cri.PodSandboxConfig{e.sandbox(), e.mapped(200000)} {
		c := inPod(command("c", "/able/cat /proc/self/status | grep CapEff"), config)
		c.Image.Image = image
		c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1000}
		if got := e.output(e.run(config), c, config); !strings.Contains(got, "0000000000002000") {
			t.Errorf("with %v: %q, want CAP_NET_RAW", config.Linux.SecurityContext.NamespaceOptions.UsernsOptions, got)
		}
	}
}

// On the node's network a pod with a user namespace sees the node's /sys.
func TestUserNamespaceOnTheNodesNetwork(t *testing.T) {
	e := startMapped(t)
	config := e.mapped(200000)
	config.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	pod := e.run(config)
	id := e.startContainer(pod, inPod(command("c", "sleep 1000"), config), config)
	links, err := os.ReadDir("/sys/class/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		e.exec(id, "ls -d /sys/class/net/"+l.Name())
	}
	if got := e.exec(id, "cat /proc/self/uid_map; grep -c ' /sys.* rw,' /proc/mounts || true"); strings.Join(strings.Fields(got), " ") != "0 200000 65536 1" {
		t.Errorf("mapping, and mounts of /sys that can be written to (the tmpfs for cgroups alone): %q", got)
	}
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if got := e.exec(id, "readlink /proc/self/ns/net"); got != own+"\n" {
		t.Errorf("its network namespace is %q, the node's %q", got, own)
	}
}

// A privileged container of such a pod has every capability there, and the node's
// devices for what it is worth to somebody who does not own them.
func TestUserNamespacePrivileged(t *testing.T) {
	e := startMapped(t)
	config := e.mapped(200000)
	config.Linux.SecurityContext.Privileged = true
	pod := e.run(config)
	c := inPod(command("c", "sleep 1000"), config)
	c.Linux.SecurityContext.Privileged = true
	id := e.startContainer(pod, c, config)
	e.exec(id, "mount -t tmpfs x /tmp && touch /tmp/f && umount /tmp")
	e.exec(id, "hostname other && test $(hostname) = other")
	e.exec(id, "echo 1 >/proc/sys/net/ipv4/ip_forward")
	if got := e.exec(id, "test -c /dev/kmsg && cat /dev/kmsg 2>/dev/null | head -n 1"); got != "" {
		t.Errorf("it reads the node's kernel log: %q", got)
	}
	shared := e.nodeVolume("shared")
	if err := unix.Mount(shared, shared, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(shared, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	for _, err := range []error{unix.Mount("", shared, "", unix.MS_SHARED, ""), os.Mkdir(shared+"/at", 0o755)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	c = inPod(command("d", "sleep 1000"), config)
	c.Mounts = []*cri.Mount{{ContainerPath: "/m", HostPath: shared, Propagation: cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER}}
	id = e.startContainer(pod, c, config)
	if err := unix.Mount("t", shared+"/at", "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	e.exec(id, "grep -q ' /m/at ' /proc/mounts")
	if err := unix.Unmount(shared+"/at", 0); err != nil {
		t.Fatal(err)
	}
}
