package resolve

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
	"berth/sandbox/leakcheck"
)

// report is what a process sees of itself inside a container.
type report struct {
	UID, GID   int
	Groups     []int
	Status     string // /proc/self/status
	Cwd        string
	Env        []string
	Limits     string
	OOM        string
	PID        int
	FDs        []string
	Mounts     string // /proc/self/mountinfo
	Devices    []string
	Failures   map[string]string // what was tried, and the error
	ReadMasked int               // bytes read of /proc/keys
	Cgroup     string            // /proc/self/cgroup
	Memory     []string          // limits of memory, and of memory with swap (v1) or swap (v2)
}

// TestMain lets the test binary, which is static, be the program in a container.
func TestMain(m *testing.M) {
	if os.Args[0] == "/pause" || os.Getenv("RESOLVE_PROBE") != "" {
		if err := json.NewEncoder(os.Stdout).Encode(probe()); err != nil {
			os.Exit(3)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func probe() report {
	text := func(name string) string {
		data, _ := os.ReadFile(name)
		return string(data)
	}
	r := report{
		UID: os.Getuid(), GID: os.Getgid(), Status: text("/proc/self/status"), Env: os.Environ(), Limits: text("/proc/self/limits"),
		OOM: strings.TrimSpace(text("/proc/self/oom_score_adj")), PID: os.Getpid(), Mounts: text("/proc/self/mountinfo"), Failures: map[string]string{},
	}
	r.Groups, _ = os.Getgroups()
	r.Cwd, _ = os.Getwd()
	for fd := range 256 {
		var stat syscall.Stat_t
		if syscall.Fstat(fd, &stat) == nil {
			at, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
			r.FDs = append(r.FDs, fmt.Sprintf("%d %s", fd, at))
		}
	}
	entries, _ := os.ReadDir("/dev")
	for _, e := range entries {
		r.Devices = append(r.Devices, e.Name())
	}
	for name, try := range map[string]func() error{
		"write /":           func() error { return os.WriteFile("/new", nil, 0o644) },
		"write /sys":        func() error { return os.WriteFile("/sys/kernel/mm/transparent_hugepage/nothing", nil, 0o644) },
		"write /proc/sys":   func() error { return os.WriteFile("/proc/sys/kernel/hostname", []byte("x"), 0o644) },
		"write /dev/shm":    func() error { return os.WriteFile("/dev/shm/new", nil, 0o644) },
		"write /etc/hosts":  func() error { return os.WriteFile("/etc/hosts", []byte("x"), 0o644) },
		"write /data":       func() error { return os.WriteFile("/data/new", nil, 0o644) },
		"exec /data/probe":  func() error { return exec.Command("/data/probe", "-h").Run() },
		"unshare":           func() error { return syscall.Unshare(syscall.CLONE_NEWUTS) },
		"read /dev/zero":    func() error { return readByte("/dev/zero") },
		"read /dev/special": func() error { return readByte("/dev/special") },
		"read /dev/kmsg":    func() error { return readByte("/dev/kmsg") },
	} {
		if err := try(); err != nil {
			r.Failures[name] = err.Error()
		}
	}
	r.Cgroup = strings.TrimSpace(text("/proc/self/cgroup"))
	for _, name := range []string{"memory/memory.limit_in_bytes", "memory/memory.memsw.limit_in_bytes", "memory.max", "memory.swap.max"} {
		if limit := strings.TrimSpace(text("/sys/fs/cgroup/" + name)); limit != "" {
			r.Memory = append(r.Memory, limit)
		}
	}
	r.ReadMasked = len(text("/proc/keys"))
	return r
}

func readByte(name string) error {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.ReadFull(f, make([]byte, 1))
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EPIPE) {
		return nil // /dev/kmsg was opened; it wants a larger buffer, or old records just went
	}
	return err
}

// node is a host, a rootfs and a pod that containers run in.
type node struct {
	t       *testing.T
	runc    string
	dir     string
	request Request
	files   spec.Files
}

func newNode(t *testing.T) *node {
	t.Helper()
	// The first look into a rootfs opens a handle on /proc that the process keeps.
	if _, err := readLines("/", "/etc/passwd"); err != nil {
		t.Fatal(err)
	}
	leakcheck.Start(t, leakcheck.Cgroups(leakcheck.Name(t)))
	n := &node{t: t, dir: t.TempDir(), runc: filepath.Join(leakcheck.DepsDir(t), "bin/runc")}
	if _, err := os.Stat(n.runc); err != nil {
		t.Skipf("no runc: %v", err)
	}
	host, err := HostFacts()
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(n.dir, "rootfs")
	write(t, filepath.Join(root, "etc/passwd"), "root:x:0:0::/root:/x\napp:x:1000:1000::/home/app:/x\n")
	write(t, filepath.Join(root, "etc/group"), "more:x:50000:app\n")
	program(t, filepath.Join(root, "probe"))
	program(t, filepath.Join(root, "pause"))
	shm := filepath.Join(n.dir, "shm")
	if err := os.Mkdir(shm, 0o1777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(shm, 0o1777); err != nil {
		t.Fatal(err)
	}
	n.files = spec.Files{Hosts: filepath.Join(n.dir, "hosts"), Shm: shm}
	write(t, n.files.Hosts, "127.0.0.1 localhost\n")
	n.request = Request{
		Rootfs: root, Host: host, Image: &ispec.Image{Config: ispec.ImageConfig{Entrypoint: []string{"/probe"}}},
		Config: &cri.ContainerConfig{
			// Go's runtime would keep files of the cgroup open.
			Envs:  []*cri.KeyValue{{Key: "RESOLVE_PROBE", Value: []byte("1")}, {Key: "GODEBUG", Value: []byte("containermaxprocs=0")}},
			Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{}},
		},
		Sandbox: &cri.PodSandboxConfig{Hostname: "pod", Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Network: cri.NamespaceMode_NODE, Pid: cri.NamespaceMode_CONTAINER},
		}}},
	}
	return n
}

// program copies the test binary.
func program(t *testing.T, at string) {
	t.Helper()
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	write(t, at, string(self))
	if err := os.Chmod(at, 0o755); err != nil {
		t.Fatal(err)
	}
}

// run makes a container's specification and runs it.
func (n *node) run() report {
	n.t.Helper()
	resolved, err := Resolve(n.request)
	if err != nil {
		n.t.Fatal(err)
	}
	s, warnings, err := spec.Container(spec.ContainerInput{
		ID: "c", SandboxID: "s", Config: n.request.Config, Sandbox: n.request.Sandbox, Image: n.request.Image, Host: n.request.Host,
		Resolved: resolved, Files: n.files, CgroupsPath: "/" + leakcheck.Name(n.t), Rootfs: n.request.Rootfs,
		Namespaces: spec.Namespaces{IPC: fmt.Sprintf("/proc/%d/ns/ipc", os.Getpid())},
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Logf("warnings: %q", warnings)
	return n.start(s)
}

func (n *node) start(s *rspec.Spec) report {
	n.t.Helper()
	data, err := json.Marshal(s)
	if err != nil {
		n.t.Fatal(err)
	}
	bundle := filepath.Join(n.dir, "bundle")
	write(n.t, filepath.Join(bundle, "config.json"), string(data))
	var out, errors bytes.Buffer
	cmd := exec.Command(n.runc, "--root", filepath.Join(n.dir, "runc"), "run", "--bundle", bundle, leakcheck.Name(n.t))
	cmd.Stdout, cmd.Stderr = &out, &errors
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		n.t.Fatalf("runc: %v: %s %s", err, errors.String(), out.String())
	}
	var r report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		n.t.Fatalf("report %q: %v", out.String(), err)
	}
	return r
}

func (r report) wantFailures(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for name := range r.Failures {
		got = append(got, name)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("failed: %v\nwant:   %v", r.Failures, want)
	}
}

func (r report) wantStatus(t *testing.T, name, want string) {
	t.Helper()
	if got := field(r.Status, name); got != want {
		t.Errorf("%s %s, want %s", name, got, want)
	}
}

// TestRuncUnprivileged: a user, groups, the filter, limits, and only the three
// standard descriptors (B87).
func TestRuncUnprivileged(t *testing.T) {
	n := newNode(t)
	data := filepath.Join(n.dir, "made/data")
	c := n.request.Config
	c.WorkingDir = "/work"
	c.Mounts = []*cri.Mount{{ContainerPath: "/data", HostPath: data, MountOptions: []string{"noexec"}}}
	c.Devices = []*cri.Device{{ContainerPath: "/dev/special", HostPath: "/dev/zero", Permissions: "r"}}
	c.Linux.Resources = &cri.LinuxContainerResources{OomScoreAdj: 700, MemoryLimitInBytes: 256 << 20, CpuShares: 100}
	sc := c.Linux.SecurityContext
	sc.RunAsUsername, sc.SupplementalGroups = "app", []int64{77}
	sc.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
	program(t, filepath.Join(data, "probe"))
	if err := os.Chmod(data, 0o777); err != nil {
		t.Fatal(err)
	}
	r := n.run()
	slices.Sort(r.Groups)
	if r.UID != 1000 || r.GID != 1000 || !slices.Equal(r.Groups, []int{77, 1000, 50000}) {
		t.Errorf("user %d:%d %v", r.UID, r.GID, r.Groups)
	}
	if r.Cwd != "/work" || r.PID != 1 || r.OOM != "700" || !slices.Contains(r.Env, "HOME=/home/app") || !slices.Contains(r.Env, "HOSTNAME=pod") {
		t.Errorf("cwd %s, pid %d, score %s, env %v", r.Cwd, r.PID, r.OOM, r.Env)
	}
	r.wantStatus(t, "CapEff:", "0000000000000000")
	r.wantStatus(t, "CapInh:", "0000000000000000")
	r.wantStatus(t, "CapBnd:", "00000000a80425fb")
	r.wantStatus(t, "Seccomp:", "2")
	r.wantFailures(t, "write /", "write /sys", "write /proc/sys", "write /etc/hosts", "exec /data/probe", "unshare", "read /dev/kmsg")
	hard := min(uint64(524288), n.request.Host.RlimitMax["RLIMIT_NOFILE"])
	limits := reader{root: n.dir}
	write(t, filepath.Join(n.dir, "proc/self/limits"), r.Limits)
	if got, err := limits.rlimitMax(false); err != nil || got["RLIMIT_NOFILE"] != hard {
		t.Errorf("hard limit %v, %v; want %d", got, err, hard)
	}
	for _, fd := range r.FDs {
		if number, at, _ := strings.Cut(fd, " "); len(number) > 1 || number > "2" {
			if !strings.HasPrefix(at, "anon_inode:") {
				t.Errorf("a descriptor leaked: %s", fd)
			}
		}
	}
	memory := []string{"268435456", "268435456"}
	if n.request.Host.CgroupV2 {
		memory[1] = "0"
		if r.Cgroup != "0::/" {
			t.Errorf("no cgroup namespace: %s", r.Cgroup)
		}
	}
	if n.request.Host.SwapControl && !slices.Equal(r.Memory, memory) {
		t.Errorf("memory limits %v, want %v", r.Memory, memory)
	}
	if r.ReadMasked != 0 {
		t.Error("/proc/keys is not masked")
	}
	if _, err := os.Stat(filepath.Join(data, "new")); err != nil {
		t.Errorf("the container's file is not on the host: %v", err)
	}
}

// TestRuncPrivileged: all capabilities that the daemon has, the host's devices,
// no filter and nothing masked.
func TestRuncPrivileged(t *testing.T) {
	n := newNode(t)
	n.request.Config.Linux.SecurityContext.Privileged = true
	n.request.Config.Mounts = []*cri.Mount{{ContainerPath: "/data", HostPath: filepath.Join(n.dir, "data")}}
	n.request.Sandbox.Linux.SecurityContext.Privileged = true
	r := n.run()
	r.wantStatus(t, "CapEff:", field(reader{root: "/"}.text("proc/self/status"), "CapBnd:"))
	r.wantStatus(t, "Seccomp:", "0")
	if !slices.Contains(r.Devices, "kmsg") || !slices.Contains(r.Devices, "fuse") {
		t.Errorf("devices %v", r.Devices)
	}
	if r.OOM != fmt.Sprint(max(0, n.request.Host.OOMScoreAdjMin)) {
		t.Errorf("score %s", r.OOM)
	}
	// What is missing: the probe in /data, the special device, and the made-up file in sysfs.
	r.wantFailures(t, "exec /data/probe", "read /dev/special", "write /sys")
	if text := r.Failures["write /sys"]; strings.Contains(text, "read-only") {
		t.Errorf("/sys is read-only: %s", text)
	}
}

// TestRuncReadOnly: a read-only root, also for the pod's files, and no way to
// gain privileges.
func TestRuncReadOnly(t *testing.T) {
	n := newNode(t)
	n.request.Config.Mounts = []*cri.Mount{{ContainerPath: "/data", HostPath: filepath.Join(n.dir, "data"), Readonly: true, RecursiveReadOnly: true}}
	for _, d := range []string{"data", "dev", "proc", "sys"} {
		if err := os.MkdirAll(filepath.Join(n.request.Rootfs, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	sc := n.request.Config.Linux.SecurityContext
	sc.ReadonlyRootfs, sc.NoNewPrivs = true, true
	sc.Capabilities = &cri.Capability{DropCapabilities: []string{"ALL"}, AddCapabilities: []string{"SYS_ADMIN"}, AddAmbientCapabilities: []string{"NET_BIND_SERVICE"}}
	r := n.run()
	r.wantStatus(t, "NoNewPrivs:", "1")
	r.wantStatus(t, "CapEff:", "0000000000200400")
	r.wantStatus(t, "CapAmb:", "0000000000000400")
	r.wantFailures(t, "write /", "write /sys", "write /proc/sys", "write /etc/hosts", "write /data", "exec /data/probe", "read /dev/special", "read /dev/kmsg")
	for _, what := range []string{"write /", "write /etc/hosts", "write /data"} {
		if !strings.Contains(r.Failures[what], "read-only file system") {
			t.Errorf("%s: %s", what, r.Failures[what])
		}
	}
}

// TestRuncPause: the pod's PID 1 runs with nothing.
func TestRuncPause(t *testing.T) {
	n := newNode(t)
	for _, d := range []string{"dev", "proc"} {
		if err := os.MkdirAll(filepath.Join(n.request.Rootfs, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.request.Sandbox.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
	s, err := spec.Pause(spec.PauseInput{
		ID: "s", Sandbox: n.request.Sandbox, Host: n.request.Host, CgroupsPath: "/" + leakcheck.Name(t), Rootfs: n.request.Rootfs,
	})
	if err != nil {
		t.Fatal(err)
	}
	r := n.start(s)
	for _, set := range []string{"CapEff:", "CapBnd:", "CapPrm:", "CapInh:", "CapAmb:"} {
		r.wantStatus(t, set, "0000000000000000")
	}
	r.wantStatus(t, "NoNewPrivs:", "1")
	r.wantStatus(t, "Seccomp:", "2")
	if r.PID != 1 || r.UID != 0 {
		t.Errorf("pid %d, uid %d", r.PID, r.UID)
	}
}
