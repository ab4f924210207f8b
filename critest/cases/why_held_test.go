package cases

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// What why says of sessions, and of an operation that waits for the lock of another
// one: both operations are in the answer, the holder with the step it is at.
func TestWhyOfSessionsAndLocks(t *testing.T) {
	gate := filepath.Join(t.TempDir(), "gate")
	hold := "while [ -e " + gate + " ]; do sleep 0.05; done"
	e := start(t, node.Options{Runc: wrapped(t, map[string]string{"start": hold, "update": hold})})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	main := e.startContainer(pod, command("main", "exec sleep 1000"), config)
	made := e.create(pod, command("made", "exec sleep 1000"), config)
	startIt := func() error {
		_, err := e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: made})
		return err
	}
	for _, tc := range []struct {
		name, id string
		holder   func() error // nil: a session, which needs no gate
		waiter   func() error
		words    []string
	}{
		{"an attach session", main, nil, nil, []string{"Attach", "streaming session"}},
		{"a stop behind an update", main, func() error {
			_, err := e.rt.UpdateContainerResources(e.ctx, &cri.UpdateContainerResourcesRequest{ContainerId: main, Linux: &cri.LinuxContainerResources{CpuShares: 512}})
			return err
		}, func() error {
			_, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: main})
			return err
		}, []string{"UpdateContainerResources", "StopContainer", "wait for the container's lock"}},
		{"a stop behind a start", made, startIt, func() error {
			_, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: made})
			return err
		}, []string{"StartContainer", "StopContainer", "wait for the container's lock"}},
	} {
		says := func(words []string) func() bool {
			return func() bool {
				out, code := e.berth("why", "--socket", e.Socket, tc.id[:12])
				for _, w := range words {
					if !strings.Contains(out, w) {
						return false
					}
				}
				return code == 0
			}
		}
		if tc.holder == nil {
			s := e.dial("spdy", e.attachURL(tc.id, false, false), false, false)
			e.eventually(tc.name+": why tells of it", says(tc.words))
			s.hangUp()
			e.eventually(tc.name+": why tells of its end", func() bool { return !says(tc.words)() })
			continue
		}
		put(t, gate, "", 0o600)
		ended := make(chan error, 2)
		go func() { ended <- tc.holder() }()
		e.eventually(tc.name+": why tells of the holder", says(tc.words[:1]))
		go func() { ended <- tc.waiter() }()
		e.eventually(tc.name+": why tells of both", says(tc.words))
		if err := os.Remove(gate); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := <-ended; err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
		}
	}
	e.removePod(pod)
}
