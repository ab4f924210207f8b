// Package network connects pods to the node's network through CNI.
//
// It owns the choice of the network configuration (the first valid file of the
// CNI configuration directory), following that directory, the ADD and DEL of a
// pod's sandbox, the readiness of the network, and GC. There may be several
// Managers, one for each configuration directory, over one CacheDir. It does not own the network
// namespace or its loopback link (sandbox/namespaces), nor the record in which a
// pod's Result is kept (sandbox): what DEL needs is in the Result, so it works
// when the configuration was changed or removed since.
//
// Terms: ADD, DEL, STATUS and GC are CNI's verbs; a plugin is a program in one of
// the BinDirs; a conflist is a chain of plugins under one network name.
//
// Files on disk: the configuration directory is only read, but for the one file
// that ApplyPodCIDR makes from a template. CacheDir/results
// holds libcni's cache of results; losing it is harmless, as it is rebuilt from
// the pod's Result before DEL.
//
// Nothing here holds a lock across a plugin run or across reading files: pods
// are set up in parallel, and Ready and Describe answer from memory.
package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/containernetworking/cni/libcni"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Sentinels of the package; test with errors.Is.
var (
	// ErrNotReady: no valid network configuration is there to plan with.
	ErrNotReady = errors.New("network is not ready")
	// ErrInvalid: a value in the PodNetwork can never work.
	ErrInvalid = errors.New("invalid pod network")
	// ErrSetup: ADD has not succeeded. Unless the error is an ErrTeardown too,
	// DEL has succeeded afterwards and nothing is left.
	ErrSetup = errors.New("set up pod network")
	// ErrTeardown: DEL has not succeeded: addresses, links or rules may be left,
	// and Teardown has to be called again.
	ErrTeardown = errors.New("tear down pod network")
	// ErrPluginNotFound: a plugin of the configuration is in none of the BinDirs.
	ErrPluginNotFound = errors.New("CNI plugin not found")
)

// IfName is the name of a pod's link; the kubelet and its users expect this one.
const IfName = "eth0"

// defaultTimeout bounds one ADD or DEL of a whole plugin chain. It is below the
// kubelet's two minutes, so that the answer with its reason still arrives.
const defaultTimeout = 90 * time.Second

// maxLooks bounds the looks at a configuration directory at a time: each may hang,
// and then holds a thread.
const maxLooks = 4

// lookPatience is how long a look is waited for. Tests shorten it.
var lookPatience = 5 * time.Second

// Options of a Manager.
type Options struct {
	ConfDir  string        // may be missing, may be a symbolic link
	BinDirs  []string      // where plugins are, in order
	CacheDir string        // libcni's cache; made when needed
	Timeout  time.Duration // of one ADD or DEL; 0 means 90 s
	Template string        // for ApplyPodCIDR; empty: none
	Runs     Runs          // nil: plugins are not held
	// Answer tells whether files answer that are about to be run: whoever runs one that
	// does not stops all goroutines of the process with it. Its error has the path. nil:
	// nobody asks.
	Answer func(ctx context.Context, paths ...string) error
}

// Runs holds plugins' processes, so that a daemon that follows a killed one finds
// them: see package oci/leash, which is one.
type Runs interface {
	// Hold gives the cgroup for a run of a plugin, or nil; end follows it.
	Hold(verb, pod string) (cgroup *os.File, end func(kill bool), err error)
	// Settle blocks until nothing that was left for a pod runs any more.
	Settle(ctx context.Context, pod string, patience time.Duration) error
}

// unheld is Runs where there is none.
type unheld struct{}

func (unheld) Hold(string, string) (*os.File, func(bool), error)   { return nil, func(bool) {}, nil }
func (unheld) Settle(context.Context, string, time.Duration) error { return nil }

// Manager follows the configuration directory and runs plugins. It is safe for
// concurrent use; calls for one pod are the caller's to order.
type Manager struct {
	o   Options
	cni libcni.CNI

	ctx     context.Context // of the watcher and of STATUS
	stop    context.CancelFunc
	stopped sync.WaitGroup // the watcher and a STATUS under way

	looks    chan struct{} // holds a token for each look at the directory
	applying sync.Mutex    // held by ApplyPodCIDR

	mu      sync.Mutex // guards the fields below; never held across I/O
	turn    uint64     // number of the newest load that was begun
	loaded  *loaded    // never nil
	status  status
	silent  time.Time // since when the directory does not answer; zero: it does
	watched string    // "" when inotify works, else why it does not
}

// Description is what verbose Status tells about the network.
type Description struct {
	Dir        string            `json:"dir"`
	File       string            `json:"file,omitempty"`
	Network    string            `json:"network,omitempty"`
	CNIVersion string            `json:"cniVersion,omitempty"`
	Plugins    []string          `json:"plugins,omitempty"`
	LoadedAt   time.Time         `json:"loadedAt"`
	Refused    map[string]string `json:"refused,omitempty"` // file → why it is not valid
	NotReady   string            `json:"notReady,omitempty"`
	Watch      string            `json:"watch,omitempty"` // why changes are found by polling only
}

// PodNetwork is what the network of one pod depends on.
type PodNetwork struct {
	ID, Name, Namespace, UID string
	NetNS                    string // file of the network namespace; may be gone at Teardown
	CgroupParent             string
	Annotations              map[string]string
	PortMappings             []*cri.PortMapping // a host port of 0 or less maps nothing
	DNS                      *cri.DNSConfig
}

// Result is what a pod's record keeps about its network. Plan fills the fields
// that DEL needs, Setup those that ADD found out.
type Result struct {
	Network string `json:"network"`
	// Config is the whole conflist, plugins from other files included.
	Config       json.RawMessage            `json:"config"`
	Args         [][2]string                `json:"args"`
	Capabilities map[string]json.RawMessage `json:"capabilities,omitempty"`
	// Ports are the pod's host ports. UnmappedPorts: no plugin of the network
	// maps them, which is then the caller's to do.
	Ports         []PortMapping `json:"ports,omitempty"`
	UnmappedPorts bool          `json:"unmappedPorts,omitempty"`

	CNI        json.RawMessage `json:"cni,omitempty"` // ADD's result in the conflist's version
	IPs        []string        `json:"ips,omitempty"` // of eth0, in CNI's order, the primary first
	Interfaces []Interface     `json:"interfaces,omitempty"`
}

// Interface is one link of ADD's result.
type Interface struct {
	Name    string `json:"name"`
	Mac     string `json:"mac,omitempty"`
	Sandbox string `json:"sandbox,omitempty"` // network namespace; empty: on the node
}

// New reads the configuration directory once and goes on following it in the
// background until Close. A missing directory is not an error, nor is a kernel
// without inotify instances to spare: then it polls only.
func New(o Options) (*Manager, error) {
	if o.ConfDir == "" || o.CacheDir == "" || len(o.BinDirs) == 0 {
		return nil, fmt.Errorf("%w: configuration, cache and plugin directories must be given", ErrInvalid)
	}
	if o.Timeout <= 0 {
		o.Timeout = defaultTimeout
	}
	if o.Answer == nil {
		o.Answer = func(context.Context, ...string) error { return nil }
	}
	if o.Runs == nil {
		o.Runs = unheld{}
	}
	ctx, cancel := context.WithCancel(context.Background())
	m := &Manager{
		o:      o,
		cni:    libcni.NewCNIConfigWithCacheDir(o.BinDirs, o.CacheDir, &pluginExec{runs: o.Runs}),
		ctx:    ctx,
		stop:   cancel,
		loaded: &loaded{},
		looks:  make(chan struct{}, maxLooks),
		status: status{err: errStatusPending},
	}
	m.check()
	m.stopped.Go(func() { m.watch(ctx) })
	return m, nil
}

// Close ends the watcher and any STATUS under way, and waits for them, but not for
// a directory that does not answer, nor for Setup and Teardown, which go on.
func (m *Manager) Close() error {
	m.mu.Lock()
	m.stop() // under the lock: no STATUS begins any more
	m.mu.Unlock()
	ended := make(chan struct{})
	go func() { m.stopped.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(lookPatience):
	}
	return nil
}

// Ready returns nil when pods can be given a network, and otherwise the reason.
// It answers from memory; the directory is followed in the background, at the
// latest two seconds behind. Where the network has a STATUS verb, the last
// answer counts, and an old one is asked for again in the background.
func (m *Manager) Ready() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.readyLocked(); err != nil {
		return err
	}
	if !m.loaded.hasStatus() {
		return nil
	}
	m.refreshStatusLocked()
	if m.status.err != nil {
		return fmt.Errorf("%w: network %q: %w", ErrNotReady, m.loaded.list.Name, m.status.err)
	}
	return nil
}

// Describe tells what is loaded and why something is not. It answers from memory.
func (m *Manager) Describe() Description {
	reason := ""
	if err := m.Ready(); err != nil {
		reason = err.Error()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	d := Description{Dir: m.o.ConfDir, LoadedAt: m.loaded.at, Refused: m.loaded.refused, NotReady: reason, Watch: m.watched}
	if l := m.loaded.list; l != nil {
		d.File, d.Network, d.CNIVersion = m.loaded.file, l.Name, l.CNIVersion
		for _, p := range l.Plugins {
			d.Plugins = append(d.Plugins, p.Network.Type)
		}
	}
	return d
}
