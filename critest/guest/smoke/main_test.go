// Package smoke drives a whole berth with crictl and looks at what the kernel, the
// cgroup tree and systemd made of it. It is meant for the guest (cgroup v2,
// systemd, AppArmor), but runs wherever root does: what a machine lacks is skipped,
// with the reason.
//
// Every test ends with the node's leak check.
package smoke

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/critest/registry"
)

var (
	reg  *registry.Registry
	slow = 1 // what limits of time are multiplied by, from BERTH_TEST_SLOW
)

func TestMain(m *testing.M) {
	code, err := setUp(m)
	if errors.Is(err, node.ErrNotRoot) {
		fmt.Println("skipped: containers need root;", err)
		os.Exit(0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "smoke:", err)
		os.Exit(1)
	}
	os.Exit(code)
}

func setUp(m *testing.M) (int, error) {
	// The guest is nobody else's, and a daemon that systemd starts is in the
	// machine's own namespaces: there the tests are too.
	if os.Getenv("BERTH_GUEST") == "" {
		if err := node.Isolate(); err != nil {
			return 0, err
		}
	}
	if text := os.Getenv("BERTH_TEST_SLOW"); text != "" {
		var err error
		if slow, err = strconv.Atoi(text); err != nil {
			return 0, fmt.Errorf("BERTH_TEST_SLOW: %w", err)
		}
	}
	stock, err := node.OpenStock()
	if err != nil {
		return 0, err
	}
	defer stock.Close()
	reg = stock.Registry
	return m.Run(), nil
}

// env is a test with its node.
type env struct {
	*testing.T
	*node.Node
	ctx context.Context
}

// start gives the test a node, closed and checked for leaks at its end.
func start(t *testing.T) *env {
	t.Helper()
	return startWith(t, node.Options{})
}

// startWith is start for a node that differs from an ordinary one.
func startWith(t *testing.T, o node.Options) *env {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(slow)*3*time.Minute)
	o.Mirror, o.LogLevel = reg.Addr(), "info"
	n, err := node.Start(ctx, o)
	if err != nil {
		cancel()
		t.Fatalf("start a node: %v", err)
	}
	t.Cleanup(func() {
		defer cancel()
		if t.Failed() {
			t.Logf("the daemon's log ends with:\n%s", n.LogTail(30))
		}
		if err := n.Close(context.Background()); err != nil {
			t.Errorf("close the node: %v", err)
		}
	})
	e := &env{T: t, Node: n, ctx: ctx}
	e.crictl("pull", images.Busybox)
	return e
}

// crictl runs crictl, which must succeed, and returns its trimmed output.
func (e *env) crictl(args ...string) string {
	e.Helper()
	out, err := e.Crictl(e.ctx, args...)
	if err != nil {
		e.Fatal(err)
	}
	return strings.TrimSpace(out)
}

type object map[string]any

// file writes a configuration for crictl.
func (e *env) file(name string, content any) string {
	e.Helper()
	path := filepath.Join(e.Dir, name+".json")
	data, err := json.Marshal(content)
	if err == nil {
		err = os.WriteFile(path, data, 0o600)
	}
	if err != nil {
		e.Fatal(err)
	}
	return path
}

// own is the PID mode in which each container has its own namespace.
var own = object{"namespace_options": object{"pid": 1}}

// pod runs a pod and returns its id and the file of its configuration.
func (e *env) pod(name, cgroup string) (id, config string) {
	e.Helper()
	config = e.file(name, object{
		"metadata": object{"name": name, "namespace": "smoke", "uid": name + "-uid"}, "hostname": name,
		"log_directory": filepath.Join(e.LogDir(), name),
		"linux":         object{"cgroup_parent": cgroup, "security_context": own},
	})
	return e.crictl("runp", config), config
}

// container creates and starts one that runs the script, and returns its id.
func (e *env) container(pod, podConfig, name, script string, linux object) string {
	e.Helper()
	if linux["security_context"] == nil {
		linux["security_context"] = own
	}
	config := e.file(name, object{
		"metadata": object{"name": name}, "image": object{"image": images.Busybox},
		"command": []string{"sh", "-c", script}, "log_path": name + ".log", "linux": linux,
	})
	id := e.crictl("create", pod, config, podConfig)
	e.crictl("start", id)
	return id
}

// exec runs a script inside and returns its trimmed output; it must end with 0.
func (e *env) exec(id, script string) string {
	e.Helper()
	res, err := e.Runtime().ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", script}, Timeout: int64(10 * slow)})
	if err != nil {
		e.Fatalf("exec %q: %v", script, err)
	}
	if res.GetExitCode() != 0 {
		e.Fatalf("exec %q: exit code %d, stdout %q, stderr %q", script, res.GetExitCode(), res.GetStdout(), res.GetStderr())
	}
	return strings.TrimSpace(string(res.GetStdout()))
}

// status asks the daemon itself: under emulation a crictl takes a second.
func (e *env) status(id string) *cri.ContainerStatus {
	e.Helper()
	res, err := e.Runtime().ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: id})
	if err != nil {
		e.Fatalf("status of container %s: %v", id, err)
	}
	return res.GetStatus()
}

// ended waits for the container's end and returns its status.
func (e *env) ended(id string) *cri.ContainerStatus {
	e.Helper()
	var s *cri.ContainerStatus
	e.eventually("the end of container "+id, func() bool {
		s = e.status(id)
		return s.GetState() == cri.ContainerState_CONTAINER_EXITED
	})
	return s
}

// pid is the container's first process.
func (e *env) pid(id string) string {
	e.Helper()
	res, err := e.Runtime().ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		e.Fatalf("status of container %s: %v", id, err)
	}
	var info struct{ PID int }
	if err := json.Unmarshal([]byte(res.GetInfo()["info"]), &info); err != nil || info.PID <= 0 {
		e.Fatalf("the verbose status of container %s has no pid: %v: %v", id, res.GetInfo(), err)
	}
	return strconv.Itoa(info.PID)
}

// eventually polls until the condition holds.
func (e *env) eventually(what string, holds func() bool) {
	e.Helper()
	end := time.Now().Add(time.Duration(slow) * 10 * time.Second)
	for !holds() {
		if time.Now().After(end) {
			e.Fatalf("%s: not so after %d s", what, slow*10)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// unified tells whether all controllers are in one cgroup tree, version 2.
func unified() bool {
	_, err := os.Stat("/sys/fs/cgroup/cgroup.controllers")
	return err == nil
}

// limit reads a file of the container's cgroup: v2's, or v1's in its controller.
func (e *env) limit(id, file2, controller, file1 string) string {
	e.Helper()
	pid := e.pid(id)
	table, err := os.ReadFile("/proc/" + pid + "/cgroup")
	if err != nil {
		e.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		path := filepath.Join("/sys/fs/cgroup", part[2], file2)
		switch {
		case unified() && part[0] == "0":
		case !unified() && strings.Contains(","+part[1]+",", ","+controller+","):
			path = filepath.Join("/sys/fs/cgroup", controller, part[2], file1)
		default:
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			e.Fatalf("read a limit of container %s: %v", id, err)
		}
		return strings.TrimSpace(string(data))
	}
	e.Fatalf("container %s has no cgroup in:\n%s", id, table)
	return ""
}

// check compares one value.
func (e *env) check(what string, got, want any) {
	e.Helper()
	if got != want {
		e.Errorf("%s is %#v, want %#v", what, got, want)
	}
}

// needs skips the test, saying why, unless the command succeeds.
func needs(t *testing.T, what string, command ...string) {
	t.Helper()
	if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
		t.Skipf("skipped: needs %s: %s: %v %s", what, strings.Join(command, " "), err, out)
	}
}
