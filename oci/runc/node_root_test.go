package runc

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"

	"berth/oci"
	"berth/oci/leash"
	"berth/oci/monitor"
	"berth/sandbox/leakcheck"
)

// node is a monitor, a client and a runtime in a directory of the test's.
type node struct {
	t       *testing.T
	dir     string
	binary  string
	client  *monitor.Client
	leash   *leash.Leash
	runtime *Runtime
	mu      sync.Mutex
	exits   map[string][]oci.Exit // guarded by mu
	seq     int
}

// slow stretches a time by BERTH_TEST_SLOW, for machines that are.
func slow(d time.Duration) time.Duration {
	factor, err := strconv.Atoi(os.Getenv("BERTH_TEST_SLOW"))
	if err != nil || factor < 1 {
		return d
	}
	return d * time.Duration(factor)
}

var buildMonitor = sync.OnceValues(func() (string, error) {
	if dir := os.Getenv("BERTH_BIN"); dir != "" {
		if path := filepath.Join(dir, "berth-monitor"); exec.Command("test", "-x", path).Run() == nil {
			return path, nil
		}
	}
	dir, err := os.MkdirTemp("", "berth-monitor-test")
	if err != nil {
		return "", err
	}
	builtIn = dir
	path := filepath.Join(dir, "berth-monitor")
	cmd := exec.Command("go", "build", "-o", path, "berth/cmd/berth-monitor")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build berth-monitor: %w: %s", err, out)
	}
	return path, nil
})

// builtIn is the directory to remove at the end, when buildMonitor made one.
var builtIn string

func TestMain(m *testing.M) {
	code := m.Run()
	if builtIn != "" {
		_ = os.RemoveAll(builtIn)
	}
	os.Exit(code)
}

// newNode starts a monitor. The test must leave no container; the monitor ends
// by itself.
func newNode(t *testing.T) *node {
	t.Helper()
	binary, err := buildMonitor()
	if err != nil {
		t.Fatal(err)
	}
	return newNodeOf(t, binary)
}

// newNodeOf is newNode with another build of the monitor.
func newNodeOf(t *testing.T, binary string) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth-runc") // short: it holds sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	leakcheck.Start(t, leakcheck.Paths(dir))
	n := &node{t: t, dir: dir, binary: binary, exits: map[string][]oci.Exit{}}
	n.open()
	t.Cleanup(n.end)
	return n
}

// open connects as a daemon that has just started.
func (n *node) open() {
	n.t.Helper()
	if err := n.tryOpen(); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) tryOpen() error {
	client, err := monitor.Open(context.Background(), monitor.Options{
		Binary: n.binary, Socket: filepath.Join(n.dir, "monitor.sock"),
		OnExit: func(x monitor.Exit) {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.exits[x.ID] = append(n.exits[x.ID], Exit(x))
		},
		OnTrouble: func(err error) { n.t.Logf("trouble: %v", err) },
	})
	if err != nil {
		return err
	}
	n.client = client
	if n.leash, err = leash.Open(n.dir); err != nil {
		return err
	}
	n.runtime, err = New(Options{Binary: filepath.Join(leakcheck.DepsDir(n.t), "bin", "runc"), Root: filepath.Join(n.dir, "runc"), Monitor: n.client, Leash: n.leash})
	return err
}

// end lets the monitor go: it leaves when it has neither daemon nor container.
func (n *node) end() {
	pid := n.client.MonitorPID()
	_ = n.client.Close()
	n.leash.Close()
	if n.t.Failed() {
		if data, err := os.ReadFile(filepath.Join(n.dir, "monitor.log")); err == nil && len(data) > 0 {
			n.t.Logf("monitor.log:\n%s", data)
		}
	}
	if pid > 0 {
		_ = syscall.Kill(pid, syscall.SIGTERM)
		n.eventually("the monitor has left", func() bool { return !alive(pid) })
	}
}

func alive(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(data), ") Z ")
}

func (n *node) eventually(what string, ok func() bool) {
	n.t.Helper()
	for limit := time.Now().Add(slow(20 * time.Second)); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(limit) {
			n.t.Errorf("not in time: %s", what)
			return
		}
	}
}

// box is a container of a test.
type box struct {
	n       *node
	id      string
	bundle  string
	log     string
	process oci.Process
	spec    *rspec.Spec
	io      oci.IO
}

// hostDirs give a container the machine's shell and tools, read-only.
var hostDirs = []string{"/bin", "/sbin", "/usr", "/lib", "/lib64", "/etc"}

// box prepares a container that runs a shell script.
func (n *node) box(script string) *box {
	n.t.Helper()
	n.seq++
	id := fmt.Sprintf("%s-%d", leakcheck.Name(n.t), n.seq)
	b := &box{n: n, id: id, bundle: filepath.Join(n.dir, "b", id), log: filepath.Join(n.dir, id+".log")}
	b.io = oci.IO{LogPath: b.log}
	rootfs := filepath.Join(b.bundle, "rootfs")
	if err := os.MkdirAll(rootfs, 0o755); err != nil {
		n.t.Fatal(err)
	}
	mounts := []rspec.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc"},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755"}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"newinstance", "ptmxmode=0666", "mode=0620"}},
		{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"mode=1777"}},
	}
	for _, d := range hostDirs {
		if info, err := os.Stat(d); err == nil && info.IsDir() {
			mounts = append(mounts, rspec.Mount{Destination: d, Type: "bind", Source: d, Options: []string{"rbind", "ro"}})
		}
	}
	b.spec = &rspec.Spec{
		Version: "1.2.0", Root: &rspec.Root{Path: rootfs}, Mounts: mounts,
		Process: &rspec.Process{Args: []string{"/bin/sh", "-c", script}, Env: []string{"PATH=/usr/bin:/bin"}, Cwd: "/",
			Capabilities: &rspec.LinuxCapabilities{}},
		Linux: &rspec.Linux{CgroupsPath: "/" + id, Namespaces: []rspec.LinuxNamespace{
			{Type: rspec.PIDNamespace}, {Type: rspec.MountNamespace}, {Type: rspec.IPCNamespace}, {Type: rspec.UTSNamespace}}},
	}
	n.t.Cleanup(b.remove)
	return b
}

func (b *box) create() error {
	if err := oci.WriteBundle(b.bundle, b.spec); err != nil {
		return err
	}
	var err error
	b.process, err = b.n.runtime.Create(context.Background(), oci.CreateRequest{ID: b.id, Bundle: b.bundle, IO: b.io})
	return err
}

// run creates and starts.
func (b *box) run() *box {
	b.n.t.Helper()
	if err := b.create(); err != nil {
		b.n.t.Fatalf("create: %v", err)
	}
	if err := b.n.runtime.Start(context.Background(), b.id); err != nil {
		b.n.t.Fatalf("start: %v", err)
	}
	return b
}

// exit waits for the end of the init.
func (b *box) exit() oci.Exit {
	b.n.t.Helper()
	for limit := time.Now().Add(slow(30 * time.Second)); time.Now().Before(limit); time.Sleep(time.Millisecond) {
		if x, ok := b.n.runtime.Exited(b.id); ok {
			return x
		}
	}
	b.n.t.Fatalf("%s has not ended", b.id)
	return oci.Exit{}
}

func (b *box) remove() {
	ctx, cancel := context.WithTimeout(context.Background(), slow(20*time.Second))
	defer cancel()
	if err := b.n.runtime.Delete(ctx, b.id); err != nil {
		b.n.t.Errorf("delete: %v", err)
	}
	_ = os.RemoveAll(filepath.Join(b.bundle, "rootfs")) // mount points that runc made
	if err := oci.RemoveBundle(b.bundle); err != nil {
		b.n.t.Errorf("remove bundle: %v", err)
	}
}

// output rebuilds what a stream wrote from the log, checking every line.
func (b *box) output(stream string) string {
	b.n.t.Helper()
	data, err := os.ReadFile(b.log)
	if err != nil {
		b.n.t.Fatal(err)
	}
	text, err := rebuild(data, stream)
	if err != nil {
		b.n.t.Fatal(err)
	}
	return text
}

func rebuild(data []byte, stream string) (string, error) {
	var out strings.Builder
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 4)
		if len(f) != 4 || !strings.HasSuffix(line, "\n") || f[2] != "P" && f[2] != "F" || f[1] != "stdout" && f[1] != "stderr" {
			return "", fmt.Errorf("log line %.200q", line)
		}
		if _, err := time.Parse(time.RFC3339Nano, f[0]); err != nil {
			return "", err
		}
		if f[1] != stream {
			continue
		}
		out.WriteString(f[3])
		if f[2] == "F" {
			out.WriteByte('\n')
		}
	}
	return out.String(), nil
}
