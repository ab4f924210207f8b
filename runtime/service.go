package runtime

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/sirupsen/logrus"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/image/rootfs"
	"berth/network"
	"berth/network/hostport"
	"berth/oci"
	"berth/oci/leash"
	"berth/oci/spec"
	"berth/runtime/admin"
	"berth/runtime/apparmor"
	"berth/runtime/cdi"
	"berth/runtime/config"
	"berth/runtime/exporter"
	"berth/runtime/nri"
	"berth/runtime/operation"
	"berth/runtime/selinux"
	"berth/runtime/stats"
	"berth/runtime/streaming"
	"berth/sandbox"
	"berth/sandbox/outside"
)

// operationLimit is the deadline of one flow; what can hang inside it (CNI,
// runc, registries) has a shorter one of its own.
const operationLimit = 4 * time.Minute

// Parts are the leaves that a Service puts together; main makes and closes them.
type Parts struct {
	Config  config.Config // at the start; see Service.Config
	Version string
	Log     *logrus.Entry
	Records *sandbox.Store
	Images  *image.Store
	Network *network.Manager
	// Networks are those of handlers with a CNI directory of their own.
	Networks  map[string]*network.Manager
	HostPorts *hostport.Manager
	Leash     *leash.Leash           // of CNI plugins; may be nil
	Handlers  map[string]oci.Runtime // by name
	// Problems are what opening the records told; of two about one path the later
	// one counts.
	Problems []sandbox.Problem
	// Retired are handlers that are configured no more but have containers.
	Retired   map[string]oci.Runtime
	BaseSpecs map[string]*rspec.Spec // of the handlers that have one
	Host      spec.Host
	AppArmor  *apparmor.Default              // nil on a node without AppArmor
	SELinux   *selinux.Policy                // nil where SELinux is not used
	Pause     func() (dir string, err error) // makes sure of the rootfs of pause containers
	Streams   *streaming.Server
	Outside   *outside.Looker // at paths that others serve
	// MonitorPID tells the pid of the monitor, 0 while none is connected; may be nil.
	MonitorPID func() int
	// MonitorMissing says what the next monitor waits for when there has been none for
	// long, else nothing; may be nil.
	MonitorMissing func() string
	// LogTrouble says in words that a container's log does not answer, else nothing; may
	// be nil.
	LogTrouble func(id string) string
}

// Service is CRI's RuntimeService.
type Service struct {
	cri.UnimplementedRuntimeServiceServer
	Parts

	reconfigured atomic.Pointer[config.Config] // nil: Parts.Config is in force

	starting   atomic.Bool // calls are refused, but for Why
	bootID     string
	beginning  beginning
	operations *operation.Group
	failures   failures
	locks      *operation.Locks
	exits      exits
	starts     starts
	events     events
	podLife    podLife
	metrics    *exporter.Metrics
	stats      *stats.Collector
	writable   *stats.Directory // the containers' directory, where it is not on the images' filesystem; else nil
	cdi        *cdi.Devices
	plugins    *nri.Plugins // nil: NRI is off
	endPlugins func()       // ends what those have started that were launched; nil: none were
	handlers   []*cri.RuntimeHandler
	abilities  map[string]abilities // of each handler, by name
	features   *cri.RuntimeFeatures
	// checkpoints is why each handler cannot checkpoint; nil until that is known.
	checkpoints atomic.Pointer[map[string]string]

	creating   sync.RWMutex  // read-held while the OCI runtime makes cgroups
	closing    chan struct{} // closed by Close
	background operation.Crew
	warned     sync.Map // texts of warnings that were logged
	preloading sync.Mutex
	forgetting sync.Mutex  // of pods
	quiet      *time.Timer // see quietAfter
}

// New makes a Service over its parts. Restore must be called before it serves.
func New(p Parts) (*Service, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("read boot id: %w", err)
	}
	writable, err := containerDisk(p.Config.Root)
	if err != nil {
		return nil, err
	}
	s := &Service{
		writable:   writable,
		Parts:      p,
		cdi:        cdi.Open(p.Config.Runtime.CDIDirs),
		bootID:     strings.TrimSpace(string(boot)),
		beginning:  beginning{waiting: map[string]adoptee{}, tidied: make(chan struct{}), collected: make(chan struct{})},
		operations: operation.NewGroup(),
		failures:   failures{last: map[string]admin.WhyFailure{}},
		locks:      operation.NewLocks(),
		closing:    make(chan struct{}),
		exits:      exits{waiting: map[string]chan struct{}{}},
		starts:     starts{running: map[string]*oci.Exit{}},
		events:     events{subscribers: map[*subscriber]bool{}, stamps: map[string]int64{}},
		podLife:    podLife{pods: map[string]life{}},
		stats:      stats.NewCollector(stats.OpenCgroups(stats.DefaultRoot), rootfs.Usage),
	}
	s.metrics = exporter.New(p.Version, s.scraped)
	s.quiet = time.AfterFunc(quietAfter, debug.FreeOSMemory)
	s.operations.Watch(s.operationEnded)
	s.operations.Explain(func(o *operation.Operation) string { return waitsText(s.waitsOf(o)) })
	p.Images.WatchPulls(s.pullEnded)
	if s.plugins, err = s.newPlugins(); err != nil {
		return nil, err
	}
	p.Records.Containers.Watch(s.containerChanged)
	p.Records.Sandboxes.Watch(s.sandboxChanged)
	return s, nil
}

// undoPatience is how long an operation that is broken off may take to undo what
// it has done.
const undoPatience = 3 * time.Second

// Close ends streaming sessions, lets no operation begin any more, and waits for
// those that run until ctx ends, but for no grace period. What runs longer is named in the log and broken off; what
// it cannot undo at once, the next daemon does. Containers go on. To be called once.
func (s *Service) Close(ctx context.Context) {
	s.Streams.Close()
	close(s.closing)
	s.operations.Close()
	s.operations.Wait(ctx)
	if broken := s.operations.Cancel(); len(broken) > 0 {
		for _, op := range broken {
			s.Log.WithFields(logrus.Fields{"operation": op.Verb, "object": readable(op.Object), "step": op.Where()}).Warn("an operation is broken off")
		}
		undo, cancel := context.WithTimeout(context.Background(), undoPatience)
		defer cancel()
		s.operations.Wait(undo)
	}
	s.background.Wait(ctx)
	s.quiet.Stop()
	if err := s.Records.Save(); err != nil {
		s.Log.WithError(err).Warn("the next daemon finds out again what the disk does not take")
	}
	s.plugins.Stop()
	if s.endPlugins != nil {
		s.endPlugins()
	}
}

// behind runs f beside the callers; Close waits for it. A panic in it does not end
// the daemon.
func (s *Service) behind(f func()) {
	s.background.Go(func() {
		err := operation.Guarded(func() error { f(); return nil })
		if p := (*operation.PanicError)(nil); errors.As(err, &p) {
			s.logPanic("background", p)
		}
	})
}

func (s *Service) logPanic(what string, p *operation.PanicError) {
	s.Log.WithField("in", what).Errorf("%v\n%s", p, p.Stack)
}

// newID makes a random id of 64 hexadecimal digits.
func newID() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails, see crypto/rand
	return hex.EncodeToString(b[:])
}

// exits tells waiters that an init has ended.
type exits struct {
	mu      sync.Mutex
	waiting map[string]chan struct{} // guarded by mu
}

// of returns a channel that is closed when id's exit becomes known.
func (e *exits) of(id string) <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	c, ok := e.waiting[id]
	if !ok {
		c = make(chan struct{})
		e.waiting[id] = c
	}
	return c
}

func (e *exits) tell(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c, ok := e.waiting[id]; ok {
		close(c)
		delete(e.waiting, id)
	}
}

// forget drops waiters of an object that is gone.
func (e *exits) forget(id string) { e.tell(id) }

// warn logs what had to be given up in a container's specification; the same
// words as a warning once, then only for those who debug.
func (s *Service) warn(fields logrus.Fields, text string) {
	level := logrus.DebugLevel
	if _, again := s.warned.LoadOrStore(text, true); !again {
		level = logrus.WarnLevel
	}
	s.Log.WithFields(fields).Log(level, text)
}
