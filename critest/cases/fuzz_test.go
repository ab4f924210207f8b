package cases

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// fuzzTime is how long random requests are sent; BERTH_FUZZ says otherwise.
const fuzzTime = 20 * time.Second

// fuzzPatience is how long one request may take on a busy machine.
const fuzzPatience = 90 * time.Second

// fuzzer sends random requests that the protocol allows, many of which make no
// sense, and looks at what comes back.
type fuzzer struct {
	*env
	*rand.Rand
	worker int
	count  *fuzzCount
}

type fuzzCount struct {
	sync.Mutex
	codes map[string]int // "RPC code"
}

// TestFuzzRequests sends random requests to the daemon from several sides: none
// may take it down, hang, or leave anything behind, and each refusal has a code
// that says whose fault it is.
func TestFuzzRequests(t *testing.T) {
	limit := fuzzTime
	if text := os.Getenv("BERTH_FUZZ"); text != "" {
		var err error
		if limit, err = time.ParseDuration(text); err != nil {
			t.Fatalf("BERTH_FUZZ: %v", err)
		}
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("%s of random requests, seed %d", limit, seed)
	e := startFor(t, node.Options{LogLevel: "info"}, limit+3*time.Minute)
	e.pull(images.Busybox)
	daemon := e.PID()
	count := &fuzzCount{codes: map[string]int{}}
	var wg sync.WaitGroup
	end := time.Now().Add(limit)
	for worker := range 3 {
		f := &fuzzer{env: e, Rand: rand.New(rand.NewPCG(seed, uint64(worker))), worker: worker, count: count}
		wg.Go(func() {
			for n := 0; time.Now().Before(end) && !t.Failed(); n++ {
				f.round(n)
			}
		})
	}
	wg.Wait()
	if _, err := e.rt.Version(e.ctx, &cri.VersionRequest{}); err != nil || e.PID() != daemon {
		t.Errorf("the daemon is gone: %v", err)
	}
	log, err := os.ReadFile(filepath.Join(e.Dir, "berth.log"))
	if err != nil || strings.Contains(string(log), "internal error") || strings.Contains(string(log), "goroutine ") {
		t.Errorf("the daemon's log tells of a panic (%v)", err)
	}
	for what, n := range count.codes {
		t.Logf("%6d %s", n, what)
	}
	if count.codes["RunPodSandbox OK"] == 0 || count.codes["CreateContainer OK"] == 0 {
		t.Error("no pod or container was ever made: the requests are too wild")
	}
	if err := e.RemoveAll(e.ctx); err != nil {
		t.Error(err)
	}
	e.empty("removing all")
}

// checked notes an outcome and complains about one that nobody may get.
func (f *fuzzer) checked(rpc string, began time.Time, err error) bool {
	code := status.Code(err)
	f.count.Lock()
	f.count.codes[rpc+" "+code.String()]++
	f.count.Unlock()
	if took := time.Since(began); took > fuzzPatience {
		f.Errorf("%s took %s", rpc, took)
	}
	excused := rpc == "PullImage" && strings.Contains(status.Convert(err).Message(), "RegistryUnavailable")
	if (code == codes.Unknown || code == codes.Internal || code == codes.DeadlineExceeded) && !excused {
		f.Errorf("%s: code %s: %v", rpc, code, err)
	}
	return err == nil
}

// round is one pod's life, or what is left of it after refusals.
func (f *fuzzer) round(n int) {
	ctx, cancel := context.WithTimeout(f.ctx, 2*fuzzPatience)
	defer cancel()
	if f.IntN(4) == 0 {
		began := time.Now()
		_, err := f.im.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: f.reference(), RuntimeHandler: f.rarely("kata")}, Auth: f.auth()})
		f.checked("PullImage", began, err)
	}
	config := f.pod(n)
	began := time.Now()
	run, err := f.rt.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: f.rarely("kata")})
	if !f.checked("RunPodSandbox", began, err) {
		return
	}
	for i := range 1 + f.IntN(3) {
		f.container(ctx, run.GetPodSandboxId(), config, i)
	}
	began = time.Now()
	_, err = f.rt.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: run.GetPodSandboxId()})
	f.checked("StopPodSandbox", began, err)
	began = time.Now()
	_, err = f.rt.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: run.GetPodSandboxId()})
	f.checked("RemovePodSandbox", began, err)
}

func (f *fuzzer) container(ctx context.Context, pod string, sandbox *cri.PodSandboxConfig, i int) {
	config := f.ctr(i)
	began := time.Now()
	made, err := f.rt.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: config, SandboxConfig: sandbox})
	if !f.checked("CreateContainer", began, err) {
		return
	}
	id := made.GetContainerId()
	began = time.Now()
	_, err = f.rt.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: id})
	if !f.started(began, err) {
		return
	}
	for range f.IntN(3) {
		f.use(ctx, pod, id)
		began = time.Now()
		_, err := f.rt.UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: f.resources()})
		f.checked("UpdateContainerResources", began, err)
	}
	if f.IntN(2) == 0 {
		began = time.Now()
		_, err := f.rt.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: int64(f.IntN(2))})
		f.checked("StopContainer", began, err)
	}
	if _, err := f.rt.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: f.IntN(2) == 0}); err != nil {
		f.Errorf("ContainerStatus: %v", err)
	}
}

// use asks one thing of a pod and its container, which may have ended.
func (f *fuzzer) use(ctx context.Context, pod, id string) {
	var err error
	rpc, began := "", time.Now()
	switch f.IntN(5) {
	case 0:
		rpc = "ExecSync"
		_, err = f.rt.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: id, Timeout: f.number() % 5, Cmd: []string{pick(f, "true", "nosuch", "/etc", "", "a\x00"), f.text()}})
	case 1:
		rpc = "Exec"
		_, err = f.rt.Exec(ctx, &cri.ExecRequest{ContainerId: id, Cmd: []string{f.text()}, Stdout: f.IntN(2) == 0, Stderr: f.IntN(2) == 0, Tty: f.IntN(2) == 0})
	case 2:
		rpc = "ReopenContainerLog"
		_, err = f.rt.ReopenContainerLog(ctx, &cri.ReopenContainerLogRequest{ContainerId: pick(f, id, f.text())})
	case 3:
		rpc = "UpdatePodSandboxResources"
		_, err = f.rt.UpdatePodSandboxResources(ctx, &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: pod, Overhead: f.resources(), Resources: f.resources()})
	case 4:
		rpc = "UpdateRuntimeConfig"
		_, err = f.rt.UpdateRuntimeConfig(ctx, &cri.UpdateRuntimeConfigRequest{RuntimeConfig: &cri.RuntimeConfig{NetworkConfig: &cri.NetworkConfig{
			PodCidr: pick(f, "10.0.0.0/24", "10.0.0.7/24,fd00::/64", "10.0.0.0/24,10.1.0.0/24", f.text())}}})
	}
	f.checked(rpc, began, err)
}

// started lets a start fail as the OCI runtime makes it: a program that is not
// there is known only then, and its words have no code of their own.
func (f *fuzzer) started(began time.Time, err error) bool {
	if status.Code(err) == codes.Unknown && strings.Contains(err.Error(), "runc") {
		err = nil
	}
	return f.checked("StartContainer", began, err)
}

// rarely is value once in ten times, else empty.
func (f *fuzzer) rarely(value string) string {
	if f.IntN(10) == 0 {
		return value
	}
	return ""
}

// pick is one of the values.
func pick[T any](f *fuzzer, values ...T) T { return values[f.IntN(len(values))] }

func (f *fuzzer) reference() string {
	return pick(f, images.Busybox, images.Pause, "localhost:1/nothing:1", "busybox", "", "UPPER/case", "x@sha256:00", reg.Addr()+"/no/such:image",
		strings.Repeat("a", 300), "a:b:c", "sha256:"+strings.Repeat("0", 64), "../x", "\x00")
}

func (f *fuzzer) auth() *cri.AuthConfig {
	return pick(f, nil, &cri.AuthConfig{}, &cri.AuthConfig{Username: "u", Password: "p"}, &cri.AuthConfig{Auth: "not base64"}, &cri.AuthConfig{RegistryToken: "t", ServerAddress: "https://other.test"})
}

func (f *fuzzer) number() int64 {
	return pick[int64](f, 0, 1, 2, 100, 1000, 1024, 100_000, 1<<20, 64<<20, 1<<31, 1<<40, -1, -1<<40, 1<<62)
}

func (f *fuzzer) text() string {
	return pick(f, "", "a", "web", "a/b", "../..", "\n", "ä", strings.Repeat("x", 70), strings.Repeat("y", 2000), "a b", "-")
}

func (f *fuzzer) mode() cri.NamespaceMode { return cri.NamespaceMode(f.IntN(5)) }

func (f *fuzzer) pod(n int) *cri.PodSandboxConfig {
	name := fmt.Sprintf("fuzz-%d-%d", f.worker, n)
	c := &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: name, Namespace: "fuzz", Uid: name, Attempt: uint32(f.IntN(2))}, Hostname: "pod",
		LogDirectory: filepath.Join(f.LogDir(), name),
		Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: pick(f, cri.NamespaceMode_CONTAINER, cri.NamespaceMode_POD)}}},
	}
	for range f.IntN(3) {
		f.spoilPod(c)
	}
	return c
}

// spoilPod changes one thing about a pod.
func (f *fuzzer) spoilPod(c *cri.PodSandboxConfig) {
	sc := c.Linux.SecurityContext
	switch f.IntN(16) {
	case 0:
		c.Hostname = f.text()
	case 1:
		c.Linux.Sysctls = map[string]string{pick(f, "net.ipv4.ip_forward", "kernel.shmmax", "kernel.core_pattern", "net.ipv4.no_such", "a/../b", ""): pick(f, "1", "0", "x", "", "1\n2")}
	case 2:
		sc.NamespaceOptions.Network = f.mode()
	case 3:
		sc.NamespaceOptions.Ipc = f.mode()
	case 4:
		sc.NamespaceOptions.Pid = f.mode()
	case 5:
		c.DnsConfig = &cri.DNSConfig{Servers: []string{pick(f, "10.0.0.1", "x", "")}, Searches: []string{f.text()}, Options: []string{f.text()}}
	case 6:
		c.PortMappings = []*cri.PortMapping{{Protocol: cri.Protocol(f.IntN(4)), ContainerPort: int32(f.IntN(70000)), HostPort: int32(f.IntN(4)-1) * int32(20000+f.IntN(60000)), HostIp: pick(f, "", "127.0.0.1", "x", "224.0.0.1", "0.0.0.0")}}
	case 7:
		c.Labels = map[string]string{f.text(): f.text()}
	case 8:
		c.Annotations = map[string]string{f.text(): f.text()}
	case 9:
		c.Metadata.Namespace = f.text()
	case 10:
		sc.RunAsUser = &cri.Int64Value{Value: f.number()}
	case 11:
		sc.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_ProfileType(f.IntN(4)), LocalhostRef: f.text()}
	case 12:
		c.LogDirectory = pick(f, f.text(), "/proc/zz", "/etc/passwd", filepath.Join(f.LogDir(), f.text()))
	case 13:
		sc.NamespaceOptions.UsernsOptions = &cri.UserNamespace{Mode: f.mode(), Uids: f.mappings(), Gids: f.mappings()}
	case 14:
		c.Linux.Resources, c.Linux.Overhead = f.resources(), f.resources()
	case 15:
		sc.SelinuxOptions = &cri.SELinuxOption{User: f.text(), Role: f.text(), Type: f.text(), Level: f.text()}
	}
}

func (f *fuzzer) mappings() []*cri.IDMapping {
	return pick(f, nil, []*cri.IDMapping{{HostId: 100000, Length: 65536}}, []*cri.IDMapping{{HostId: 1 << 31, ContainerId: 1, Length: 1 << 31}},
		[]*cri.IDMapping{{Length: 0}}, []*cri.IDMapping{{HostId: 100000, Length: 65536}, {HostId: 100000, ContainerId: 5, Length: 65536}})
}

func (f *fuzzer) resources() *cri.LinuxContainerResources {
	if f.IntN(3) == 0 {
		return nil
	}
	r := &cri.LinuxContainerResources{}
	for range f.IntN(4) {
		switch f.IntN(9) {
		case 0:
			r.CpuShares = f.number()
		case 1:
			r.CpuQuota = f.number()
		case 2:
			r.CpuPeriod = f.number()
		case 3:
			r.MemoryLimitInBytes = pick[int64](f, 0, 32<<20, 64<<20, 1<<40, -1)
		case 4:
			r.MemorySwapLimitInBytes = f.number()
		case 5:
			r.OomScoreAdj = pick(f, int64(0), 500, 1000, -999, 5000)
		case 6:
			r.CpusetCpus, r.CpusetMems = pick(f, "0", "0-1", "7000", "x", "1-0"), pick(f, "", "0", "99")
		case 7:
			r.HugepageLimits = []*cri.HugepageLimit{{PageSize: pick(f, "2MB", "1GB", "2M", ""), Limit: uint64(f.IntN(3))}}
		case 8:
			r.Unified = map[string]string{pick(f, "memory.high", "cgroup.kill", "x", "../y"): pick(f, "1", "max", "x")}
		}
	}
	return r
}

func (f *fuzzer) ctr(i int) *cri.ContainerConfig {
	c := command(fmt.Sprintf("c%d", i), pick(f, "sleep 100", "true", "exit 3", "kill -9 $$", "yes | head -c 100000"))
	c.Linux.SecurityContext.NamespaceOptions = nil
	c.Linux.Resources = f.resources()
	for range f.IntN(3) {
		f.spoilContainer(c)
	}
	return c
}

// spoilContainer changes one thing about a container.
func (f *fuzzer) spoilContainer(c *cri.ContainerConfig) {
	sc := c.Linux.SecurityContext
	switch f.IntN(19) {
	case 18:
		c.Metadata.Name = f.text()
	case 0:
		c.Command = pick(f, nil, []string{""}, []string{"/no/such"}, []string{"sh"})
	case 1:
		c.Args = []string{f.text()}
	case 2:
		c.WorkingDir = pick(f, "/", "tmp", "/proc/self/fd/7", "/new/dir", f.text())
	case 3:
		c.Envs = []*cri.KeyValue{{Key: f.text(), Value: []byte(pick(f, "v", "", "\xff\xfe", "a\x00b"))}}
	case 4:
		c.Mounts = append(c.Mounts, &cri.Mount{HostPath: pick(f, f.LogDir(), "/no/such", "", "relative"), ContainerPath: pick(f, "/m", "/", "", "m", "/proc", "/dev"),
			Readonly: f.IntN(2) == 0, RecursiveReadOnly: f.IntN(4) == 0, Propagation: cri.MountPropagation(f.IntN(4)), MountOptions: pick(f, nil, []string{"noexec"}, []string{"x"})})
	case 5:
		c.Mounts = append(c.Mounts, &cri.Mount{ContainerPath: "/image", Image: &cri.ImageSpec{Image: f.reference()}, ImageSubPath: pick(f, "", "etc", "../..", "/no")})
	case 6:
		c.Devices = []*cri.Device{{HostPath: pick(f, "/dev/null", "/dev", "/no", ""), ContainerPath: pick(f, "/dev/x", "", "x"), Permissions: pick(f, "rwm", "r", "x", "")}}
	case 7:
		c.CDIDevices = []*cri.CDIDevice{{Name: pick(f, "vendor.test/gpu=0", "x", "")}}
	case 8:
		sc.Privileged = true
	case 9:
		sc.RunAsUser = &cri.Int64Value{Value: f.number()}
	case 10:
		sc.RunAsUsername = pick(f, "nobody", "nosuch", "0", f.text())
	case 11:
		sc.RunAsGroup = &cri.Int64Value{Value: f.number()}
	case 12:
		names := []string{pick(f, "NET_ADMIN", "ALL", "SYS_NOTHING", "")}
		sc.Capabilities = &cri.Capability{AddCapabilities: names, DropCapabilities: []string{pick(f, "ALL", "KILL", "x")}, AddAmbientCapabilities: pick(f, nil, names)}
	case 13:
		sc.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_ProfileType(f.IntN(4)), LocalhostRef: f.text()}
		sc.Apparmor = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_ProfileType(f.IntN(4)), LocalhostRef: f.text()}
	case 14:
		sc.NamespaceOptions = &cri.NamespaceOption{Network: f.mode(), Ipc: f.mode(), Pid: f.mode(), TargetId: pick(f, "", "x")}
	case 15:
		c.StopSignal = cri.Signal(f.IntN(70))
		c.LogPath = pick(f, "a/b/c.log", "../x", f.text())
	case 16:
		sc.SupplementalGroups, sc.SupplementalGroupsPolicy = []int64{f.number()}, cri.SupplementalGroupsPolicy(f.IntN(3))
		sc.MaskedPaths, sc.ReadonlyPaths = pick(f, nil, []string{"/proc/x"}, []string{"x"}), pick(f, nil, []string{f.text()})
	case 17:
		c.Tty, c.Stdin, c.StdinOnce = f.IntN(2) == 0, f.IntN(2) == 0, f.IntN(2) == 0
		sc.ReadonlyRootfs, sc.NoNewPrivs = f.IntN(2) == 0, f.IntN(2) == 0
	}
}
