package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// What nobody can mean in a pod's own fields is refused by field and value, and
// not even a log directory is made.
func TestRefusedPods(t *testing.T) {
	e := start(t, node.Options{})
	file := filepath.Join(e.Dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	port := func(m *cri.PortMapping) func(*cri.PodSandboxConfig) {
		return func(c *cri.PodSandboxConfig) { c.PortMappings = []*cri.PortMapping{m} }
	}
	for name, c := range map[string]struct {
		change func(*cri.PodSandboxConfig)
		words  []string
	}{
		"slash in the name":     {func(c *cri.PodSandboxConfig) { c.Metadata.Name = "a/b" }, []string{"metadata.name", `"a/b"`}},
		"newline in the name":   {func(c *cri.PodSandboxConfig) { c.Metadata.Namespace = "a\nb" }, []string{"metadata.namespace", `"a\nb"`}},
		"NUL in the uid":        {func(c *cri.PodSandboxConfig) { c.Metadata.Uid = "a\x00" }, []string{"metadata.uid", `"a\x00"`}},
		"direction in the name": {func(c *cri.PodSandboxConfig) { c.Metadata.Name = "a\u202eb" }, []string{"metadata.name"}},
		"long name":             {func(c *cri.PodSandboxConfig) { c.Metadata.Name = strings.Repeat("n", 2000) }, []string{"metadata.name", "1024"}},
		"large annotation": {func(c *cri.PodSandboxConfig) { c.Annotations = map[string]string{"note": strings.Repeat("x", 14<<20)} },
			[]string{"config.annotations", fmt.Sprint(14<<20 + 4)}},
		"many labels": {func(c *cri.PodSandboxConfig) {
			c.Labels = map[string]string{}
			for i := range 3 << 10 {
				c.Labels[fmt.Sprint(i)] = strings.Repeat("x", 400)
			}
		}, []string{"config.labels"}},
		"large anything": {func(c *cri.PodSandboxConfig) {
			c.DnsConfig = &cri.DNSConfig{Options: []string{strings.Repeat("x", 9<<20)}}
		}, []string{"config takes"}},
		"log file":       {func(c *cri.PodSandboxConfig) { c.LogDirectory = file }, []string{"log_directory", file}},
		"below a file":   {func(c *cri.PodSandboxConfig) { c.LogDirectory = file + "/x" }, []string{"log_directory", file + "/x"}},
		"log in proc":    {func(c *cri.PodSandboxConfig) { c.LogDirectory = "/proc/zz" }, []string{"log_directory", "/proc/zz"}},
		"container port": {port(&cri.PortMapping{HostPort: -1, ContainerPort: 70000}), []string{"port_mappings[0].container_port", "70000"}},
		"protocol":       {port(&cri.PortMapping{ContainerPort: 80, Protocol: 7}), []string{"port_mappings[0].protocol", "7"}},
		"multicast":      {port(&cri.PortMapping{HostPort: 80, ContainerPort: 80, HostIp: "224.0.0.1"}), []string{"port_mappings[0].host_ip", "224.0.0.1"}},
		"DNS option":     {func(c *cri.PodSandboxConfig) { c.DnsConfig = &cri.DNSConfig{Options: []string{"a\r"}} }, []string{"dns_config.options[0]"}},
		"resources":      {func(c *cri.PodSandboxConfig) { c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: -5} }, []string{"resources.cpu_shares", "-5"}},
		"overhead":       {func(c *cri.PodSandboxConfig) { c.Linux.Overhead = &cri.LinuxContainerResources{CpusetCpus: "abc"} }, []string{"overhead.cpuset_cpus", `"abc"`}},
	} {
		config := e.sandbox()
		c.change(config)
		_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: config})
		e.refused(name, err, codes.InvalidArgument, c.words...)
		if dir := config.GetLogDirectory(); dir != file {
			if _, err := os.Stat(dir); err == nil {
				t.Errorf("%s: %s was made", name, dir)
			}
		}
		e.empty(name)
	}
	config := e.sandbox()
	config.PortMappings = []*cri.PortMapping{{HostPort: -1, ContainerPort: 80}, {ContainerPort: 81, HostIp: "0.0.0.0"}}
	config.Annotations = map[string]string{"note": strings.Repeat("x", 1<<19)}
	e.run(config)
}

// Limits that no kernel knows are refused in every call that takes some.
func TestRefusedLimits(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	id := e.startContainer(pod, command("main", "sleep 1000"), config)
	for field, r := range map[string]*cri.LinuxContainerResources{
		"cpu_quota": {CpuQuota: -7}, "cpu_period": {CpuPeriod: -100}, "cpu_shares": {CpuShares: -1}, "cpuset_cpus": {CpusetCpus: "abc"},
		"cpuset_mems": {CpusetMems: "1-0"}, "memory_limit_in_bytes": {MemoryLimitInBytes: -4096}, "memory_swap_limit_in_bytes": {MemorySwapLimitInBytes: -2},
		"oom_score_adj": {OomScoreAdj: 5000}, "hugepage_limits.page_size": {HugepageLimits: []*cri.HugepageLimit{{PageSize: "huge"}}},
		"unified": {Unified: map[string]string{"../x": "1"}},
	} {
		_, err := e.rt.UpdatePodSandboxResources(e.ctx, &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: pod, Resources: r})
		e.refused("pod, "+field, err, codes.InvalidArgument, "resources."+field)
		_, err = e.rt.UpdatePodSandboxResources(e.ctx, &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: pod, Overhead: r})
		e.refused("overhead, "+field, err, codes.InvalidArgument, "overhead."+field)
		_, err = e.rt.UpdateContainerResources(e.ctx, &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: r})
		e.refused("container, "+field, err, codes.InvalidArgument, "linux."+field)
		c := command("more", "true")
		c.Linux.Resources = r
		_, err = e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		e.refused("create, "+field, err, codes.InvalidArgument, "linux.resources."+field)
	}
}

// Containers' names and sizes, commands of exec, and long or odd words in errors.
func TestRefusedContainersAndCommands(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	for name, change := range map[string]func(*cri.ContainerConfig){
		`"a/b"`:              func(c *cri.ContainerConfig) { c.Metadata.Name = "a/b" },
		`"a\x00b"`:           func(c *cri.ContainerConfig) { c.Metadata.Name = "a\x00b" },
		"config.annotations": func(c *cri.ContainerConfig) { c.Annotations = map[string]string{"note": strings.Repeat("x", 14<<20)} },
		"config takes": func(c *cri.ContainerConfig) {
			c.Envs = []*cri.KeyValue{{Key: "E", Value: make([]byte, 9<<20)}}
		},
	} {
		c := command("bad", "true")
		change(c)
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		e.refused(name, err, codes.InvalidArgument, name)
	}
	id := e.startContainer(pod, command("main", "sleep 1000"), config)
	for what, cmd := range map[string][]string{"cmd is empty": nil, "cmd[0]": {""}, `cmd[1] "a\x00b"`: {"echo", "a\x00b"}} {
		_, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: cmd})
		e.refused("ExecSync: "+what, err, codes.InvalidArgument, what)
		_, err = e.rt.Exec(e.ctx, &cri.ExecRequest{ContainerId: id, Cmd: cmd, Stdout: true})
		e.refused("Exec: "+what, err, codes.InvalidArgument, what)
	}
	for _, program := range []string{"/no/such/program", "nosuch", "/etc", "/etc/passwd"} {
		_, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{program}})
		e.refused("ExecSync of "+program, err, codes.InvalidArgument, program)
	}
	long := strings.Repeat("0", 1<<20)
	_, err := e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: long})
	e.refused("long id", err, codes.NotFound, "bytes)")
	if n := len(err.Error()); n > 1000 {
		t.Errorf("the error about a long id has %d bytes", n)
	}
	_, err = e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: "a\x1b[31m\nb"})
	e.refused("odd id", err, codes.NotFound)
	if strings.ContainsAny(err.Error(), "\x1b\n") {
		t.Errorf("the error about an odd id is %q", err)
	}
}

// A name that is there already answers a repeated request, also when what may
// change under a kubelet has changed; another object is not taken for it.
func TestTheSameName(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	e.pull(images.Pause)
	config := e.sandbox()
	pod := e.run(config)
	again := e.sandbox()
	again.Metadata, again.Hostname = config.Metadata, config.Hostname // its log directory and labels are others
	again.Annotations = map[string]string{"new": "one"}
	again.DnsConfig = &cri.DNSConfig{Servers: []string{"10.0.0.10"}}
	if got := e.run(again); got != pod {
		t.Errorf("a retry with other labels made %s beside %s", got, pod)
	}
	again.Hostname = "other"
	_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: again})
	e.refused("another hostname", err, codes.AlreadyExists, pod, "config.hostname")
	id := e.create(pod, command("c", "sleep 1000"), config)
	retry := command("c", "sleep 1000")
	retry.Mounts = []*cri.Mount{{HostPath: filepath.Join(e.Dir, "termination"), ContainerPath: "/dev/termination-log"}}
	retry.Envs = []*cri.KeyValue{{Key: "NEW", Value: []byte("service")}}
	if got := e.create(pod, retry, config); got != id {
		t.Errorf("a retry with another termination file made %s beside %s", got, id)
	}
	for field, change := range map[string]func(*cri.ContainerConfig){
		"config.image.image": func(c *cri.ContainerConfig) { c.Image.Image = images.Pause },
		"config.command":     func(c *cri.ContainerConfig) { c.Command = []string{"sleep", "5"} },
		"config.tty":         func(c *cri.ContainerConfig) { c.Tty = true },
	} {
		other := command("c", "sleep 1000")
		change(other)
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: other, SandboxConfig: config})
		e.refused(field, err, codes.AlreadyExists, id, field)
	}
	other := command("c", "sleep 5")
	other.Metadata.Attempt = 1 // what a kubelet does then
	if next := e.create(pod, other, config); next == id {
		t.Error("another attempt is the same container")
	}
}

// A description that no client would take leaves parts out and says so.
func TestVerboseStatusIsBounded(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	config.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE   // plugins would read all of it
	config.DnsConfig = &cri.DNSConfig{Options: []string{strings.Repeat("<", 5<<19)}} // six bytes each in JSON
	pod := e.run(config)
	c := command("c", "sleep 1000")
	for i := range 25 {
		c.Envs = append(c.Envs, &cri.KeyValue{Key: fmt.Sprintf("E%d", i), Value: []byte(strings.Repeat("<", 100<<10))})
	}
	id := e.create(pod, c, config)
	status, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod, Verbose: true})
	if info := status.GetInfo()["info"]; err != nil || len(info) > 12<<20 || !strings.Contains(info, `"omitted":["config"`) {
		t.Errorf("pod: %v, %d bytes of info, %.100s", err, len(info), info)
	}
	cstatus, err := e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if info := cstatus.GetInfo()["info"]; err != nil || len(info) > 12<<20 || !strings.Contains(info, `"omitted":["runtimeSpec"`) || !strings.Contains(info, `"sandboxID"`) {
		t.Errorf("container: %v, %d bytes of info, %.100s", err, len(info), info)
	}
}

// A log whose directory was deleted is made anew with it; what lies in its place
// is not written to.
func TestReopenLogWithoutItsDirectory(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	id := e.startContainer(e.run(config), command("main", "while :; do echo tick; sleep 0.05; done"), config)
	log := e.status(id).GetLogPath()
	if err := os.RemoveAll(filepath.Dir(log)); err != nil {
		t.Fatal(err)
	}
	if _, err := e.rt.ReopenContainerLog(e.ctx, &cri.ReopenContainerLogRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	e.eventually("lines in the new log", func() bool {
		b, err := os.ReadFile(log)
		return err == nil && strings.Contains(string(b), "tick")
	})
	if err := os.Remove(log); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(log, 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := e.rt.ReopenContainerLog(e.ctx, &cri.ReopenContainerLogRequest{ContainerId: id})
	e.refused("directory in the log's place", err, codes.FailedPrecondition, log)
}

// What cannot be imported: the message says import once, and why.
func TestRefusedImports(t *testing.T) {
	e := start(t, node.Options{})
	for path, code := range map[string]string{"/nonexist": "NotFound", e.Dir: "InvalidArgument", "/etc/passwd/x": "InvalidArgument", filepath.Join(e.Dir, "config.toml"): "InvalidArgument"} {
		out, exit := e.berth("image", "--socket", e.Socket, "import", path)
		if exit == 0 || !strings.Contains(out, code) || strings.Count(out, "import "+path) != 1 {
			t.Errorf("import %s: exit code %d, %q; want %s and the path once", path, exit, out, code)
		}
	}
}
