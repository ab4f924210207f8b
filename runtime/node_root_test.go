package runtime

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	pathrs "github.com/cyphar/filepath-securejoin/pathrs-lite"
	"github.com/moby/sys/mountinfo"
	"github.com/sirupsen/logrus"

	"berth/image"
	"berth/network"
	"berth/network/hostport"
	"berth/oci"
	"berth/oci/leash"
	"berth/oci/monitor"
	"berth/oci/runc"
	"berth/runtime/config"
	"berth/runtime/operation"
	"berth/runtime/resolve"
	"berth/runtime/streaming"
	"berth/sandbox"
	"berth/sandbox/leakcheck"
	"berth/sandbox/namespaces"
	"berth/sandbox/outside"
)

// node is a whole node in one process: real records, images, CNI plugins,
// monitor and runc, in directories and a network namespace of the test's. The
// plugins and runc stand behind scripts that can be told to fail or to hang.
type node struct {
	*Service
	t       *testing.T
	dir     string
	cfg     config.Config
	binary  string // berth-monitor
	parent  string // cgroup of the pods
	netns   string // where the bridge is
	image   string
	client  *monitor.Client
	closers []func()
	// wrap stands before the OCI runtime, where it is set.
	wrap     func(oci.Runtime) oci.Runtime
	untidied bool // a start is not waited for to its end
}

var buildMonitor = sync.OnceValues(func() (string, error) {
	if dir := os.Getenv("BERTH_BIN"); dir != "" {
		return filepath.Join(dir, "berth-monitor"), nil
	}
	dir, err := os.MkdirTemp("", "berth-monitor-test")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "berth-monitor")
	cmd := exec.Command("go", "build", "-o", path, "berth/cmd/berth-monitor")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build berth-monitor: %w: %s", err, out)
	}
	return path, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if os.Getenv("BERTH_BIN") == "" && os.Geteuid() == 0 {
		if path, err := buildMonitor(); err == nil {
			_ = os.RemoveAll(filepath.Dir(path))
		}
	}
	os.Exit(code)
}

// newNode brings a node up with a bridge network and an image. prepare sees its
// directories before they are used.
func newNode(t *testing.T, prepare ...func(*node)) *node {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skipf("skipped: needs root, runs as uid %d", os.Geteuid())
	}
	binary, err := buildMonitor()
	must(t, err)
	warmUp(t)
	dir, err := os.MkdirTemp("", "berth-rt") // short: it holds sockets
	must(t, err)
	must(t, os.Chmod(dir, 0o711)) // root of a pod's user namespace is another user
	n := &node{t: t, dir: dir, binary: binary, parent: "/" + leakcheck.Name(t)}
	leakcheck.Start(t, leakcheck.Paths(dir), leakcheck.Leases(n.leases()))
	t.Cleanup(n.removeFiles)
	for _, sub := range []string{"root", "state", "net.d", "bin", "ctl", "pause", "share", "logs"} {
		must(t, os.Mkdir(filepath.Join(dir, sub), 0o755))
	}
	for _, f := range prepare {
		f(n)
	}
	n.pinNode()
	n.scripts()
	n.bridge("10.88.9.0/28")
	n.cfg = config.Default()
	n.cfg.Root, n.cfg.State = dir+"/root", dir+"/state"
	n.cfg.NRI.Enable = config.NRIOff
	pause, err := os.ReadFile(binary)
	must(t, err)
	must(t, os.WriteFile(dir+"/pause/pause", pause, 0o755))
	for _, sub := range []string{"proc", "dev", "sys"} {
		must(t, os.Mkdir(filepath.Join(dir, "pause", sub), 0o755))
	}
	n.open()
	t.Cleanup(n.end)
	n.image = n.importImage("tiny")
	return n
}

func (n *node) leases() string { return n.dir + "/leases" }

// warmUp opens what a library keeps open for good once it has resolved a path.
var warm sync.Once

func warmUp(t *testing.T) {
	warm.Do(func() {
		handle, err := pathrs.OpenInRoot(t.TempDir(), ".")
		must(t, err)
		file, err := pathrs.Reopen(handle, os.O_RDONLY)
		must(t, err)
		must(t, handle.Close())
		must(t, file.Close())
	})
}

// removeFiles refuses to walk into what is still mounted.
func (n *node) removeFiles() {
	removeCgroups(n.t, n.parent)
	if m := n.mounts(n.dir); len(m) > 0 {
		n.t.Errorf("still mounted: %q", m)
		return
	}
	must(n.t, os.RemoveAll(n.dir))
}

// removeCgroups removes the test's own cgroup where it is empty.
func removeCgroups(t *testing.T, parent string) {
	t.Helper()
	for _, root := range cgroupRoots(t) {
		_ = os.Remove(root + parent)
	}
}

// cgroupRoots are where the hierarchies are mounted: one on v2, many on v1.
func cgroupRoots(t *testing.T) []string {
	t.Helper()
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	must(t, err)
	var out []string
	for _, m := range mounts {
		out = append(out, m.Mountpoint)
	}
	return out
}

func (n *node) pinNode() {
	n.t.Helper()
	dir := filepath.Join(n.dir, "ns")
	must(n.t, namespaces.Pin(namespaces.Spec{Dir: dir, Net: true}))
	n.t.Cleanup(func() { must(n.t, namespaces.Release(dir)) })
	n.netns = namespaces.Path(dir, namespaces.Net)
}

// scripts stand before runc and the bridge plugin. A file ctl/<what>-<verb>
// says what the verb does: hang while it is there, fail at once, or fail late,
// when all was done.
func (n *node) scripts() {
	n.t.Helper()
	deps := leakcheck.DepsDir(n.t)
	const body = `#!/bin/sh
%s
echo $verb >> %s/calls
while [ -e %[2]s/ctl/hang-$verb ]; do sleep 0.05; done
if [ -e %[2]s/ctl/fail-$verb ]; then cat %[2]s/ctl/fail-$verb >&%[3]d; exit 1; fi
if [ -e %[2]s/ctl/late-$verb ]; then %[4]s "$@" > /dev/null; cat %[2]s/ctl/late-$verb >&%[3]d; exit 1; fi
exec %[4]s "$@"
`
	verbs := `for verb in "$@"; do case $verb in create|start|delete|exec|update|features|--help|--version) break;; esac; done`
	must(n.t, os.WriteFile(n.dir+"/bin/runc", fmt.Appendf(nil, body, verbs, n.dir, 2, deps+"/bin/runc"), 0o755))
	bridge := fmt.Sprintf("nsenter --net=%s %s/cni/bridge", n.netns, deps)
	must(n.t, os.WriteFile(n.dir+"/bin/bridge", fmt.Appendf(nil, body, "verb=$CNI_COMMAND", n.dir, 1, bridge), 0o755))
	must(n.t, os.Symlink(deps+"/cni/host-local", n.dir+"/bin/host-local"))
}

// tell writes a file for scripts; the returned func takes it back.
func (n *node) tell(what string) (undo func()) {
	n.t.Helper()
	text := what + " was told to"
	if strings.HasSuffix(what, "ADD") || strings.HasSuffix(what, "DEL") {
		text = fmt.Sprintf(`{"cniVersion":"1.0.0","code":100,"msg":%q}`, text)
	}
	path := filepath.Join(n.dir, "ctl", what)
	must(n.t, os.WriteFile(path, []byte(text), 0o600))
	return func() { _ = os.Remove(path) }
}

// calls tells how often runc or a plugin was run with a verb.
func (n *node) calls(verb string) int {
	b, _ := os.ReadFile(n.dir + "/calls")
	count := 0
	for line := range strings.Lines(string(b)) {
		if strings.TrimSpace(line) == verb {
			count++
		}
	}
	return count
}

func (n *node) bridge(subnet string) {
	n.t.Helper()
	must(n.t, os.WriteFile(n.dir+"/net.d/10-bt.conflist", fmt.Appendf(nil, `{"cniVersion":"1.0.0","name":"bt","plugins":[
		{"type":"bridge","bridge":"br0","isGateway":true,"ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":%q}]]}}]}`,
		n.leases(), subnet), 0o600))
}

// open is what a daemon does when it starts; close what it does when it ends.
func (n *node) open() {
	n.t.Helper()
	log := logrus.New()
	log.SetOutput(n.t.Output())
	log.SetLevel(logrus.DebugLevel)
	p := Parts{Config: n.cfg, Version: "test", Log: logrus.NewEntry(log), Pause: func() (string, error) { return n.dir + "/pause", nil }}
	var err error
	p.Records, err = sandbox.Open(n.cfg.Root, func(problem sandbox.Problem) { p.Problems = append(p.Problems, problem) })
	must(n.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	p.Images, err = image.Open(ctx, image.Options{Root: n.cfg.Root + "/images"})
	must(n.t, err)
	p.Leash, err = leash.Open(n.cfg.State)
	must(n.t, err)
	p.Network, err = network.New(network.Options{Runs: p.Leash, ConfDir: n.dir + "/net.d", BinDirs: []string{n.dir + "/bin"},
		CacheDir: n.cfg.Root + "/cni", Timeout: 30 * time.Second, Template: n.cfg.CNI.ConfTemplate})
	must(n.t, err)
	p.Streams, err = streaming.New(streaming.Options{Address: "127.0.0.1:0", Lifetime: time.Minute, Idle: time.Hour})
	must(n.t, err)
	p.Outside = outside.New(outside.Options{Command: []string{n.binary, "look"}, Limit: time.Minute, Await: operation.Await, Whereabouts: monitor.Whereabouts})
	p.HostPorts = hostport.New(hostport.Options{Table: "berth", Enter: func(f func() error) error { return namespaces.Enter(n.netns, f) }})
	p.Host, err = resolve.HostFacts()
	must(n.t, err)
	made := make(chan struct{})
	n.client, err = monitor.Open(ctx, monitor.Options{Socket: n.cfg.State + "/monitor.sock", Binary: n.binary,
		OnExit:    func(e monitor.Exit) { <-made; n.Exited(runc.Exit(e)) },
		OnTrouble: func(err error) { log.WithError(err).Warn("monitor") }, Await: operation.Await})
	must(n.t, err)
	rt, err := runc.New(runc.Options{Binary: n.dir + "/bin/runc", Root: n.cfg.State + "/runc/runc", Monitor: n.client, Leash: p.Leash})
	must(n.t, err)
	p.MonitorPID, p.MonitorMissing = n.client.MonitorPID, n.client.Missing
	p.Handlers = map[string]oci.Runtime{"runc": rt}
	if n.wrap != nil {
		p.Handlers["runc"] = n.wrap(rt)
	}
	n.Service, err = New(p)
	must(n.t, err)
	close(made)
	s, client := n.Service, n.client
	n.closers = []func(){cancel, func() { s.Close(context.Background()) }, p.Outside.Close, func() { _ = client.Close() },
		func() { must(n.t, p.Network.Close()) }, p.Leash.Close, func() { must(n.t, p.Images.Close()) }}
	must(n.t, n.Restore(ctx))
	if !n.untidied {
		n.tidied()
	}
	must(n.t, n.StartPlugins())
}

// tidied waits until what an earlier daemon left is undone.
func (n *node) tidied() {
	n.t.Helper()
	select {
	case <-n.beginning.tidied:
	case <-time.After(time.Minute):
		n.t.Fatal("not in time: the tidying of a start")
	}
}

func (n *node) close() {
	for _, f := range n.closers {
		f()
	}
	n.closers = nil
}

// restart is a new daemon over the same directories. meanwhile runs while
// there is none.
func (n *node) restart(meanwhile func()) {
	n.t.Helper()
	n.close()
	if meanwhile != nil {
		meanwhile()
	}
	n.open()
}

// end removes every pod, closes, and lets the monitor go.
func (n *node) end() {
	ctl, _ := filepath.Glob(n.dir + "/ctl/*")
	for _, f := range ctl {
		_ = os.Remove(f)
	}
	for _, sb := range n.Records.Sandboxes.List() {
		n.removePod(sb.ID)
	}
	pid := n.client.MonitorPID()
	n.close()
	if pid > 0 {
		_ = syscall.Kill(pid, syscall.SIGTERM)
		eventually(n.t, "the monitor has left", func() bool { return syscall.Kill(pid, 0) != nil })
	}
	if b, err := os.ReadFile(n.cfg.State + "/monitor.log"); err == nil && n.t.Failed() && len(b) > 0 {
		n.t.Logf("monitor.log: %s", b)
	}
}

// mounts lists what is mounted below a directory.
func (n *node) mounts(dir string) []string {
	b, err := os.ReadFile("/proc/self/mountinfo")
	must(n.t, err)
	var out []string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); strings.HasPrefix(f[4], dir+"/") {
			out = append(out, f[4])
		}
	}
	return out
}

// left lists what pods and containers have left on the node.
func (n *node) left() []string {
	out := n.mounts(n.cfg.State)
	for _, pattern := range []string{"root/sandboxes/*", "root/containers/*", "root/trash/*", "state/containers/*",
		"state/sandboxes/*", "state/namespaces/*", "state/runc/runc/*"} {
		found, _ := filepath.Glob(filepath.Join(n.dir, pattern))
		out = append(out, found...)
	}
	for _, root := range cgroupRoots(n.t) {
		found, _ := filepath.Glob(root + n.parent + "/*/")
		out = append(out, found...)
	}
	children, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", n.client.MonitorPID()))
	for _, f := range children {
		if b, _ := os.ReadFile(f); len(b) > 0 {
			out = append(out, "child of the monitor: "+string(b))
		}
	}
	if rules := n.rules(); rules != "" {
		out = append(out, "rules: "+rules)
	}
	return append(append(out, n.leased()...), n.veths()...)
}

func (n *node) leased() []string {
	var out []string
	files, _ := filepath.Glob(n.leases() + "/*/*")
	for _, f := range files {
		if net.ParseIP(filepath.Base(f)) != nil {
			out = append(out, "lease "+filepath.Base(f))
		}
	}
	return out
}

func (n *node) veths() []string {
	var out []string
	must(n.t, namespaces.Enter(n.netns, func() error {
		links, err := net.Interfaces()
		for _, l := range links {
			if strings.HasPrefix(l.Name, "veth") {
				out = append(out, "link "+l.Name)
			}
		}
		return err
	}))
	return out
}

// empty fails the test unless nothing is left; the kernel takes its time for
// network namespaces.
func (n *node) empty(after string) {
	n.t.Helper()
	limit := time.Now().Add(10 * time.Second)
	for {
		left := n.left()
		if len(left) == 0 {
			return
		}
		if time.Now().After(limit) {
			n.t.Errorf("after %s there is left:\n\t%s", after, strings.Join(left, "\n\t"))
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for limit := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("not in time: %s", what)
		}
	}
}
