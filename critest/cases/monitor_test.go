package cases

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/cri-tools/pkg/common"

	"berth/critest/images"
	"berth/critest/node"
)

// figure reads a number from the environment: the long form of a test.
func figure(t *testing.T, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q is no number", name, text)
	}
	return n
}

// replaceMonitor kills the node's monitor and waits for the next one.
func (e *env) replaceMonitor() {
	e.Helper()
	old := e.Monitors()
	for _, pid := range old {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may be leaving
	}
	e.eventually("a new monitor", func() bool {
		now := e.Monitors()
		return len(now) == 1 && !slices.Contains(old, now[0])
	})
}

// load is what goes on at a node while its monitor is killed.
type load struct {
	*env
	pod    string
	config *cri.PodSandboxConfig
	signal string // a directory; containers end when it has the file "end"
	over   atomic.Bool
	work   sync.WaitGroup

	containers, execs, sessions, refused atomic.Int64
}

// go_ repeats a piece of work until the load is over.
func (l *load) go_(work func(round int)) {
	l.work.Add(1)
	go func() {
		defer l.work.Done()
		for round := 0; !l.over.Load() && !l.Failed(); round++ {
			work(round)
		}
	}()
}

// ask repeats a request as the kubelet does when the runtime was not there.
func (l *load) ask(what string, request func() error) bool {
	for range 100 {
		err := request()
		if err == nil {
			return true
		}
		if code := status.Code(err); code != codes.Unavailable && code != codes.Unknown {
			l.Errorf("%s: %v", what, err)
			return false
		}
		l.refused.Add(1)
		time.Sleep(20 * time.Millisecond)
	}
	l.Errorf("%s: still not possible after 100 tries", what)
	return false
}

// lives makes a container that ends with a code of its own, and waits for that.
func (l *load) lives(worker, round int) {
	want := int32(round%200 + 1)
	c := command(fmt.Sprintf("short-%d-%d", worker, round), fmt.Sprintf("echo hello; sleep 0.%d; echo bye; exit %d", round%3, want))
	id := ""
	made := l.ask("create "+c.Metadata.Name, func() error {
		res, err := l.rt.CreateContainer(l.ctx, &cri.CreateContainerRequest{PodSandboxId: l.pod, Config: c, SandboxConfig: l.config})
		id = res.GetContainerId()
		return err
	})
	if !made || !l.ask("start "+c.Metadata.Name, func() error {
		_, err := l.rt.StartContainer(l.ctx, &cri.StartContainerRequest{ContainerId: id})
		if s := l.status(id); status.Code(err) == codes.FailedPrecondition && s.GetStartedAt() != 0 {
			return nil
		}
		return err
	}) {
		return
	}
	s := l.exitedIn(id, time.Minute)
	if s.GetExitCode() != want {
		l.Errorf("%s ended with code %d (%s: %s), want %d", c.Metadata.Name, s.GetExitCode(), s.GetReason(), s.GetMessage(), want)
	}
	if out, _ := l.logs(id); out != "hello\nbye\n" {
		l.Errorf("%s logged %q", c.Metadata.Name, out)
	}
	l.ask("remove "+c.Metadata.Name, func() error {
		_, err := l.rt.RemoveContainer(l.ctx, &cri.RemoveContainerRequest{ContainerId: id})
		return err
	})
	l.containers.Add(1)
}

// stops makes a container that ends at its SIGTERM only.
func (l *load) stops(round int) {
	id := ""
	c := command(fmt.Sprintf("stopped-%d", round), "trap 'exit 33' TERM; while :; do sleep 0.02; done")
	if !l.ask("create", func() error {
		res, err := l.rt.CreateContainer(l.ctx, &cri.CreateContainerRequest{PodSandboxId: l.pod, Config: c, SandboxConfig: l.config})
		id = res.GetContainerId()
		return err
	}) || !l.ask("start", func() error {
		_, err := l.rt.StartContainer(l.ctx, &cri.StartContainerRequest{ContainerId: id})
		return err
	}) {
		return
	}
	time.Sleep(100 * time.Millisecond) // the shell has set its trap, or dies of the signal
	l.ask("stop", func() error {
		_, err := l.rt.StopContainer(l.ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 20})
		return err
	})
	if s := l.status(id); s.GetState() != cri.ContainerState_CONTAINER_EXITED || s.GetExitCode() != 33 && s.GetExitCode() != 143 {
		l.Errorf("a stopped container is %s with code %d (%s: %s), want 33", s.GetState(), s.GetExitCode(), s.GetReason(), s.GetMessage())
	}
	l.ask("remove", func() error {
		_, err := l.rt.RemoveContainer(l.ctx, &cri.RemoveContainerRequest{ContainerId: id})
		return err
	})
	l.containers.Add(1)
}

// talks attaches to a container that answers, talks to it, and hangs up or is hung
// up on: after that it must come to its end, and the next one be served.
func (l *load) talks(id string, round int) {
	s := l.dial(common.TransportWebsocket, l.attachURL(id, true, false), true, false)
	text := fmt.Sprintf("round %d\n", round)
	typed := make(chan struct{})
	go func() {
		defer close(typed)
		_, _ = s.in.Write([]byte(text)) // a session that is over takes nothing
	}()
	answered := false
	for end := time.Now().Add(20 * time.Second); !answered && len(s.ended) == 0; time.Sleep(5 * time.Millisecond) {
		answered = strings.Contains(s.out.String(), "got "+text)
		if time.Now().After(end) {
			l.Errorf("session %d neither answers nor ends; it saw %q and %q", round, s.out.String(), s.err.String())
			break
		}
	}
	if answered {
		l.sessions.Add(1)
	}
	s.hangUp()
	_ = s.in.Close()
	_ = s.end()
	<-typed
}

// counts is a script that logs numbered lines, now and then one longer than a
// piece, until the end is told, and the last number before it ends with 7.
const counts = `awk 'BEGIN { while (1) { print "line " i++; if (i % 500 == 0) { printf "%20000d\n", i; fflush(); ` +
	`system("sleep 0.05"); if (system("test -e /signal/end") == 0) exit 7 } } }'`

// signals is the directory that counting containers look into.
func (e *env) signals() string {
	e.Helper()
	dir := filepath.Join(e.Dir, "signal")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		e.Fatal(err)
	}
	return dir
}

// counting starts a container that runs counts.
func (e *env) counting(name, pod string, config *cri.PodSandboxConfig) string {
	e.Helper()
	c := command(name, counts)
	c.Mounts = []*cri.Mount{{HostPath: e.signals(), ContainerPath: "/signal"}}
	return e.startContainer(pod, c, config)
}

// counted checks the log of counts.
func (e *env) counted(id string) int {
	e.Helper()
	out, _ := e.logs(id)
	i := 0
	for line := range strings.Lines(out) {
		want := fmt.Sprintf("line %d\n", i)
		if len(line) == 20001 {
			line, want = strings.TrimLeft(line, " "), fmt.Sprintf("%d\n", i)
			i--
		}
		if line != want {
			e.Errorf("the log of %s has %.60q where %q should be", id, line, want)
			return i
		}
		i++
	}
	return i
}

// The monitor is killed again and again while containers write floods, are made,
// end, are stopped, run commands and are attached to: none is lost, no exit is
// missed and no line. BERTH_MONITOR_KILLS=100 is the long form.
func TestMonitorKilledUnderLoad(t *testing.T) {
	kills := figure(t, "BERTH_MONITOR_KILLS", 10)
	e := startFor(t, node.Options{LogLevel: "info"}, 2*time.Minute+time.Duration(kills)*10*time.Second)
	e.pull(images.Busybox)
	l := &load{env: e, config: e.sandbox(), signal: e.signals()}
	l.pod = e.run(l.config)
	var writers []string
	for i := range 4 {
		writers = append(writers, e.counting(fmt.Sprintf("writer%d", i), l.pod, l.config))
	}
	c := command("talker", "while read -r l; do echo got $l; done")
	c.Stdin = true
	talker := e.startContainer(l.pod, c, l.config)
	l.go_(func(round int) { l.lives(0, round) })
	l.go_(func(round int) { l.lives(1, round) })
	l.go_(func(round int) { l.stops(round) })
	l.go_(func(round int) { l.talks(talker, round) })
	l.go_(func(int) {
		res, err := l.rt.ExecSync(l.ctx, &cri.ExecSyncRequest{ContainerId: talker, Cmd: []string{"sh", "-c", "echo well; exit 4"}, Timeout: 60})
		if err != nil || string(res.GetStdout()) != "well\n" || res.GetExitCode() != 4 {
			l.Errorf("exec: %v, %v", res, err)
		}
		l.execs.Add(1)
	})
	begin := time.Now()
	for range kills {
		time.Sleep(time.Duration(20+rand.IntN(900)) * time.Millisecond)
		e.replaceMonitor()
	}
	took := time.Since(begin)
	l.over.Store(true)
	if err := os.WriteFile(filepath.Join(l.signal, "end"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l.work.Wait()
	lines := 0
	for _, id := range writers {
		if s := e.exitedIn(id, time.Minute); s.GetExitCode() != 7 {
			t.Errorf("a writer ended with code %d (%s: %s), want 7", s.GetExitCode(), s.GetReason(), s.GetMessage())
		}
		lines += e.counted(id)
	}
	if s := e.status(talker); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the talker is %s with code %d", s.GetState(), s.GetExitCode())
	}
	t.Logf("%d kills in %.0f s: %d containers lived and ended with the right code, %d commands, %d sessions answered, %d lines of floods, %d requests sent again",
		kills, took.Seconds(), l.containers.Load(), l.execs.Load(), l.sessions.Load(), lines, l.refused.Load())
}
