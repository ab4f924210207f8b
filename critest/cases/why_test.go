package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/sandbox/leakcheck"
)

// An operator sees what a hanging pod waits for, with `berth why` at once and in
// the log after ten seconds.
func TestWhyAPodHangs(t *testing.T) {
	plugins := t.TempDir()
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	hang := filepath.Join(plugins, "hang")
	script := "#!/bin/sh\nwhile [ -e " + hang + " ]; do sleep 0.1; done\nexec " + deps + "/cni/bridge\n"
	if err := os.WriteFile(filepath.Join(plugins, "bridge"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	e := start(t, node.Options{Plugins: plugins})
	if err := os.WriteFile(hang, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: e.sandbox()})
		done <- err
	}()
	const plugin = "CNI plugin bridge ADD"
	e.eventually("berth why names the plugin", func() bool {
		out, code := e.berth("why", "--socket", e.Socket)
		return code == 0 && strings.Contains(out, plugin+", pid ") && strings.Contains(out, "network setup")
	})
	for end := time.Now().Add(leakcheck.Patience(30 * time.Second)); ; time.Sleep(100 * time.Millisecond) {
		log := e.LogTail(200)
		if strings.Contains(log, "an operation takes long") && strings.Contains(log, plugin) {
			break
		}
		if time.Now().After(end) {
			t.Error("the log does not tell of the plugin")
			break
		}
	}
	if err := os.Remove(hang); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("the pod, once its plugin goes on: %v", err)
	}
	if out, code := e.berth("why", "--socket", e.Socket, "nobody"); code == 0 || !strings.Contains(out, "nobody") {
		t.Errorf("why of nothing: code %d, %q", code, out)
	}
}

// Of an exec that hangs, here at a FIFO, why tells the process and where it is.
func TestWhyOfAnExec(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	id := e.startContainer(pod, command("main", "mkfifo /fifo; sleep 1000"), config)
	ended := make(chan error, 1)
	go func() {
		_, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "exec cat /fifo"}})
		ended <- err
	}()
	said := regexp.MustCompile(`ExecSync(?s:.*)its process, pid [0-9]+ +state S at [a-z_]+`)
	for _, object := range [][]string{nil, {id[:12]}} {
		e.eventually(fmt.Sprintf("why %q names the exec's process", object), func() bool {
			out, code := e.berth(append([]string{"why", "--socket", e.Socket}, object...)...)
			return code == 0 && said.MatchString(out)
		})
	}
	e.exec(id, "echo >/fifo")
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if out, code := e.berth("why", "--socket", e.Socket); code != 0 || strings.Contains(out, "ExecSync") {
		t.Errorf("why after its end: %q", out)
	}
	e.removePod(pod)
}

// A daemon whose start takes long answers nothing but why, and never a half-truth.
func TestWhyWhileTheDaemonStarts(t *testing.T) {
	dir := t.TempDir()
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	hang, binary := filepath.Join(dir, "hang"), filepath.Join(dir, "runc")
	put(t, binary, "#!/bin/sh\nwhile [ \"$3\" = features ] && [ -e "+hang+" ]; do sleep 0.1; done\nexec "+deps+"/bin/runc \"$@\"\n", 0o755)
	e := start(t, node.Options{Settings: map[string]string{"runtime.handlers.runc": "[runtime.handlers.slow]\npath = \"" + binary + "\""}})
	pod := e.run(e.sandbox())
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	put(t, hang, "", 0o644)
	launched := make(chan error, 1)
	go func() { launched <- e.Launch(e.ctx) }()
	e.eventually("berth why tells of the start", func() bool {
		out, code := e.berth("why", "--socket", e.Socket)
		return code == 0 && strings.Contains(out, "Restore") && strings.Contains(out, "ask the OCI runtimes")
	})
	_, err = e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{})
	e.refused("a list meanwhile", err, codes.Unavailable, "the daemon is starting", "Restore at step ask the OCI runtimes")
	if err := os.Remove(hang); err != nil {
		t.Fatal(err)
	}
	if err := <-launched; err != nil {
		t.Fatal(err)
	}
	list, err := e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{})
	if err != nil || len(list.GetItems()) != 1 || list.GetItems()[0].GetId() != pod {
		t.Errorf("the list, once it has started: %v, %v", list, err)
	}
}
