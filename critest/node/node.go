// Package node is one berth node for tests: a daemon of its own in a temporary
// place, beside whatever else runs on the machine, with a bridge network and a
// registry that answers for the public ones.
//
// It owns the daemon's process, its directories, configuration and bridge, and
// the check that nothing of them is left. It does not own the binaries (built by
// `make build`), the tools (`make deps`) or the registry it is given.
//
// Below Options.Dir: config.toml, registries.conf, net.d (CNI configuration),
// leases (CNI addresses), root and state (the daemon's own), logs, berth.log.
package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox/leakcheck"
)

// ErrBinaries: berth or a tool it needs is not where it should be.
var ErrBinaries = errors.New("binaries missing (run `make deps build`)")

// ErrLeak: something of the node was still there after Close had removed all.
var ErrLeak = errors.New("left behind")

// maxMessage is the kubelet's limit for one message.
const maxMessage = 16 << 20

// readyTimeout bounds the wait for a daemon to answer after its start, on a
// machine of ordinary speed.
const readyTimeout = 20 * time.Second

// serial numbers the nodes of one process, for subnets and bridge names.
var serial atomic.Int32

// Options says what differs from an ordinary node; the zero value is one.
type Options struct {
	Mirror string // host:port of the registry that answers for all others
	// Settings are extra lines of config.toml by table: "" is the top level; a table
	// runtime.handlers.NAME makes another handler.
	Settings map[string]string
	// CgroupDriver of the daemon; empty: cgroupfs, also where systemd runs.
	CgroupDriver string
	Wrap         []string // command that the daemon is started through, such as prlimit
	NoCNI        bool     // leave the CNI directory out
	Plugins      string   // directory of CNI plugins that go before those of make deps
	LogLevel     string   // of the daemon; empty: debug
	Systemd      *Systemd // who starts the daemon; nil: nobody of that kind
	RootSize     string   // put root on a tmpfs of this size ("8m"), optionally with ",nr_inodes=…"
	StateSize    string   // the same for state
	Runc         string   // OCI runtime of the default handler; empty: that of make deps
	RootDisk     int64    // put root, and CNI's leases, on a disk of so many bytes; see CopyDisk
}

// Node is a running daemon. Its methods are for one goroutine; the clients are
// for many.
type Node struct {
	Dir     string // everything else is below it
	Socket  string
	ConfDir string // CNI configurations
	Leases  string // host-local's directory
	Bridge  string // name of the bridge that pods hang on
	Subnet  string // of the pods
	Bin     string // folder of berth and berth-monitor
	Deps    string // folder made by `make deps`

	options Options
	daemon  *exec.Cmd
	exited  chan error // receives the daemon's end once
	conn    *grpc.ClientConn
	scope   leakcheck.Scope
	before  leakcheck.State
	ready   bool            // the daemon has been ready once
	disk    string          // the file behind root, with Options.RootDisk
	watch   *os.File        // notes the ids of pods
	pods    map[string]bool // ids of every pod there ever was
}

// Start makes the directories, starts the daemon and waits until it says that
// runtime and network are ready. On an error nothing is left behind.
func Start(ctx context.Context, o Options) (*Node, error) {
	n := &Node{options: o}
	var err error
	if n.Bin, n.Deps, err = locate(); err != nil {
		return nil, err
	}
	if n.Dir, err = os.MkdirTemp("", "berth-"); err != nil {
		return nil, fmt.Errorf("make the node's directory: %w", err)
	}
	// Root of a pod's user namespace is another user of the node.
	if err := os.Chmod(n.Dir, 0o711); err != nil {
		return nil, errors.Join(fmt.Errorf("open the node's directory: %w", err), os.Remove(n.Dir))
	}
	id := serial.Add(1)
	n.Socket = filepath.Join(n.Dir, "berth.sock")
	n.ConfDir, n.Leases = filepath.Join(n.Dir, "net.d"), filepath.Join(n.Dir, "leases")
	if o.RootDisk > 0 {
		n.Leases = filepath.Join(n.Root(), "leases")
	}
	n.Bridge = fmt.Sprintf("bt%d-%d", os.Getpid(), id)
	n.Subnet = fmt.Sprintf("10.88.%d.0/24", id%256) // of so many nodes the first ones are closed
	n.scope = leakcheck.Scope{
		Paths: []string{n.Dir}, Tables: true, Leases: []string{n.Leases}, Cgroups: []string{n.Bridge},
		Files: []string{
			filepath.Join(n.Root(), "sandboxes"), filepath.Join(n.Root(), "containers"),
			filepath.Join(n.State(), "sandboxes"), filepath.Join(n.State(), "containers"),
			filepath.Join(n.State(), "namespaces"), filepath.Join(n.State(), "runc", "runc"),
		},
	}
	for table := range o.Settings {
		if handler, ok := strings.CutPrefix(table, "runtime.handlers."); ok {
			n.scope.Files = append(n.scope.Files, filepath.Join(n.State(), "runc", handler))
		}
	}
	n.pods = map[string]bool{}
	err = n.writeFiles()
	if err == nil {
		err = n.watchPods()
	}
	if err == nil {
		n.before, err = leakcheck.Snapshot(n.scope)
	}
	if err != nil {
		n.sweep(n.Dir)
		return nil, errors.Join(err, os.RemoveAll(n.Dir))
	}
	if err := n.Launch(ctx); err != nil {
		return nil, errors.Join(err, n.Close(context.WithoutCancel(ctx)))
	}
	return n, nil
}

// Root and State are the daemon's directories.
func (n *Node) Root() string { return filepath.Join(n.Dir, "root") }

// State is the daemon's directory that a reboot would empty.
func (n *Node) State() string { return filepath.Join(n.Dir, "state") }

// NRISocket is where NRI plugins connect to the daemon.
func (n *Node) NRISocket() string { return filepath.Join(n.Dir, "nri", "nri.sock") }

// LogDir is a directory for pod logs.
func (n *Node) LogDir() string { return filepath.Join(n.Dir, "logs") }

// PID is the daemon's.
func (n *Node) PID() int { return n.daemon.Process.Pid }

// Runtime is a client of the daemon's socket; it survives restarts of the daemon.
func (n *Node) Runtime() cri.RuntimeServiceClient { return cri.NewRuntimeServiceClient(n.conn) }

// Images is the same for images.
func (n *Node) Images() cri.ImageServiceClient { return cri.NewImageServiceClient(n.conn) }

// Launch starts the daemon, which must not be running, and waits until it is
// ready. The error holds the end of its log.
func (n *Node) Launch(ctx context.Context) error {
	log, err := os.OpenFile(filepath.Join(n.Dir, "berth.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open the daemon's log: %w", err)
	}
	defer log.Close()
	args := append(append([]string{}, n.options.Wrap...),
		filepath.Join(n.Bin, "berth"), "serve", "--config", filepath.Join(n.Dir, "config.toml"))
	var env []string
	var files []*os.File
	if n.options.Systemd != nil {
		args, env, files = n.options.Systemd.pass(args)
	}
	n.daemon = exec.Command(args[0], args[1:]...)
	n.daemon.Env, n.daemon.ExtraFiles = append(os.Environ(), env...), files
	n.daemon.Stdout, n.daemon.Stderr = log, log
	// A session of its own: the terminal's Ctrl-C is for the test, which stops
	// the daemon when it has cleaned up.
	n.daemon.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := n.daemon.Start(); err != nil {
		return fmt.Errorf("start the daemon: %w", err)
	}
	n.exited = make(chan error, 1)
	go func(d *exec.Cmd, done chan<- error) { done <- d.Wait() }(n.daemon, n.exited)
	if n.conn == nil {
		n.conn, err = grpc.NewClient("unix://"+n.Socket,
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)))
		if err != nil {
			return fmt.Errorf("make a client of %s: %w", n.Socket, err)
		}
	}
	return n.wait(ctx, n.unready)
}

// wait polls Status until the daemon answers and lacks nothing.
func (n *Node) wait(ctx context.Context, lacks func(*cri.RuntimeStatus) error) error {
	ctx, cancel := context.WithTimeout(ctx, leakcheck.Patience(readyTimeout))
	defer cancel()
	for {
		call, stop := context.WithTimeout(ctx, time.Second)
		res, err := n.Runtime().Status(call, &cri.StatusRequest{})
		stop()
		if err == nil {
			err = lacks(res.GetStatus())
		}
		if err == nil {
			n.ready = true
			return nil
		}
		n.conn.ResetConnectBackoff()
		select {
		case end := <-n.exited:
			n.exited <- end
			return fmt.Errorf("the daemon ended at once (%w); its log ends with:\n%s", errOf(end), n.LogTail(30))
		case <-ctx.Done():
			return fmt.Errorf("wait for the daemon: %w; its log ends with:\n%s", err, n.LogTail(30))
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func errOf(err error) error {
	if err == nil {
		return errors.New("exit status 0")
	}
	return err
}

// unready returns the first condition that does not hold.
func (n *Node) unready(s *cri.RuntimeStatus) error {
	for _, c := range s.GetConditions() {
		asked := c.GetType() == cri.RuntimeReady || c.GetType() == cri.NetworkReady && !n.options.NoCNI
		if asked && !c.GetStatus() {
			return fmt.Errorf("%s is false: %s: %s", c.GetType(), c.GetReason(), c.GetMessage())
		}
	}
	return nil
}

// Kill ends the daemon with SIGKILL and waits for its end.
func (n *Node) Kill() error { return n.signal(syscall.SIGKILL) }

// Terminate ends the daemon with SIGTERM and waits for its end; containers run on.
func (n *Node) Terminate() error { return n.signal(syscall.SIGTERM) }

func (n *Node) signal(s syscall.Signal) error {
	if err := n.daemon.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal the daemon: %w", err)
	}
	select {
	case end := <-n.exited:
		n.exited <- end
		if s == syscall.SIGTERM && end != nil {
			return fmt.Errorf("the daemon ended badly: %w; its log ends with:\n%s", end, n.LogTail(30))
		}
		return nil
	case <-time.After(20 * time.Second):
		return fmt.Errorf("the daemon (process %d) outlives signal %v", n.PID(), s)
	}
}

// running tells whether the daemon has not ended.
func (n *Node) running() bool {
	if n.daemon == nil || n.daemon.Process == nil {
		return false
	}
	select {
	case end := <-n.exited:
		n.exited <- end
		return false
	default:
		return true
	}
}
