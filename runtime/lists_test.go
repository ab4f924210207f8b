package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstats "google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox"
)

// Every item comes once and in order, no message is empty, and none is larger
// than asked for unless one item alone is.
func TestInParts(t *testing.T) {
	kib := func(sizes ...int) (list []*cri.Container) {
		for i, n := range sizes {
			list = append(list, &cri.Container{Id: fmt.Sprint(i), ImageRef: strings.Repeat("x", n<<10)})
		}
		return list
	}
	for name, tc := range map[string]struct {
		list []*cri.Container
		want []int // items of each message
	}{
		"none":            {nil, nil},
		"one":             {kib(1), []int{1}},
		"small ones":      {kib(1, 1, 1), []int{3}},
		"full":            {kib(512, 511, 1, 1), []int{2, 2}},
		"large ones":      {kib(2000, 2000, 1), []int{1, 1, 1}},
		"large amid":      {kib(1, 2000, 1, 1), []int{1, 1, 2}},
		"many":            {kib(slices.Repeat([]int{100}, 25)...), []int{10, 10, 5}},
		"exactly as much": {kib(600, 600), []int{1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			var all []*cri.Container
			var got []int
			err := inParts(tc.list, func(part []*cri.Container) error {
				if n := proto.Size(&cri.StreamContainersResponse{Containers: part}); n > partSize+len(part)*8 && len(part) > 1 {
					t.Errorf("a message of %d items has %d bytes", len(part), n)
				}
				all, got = append(all, part...), append(got, len(part))
				return nil
			})
			if err != nil || !slices.Equal(got, tc.want) || !slices.Equal(all, tc.list) {
				t.Errorf("messages of %v items, error %v, want %v; %d items of %d", got, err, tc.want, len(all), len(tc.list))
			}
		})
	}
	broken := errors.New("broken")
	sent := 0
	if err := inParts(kib(2000, 2000), func([]*cri.Container) error { sent++; return broken }); !errors.Is(err, broken) || sent != 1 {
		t.Errorf("after an error: %v, %d messages", err, sent)
	}
}

// stream is a client's end of a stream, as the server sees it.
type stream[T any] struct {
	grpc.ServerStream
	ctx  context.Context
	send func(*T) error
}

func (s *stream[T]) Context() context.Context { return s.ctx }
func (s *stream[T]) Send(m *T) error          { return s.send(m) }

func gather[T any](t *testing.T) (*stream[T], *[]*T) {
	var all []*T
	return &stream[T]{ctx: t.Context(), send: func(m *T) error { all = append(all, m); return nil }}, &all
}

// The filters are ANDed, and the streams have what the lists have.
func TestListsAndStreamsFilterAlike(t *testing.T) {
	m := newMeasured(t)
	_, err := m.Records.Containers.Update("c2", func(c *sandbox.Container) { c.FinishedAt = 9 })
	must(t, err)
	_, err = m.Records.Sandboxes.Update("b2", func(sb *sandbox.Sandbox) { sb.StoppedAt = 9 })
	must(t, err)
	must(t, m.Records.Containers.Create(&sandbox.Container{ID: "half", Name: "half", SandboxID: "a1", BootID: "boot",
		Config: sandbox.Config[*cri.ContainerConfig]{Message: &cri.ContainerConfig{}}}))
	exited := &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_EXITED}
	running := &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}
	for _, tc := range []struct {
		filter *cri.ContainerFilter
		want   string
	}{
		{nil, "c1 c2 d3"},
		{&cri.ContainerFilter{}, "c1 c2 d3"},
		{&cri.ContainerFilter{State: exited}, "c2"},
		{&cri.ContainerFilter{State: running, PodSandboxId: "a1"}, "c1"},
		{&cri.ContainerFilter{Id: "c2", State: running}, ""},
		{&cri.ContainerFilter{Id: "c"}, ""}, // two begin so
		{&cri.ContainerFilter{Id: "d"}, "d3"},
		{&cri.ContainerFilter{Id: "d3", PodSandboxId: "a1"}, ""},
		{&cri.ContainerFilter{PodSandboxId: "nowhere"}, ""},
		{&cri.ContainerFilter{Id: "half"}, ""},
		{&cri.ContainerFilter{LabelSelector: map[string]string{"no": "such"}}, ""},
	} {
		ids := func(list []*cri.Container) string {
			var out []string
			for _, c := range list {
				out = append(out, c.GetId())
			}
			slices.Sort(out)
			return strings.Join(out, " ")
		}
		list, err := m.ListContainers(t.Context(), &cri.ListContainersRequest{Filter: tc.filter})
		if got := ids(list.GetContainers()); err != nil || got != tc.want {
			t.Errorf("list of %v: %q, %v; want %q", tc.filter, got, err, tc.want)
		}
		to, all := gather[cri.StreamContainersResponse](t)
		err = m.StreamContainers(&cri.StreamContainersRequest{Filter: tc.filter}, to)
		var items []*cri.Container
		for _, part := range *all {
			items = append(items, part.GetContainers()...)
		}
		if got := ids(items); err != nil || got != tc.want || tc.want == "" && len(*all) != 0 {
			t.Errorf("stream of %v: %q in %d messages, %v; want %q", tc.filter, got, len(*all), err, tc.want)
		}
	}
	for _, tc := range []struct {
		filter *cri.PodSandboxFilter
		want   string
	}{
		{nil, "a1 b2"},
		{&cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}}, "a1"},
		{&cri.PodSandboxFilter{Id: "b", State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}}, ""},
		{&cri.PodSandboxFilter{Id: "b"}, "b2"},
	} {
		to, all := gather[cri.StreamPodSandboxesResponse](t)
		err := m.StreamPodSandboxes(&cri.StreamPodSandboxesRequest{Filter: tc.filter}, to)
		var got []string
		for _, part := range *all {
			for _, sb := range part.GetPodSandboxes() {
				got = append(got, sb.GetId())
			}
		}
		slices.Sort(got)
		if strings.Join(got, " ") != tc.want || err != nil {
			t.Errorf("stream of %v: %q, %v; want %q", tc.filter, got, err, tc.want)
		}
	}
}

// B91 in numbers: 2000 ended pods and containers with 8 KiB of annotations each,
// over a real connection, to a client with the kubelet's limit.
func TestB91TwoThousand(t *testing.T) {
	m := newMeasured(t)
	fat := map[string]string{"fat": strings.Repeat("x", 8<<10)}
	const many = 2000
	for i := range many {
		id := fmt.Sprintf("%064x", i)
		must(t, m.Records.Containers.Create(&sandbox.Container{ID: id, Name: id, SandboxID: "a1", BootID: "boot", MadeAt: 1, FinishedAt: 2,
			ImageID: "sha256:" + id, ImageRef: "registry.example/app@sha256:" + id,
			Config: sandbox.Config[*cri.ContainerConfig]{Message: &cri.ContainerConfig{Annotations: fat}}}))
	}
	client := serve(t, m.Service)

	_, err := client.ListContainers(t.Context(), &cri.ListContainersRequest{})
	if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "received message larger than max") {
		t.Errorf("the whole list: %v; the client should refuse it", err)
	}
	began := time.Now()
	parts, err := client.StreamContainers(t.Context(), &cri.StreamContainersRequest{})
	must(t, err)
	seen := map[string]bool{}
	for {
		part, err := parts.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		for _, c := range part.GetContainers() {
			if seen[c.GetId()] {
				t.Errorf("container %s comes again", c.GetId())
			}
			seen[c.GetId()] = true
		}
	}
	if len(seen) != many+3 {
		t.Errorf("the stream has %d containers, want %d", len(seen), many+3)
	}
	took := time.Since(began)
	began = time.Now()
	running, err := client.ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{
		State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}}})
	if err != nil || len(running.GetContainers()) != 3 || proto.Size(running) > 4<<10 {
		t.Errorf("the running ones: %d in %d bytes, %v", len(running.GetContainers()), proto.Size(running), err)
	}
	t.Logf("the stream took %s, the filtered list %s", took, time.Since(began))
}

// serve puts a service behind a socket and returns a client with the kubelet's
// limit.
func serve(t testing.TB, s *Service) cri.RuntimeServiceClient {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "berth.sock")
	l, err := Listen(socket, quiet())
	if err != nil {
		t.Fatal(err)
	}
	g := s.Server()
	go func() { _ = g.Serve(l) }()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(clientLimit)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(); g.Stop() })
	return cri.NewRuntimeServiceClient(conn)
}

// The lists that the kubelet asks for each second, at 300 pods and 600
// containers with the labels and annotations it gives them.
func BenchmarkLists(b *testing.B) {
	records, err := sandbox.Open(b.TempDir(), func(sandbox.Problem) {})
	if err != nil {
		b.Fatal(err)
	}
	marks := map[string]string{}
	for i := range 5 {
		marks[fmt.Sprintf("io.kubernetes.container.some-key-%d", i)] = strings.Repeat("v", 40)
	}
	image := &cri.ImageSpec{Image: "sha256:" + strings.Repeat("0", 64), UserSpecifiedImage: "registry.example/team/app:1.2.3"}
	for i := range 300 {
		pod := fmt.Sprintf("%064x", i)
		if err := records.Sandboxes.Create(&sandbox.Sandbox{ID: pod, Name: pod, BootID: "boot", CreatedAt: int64(i), ReadyAt: 1,
			Config: sandbox.Config[*cri.PodSandboxConfig]{Message: &cri.PodSandboxConfig{Labels: marks, Annotations: marks,
				Metadata: &cri.PodSandboxMetadata{Name: pod[:40], Namespace: "default", Uid: pod[:36]}}}}); err != nil {
			b.Fatal(err)
		}
		for j := range 2 {
			id := fmt.Sprintf("%063x%d", i, j)
			if err := records.Containers.Create(&sandbox.Container{ID: id, Name: id, SandboxID: pod, BootID: "boot", CreatedAt: int64(i), MadeAt: 1, StartedAt: 2,
				ImageID: image.Image, ImageRef: "registry.example/team/app@" + image.Image,
				Config: sandbox.Config[*cri.ContainerConfig]{Message: &cri.ContainerConfig{Labels: marks, Annotations: marks, Image: image,
					Metadata: &cri.ContainerMetadata{Name: "app"}}}}); err != nil {
				b.Fatal(err)
			}
		}
	}
	log, _ := logtest.NewNullLogger()
	client := serve(b, &Service{Parts: Parts{Records: records, Log: log.WithField("", "")}, bootID: "boot", metrics: noMetrics()})
	for name, list := range map[string]func(context.Context) error{
		"pods":       func(ctx context.Context) error { _, err := client.ListPodSandbox(ctx, nil); return err },
		"containers": func(ctx context.Context) error { _, err := client.ListContainers(ctx, nil); return err },
		"container stream": func(ctx context.Context) error {
			parts, err := client.StreamContainers(ctx, nil)
			for err == nil {
				_, err = parts.Recv()
			}
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if err := list(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// A stream's errors get their codes and a line in the log, and a panic ends
// the RPC alone.
func TestStreamsAreIntercepted(t *testing.T) {
	log, hook := logtest.NewNullLogger()
	s := &Service{Parts: Parts{Log: log.WithField("", "")}, metrics: noMetrics()}
	for _, tc := range []struct {
		handler func() error
		code    codes.Code
		words   string
	}{
		{func() error { return nil }, codes.OK, ""},
		{func() error { return fmt.Errorf("pod: %w", errInvalid) }, codes.InvalidArgument, "rpc failed"},
		{func() error { return status.Error(codes.Aborted, "own code") }, codes.Aborted, "rpc failed"},
		{func() error { panic("oh") }, codes.Internal, "rpc failed"},
	} {
		hook.Reset()
		err := s.interceptStream(nil, nil, &grpc.StreamServerInfo{FullMethod: "/x/Stream"}, func(any, grpc.ServerStream) error { return tc.handler() })
		if status.Code(err) != tc.code {
			t.Errorf("error %v, want code %s", err, tc.code)
		}
		if last := hook.LastEntry(); (tc.words == "") != (last == nil) || last != nil && (last.Message != tc.words || last.Data["rpc"] != "Stream") {
			t.Errorf("code %s: the log says %v", tc.code, last)
		}
	}
}

// Large replies are logged with size and count, once a minute for each RPC.
func TestLargeRepliesAreLogged(t *testing.T) {
	log, hook := logtest.NewNullLogger()
	log.SetOutput(io.Discard)
	r := &replySizes{log: logrus.NewEntry(log), warned: map[string]time.Time{}}
	reply := func(rpc string, bytes int, payload any) *logrus.Entry {
		hook.Reset()
		ctx := r.TagRPC(context.Background(), &grpcstats.RPCTagInfo{FullMethodName: rpc})
		r.HandleRPC(ctx, &grpcstats.OutPayload{Payload: payload, Length: bytes})
		return hook.LastEntry()
	}
	two := &cri.ListContainersResponse{Containers: []*cri.Container{{}, {}}}
	if e := reply("/v1/a", nearLimit-1, two); e != nil {
		t.Errorf("a small reply: %v", e)
	}
	if e := reply("/v1/a", nearLimit, two); e == nil || e.Level != logrus.WarnLevel || e.Data["items"] != 2 || e.Data["bytes"] != nearLimit || e.Data["rpc"] != "a" {
		t.Errorf("near the limit: %v", e)
	}
	if e := reply("/v1/a", clientLimit+1, two); e != nil {
		t.Errorf("at once again: %v", e)
	}
	r.warned["a"] = time.Now().Add(-warnAgain)
	if e := reply("/v1/a", clientLimit+1, two); e == nil || e.Level != logrus.ErrorLevel {
		t.Errorf("over the limit a minute later: %v", e)
	}
	if e := reply("/v1/b", clientLimit+1, "no message"); e == nil || e.Data["items"] != 0 {
		t.Errorf("another RPC: %v", e)
	}
}
