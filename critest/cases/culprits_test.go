package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// Whatever of a request the node, the kernel or the OCI runtime cannot do, the error
// has the code, the field and the value.
func TestErrorsNameTheCulpritOfAContainer(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	logs := config.GetLogDirectory()
	put(t, logs+"/.keep", "", 0o644)
	for _, err := range []error{os.Symlink("/etc/passwd", logs+"/link.log"), syscall.Mkfifo(logs+"/fifo.log", 0o644), os.Mkdir(logs+"/dir.log", 0o755), os.Symlink("/etc", logs+"/out")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(e.Dir, "file")
	put(t, file, "x", 0o644)
	resources := func(r *cri.LinuxContainerResources) func(*cri.ContainerConfig) {
		return func(c *cri.ContainerConfig) { c.Linux.Resources = r }
	}
	run := func(argv ...string) func(*cri.ContainerConfig) {
		return func(c *cri.ContainerConfig) { c.Command = argv }
	}
	for name, tc := range map[string]struct {
		change func(*cri.ContainerConfig)
		code   codes.Code
		words  []string
	}{
		"log that is a symlink":   {func(c *cri.ContainerConfig) { c.LogPath = "link.log" }, codes.InvalidArgument, []string{"config.log_path", `"link.log"`, "no regular file"}},
		"log that is a FIFO":      {func(c *cri.ContainerConfig) { c.LogPath = "fifo.log" }, codes.InvalidArgument, []string{"config.log_path", `"fifo.log"`, "no regular file"}},
		"log that is a directory": {func(c *cri.ContainerConfig) { c.LogPath = "dir.log" }, codes.InvalidArgument, []string{"config.log_path", `"dir.log"`, "no regular file"}},
		"log below a symlink":     {func(c *cri.ContainerConfig) { c.LogPath = "out/x.log" }, codes.InvalidArgument, []string{"config.log_path", `"out/x.log"`, logs + "/out"}},
		"log below a FIFO":        {func(c *cri.ContainerConfig) { c.LogPath = "fifo.log/x" }, codes.InvalidArgument, []string{"config.log_path", `"fifo.log/x"`}},
		"working_dir of a file":   {func(c *cri.ContainerConfig) { c.WorkingDir = "/etc/passwd" }, codes.InvalidArgument, []string{"config.working_dir", `"/etc/passwd"`}},
		"little memory":           {resources(&cri.LinuxContainerResources{MemoryLimitInBytes: 1024}), codes.InvalidArgument, []string{"memory_limit_in_bytes", "1024"}},
		"processor out of range":  {resources(&cri.LinuxContainerResources{CpusetCpus: "500"}), codes.InvalidArgument, []string{"cpuset_cpus", `"500"`}},
		"memory node":             {resources(&cri.LinuxContainerResources{CpusetMems: "77"}), codes.InvalidArgument, []string{"cpuset_mems", `"77"`}},
		"no device": {func(c *cri.ContainerConfig) {
			c.Devices = []*cri.Device{{HostPath: file, ContainerPath: "/dev/x", Permissions: "r"}}
		}, codes.InvalidArgument, []string{"devices[0].host_path", file, "is no device"}},
		"dangling mount source": {func(c *cri.ContainerConfig) {
			c.Mounts = []*cri.Mount{{HostPath: file + "/below", ContainerPath: "/data"}}
		}, codes.InvalidArgument, []string{"mounts[0].host_path", file + "/below", "no directory"}},
		"unknown user": {func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext = &cri.LinuxContainerSecurityContext{RunAsUsername: "stranger"}
		}, codes.InvalidArgument, []string{"run_as_username", `"stranger"`}},
		"no such program":        {run("/no/such"), codes.InvalidArgument, []string{`"/no/such"`, "no such file"}},
		"program not in PATH":    {run("stranger"), codes.InvalidArgument, []string{`"stranger"`, "not found"}},
		"program is a directory": {run("/etc"), codes.InvalidArgument, []string{`"/etc"`}},
		"program of no mode":     {run("/etc/passwd"), codes.InvalidArgument, []string{`"/etc/passwd"`, "permission denied"}},
	} {
		c := command("c", "true")
		tc.change(c)
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		e.refused(name, err, tc.code, tc.words...)
		if list, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{}); err != nil || len(list.GetContainers()) != 0 {
			t.Errorf("%s: left %v, %v", name, list.GetContainers(), err)
		}
	}
}

// The same of a pod: what its network plugins say, and programs that are not there.
func TestErrorsNameTheCulpritOfAPod(t *testing.T) {
	dir, plugins := t.TempDir(), t.TempDir()
	handler := filepath.Join(dir, "vanishing-runc")
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	put(t, handler, "#!/bin/sh\nexec "+deps+"/bin/runc \"$@\"\n", 0o755)
	put(t, plugins+"/bridge", "#!/bin/sh\nexec "+deps+"/cni/bridge\n", 0o755)
	e := start(t, node.Options{Plugins: plugins, Settings: map[string]string{"runtime.handlers.runc": fmt.Sprintf("[runtime.handlers.vanishing]\npath = %q", handler)}})
	e.pull(images.Busybox)
	for name, tc := range map[string]struct {
		sysctl, value string
		handler       string
		words         []string
	}{
		"sysctl refused by the kernel": {"net.ipv4.ip_local_port_range", "seven", "", []string{"net.ipv4.ip_local_port_range", `"seven"`}},
		"unknown sysctl":               {"net.no.such", "1", "", []string{"net.no.such"}},
		"sysctl of the node":           {"kernel.panic", "1", "", []string{"kernel.panic"}},
		"unknown handler":              {"", "", "gvisor", []string{"runtime_handler", `"gvisor"`}},
	} {
		config := e.sandbox()
		if tc.sysctl != "" {
			config.Linux.Sysctls = map[string]string{tc.sysctl: tc.value}
		}
		_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: tc.handler})
		e.refused(name, err, codes.InvalidArgument, tc.words...)
	}
	for name, script := range map[string]string{
		"garbage": "#!/bin/sh\necho 'this is no JSON'\necho 'and this is what I think' >&2\n",
		"failure": "#!/bin/sh\necho 'this is no JSON'\necho 'and this is what I think' >&2\nexit 3\n",
		"endless": "#!/bin/sh\nhead -c 100000 /dev/zero | tr '\\0' 'x'\necho 'and this is what I think' >&2\n",
	} {
		put(t, plugins+"/bridge", "#!/bin/sh\n[ \"$CNI_COMMAND\" = ADD ] || exec "+deps+"/cni/bridge\n"+script[len("#!/bin/sh\n"):], 0o755)
		_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: e.sandbox()})
		e.refused("a plugin's "+name, err, codes.Unknown, "CNI plugin bridge ADD", "network setup", "and this is what I think")
		if name != "endless" {
			e.refused("a plugin's "+name, err, codes.Unknown, "this is no JSON")
		}
		if len(err.Error()) > 8<<10 {
			t.Errorf("a plugin's %s: an error of %d bytes", name, len(err.Error()))
		}
	}
	put(t, plugins+"/bridge", "#!/bin/sh\nexec "+deps+"/cni/bridge\n", 0o755)
	config := e.sandbox()
	res, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: "vanishing"})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(handler, handler+".away"); err != nil {
		t.Fatal(err)
	}
	_, err = e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: res.GetPodSandboxId(), Config: command("c", "true"), SandboxConfig: config})
	e.refused("an OCI runtime that is gone", err, codes.FailedPrecondition, handler, "no such file")
	if err := os.Rename(handler+".away", handler); err != nil {
		t.Fatal(err)
	}
	e.useConflist(`{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "stranger"}]}`)
	_, err = e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: e.sandbox()})
	e.refused("a plugin that is not there", err, codes.Unavailable, `"stranger"`, plugins)
	e.useConflist(e.Conflist())
}
