package cases

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
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

// heard is what a subscriber has got of each object.
type heard struct {
	mu    sync.Mutex
	kinds map[string][]string // by object, guarded by mu
	last  map[string]int64    // stamp by object, guarded by mu
	wrong []string            // guarded by mu
}

func (h *heard) add(id, kind string, at int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if at <= h.last[id] {
		h.wrong = append(h.wrong, fmt.Sprintf("%s of %s is stamped %d after %d", kind, id, at, h.last[id]))
	}
	h.last[id] = at
	h.kinds[id] = append(h.kinds[id], strings.TrimSuffix(strings.TrimPrefix(kind, "CONTAINER_"), "_EVENT"))
}

func (h *heard) complain(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wrong = append(h.wrong, fmt.Sprintf(format, args...))
}

// of is the sequence of an object.
func (h *heard) of(id string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return strings.Join(h.kinds[id], " ")
}

func newHeard() *heard { return &heard{kinds: map[string][]string{}, last: map[string]int64{}} }

// listen subscribes over gRPC and checks each event's statuses.
func (e *env) listen(ctx context.Context) *heard {
	e.Helper()
	h := newHeard()
	stream, err := e.rt.GetContainerEvents(ctx, &cri.GetEventsRequest{})
	if err == nil {
		_, err = stream.Header() // from now on nothing is missed
	}
	if err != nil {
		e.Fatalf("subscribe to events: %v", err)
	}
	go func() {
		for {
			m, err := stream.Recv()
			if err != nil {
				if status.Code(err) != codes.Canceled {
					h.complain("the stream ended: %v", err)
				}
				return
			}
			h.add(m.GetContainerId(), m.GetContainerEventType().String(), m.GetCreatedAt())
			if text := statuses(m); text != "" {
				h.complain("%s of %s: %s", m.GetContainerEventType(), m.GetContainerId(), text)
			}
		}
	}()
	return h
}

// statuses says what is wrong with the statuses of an event.
func statuses(m *cri.ContainerEventResponse) string {
	sb := m.GetPodSandboxStatus()
	if sb.GetId() == "" || sb.GetMetadata().GetUid() == "" || sb.GetCreatedAt() == 0 {
		return fmt.Sprintf("sandbox status %v", sb)
	}
	want := map[cri.ContainerEventType]cri.ContainerState{
		cri.ContainerEventType_CONTAINER_CREATED_EVENT: cri.ContainerState_CONTAINER_CREATED,
		cri.ContainerEventType_CONTAINER_STARTED_EVENT: cri.ContainerState_CONTAINER_RUNNING,
		cri.ContainerEventType_CONTAINER_STOPPED_EVENT: cri.ContainerState_CONTAINER_EXITED,
	}
	found := m.GetContainerId() == sb.GetId() || m.GetContainerEventType() == cri.ContainerEventType_CONTAINER_DELETED_EVENT
	for _, c := range m.GetContainersStatuses() {
		if c.GetImage().GetImage() == "" || c.GetImageRef() == "" || c.GetImageId() == "" || c.GetMetadata().GetName() == "" {
			return fmt.Sprintf("container status %v", c)
		}
		if c.GetId() != m.GetContainerId() {
			continue
		}
		found = true
		if state := want[m.GetContainerEventType()]; c.GetState() != state {
			return fmt.Sprintf("its state is %s", c.GetState())
		}
		if c.GetMetadata().GetName() == "oom" && c.GetState() == cri.ContainerState_CONTAINER_EXITED && c.GetReason() != "OOMKilled" {
			return fmt.Sprintf("its reason is %s", c.GetReason())
		}
	}
	if !found {
		return "no status of its container"
	}
	return ""
}

// crictlEvents has the real crictl listen; the func ends it.
func (e *env) crictlEvents() (*heard, func()) {
	h, ctx, done := newHeard(), context.Context(nil), make(chan string, 1)
	ctx, leave := context.WithCancel(e.ctx)
	go func() {
		out, err := e.Crictl(ctx, "events")
		if ctx.Err() == nil {
			h.complain("crictl events ended: %v", err)
		}
		done <- out
	}()
	return h, func() {
		leave()
		for dec := json.NewDecoder(strings.NewReader(<-done)); ; {
			var m struct {
				ID   string `json:"containerId"`
				Kind string `json:"containerEventType"`
				At   string `json:"createdAt"`
			}
			if err := dec.Decode(&m); err != nil {
				if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
					h.complain("crictl's output: %v", err)
				}
				return
			}
			at, err := strconv.ParseInt(m.At, 10, 64)
			if err != nil {
				h.complain("crictl's createdAt: %v", err)
			}
			h.add(m.ID, m.Kind, at)
		}
	}
}

// counts reads the subscriber counts of the verbose Status.
func (e *env) eventCounts() (c struct{ Subscribers, Waiting, Dropped int }) {
	e.Helper()
	res, err := e.rt.Status(e.ctx, &cri.StatusRequest{Verbose: true})
	if err == nil {
		err = json.Unmarshal([]byte(res.GetInfo()["events"]), &c)
	}
	if err != nil {
		e.Fatalf("event counts of the status: %v", err)
	}
	return c
}

const wholeLife = "CREATED STARTED STOPPED DELETED"

// lives takes a pod through its life with containers that end in every way, and
// returns the events that are due by object.
func (e *env) lives(config *cri.PodSandboxConfig) (map[string]string, error) {
	res, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: config})
	if err != nil {
		return nil, err
	}
	pod := res.GetPodSandboxId()
	due := map[string]string{pod: wholeLife}
	hungry := command("oom", "")
	hungry.Command = []string{"dd", "if=/dev/zero", "of=/dev/null", "bs=64M"}
	hungry.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: 15 << 20}
	for _, c := range []*cri.ContainerConfig{command("instant", "exit 3"), hungry, command("killed", "sleep 1000"), command("never", ""), command("left", "sleep 1000")} {
		name := c.GetMetadata().GetName()
		made, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		if err != nil {
			return nil, err
		}
		id := made.GetContainerId()
		due[id] = wholeLife
		if name == "never" {
			due[id] = "CREATED STOPPED DELETED"
			continue
		}
		if _, err := e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: id}); err != nil {
			return nil, err
		}
		switch name {
		case "killed":
			_, err = e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id})
		case "instant":
			_, err = e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: id})
		case "oom":
			err = e.awaitEnd(id)
		}
		if err != nil {
			return nil, err
		}
	}
	if _, err := e.rt.StopPodSandbox(e.ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod}); err != nil {
		return nil, err
	}
	_, err = e.rt.RemovePodSandbox(e.ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod})
	return due, err
}

// awaitEnd is exited for a goroutine that is not the test's.
func (e *env) awaitEnd(id string) error {
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		res, err := e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: id})
		if err != nil {
			return err
		}
		if res.GetStatus().GetState() == cri.ContainerState_CONTAINER_EXITED {
			return nil
		}
	}
	return fmt.Errorf("container %s still runs after 30 s", id)
}

// B99: the streams of events miss nothing and mix up nothing, whatever ends how.
func TestB99EventsFollowEveryLife(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	ctx, leave := context.WithCancel(e.ctx)
	defer leave()
	direct := e.listen(ctx)
	tool, end := e.crictlEvents()
	e.eventually("both subscribers are there", func() bool { return e.eventCounts().Subscribers == 2 })

	configs := make(chan *cri.PodSandboxConfig, 50)
	for i := range cap(configs) {
		config := e.sandbox()
		if i%2 == 1 {
			config.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
		}
		configs <- config
	}
	close(configs)
	due := map[string]string{}
	var mu sync.Mutex
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for config := range configs {
				more, err := e.lives(config)
				mu.Lock()
				if err != nil {
					t.Errorf("pod %s: %v", config.GetMetadata().GetName(), err)
				}
				for id, kinds := range more {
					due[id] = kinds
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	e.eventually("all queues are read", func() bool { return e.eventCounts().Waiting == 0 })
	e.eventually("the last pod's end is heard", func() bool {
		for id := range due {
			if !strings.HasSuffix(direct.of(id), "DELETED") {
				return false
			}
		}
		return true
	})
	end()
	for who, h := range map[string]*heard{"a client": direct, "crictl events": tool} {
		for id, kinds := range due {
			if got := h.of(id); got != kinds {
				t.Errorf("%s hears %q of %s, want %q", who, got, id, kinds)
			}
		}
		if len(h.kinds) != len(due) {
			t.Errorf("%s hears of %d objects, want %d", who, len(h.kinds), len(due))
		}
		for _, w := range h.wrong {
			t.Errorf("%s: %s", who, w)
		}
	}
	leave()
	e.eventually("no subscriber is left", func() bool { return e.eventCounts().Subscribers == 0 })
	if c := e.eventCounts(); c.Dropped != 0 {
		t.Errorf("%d events were dropped", c.Dropped)
	}
}

// A subscriber that never reads holds up no pod.
func TestDeafSubscriberHoldsUpNobody(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	stream, err := e.rt.GetContainerEvents(e.ctx, &cri.GetEventsRequest{})
	if err == nil {
		_, err = stream.Header()
	}
	if err != nil {
		t.Fatal(err)
	}
	config := e.sandbox()
	config.Annotations = map[string]string{"fat": strings.Repeat("x", 200<<10)} // fills the connection at once
	pod := e.run(config)
	for i := range 5 {
		id := e.startContainer(pod, command(fmt.Sprint("c", i), "exit 0"), config)
		e.exited(id)
	}
	if c := e.eventCounts(); c.Subscribers != 1 || c.Waiting == 0 {
		t.Errorf("counts %+v; the events should wait in the queue", c)
	}
	e.removePod(pod)
	if err := e.Terminate(); err != nil {
		t.Errorf("the daemon's end: %v", err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
}

// A stream ends with its daemon, in good order where the daemon can; the next
// daemon tells what ended while there was none.
func TestEventsOverARestart(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	sandbox := e.sandbox()
	pod := e.run(sandbox)
	share := t.TempDir()
	waits := func(name string) string {
		c := command(name, "while [ ! -e /share/"+name+" ]; do sleep 0.05; done; exit 4")
		c.Mounts = []*cri.Mount{{HostPath: share, ContainerPath: "/share"}}
		return e.startContainer(pod, c, sandbox)
	}
	for name, leave := range map[string]func() error{"terminated": e.Terminate, "killed": e.Kill} {
		id := waits(name)
		stream, err := e.rt.GetContainerEvents(e.ctx, &cri.GetEventsRequest{})
		if err == nil {
			_, err = stream.Header()
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := leave(); err != nil {
			t.Fatal(err)
		}
		for err == nil { // the second daemon has told what it found
			_, err = stream.Recv()
		}
		if name == "terminated" && !errors.Is(err, io.EOF) || name == "killed" && status.Code(err) != codes.Unavailable {
			t.Errorf("the stream of a daemon that was %s ends with %v", name, err)
		}
		if err := os.WriteFile(filepath.Join(share, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		e.eventually("the container's end is written down", func() bool {
			_, err := os.Stat(filepath.Join(e.State(), "containers", id, "exit.json"))
			return err == nil
		})
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
		ctx, done := context.WithCancel(e.ctx)
		h := e.listen(ctx)
		e.eventually("the end is told", func() bool { return h.of(id) == "STOPPED" })
		if _, err := e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
			t.Fatal(err)
		}
		e.eventually("the removal is told", func() bool { return h.of(id) == "STOPPED DELETED" })
		done()
		h.mu.Lock()
		if len(h.wrong) > 0 {
			t.Errorf("%s: %q", name, h.wrong)
		}
		h.mu.Unlock()
	}
}
