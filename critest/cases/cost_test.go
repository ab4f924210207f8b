package cases

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// What one pod with a bridge, host ports and one container may cost in its
// whole life. Counts, unlike times, do not depend on the neighbours.
const (
	maxProcesses = 40
	maxSyncs     = 8
)

// trace attaches strace to the daemon and its monitor until stop is called,
// which returns the system calls seen.
func (e *env) trace() (stop func() []string) {
	e.Helper()
	file := filepath.Join(e.Dir, "strace")
	args := []string{"-f", "-qq", "-s", "200", "-o", file, "-e", "trace=execve,execveat,fsync,fdatasync,sync,syncfs,sync_file_range,msync"}
	for _, pid := range e.Daemons() {
		args = append(args, "-p", strconv.Itoa(pid))
	}
	cmd := exec.Command("strace", args...)
	if err := cmd.Start(); err != nil {
		e.Skipf("strace is missing: %v", err)
	}
	attached := func() bool {
		for _, pid := range e.Daemons() {
			data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
			if err != nil || !regexp.MustCompile(`TracerPid:\t[1-9]`).Match(data) {
				return false
			}
		}
		return true
	}
	for end := time.Now().Add(5 * time.Second); !attached(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			e.Fatal("strace did not attach")
		}
	}
	return func() []string {
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			e.Fatal(err)
		}
		_ = cmd.Wait() // it ends by the signal
		data, err := os.ReadFile(file)
		if err != nil {
			e.Fatal(err)
		}
		return strings.Split(string(bytes.TrimSpace(data)), "\n")
	}
}

// A pod's whole life spawns few processes and waits for the disk seldom.
func TestPodLifeCosts(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	life := func() {
		config := e.sandbox()
		config.PortMappings = []*cri.PortMapping{{HostPort: 18080, ContainerPort: 80}}
		pod := e.run(config)
		c := command("main", "")
		c.Command = []string{"sleep", "1000"}
		id := e.startContainer(pod, c, config)
		if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id}); err != nil {
			t.Fatal(err)
		}
		if _, err := e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
			t.Fatal(err)
		}
		e.removePod(pod)
	}
	life() // what is made once, such as the bridge and the firewall's chains
	stop := e.trace()
	life()
	calls := stop()
	spawned := regexp.MustCompile(`execve(?:at)?\((?:\d+, )?"([^"]*)".* = 0$`)
	synced := regexp.MustCompile(`(?:fsync|fdatasync|syncfs|msync|sync_file_range|sync)\(.* = 0$`)
	var programs []string
	syncs := 0
	for _, c := range calls {
		if m := spawned.FindStringSubmatch(c); m != nil && filepath.Base(m[1]) != "sleep" { // the container's own
			programs = append(programs, filepath.Base(m[1]))
		}
		if synced.MatchString(c) {
			syncs++
		}
	}
	t.Logf("%d processes (%s), %d syncs", len(programs), strings.Join(programs, " "), syncs)
	if len(programs) == 0 {
		t.Error("no process was seen at all: the trace is broken")
	}
	if len(programs) > maxProcesses {
		t.Errorf("%d processes, want at most %d", len(programs), maxProcesses)
	}
	if syncs > maxSyncs {
		t.Errorf("%d syncs, want at most %d", syncs, maxSyncs)
	}
}
