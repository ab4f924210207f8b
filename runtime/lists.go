package runtime

import (
	"context"
	"path/filepath"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	grpcstats "google.golang.org/grpc/stats"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox"
)

// Lists come in one message or, by KEP-5825, as a stream of parts. Both have
// the same items, taken from memory at one moment.

const (
	// partSize is what one message of a stream is filled up to; below the 4 MiB
	// that a gRPC client takes unless told otherwise.
	partSize = 1 << 20
	// clientLimit is the largest message that the kubelet and crictl take.
	clientLimit = 16 << 20
	// nearLimit is when the log warns of a reply.
	nearLimit = clientLimit / 4 * 3
	// warnAgain is how long the log says nothing more of the same list.
	warnAgain = time.Minute
)

// ListPodSandbox answers from memory; all parts of the filter must fit.
func (s *Service) ListPodSandbox(_ context.Context, req *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	return &cri.ListPodSandboxResponse{Items: s.listSandboxes(req.GetFilter())}, nil
}

// StreamPodSandboxes is ListPodSandbox in parts.
func (s *Service) StreamPodSandboxes(req *cri.StreamPodSandboxesRequest, stream grpc.ServerStreamingServer[cri.StreamPodSandboxesResponse]) error {
	return inParts(s.listSandboxes(req.GetFilter()), func(part []*cri.PodSandbox) error {
		return stream.Send(&cri.StreamPodSandboxesResponse{PodSandboxes: part})
	})
}

func (s *Service) listSandboxes(f *cri.PodSandboxFilter) []*cri.PodSandbox {
	var out []*cri.PodSandbox
	for _, sb := range s.selectSandboxes(f) {
		c := sb.Config.Message
		out = append(out, &cri.PodSandbox{
			Id: sb.ID, Metadata: c.GetMetadata(), State: s.sandboxState(sb), CreatedAt: sb.CreatedAt,
			Labels: c.GetLabels(), Annotations: c.GetAnnotations(), RuntimeHandler: sb.Handler,
		})
	}
	return out
}

func (s *Service) selectSandboxes(f *cri.PodSandboxFilter) []*sandbox.Sandbox {
	fits := func(sb *sandbox.Sandbox) bool {
		return visibleSandbox(sb) && (f.GetState() == nil || f.GetState().GetState() == s.sandboxState(sb)) &&
			matches(f.GetLabelSelector(), sb.Config.Message.GetLabels())
	}
	if id := f.GetId(); id != "" {
		sb, err := s.findSandbox(id)
		if err != nil || !fits(sb) {
			return nil
		}
		return []*sandbox.Sandbox{sb}
	}
	return s.Records.Sandboxes.Select(fits)
}

// ListContainers answers from memory; all parts of the filter must fit.
func (s *Service) ListContainers(_ context.Context, req *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	return &cri.ListContainersResponse{Containers: s.listContainers(req.GetFilter())}, nil
}

// StreamContainers is ListContainers in parts.
func (s *Service) StreamContainers(req *cri.StreamContainersRequest, stream grpc.ServerStreamingServer[cri.StreamContainersResponse]) error {
	return inParts(s.listContainers(req.GetFilter()), func(part []*cri.Container) error {
		return stream.Send(&cri.StreamContainersResponse{Containers: part})
	})
}

// listContainers leaves out of an entry what the contract does not ask for: the
// annotations of the image's spec are in ContainerStatus.
func (s *Service) listContainers(f *cri.ContainerFilter) []*cri.Container {
	var out []*cri.Container
	for _, c := range s.selectContainers(f) {
		config, img := c.Config.Message, s.imageSpec(c)
		img.Annotations = nil
		out = append(out, &cri.Container{
			Id: c.ID, PodSandboxId: c.SandboxID, Metadata: config.GetMetadata(), Image: img, ImageRef: c.ImageRef, ImageId: c.ImageID,
			State: c.State(s.bootID), CreatedAt: c.CreatedAt, Labels: config.GetLabels(), Annotations: config.GetAnnotations(),
		})
	}
	return out
}

func (s *Service) selectContainers(f *cri.ContainerFilter) []*sandbox.Container {
	pod := f.GetPodSandboxId()
	if pod != "" {
		sb, err := s.findSandbox(pod)
		if err != nil {
			return nil
		}
		pod = sb.ID
	}
	fits := func(c *sandbox.Container) bool {
		return c.MadeAt != 0 && (pod == "" || c.SandboxID == pod) &&
			(f.GetState() == nil || f.GetState().GetState() == c.State(s.bootID)) &&
			matches(f.GetLabelSelector(), c.Config.Message.GetLabels())
	}
	if id := f.GetId(); id != "" {
		c, err := s.findContainer(id)
		if err != nil || !fits(c) {
			return nil
		}
		return []*sandbox.Container{c}
	}
	return s.Records.Containers.Select(fits)
}

// StreamContainerStats is ListContainerStats in parts.
func (s *Service) StreamContainerStats(req *cri.StreamContainerStatsRequest, stream grpc.ServerStreamingServer[cri.StreamContainerStatsResponse]) error {
	all, err := s.listContainerStats(stream.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	return inParts(all, func(part []*cri.ContainerStats) error {
		return stream.Send(&cri.StreamContainerStatsResponse{ContainerStats: part})
	})
}

// StreamPodSandboxStats is ListPodSandboxStats in parts.
func (s *Service) StreamPodSandboxStats(req *cri.StreamPodSandboxStatsRequest, stream grpc.ServerStreamingServer[cri.StreamPodSandboxStatsResponse]) error {
	all, err := s.listPodSandboxStats(stream.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	return inParts(all, func(part []*cri.PodSandboxStats) error {
		return stream.Send(&cri.StreamPodSandboxStatsResponse{PodSandboxStats: part})
	})
}

// StreamPodSandboxMetrics is ListPodSandboxMetrics in parts.
func (s *Service) StreamPodSandboxMetrics(_ *cri.StreamPodSandboxMetricsRequest, stream grpc.ServerStreamingServer[cri.StreamPodSandboxMetricsResponse]) error {
	all, err := s.listPodSandboxMetrics(stream.Context())
	if err != nil {
		return err
	}
	return inParts(all, func(part []*cri.PodSandboxMetrics) error {
		return stream.Send(&cri.StreamPodSandboxMetricsResponse{PodSandboxMetrics: part})
	})
}

// inParts sends a list in order, each item once, as many to a message as fit in
// partSize and at least one. An empty list sends nothing.
func inParts[T proto.Message](list []T, send func([]T) error) error {
	for len(list) > 0 {
		n, size := 1, proto.Size(list[0])
		for ; n < len(list); n++ {
			if size += proto.Size(list[n]); size > partSize {
				break
			}
		}
		if err := send(list[:n]); err != nil {
			return err
		}
		list = list[n:]
	}
	return nil
}

// replySizes warns in the log of replies that clients can hardly take or not
// take at all: their own error does not say on the node why a list fails. It
// learns the sizes from gRPC, which knows them anyway.
type replySizes struct {
	log *logrus.Entry

	mu     sync.Mutex
	warned map[string]time.Time // RPC → last warning; guarded by mu
}

type rpcName struct{}

// TagRPC has HandleRPC know the RPC's name.
func (*replySizes) TagRPC(ctx context.Context, info *grpcstats.RPCTagInfo) context.Context {
	return context.WithValue(ctx, rpcName{}, info.FullMethodName)
}

// HandleRPC looks at replies.
func (r *replySizes) HandleRPC(ctx context.Context, event grpcstats.RPCStats) {
	reply, ok := event.(*grpcstats.OutPayload)
	if !ok || reply.Length < nearLimit {
		return
	}
	method, _ := ctx.Value(rpcName{}).(string)
	rpc := filepath.Base(method)
	if !r.due(rpc, time.Now()) {
		return
	}
	log := r.log.WithFields(logrus.Fields{"rpc": rpc, "bytes": reply.Length, "items": items(reply.Payload)})
	if reply.Length > clientLimit {
		log.Errorf("a reply is larger than the %d bytes that clients take: remove ended containers and pods, or have the kubelet stream lists (CRIListStreaming)", clientLimit)
	} else {
		log.Warnf("a reply comes near the %d bytes that clients take: remove ended containers and pods, or have the kubelet stream lists (CRIListStreaming)", clientLimit)
	}
}

func (r *replySizes) due(rpc string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if last, ok := r.warned[rpc]; ok && now.Sub(last) < warnAgain {
		return false
	}
	r.warned[rpc] = now
	return true
}

// items counts the entries of a reply that is a list.
func items(reply any) int {
	n := 0
	m, ok := reply.(proto.Message)
	if !ok {
		return n
	}
	fields := m.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if f := fields.Get(i); f.IsList() {
			n += m.ProtoReflect().Get(f).List().Len()
		}
	}
	return n
}

// TagConn and HandleConn complete the interface.
func (*replySizes) TagConn(ctx context.Context, _ *grpcstats.ConnTagInfo) context.Context { return ctx }

// HandleConn has nothing to do.
func (*replySizes) HandleConn(context.Context, grpcstats.ConnStats) {}
