package cases

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/node"
	"berth/sandbox/leakcheck"
)

// A daemon that is told to stop while a CNI plugin hangs names what it breaks off
// and ends soon; nothing of the pod is left, and it can be run by the next one.
func TestStoppingBesideAHungPlugin(t *testing.T) {
	plugins := t.TempDir()
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	hung := filepath.Join(plugins, "hung")
	script := "#!/bin/sh\n[ \"$CNI_COMMAND:$(ls " + hung + " 2>/dev/null)\" = ADD:" + hung + " ] && sleep 600\nexec " + deps + "/cni/bridge\n"
	for path, text := range map[string]string{hung: "", filepath.Join(plugins, "bridge"): script} {
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	e := start(t, node.Options{Plugins: plugins})
	config := e.sandbox()
	done := make(chan error, 1)
	go func() {
		_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: config})
		done <- err
	}()
	e.eventually("the plugin hangs", func() bool {
		res, err := e.rt.Status(e.ctx, &cri.StatusRequest{Verbose: true})
		return err == nil && strings.Contains(res.GetInfo()["operations"], "network setup")
	})
	began := time.Now()
	if err := e.Terminate(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > leakcheck.Patience(18*time.Second) {
		t.Errorf("the daemon took %v to stop", took)
	}
	if err := <-done; err == nil {
		t.Error("the hung pod is said to run")
	}
	log, err := os.ReadFile(filepath.Join(e.Dir, "berth.log"))
	if err != nil || !strings.Contains(string(log), "broken off") || !strings.Contains(string(log), "RunPodSandbox") {
		t.Errorf("the log does not name what is broken off (%v): %s", err, e.LogTail(10))
	}
	if err := os.Remove(hung); err != nil {
		t.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	e.empty("the restart")
	e.removePod(e.run(config))
	if left := e.leases(); len(left) != 0 {
		t.Errorf("leases %v are left", left)
	}
}
