package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// descriptors counts the open descriptors of a process.
func descriptors(t *testing.T, pid int) int {
	t.Helper()
	list, err := os.ReadDir(filepath.Join("/proc", fmt.Sprint(pid), "fd"))
	if err != nil {
		t.Fatalf("count descriptors: %v", err)
	}
	return len(list)
}

// B71: an exec ends with its main process, though a child holds its pipes.
func TestB71ExecReturnsWhenItsMainProcessEnds(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	id := e.startContainer(e.run(config), command("main", "sleep 1000"), config)
	e.exec(id, "true") // whatever is opened once is open now
	before := descriptors(t, e.PID())
	for range 5 {
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() {
				begin := time.Now()
				res, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "echo hi; sleep 600 &"}, Timeout: 10})
				if err != nil || res.GetExitCode() != 0 || string(res.GetStdout()) != "hi\n" {
					t.Errorf("exec: %v, exit code %d, stdout %q; want hi", err, res.GetExitCode(), res.GetStdout())
				}
				if took := time.Since(begin); took > 4*time.Second { // eight at once on few cores
					t.Errorf("an exec took %v though its main process ended at once", took)
				}
			})
		}
		group.Wait()
	}
	begin := time.Now()
	if out := e.exec(id, "echo hi; sleep 600 &"); out != "hi\n" {
		t.Errorf("stdout %q, want hi", out)
	}
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("an exec alone took %v, want less than 2 s", took)
	}
	after := 0
	for range 100 {
		if after = descriptors(t, e.PID()); after <= before+5 {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if after > before+5 {
		t.Errorf("the daemon has %d descriptors after 41 such execs, had %d", after, before)
	}
}

// B73: an exec that times out leaves none of its processes.
func TestB73ExecTimeoutKillsEveryProcess(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	id := e.startContainer(e.run(config), command("main", "sleep 1000"), config)
	var group sync.WaitGroup
	for range 6 {
		group.Go(func() {
			begin := time.Now()
			_, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id,
				Cmd: []string{"sh", "-c", "sleep 999 & setsid sleep 998 & sleep 997"}, Timeout: 1})
			e.refused("exec with a timeout of 1 s", err, codes.DeadlineExceeded)
			if took := time.Since(begin); took < time.Second || took > 3*time.Second {
				t.Errorf("the timeout of 1 s came after %v", took)
			}
		})
	}
	group.Wait()
	if left := e.exec(id, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"); strings.Contains(left, "sleep 99") {
		t.Errorf("processes of the exec are left: %q", left)
	}
	if s := e.status(id); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the container is %s after the execs, want running", s.GetState())
	}
}

// An exec keeps both streams apart, gives the exit code and caps the output.
func TestExecSyncResult(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	id := e.startContainer(e.run(config), command("main", "sleep 1000"), config)
	res, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "printf out; printf err >&2; exit 7"}})
	if err != nil || res.GetExitCode() != 7 || string(res.GetStdout()) != "out" || string(res.GetStderr()) != "err" {
		t.Errorf("exec: %v, %v; want out, err and 7", res, err)
	}
	// The client here takes 16 MiB a message, as the kubelet does.
	res, err = e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "printf end >&2; dd if=/dev/zero bs=1M count=20 2>/dev/null"}, Timeout: 30})
	if err != nil || res.GetExitCode() != 0 || len(res.GetStdout()) < 15<<20 || len(res.GetStdout()) > 16<<20 || string(res.GetStderr()) != "end" {
		t.Errorf("exec with 20 MiB of output: %v, exit code %d, %d bytes, stderr %q; want success with nearly 16 MiB and the whole stderr",
			err, res.GetExitCode(), len(res.GetStdout()), res.GetStderr())
	}
	_, err = e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"/no/such/program"}})
	if err == nil || !strings.Contains(err.Error(), "/no/such/program") {
		t.Errorf("exec of a missing program: %v; want an error that names it", err)
	}
	_, err = e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id})
	e.refused("exec of nothing", err, codes.InvalidArgument, "cmd")
}
