package nri

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	"github.com/containerd/ttrpc"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
)

// Sentinels of the package; test with errors.Is.
var (
	// ErrRefused: a plugin refused a request, or asked for what cannot be done.
	ErrRefused = errors.New("refused by an NRI plugin")
	// ErrSocketInUse: another process listens on the socket.
	ErrSocketInUse = errors.New("another process listens on the NRI socket")
)

// Node is what plugins see and change. All methods may be called from any
// goroutine.
type Node interface {
	// Pod and Container describe an object, also while it is born. An error
	// means that it is gone.
	Pod(id string) (Pod, error)
	Container(id string) (Container, error)
	// List gives the ids of all pods and containers that are not being born.
	List() (pods, containers []string)
	// UpdateContainer changes limits of a container that was made and has not
	// ended. It takes the container's lock and blocks.
	UpdateContainer(ctx context.Context, u Update) error
	// Evict stops a container in the background. It does not block.
	Evict(id, reason string)
}

// Level is how much a line of log matters.
type Level int

// Levels of log lines.
const (
	Debug Level = iota
	Info
	Warning
)

// Options of the plugins' side. All fields but the last are needed.
type Options struct {
	Node                Node
	Version             string // of berth, told to plugins
	Socket              string // where plugins connect
	PluginDir           string // of plugins to launch, named <two digits>-<name>; need not exist
	ConfigDir           string // of <plugin>.conf files; need not exist
	RegistrationTimeout time.Duration
	RequestTimeout      time.Duration // of one plugin's answer
	Log                 func(Level, string)
	// InjectCDI adds CDI devices, by their qualified names, to a specification.
	// Nil: plugins that ask for some are refused.
	InjectCDI func(*rspec.Spec, []string) error
}

// Plugins are the running adaptation. A nil Plugins is NRI switched off: every
// hook returns at once.
type Plugins struct {
	Options
	adaptation *adaptation.Adaptation
	connected  atomic.Int32
	failed     atomic.Pointer[failure]
	turns      turns
	starting   sync.RWMutex // read-held by hooks

	mu    sync.Mutex
	marks map[string]mark // by object id, guarded by mu
}

// mark says what plugins have been told of an object beyond what its record shows.
type mark uint8

const (
	born    mark = 1 << iota // its first hook ran, its record does not show it yet
	stopped                  // told that it stopped
	removed                  // told that it is removed
)

// failure is the last error of a plugin's answer.
type failure struct {
	plugin string
	err    error
}

// New prepares NRI without any effect; Start begins it. NRI has some settings for
// the whole process, so there can be one Plugins at a time.
func New(o Options) (*Plugins, error) {
	p := &Plugins{Options: o, marks: map[string]mark{}}
	logTo.Store(&p.Log)
	setLogger()
	adaptation.SetPluginRegistrationTimeout(o.RegistrationTimeout)
	adaptation.SetPluginRequestTimeout(o.RequestTimeout)
	var err error
	p.adaptation, err = adaptation.New("berth", o.Version, p.synchronize, p.unsolicited,
		adaptation.WithSocketPath(o.Socket), adaptation.WithPluginPath(o.PluginDir), adaptation.WithPluginConfigPath(o.ConfigDir),
		adaptation.WithMetrics((*observer)(p)), adaptation.WithTTRPCOptions(
			[]ttrpc.ClientOpts{ttrpc.WithUnaryClientInterceptor(p.callPlugin)},
			[]ttrpc.ServerOpt{ttrpc.WithUnaryServerInterceptor(p.calledByPlugin)}))
	if err != nil {
		return nil, fmt.Errorf("make the NRI adaptation: %w", err)
	}
	return p, nil
}

// Start launches the plugins of the directory, synchronises them and listens
// for others; hooks wait meanwhile. A plugin that does not start in time is left
// out and logged; a directory with a misnamed executable is an error, and so is
// a socket that another process listens on, ErrSocketInUse. To be called once,
// when the node's records are restored. Stop ends it, also after an error.
func (p *Plugins) Start() error {
	if c, err := net.DialTimeout("unix", p.Socket, time.Second); err == nil {
		_ = c.Close()
		return fmt.Errorf("%w: %s", ErrSocketInUse, p.Socket)
	}
	if err := os.Remove(p.Socket); err != nil && !errors.Is(err, os.ErrNotExist) { // of an earlier daemon; the library does not say why it cannot
		return fmt.Errorf("start NRI: %w", err)
	}
	p.starting.Lock()
	defer p.starting.Unlock()
	if err := p.adaptation.Start(); err != nil {
		return fmt.Errorf("start NRI: %w", err)
	}
	return nil
}

// CheckDirectory tells which executable of a plugin directory has a name that
// Start would refuse; a directory that is not there has none.
func CheckDirectory(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			continue
		}
		if _, _, err := api.ParsePluginName(e.Name()); err != nil {
			return fmt.Errorf("%s: the executable %q is not named like 10-name", dir, e.Name())
		}
	}
	return nil
}

// Stop closes the socket and ends the plugins that were launched.
func (p *Plugins) Stop() {
	if p != nil {
		p.adaptation.Stop()
	}
}

// Settled says that an object's record now shows it.
func (p *Plugins) Settled(id string) { p.unmark(id, born) }

// Forget drops what is remembered of an object that is gone. Idempotent.
func (p *Plugins) Forget(id string) { p.unmark(id, born|stopped|removed) }

func (p *Plugins) unmark(id string, m mark) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.marks[id] &^= m; p.marks[id] == 0 {
		delete(p.marks, id)
	}
}

// put marks an object; false when it was marked so already.
func (p *Plugins) put(id string, m mark) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.marks[id]&m != 0 {
		return false
	}
	p.marks[id] |= m
	return true
}

func (p *Plugins) marked(id string, m mark) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.marks[id]&m != 0
}

// hold keeps plugins from being synchronised until release is called.
func (p *Plugins) hold() (release func()) {
	p.starting.RLock()
	block := p.adaptation.BlockPluginSync()
	return func() {
		block.Unblock()
		p.starting.RUnlock()
	}
}

// none tells whether no plugin is connected; nobody needs to be told then.
func (p *Plugins) none() bool { return p.connected.Load() == 0 }

// refusal names the plugin and the event of an error.
func (p *Plugins) refusal(event string, err error) error {
	if err == nil {
		return nil
	}
	if f := p.failed.Load(); f != nil && f.err == err {
		return fmt.Errorf("%w: plugin %s, %s: %w", ErrRefused, f.plugin, event, err)
	}
	return fmt.Errorf("%w: %s: %w", ErrRefused, event, err)
}

// observer hears of the plugins' number and failures.
type observer Plugins

func (o *observer) RecordPluginInvocation(plugin, _ string, err error) {
	if err != nil {
		o.failed.Store(&failure{plugin: plugin, err: err})
	}
}

func (o *observer) UpdatePluginCount(n int) { o.connected.Store(int32(n)) }

func (*observer) RecordPluginLatency(string, string, time.Duration) {}

func (*observer) RecordPluginAdjustments(string, string, *api.ContainerAdjustment, int, int) {}

// NRI has one logger in a process. It is set once; where its lines go follows
// the newest Plugins.
var (
	logTo     atomic.Pointer[func(Level, string)]
	setLogger = sync.OnceFunc(func() { nrilog.Set(logger{}) })
)

type logger struct{}

func (logger) Debugf(_ context.Context, format string, args ...any) { logLine(Debug, format, args) }
func (logger) Infof(_ context.Context, format string, args ...any)  { logLine(Info, format, args) }
func (logger) Warnf(_ context.Context, format string, args ...any)  { logLine(Warning, format, args) }
func (logger) Errorf(_ context.Context, format string, args ...any) { logLine(Warning, format, args) }

// logLine passes a line on. That WebAssembly was left out of the build is meant.
func logLine(level Level, format string, args []any) {
	for _, a := range args {
		if err, ok := a.(error); ok && errors.Is(err, adaptation.ErrWasmDisabled) {
			level = Debug
		}
	}
	(*logTo.Load())(level, fmt.Sprintf(format, args...))
}
