package cases

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/critest/registry"
)

// A request that is sent again while the first one runs joins it: both have one
// result, and nobody reads that something is in use or exists. When the first caller
// gives up, the second is none the worse.
func TestDuplicatesJoin(t *testing.T) {
	gates := t.TempDir()
	hold := func(verb string) string {
		gate := filepath.Join(gates, verb)
		return "while [ -e " + gate + " ]; do : > " + gate + ".reached; sleep 0.05; done"
	}
	e := start(t, node.Options{Runc: wrapped(t, map[string]string{"create": hold("create"), "start": hold("start"), "delete": hold("delete")})})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	other := e.sandbox()
	removed := e.run(other)
	e.startContainer(removed, command("c", "exec sleep 1000"), other)
	stubborn := command("stubborn", "trap '' TERM; echo up; while :; do sleep 1; done")
	started, stopped := e.create(pod, command("started", "exec sleep 1000"), config), e.startContainer(pod, stubborn, config)
	e.eventually("it ignores SIGTERM", func() bool { out, _ := e.logs(stopped); return strings.Contains(out, "up") })
	ended := e.startContainer(pod, command("ended", "true"), config)
	e.exited(ended)
	made := command("made", "true")
	created := map[string]bool{}
	for _, tc := range []struct {
		name, gate string
		call       func(context.Context) (string, error)
	}{
		{"CreateContainer", "create", func(ctx context.Context) (string, error) {
			res, err := e.rt.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: made, SandboxConfig: config})
			return res.GetContainerId(), err
		}},
		{"StartContainer", "start", func(ctx context.Context) (string, error) {
			_, err := e.rt.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: started})
			return "", err
		}},
		{"StopContainer", "", func(ctx context.Context) (string, error) {
			_, err := e.rt.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: stopped, Timeout: 3})
			return "", err
		}},
		{"RemoveContainer", "delete", func(ctx context.Context) (string, error) {
			_, err := e.rt.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: ended})
			return "", err
		}},
		{"StopPodSandbox", "delete", func(ctx context.Context) (string, error) {
			_, err := e.rt.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: removed})
			return "", err
		}},
		{"RemovePodSandbox", "delete", func(ctx context.Context) (string, error) {
			_, err := e.rt.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: removed})
			return "", err
		}},
	} {
		gate := filepath.Join(gates, tc.gate)
		if tc.gate != "" {
			put(t, gate, "", 0o600)
			_ = os.Remove(gate + ".reached")
		}
		type answer struct {
			id  string
			err error
		}
		ask := func(ctx context.Context) chan answer {
			got := make(chan answer, 1)
			go func() { id, err := tc.call(ctx); got <- answer{id, err} }()
			return got
		}
		first, giveUp := context.WithCancel(e.ctx)
		gaveUp := ask(first)
		if tc.gate != "" && tc.name != "StopPodSandbox" {
			e.eventually(tc.name+" is at the OCI runtime", func() bool { _, err := os.Stat(gate + ".reached"); return err == nil })
			e.eventually("berth why tells of "+tc.name, func() bool {
				said, code := e.berth("why", "--socket", e.Socket)
				return code == 0 && strings.Contains(said, tc.name) && strings.Contains(said, "runc "+tc.gate)
			})
		} else {
			time.Sleep(300 * time.Millisecond) // a call that has ended before is joined by none, and right too
		}
		second, third := ask(e.ctx), ask(e.ctx)
		time.Sleep(200 * time.Millisecond)
		giveUp()
		if a := <-gaveUp; status.Code(a.err) != codes.Canceled && a.err != nil {
			t.Errorf("%s: the first, which gave up: %v", tc.name, a.err)
		}
		time.Sleep(200 * time.Millisecond)
		if tc.gate != "" {
			if err := os.Remove(gate); err != nil {
				t.Fatal(err)
			}
		}
		two, three := <-second, <-third
		if two.err != nil || three.err != nil || two.id != three.id {
			t.Errorf("%s: the second %+v, the third %+v", tc.name, two, three)
		}
		if two.id != "" {
			created[two.id] = true
		}
		if again := <-ask(e.ctx); again.err != nil || again.id != two.id {
			// Only a start may be refused later, for the container runs by then.
			if tc.name != "StartContainer" || status.Code(again.err) != codes.FailedPrecondition {
				t.Errorf("%s once more: %+v", tc.name, again)
			}
		}
	}
	if len(created) != 1 {
		t.Errorf("%d containers were made", len(created))
	}

}

// Pulls of one image share one transfer; who gives up does not end the others'.
func TestDuplicatePullsJoin(t *testing.T) {
	e := start(t, node.Options{})
	pull := func(ctx context.Context) chan error {
		done := make(chan error, 1)
		go func() {
			_, err := e.im.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: images.Busybox}})
			done <- err
		}()
		return done
	}
	release := reg.Script(registry.Fault{Path: "/manifests/", Delay: 3 * time.Second})
	defer release()
	first, giveUp := context.WithCancel(e.ctx)
	gaveUp, second, third := pull(first), pull(e.ctx), pull(e.ctx)
	e.eventually("berth why shows the pull", func() bool {
		out, code := e.berth("why", "--socket", e.Socket)
		return code == 0 && strings.Contains(out, "pull") && strings.Contains(out, "busybox")
	})
	giveUp()
	if err := <-gaveUp; status.Code(err) != codes.Canceled {
		t.Errorf("the first, which gave up: %v", err)
	}

	for _, err := range []error{<-second, <-third} {
		if err != nil {
			t.Errorf("another: %v", err)
		}
	}
}
