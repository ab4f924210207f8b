package cases

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/node"
	"berth/sandbox/leakcheck"
)

// B55: one pod whose CNI plugin hangs holds up nothing else, not even while the
// network's configuration is rewritten, and ends at its own deadline.
func TestB55SlowCNI(t *testing.T) {
	plugins, deadline := t.TempDir(), leakcheck.Patience(8*time.Second)
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	slow := "#!/bin/sh\ncase \"$CNI_ARGS:$CNI_COMMAND\" in *K8S_POD_NAME=slow*:ADD) sleep 60;; esac\nexec " + deps + "/cni/bridge\n"
	if err := os.WriteFile(filepath.Join(plugins, "bridge"), []byte(slow), 0o755); err != nil {
		t.Fatal(err)
	}
	e := start(t, node.Options{Plugins: plugins, Settings: map[string]string{"cni": fmt.Sprintf("timeout = %q", deadline)}})
	config := e.sandbox()
	config.Metadata.Name = "slow"
	done := make(chan error, 1)
	began := time.Now()
	go func() {
		_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: config})
		done <- err
	}()
	e.eventually("the plugin hangs", func() bool {
		res, err := e.rt.Status(e.ctx, &cri.StatusRequest{Verbose: true})
		return err == nil && strings.Contains(res.GetInfo()["operations"], "network setup")
	})
	var took []time.Duration
	for i := range 20 {
		e.timed(&took, "Status", func(ctx context.Context) error {
			res, err := e.rt.Status(ctx, &cri.StatusRequest{Verbose: i%2 == 0})
			for _, c := range res.GetStatus().GetConditions() {
				if !c.GetStatus() {
					err = errors.Join(err, fmt.Errorf("%s is false: %s", c.GetType(), c.GetMessage()))
				}
			}
			return err
		})
		e.timed(&took, "ListPodSandbox", func(ctx context.Context) error {
			_, err := e.rt.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
			return err
		})
		if i%5 == 0 {
			e.useConflist(e.Conflist() + strings.Repeat("\n", i))
			at := time.Now()
			e.removePod(e.run(e.sandbox()))
			if took := time.Since(at); took > leakcheck.Patience(4*time.Second) {
				t.Errorf("another pod took %v", took)
			}
		}
	}
	slices.Sort(took)
	if median, worst := took[len(took)/2], took[len(took)-1]; median > leakcheck.Patience(100*time.Millisecond) || worst > leakcheck.Patience(2*time.Second) {
		t.Errorf("Status and ListPodSandbox beside a slow pod took %v, at worst %v", median, worst)
	}
	select {
	case err := <-done:
		t.Fatalf("the slow pod ended after %v, before the others: %v", time.Since(began), err)
	default:
	}
	err = <-done
	e.refused("the slow pod", err, codes.DeadlineExceeded, "network setup", "bridge")
	if took := time.Since(began); took < deadline || took > 2*deadline {
		t.Errorf("the slow pod ended after %v, its deadline was %v", took, deadline)
	}
	e.empty("the slow pod")
	if left := e.leases(); len(left) != 0 {
		t.Errorf("leases %v are left", left)
	}
}

// timed makes a call, which must succeed, and adds how long it took.
func (e *env) timed(took *[]time.Duration, what string, call func(context.Context) error) {
	e.Helper()
	at := time.Now()
	if err := call(e.ctx); err != nil {
		e.Errorf("%s beside a slow pod: %v", what, err)
	}
	*took = append(*took, time.Since(at))
}
