package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox/leakcheck"
)

// truthTime is how long an exit may take to show, while a monitor is replaced.
const truthTime = 5 * time.Second

// between is the watcher's pause between two looks.
const between = 20 * time.Millisecond

// watcher asks for lists and statuses again and again, whatever else goes on, and
// keeps every lie it is told.
type watcher struct {
	runtime cri.RuntimeServiceClient
	state   string // the daemon's directory

	mu     sync.Mutex
	lies   []string            // guarded by mu
	known  map[string]*seen    // objects that were ever listed; guarded by mu
	may    map[string]bool     // objects whose removal was asked for; guarded by mu
	looks  int                 // guarded by mu
	events map[string][]string // kinds of events by object; guarded by mu
}

// seen is what the lists have said of an object.
type seen struct {
	name    string
	state   int // of the enumeration; it never goes down
	pid     int
	born    string    // when the process began, see alive
	dead    time.Time // since when the process was seen dead; zero: it was not
	gone    bool
	came    bool // it was whole once: a pod that never was ready is removed by the next attempt
	checked bool // its exit was looked at
}

func watch(runtime cri.RuntimeServiceClient, state string) *watcher {
	return &watcher{runtime: runtime, state: state, known: map[string]*seen{}, may: map[string]bool{}, events: map[string][]string{}}
}

// run looks until ctx ends. Errors are no lies: the daemon may be down.
func (w *watcher) run(ctx context.Context) {
	for ctx.Err() == nil {
		w.look(ctx)
		time.Sleep(between)
	}
}

// look compares one answer of each list with the ones before and with the kernel.
func (w *watcher) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	pods, err := w.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err == nil {
		listed := map[string]bool{}
		for _, p := range pods.GetItems() {
			listed[p.GetId()] = true
			w.pod(ctx, p)
		}
		w.missing("pod ", listed)
	}
	list, err := w.runtime.ListContainers(ctx, &cri.ListContainersRequest{})
	if err == nil {
		listed := map[string]bool{}
		for _, c := range list.GetContainers() {
			listed[c.GetId()] = true
			w.container(ctx, c)
		}
		w.missing("container ", listed)
	}
	w.mu.Lock()
	w.looks++
	w.mu.Unlock()
}

func (w *watcher) lie(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lies = append(w.lies, fmt.Sprintf(format, args...))
}

// took returns the lies since the last call.
func (w *watcher) took() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	lies := w.lies
	w.lies = nil
	return lies
}

// mayGo allows an object to leave the lists.
func (w *watcher) mayGo(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.may[id] = true
}

// listed notes what a list says of an object and returns what is known of it.
func (w *watcher) listed(id, name string, state int) *seen {
	w.mu.Lock()
	s, ok := w.known[id]
	if !ok {
		s = &seen{name: name, state: state}
		w.known[id] = s
	}
	before, gone := s.state, s.gone
	s.came = s.came || state == 0 || strings.HasPrefix(name, "container ")
	s.state = max(s.state, state)
	w.mu.Unlock()
	if gone {
		w.lie("%s is listed again after it was gone", name)
	}
	if state < before {
		w.lie("%s is in state %d after it was in %d", name, state, before)
	}
	return s
}

// missing finds the objects of a kind that a list has no longer.
func (w *watcher) missing(kind string, listed map[string]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, s := range w.known {
		if !strings.HasPrefix(s.name, kind) || s.gone || listed[id] {
			continue
		}
		s.gone = true
		if !w.may[id] && s.came {
			w.lies = append(w.lies, s.name+" is listed no longer, though nobody removed it")
		}
	}
}

// pod wants a ready pod to have its network namespace.
func (w *watcher) pod(ctx context.Context, p *cri.PodSandbox) {
	name := "pod " + p.GetMetadata().GetName()
	w.listed(p.GetId(), name, int(p.GetState()))
	if p.GetState() != cri.PodSandboxState_SANDBOX_READY || p.GetAnnotations()[hostNetwork] != "" || w.pinned(p.GetId()) {
		return
	}
	// It may have been stopped between the two looks.
	res, err := w.runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: p.GetId()})
	if err == nil && res.GetStatus().GetState() == cri.PodSandboxState_SANDBOX_READY {
		w.lie("%s is ready, but its network namespace is gone", name)
	}
}

func (w *watcher) pinned(id string) bool {
	var fs unix.Statfs_t
	err := unix.Statfs(filepath.Join(w.state, "namespaces", id, "net"), &fs)
	return err == nil && fs.Type == unix.NSFS_MAGIC
}

// container wants a running container to have its process, and an ended one its
// end.
func (w *watcher) container(ctx context.Context, c *cri.Container) {
	name := "container " + c.GetMetadata().GetName() + " " + c.GetId()[:8]
	s := w.listed(c.GetId(), name, int(c.GetState()))
	switch c.GetState() {
	case cri.ContainerState_CONTAINER_RUNNING:
		w.runs(ctx, c.GetId(), s)
	case cri.ContainerState_CONTAINER_EXITED:
		if s.checked {
			return
		}
		res, err := w.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.GetId()})
		if err == nil {
			s.checked = true
			w.ended(name, res.GetStatus())
			if born, lives := alive(s.pid); lives && born == s.born {
				w.lie("%s has ended, but its process %d lives", name, s.pid)
			}
		} else if status.Code(err) == codes.NotFound && !w.goes(c.GetId()) {
			w.lie("%s is listed, but has no status", name)
		}
	}
}

func (w *watcher) goes(id string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.may[id]
}

func (w *watcher) runs(ctx context.Context, id string, s *seen) {
	if s.pid == 0 {
		res, err := w.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
		if err != nil {
			return
		}
		var info struct{ PID int }
		if err := json.Unmarshal([]byte(res.GetInfo()["info"]), &info); err != nil {
			w.lie("%s: its status has no info: %v", s.name, err)
		}
		s.pid = info.PID
		s.born, _ = alive(s.pid)
	}
	_, lives := alive(s.pid)
	switch {
	case s.pid == 0 || lives:
		s.dead = time.Time{}
	case s.dead.IsZero():
		s.dead = time.Now()
	case time.Since(s.dead) > leakcheck.Patience(truthTime):
		w.lie("%s is said to run, but its process %d is gone since %v", s.name, s.pid, time.Since(s.dead))
		s.dead = time.Now() // once in a while is enough
	}
}

// ended checks the times of a container that has ended.
func (w *watcher) ended(name string, s *cri.ContainerStatus) {
	if s.GetState() != cri.ContainerState_CONTAINER_EXITED {
		w.lie("%s is listed as ended, its status says %s", name, s.GetState())
	}
	started := s.GetStartedAt()
	if started == 0 {
		started = s.GetCreatedAt() // it was killed before its start
	}
	if s.GetCreatedAt() == 0 || s.GetFinishedAt() < started || started < s.GetCreatedAt() {
		w.lie("%s was made at %d, started at %d and ended at %d", name, s.GetCreatedAt(), s.GetStartedAt(), s.GetFinishedAt())
	}
	if s.GetReason() == "" {
		w.lie("%s has ended with code %d for no reason", name, s.GetExitCode())
	}
}

// alive: there is such a process, and it is no zombie. born tells it from a later one
// of the same number.
func alive(pid int) (born string, lives bool) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, after, ok := strings.Cut(string(data), ") ")
	fields := strings.Fields(after)
	if err != nil || !ok || len(fields) < 20 {
		return "", false
	}
	return fields[19], fields[0] != "Z"
}

// open are the objects that are listed.
func (w *watcher) open() map[string]bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	ids := map[string]bool{}
	for id, s := range w.known {
		if !s.gone {
			ids[id] = true
		}
	}
	return ids
}

// looked is how often the watcher has looked.
func (w *watcher) looked() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.looks
}
