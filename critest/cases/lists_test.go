package cases

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// messages reads a stream to its end.
func messages[T any](stream grpc.ServerStreamingClient[T], err error) ([]*T, error) {
	var all []*T
	for err == nil {
		var m *T
		if m, err = stream.Recv(); err == nil {
			all = append(all, m)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return all, err
}

// sizes are the largest message and the sum of all.
func sizes[T proto.Message](all []T) (largest, sum int) {
	for _, m := range all {
		n := proto.Size(m)
		largest, sum = max(largest, n), sum+n
	}
	return largest, sum
}

// logged reads the daemon's whole log.
func (e *env) logged() string {
	e.Helper()
	b, err := os.ReadFile(filepath.Join(e.Dir, "berth.log"))
	if err != nil {
		e.Fatal(err)
	}
	return string(b)
}

// B91: ended pods with fat annotations make a list larger than a client takes.
// The same list as a stream comes whole, filters are small, and the log says
// which list is the trouble.
func TestB91ListsBeyondTheClientsLimit(t *testing.T) {
	const pods, annotation = 70, 250 << 10
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	fat := map[string]string{"fat": strings.Repeat("x", annotation)}
	want := map[string]string{} // container: pod
	for i := range pods {
		sandbox := e.sandbox()
		sandbox.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
		sandbox.Annotations = fat
		pod := e.run(sandbox)
		c := command("c", "exit 0")
		c.Annotations = fat
		if i == 0 { // one lives
			c = command("c", "sleep 1000")
		}
		want[e.startContainer(pod, c, sandbox)] = pod
		if i > 0 {
			if _, err := e.rt.StopPodSandbox(e.ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod}); err != nil {
				t.Fatal(err)
			}
		}
	}
	e.plainListsFail()
	e.streamsAreWhole(want, fat["fat"])
	e.filtersAreSmall()
	for _, rpc := range []string{"ListPodSandbox", "ListContainers"} {
		if log := e.logged(); !strings.Contains(log, "rpc="+rpc) || !strings.Contains(log, fmt.Sprintf("items=%d", pods)) {
			t.Errorf("the log does not say that %s is too large", rpc)
		}
	}
}

// plainListsFail sees the client refuse what is too large, with the daemon well.
func (e *env) plainListsFail() {
	e.Helper()
	_, podsErr := e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{})
	_, containersErr := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{})
	for _, err := range []error{podsErr, containersErr} {
		if status.Code(err) != codes.ResourceExhausted {
			e.Errorf("a list of more than 16 MiB: %v; the client's limit should refuse it", err)
		}
	}
}

func (e *env) streamsAreWhole(want map[string]string, fat string) {
	e.Helper()
	began := time.Now()
	containers, err := messages(e.rt.StreamContainers(e.ctx, &cri.StreamContainersRequest{}))
	if err != nil {
		e.Fatalf("stream containers: %v", err)
	}
	seen := map[string]bool{}
	for _, m := range containers {
		for _, c := range m.GetContainers() {
			ended := c.GetState() == cri.ContainerState_CONTAINER_EXITED
			if seen[c.GetId()] || want[c.GetId()] != c.GetPodSandboxId() || ended && c.GetAnnotations()["fat"] != fat {
				e.Errorf("container %s: again %v, pod %s, %d annotations", c.GetId(), seen[c.GetId()], c.GetPodSandboxId(), len(c.GetAnnotations()))
			}
			seen[c.GetId()] = true
		}
		if len(m.GetContainers()) == 0 {
			e.Error("a message without containers")
		}
	}
	pods, err := messages(e.rt.StreamPodSandboxes(e.ctx, &cri.StreamPodSandboxesRequest{}))
	if err != nil {
		e.Fatalf("stream pods: %v", err)
	}
	number := 0
	for _, m := range pods {
		number += len(m.GetPodSandboxes())
	}
	if len(seen) != len(want) || number != len(want) {
		e.Errorf("streams of %d containers and %d pods, want %d of each", len(seen), number, len(want))
	}
	largest, sum := sizes(containers)
	e.Logf("containers in %d messages, the largest of %d bytes, %d in all; both streams took %s", len(containers), largest, sum, time.Since(began))
	if largest > 4<<20 || sum < 16<<20 {
		e.Errorf("messages up to %d bytes, %d in all; want at most 4 MiB each, and more than 16 MiB in all", largest, sum)
	}
}

func (e *env) filtersAreSmall() {
	e.Helper()
	ready, err := e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{
		State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}}})
	if err != nil || len(ready.GetItems()) != 1 || proto.Size(ready) > 1<<20 {
		e.Errorf("ready pods: %d in %d bytes, error %v; want 1", len(ready.GetItems()), proto.Size(ready), err)
	}
	running, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{
		State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}}})
	if err != nil || len(running.GetContainers()) != 1 || proto.Size(running) > 1<<20 {
		e.Errorf("running containers: %d in %d bytes, error %v; want 1", len(running.GetContainers()), proto.Size(running), err)
	}
}

// The small streams: the living ones' statistics, images, and nothing at all.
func TestStreamsOfStatsAndImages(t *testing.T) {
	e := start(t, node.Options{})
	none, err := messages(e.im.StreamImages(e.ctx, &cri.StreamImagesRequest{}))
	if err != nil || len(none) != 0 {
		t.Errorf("no images: %d messages, error %v; want none", len(none), err)
	}
	e.pull(images.Busybox)
	e.pull(images.Pause)
	all, err := messages(e.im.StreamImages(e.ctx, &cri.StreamImagesRequest{}))
	if err != nil || len(all) != 1 || len(all[0].GetImages()) != 2 {
		t.Errorf("two images: %v, error %v", all, err)
	}
	one, err := messages(e.im.StreamImages(e.ctx, &cri.StreamImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{Image: images.Pause}}}))
	if err != nil || len(one) != 1 || len(one[0].GetImages()) != 1 || one[0].GetImages()[0].GetRepoTags()[0] != images.Pause {
		t.Errorf("one image: %v, error %v", one, err)
	}
	_, err = messages(e.im.StreamImages(e.ctx, &cri.StreamImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{Image: "Not//valid"}}}))
	e.refused("a filter that names no image", err, codes.InvalidArgument, "Not//valid")
	sandbox := e.sandbox()
	pod := e.run(sandbox)
	id := e.startContainer(pod, command("on", "sleep 1000"), sandbox)
	e.exited(e.startContainer(pod, command("off", "exit 0"), sandbox))
	figures, err := messages(e.rt.StreamContainerStats(e.ctx, &cri.StreamContainerStatsRequest{}))
	if err != nil || len(figures) != 1 || len(figures[0].GetContainerStats()) != 1 || figures[0].GetContainerStats()[0].GetAttributes().GetId() != id {
		t.Errorf("statistics of one running container: %v, error %v", figures, err)
	}
	pods, err := messages(e.rt.StreamPodSandboxStats(e.ctx, &cri.StreamPodSandboxStatsRequest{}))
	if err != nil || len(pods) != 1 || len(pods[0].GetPodSandboxStats()) != 1 || pods[0].GetPodSandboxStats()[0].GetAttributes().GetId() != pod {
		t.Errorf("statistics of one pod: %v, error %v", pods, err)
	}
	metrics, err := messages(e.rt.StreamPodSandboxMetrics(e.ctx, &cri.StreamPodSandboxMetricsRequest{}))
	if err != nil || len(metrics) != 1 || len(metrics[0].GetPodSandboxMetrics()) != 1 || metrics[0].GetPodSandboxMetrics()[0].GetPodSandboxId() != pod {
		t.Errorf("metrics of one pod: %v, error %v", metrics, err)
	}
	gone, leave := context.WithCancel(e.ctx)
	leave()
	if _, err := messages(e.rt.StreamContainers(gone, &cri.StreamContainersRequest{})); status.Code(err) != codes.Canceled {
		t.Errorf("a client that left: %v", err)
	}
}
