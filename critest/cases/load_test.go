package cases

import (
	"context"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/critest/registry"
)

// loads are what clients do to a daemon, and how often. Nothing of it may stay.
var loads = []struct {
	name  string
	times int
	do    func(e *env, id string, i int)
}{
	{"pods up and down", 50, func(e *env, _ string, i int) {
		config := e.podOf(i)
		pod := e.run(config)
		e.startContainer(pod, command("c", "echo x; exec sleep 1000"), config)
		e.removePod(pod)
	}},
	{"execs", 200, func(e *env, id string, i int) {
		if i%4 == 0 {
			s := e.dial(transports[i%8/4], e.execURL(id, false, false, "echo", "hi"), false, false)
			_ = s.end()
			return
		}
		e.exec(id, "head -c 300000 /dev/zero")
	}},
	{"attach sessions broken off", 20, func(e *env, id string, i int) {
		c, err := e.spdyTo(e.attachURL(id, false, false), "error", "stdout", "stderr")
		if err != nil {
			e.Errorf("attach: %v", err)
			return
		}
		if i%2 == 0 {
			_ = c.(*net.TCPConn).SetLinger(0) // a reset instead of an end
		}
		_ = c.Close()
	}},
	{"pulls broken off", 20, func(e *env, _ string, i int) {
		ctx, cancel := context.WithTimeout(e.ctx, 300*time.Millisecond)
		defer cancel()
		if _, err := e.im.PullImage(ctx, pullRequest(fmt.Sprint("docker.io/cases/stalls:", i))); err == nil {
			e.Error("a pull from a registry that stalls has succeeded")
		}
	}},
	{"readers of streaming lists that vanish", 40, func(e *env, _ string, i int) {
		ctx, cancel := context.WithCancel(e.ctx)
		defer cancel()
		if i%2 == 0 {
			if s, err := e.rt.StreamContainers(ctx, &cri.StreamContainersRequest{}); err == nil {
				_, _ = s.Header() // it runs; what it brings is read by nobody
			}
		} else if s, err := e.rt.StreamContainerStats(ctx, &cri.StreamContainerStatsRequest{}); err == nil {
			_, _ = s.Header()
		}
	}},
	{"watchers of events that never read", 20, func(e *env, _ string, i int) {
		ctx, cancel := context.WithCancel(e.ctx)
		defer cancel()
		s, err := e.rt.GetContainerEvents(ctx, &cri.GetEventsRequest{})
		if err == nil {
			_, err = s.Header()
		}
		if err != nil {
			e.Errorf("watch events: %v", err)
		}
		if i%5 == 0 {
			config := e.podOf(1000 + i)
			e.removePod(e.run(config))
		}
	}},
	{"statistics", 40, func(e *env, _ string, _ int) {
		if _, err := e.rt.ListPodSandboxMetrics(e.ctx, &cri.ListPodSandboxMetricsRequest{}); err != nil {
			e.Errorf("metrics: %v", err)
		}
	}},
}

// podOf is the configuration of a pod with a number; half of them are on the
// node's network.
func (e *env) podOf(i int) *cri.PodSandboxConfig {
	inner := e.sub(e.T)
	inner.pod = 100 + i
	config := inner.sandbox()
	if i%2 == 0 {
		config.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	}
	return config
}

// After a load the daemon is what it was: goroutines and descriptors to the
// number, and its memory does not grow from one such load to the next.
func TestLoadLeavesNothing(t *testing.T) {
	e := startFor(t, node.Options{LogLevel: "warning"}, 8*time.Minute)
	id := e.idle()
	for i := range 20 {
		publish(t, "cases/stalls", fmt.Sprint(i), ispec.ImageConfig{Cmd: []string{"sh"}}, layer(t, images.File("f", 0o644, noise(200_000+i))))
	}
	t.Cleanup(reg.Script(registry.Fault{Path: "/v2/cases/stalls/blobs/", StallAfter: 10_000}))
	all := func(share int) {
		for _, l := range loads {
			inParallel(l.times/share, func(i int) { l.do(e, id, i) })
		}
	}
	all(5) // what is opened once is open now
	time.Sleep(time.Second)
	before := e.usage()
	var sizes []int
	for _, l := range loads {
		began := time.Now()
		inParallel(l.times, func(i int) { l.do(e, id, i) })
		took := time.Since(began)
		e.settled(fmt.Sprint(l.times, " ", l.name), before)
		sizes = append(sizes, resident(t, e.PID(), "VmRSS"))
		t.Logf("%d %s: %v; %d MiB", l.times, l.name, took.Round(time.Millisecond), sizes[len(sizes)-1])
	}
	all(5)
	e.settled("all of it again", before)
	sizes = append(sizes, resident(t, e.PID(), "VmRSS"))
	t.Logf("MiB after each load: %v; %+v, before %+v", sizes, e.usage(), before)
	if last := sizes[len(sizes)-1]; last > sizes[0]+sizes[0]/4+8 {
		t.Errorf("memory grew from %d to %d MiB, %d at most", sizes[0], last, slices.Max(sizes))
	}
}
