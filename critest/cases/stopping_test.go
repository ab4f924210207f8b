package cases

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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
	other := e.sandbox()
	others := e.insist(other)
	began := time.Now()
	if err := e.Terminate(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > leakcheck.Patience(18*time.Second) {
		t.Errorf("the daemon took %v to stop", took)
	}
	e.refused("the hung pod", <-done, codes.Unavailable)
	if n := others(); n == 0 {
		t.Error("nothing was refused by the stopping daemon")
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
	e.removePod(e.run(other))
	e.empty("the restart")
	e.removePod(e.run(config))
	if left := e.leases(); len(left) != 0 {
		t.Errorf("leases %v are left", left)
	}
}

// insist has eight clients run and remove a pod, without a pause, until stop is
// called; it may be left. A stopping daemon refuses them, and nothing else refuses them.
func (e *env) insist(pod *cri.PodSandboxConfig) (stop func() (refused int64)) {
	var over atomic.Bool
	var refused atomic.Int64
	var all sync.WaitGroup
	pod.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	for range 8 {
		all.Go(func() {
			for !over.Load() {
				res, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: pod})
				if err == nil {
					_, err = e.rt.RemovePodSandbox(e.ctx, &cri.RemovePodSandboxRequest{PodSandboxId: res.GetPodSandboxId()})
				}
				switch status.Code(err) {
				case codes.OK:
				case codes.Unavailable:
					refused.Add(1)
					time.Sleep(5 * time.Millisecond)
				default:
					e.Errorf("beside the stop: %v", err)
					return
				}
			}
		})
	}
	return func() int64 {
		over.Store(true)
		all.Wait()
		return refused.Load()
	}
}
