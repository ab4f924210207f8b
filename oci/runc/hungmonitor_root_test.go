package runc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"berth/oci"
	"berth/oci/monitor"
)

// said is what a client tells.
type said struct {
	mu       sync.Mutex
	troubles []string       // guarded by mu
	awaits   map[string]int // pid by text, guarded by mu
}

func (s *said) trouble(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.troubles = append(s.troubles, err.Error())
}

func (s *said) await(_ context.Context, what string, pid int) func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.awaits[what] = pid
	return func() {}
}

func (s *said) awaited(what string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.awaits[what]
}

func (s *said) told(text string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Contains(strings.Join(s.troubles, "\n"), text)
}

// The installed monitor hangs as it begins, and so does the recovery from a monitor's
// death: requests say what they wait for, and after a while the log does.
func TestMonitorThatHangsAtItsStart(t *testing.T) {
	i := newInstalled(t)
	n := newNodeOf(t, i.path)
	_ = n.client.Close()
	s := &said{awaits: map[string]int{}}
	var err error
	if n.client, err = monitor.Open(t.Context(), monitor.Options{Binary: i.path, Socket: filepath.Join(n.dir, "monitor.sock"),
		OnTrouble: s.trouble, Await: s.await}); err != nil {
		t.Fatal(err)
	}
	died := n.client.MonitorPID()
	i.put([]byte("#!/bin/sh\nexec sleep 1000\n"))
	n.killMonitor()
	requests, cancel := context.WithCancel(t.Context())
	asked := make(chan error, 1)
	go func() { asked <- n.client.Reopen(requests, "any") }()
	what, pid := "the monitor "+i.path+" to begin", 0
	n.eventually("a request says what it waits for", func() bool { pid = s.awaited(what); return pid > 0 })
	if text := n.client.Missing(); text != "" {
		t.Errorf("at once it is said that there is no monitor: %s", text)
	}
	want := fmt.Sprintf("which wait for %s: pid %d (sleep) in state S", what, pid)
	n.eventually("the log tells", func() bool { return s.told(want) })
	if text := n.client.Missing(); text == "" || !strings.Contains("which wait for "+text, want) {
		t.Errorf("what is missing is %q, want %q", text, want)
	}
	cancel()
	if err := <-asked; !errors.Is(err, monitor.ErrUnavailable) {
		t.Errorf("the request: %v", err)
	}
	i.put(i.stock)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.eventually("there is a monitor", func() bool { return n.client.MonitorPID() != 0 })
	took := fmt.Sprintf("monitor %d has died; monitor %d has taken its place", died, n.client.MonitorPID())
	n.eventually("the log tells: "+took, func() bool { return s.told(took) })
	if text := n.client.Missing(); text != "" {
		t.Errorf("it is said that there is no monitor: %s", text)
	}
}

// A monitor is killed while it runs a new build that hangs: that ends with it. And a
// build that hangs does not keep a renewal, nor creates, for ever.
func TestKilledMonitorTakesTheNewBuildAlong(t *testing.T) {
	i := newInstalled(t)
	n := newNodeOf(t, i.path)
	b := n.box("sleep 1000").run()
	file := filepath.Join(n.dir, "pid")
	i.put(fmt.Appendf(nil, "#!/bin/sh\necho $$ > %s.new; mv %s.new %s; exec sleep 1000\n", file, file, file))
	renewed := make(chan error, 1)
	go func() {
		_, err := n.client.Renew(t.Context())
		renewed <- err
	}()
	pid := 0
	n.eventually("the new build runs", func() bool {
		text, err := os.ReadFile(file)
		_, _ = fmt.Sscan(string(text), &pid)
		return err == nil
	})
	i.put(i.stock)
	began := time.Now()
	n.replaceMonitor()
	n.eventually("the new build has ended", func() bool { return !alive(pid) })
	if err := <-renewed; err == nil {
		t.Error("the renewal has succeeded")
	}
	if took := time.Since(began); took > slow(9*time.Second) {
		t.Errorf("it took %v: the new build has ended by itself", took)
	}
	if st := n.restore(b)[b.id]; st != (oci.State{Running: true, Started: true}) {
		t.Errorf("the container is %+v", st)
	}
}
