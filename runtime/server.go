package runtime

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/runtime/admin"
	"berth/runtime/exporter"
	"berth/runtime/operation"
)

// maxRequest bounds one request: the kubelet's own bound for a message is
// 16 MiB, and annotations are large. Replies have no bound here: it is the
// client's that counts, and the client that is told (see replySizes).
const maxRequest = 32 << 20

// Server is a gRPC server with both CRI services.
func (s *Service) Server() *grpc.Server {
	g := grpc.NewServer(
		grpc.MaxRecvMsgSize(maxRequest), grpc.ForceServerCodecV2(listCodec{encoding.GetCodecV2(proto.Name)}),
		grpc.UnaryInterceptor(s.intercept), grpc.StreamInterceptor(s.interceptStream),
		grpc.StatsHandler(&replySizes{log: s.Log, warned: map[string]time.Time{}}),
		grpc.SharedWriteBuffer(true), grpc.ReadBufferSize(8<<10), grpc.WriteBufferSize(8<<10),
	)
	cri.RegisterRuntimeServiceServer(g, s)
	cri.RegisterImageServiceServer(g, &imageService{service: s})
	g.RegisterService(adminService, s)
	return g
}

// intercept gives every error its code, logs a failed RPC once, and keeps a
// panic in one RPC from ending the daemon.
func (s *Service) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (reply any, err error) {
	began := time.Now()
	defer func() { err = s.ended(call{info.FullMethod, began, req, false}, recover(), err) }()
	if s.starting.Load() && filepath.Base(info.FullMethod) != string(admin.Why) {
		return nil, s.notYet()
	}
	operation.Reached(info.FullMethod, "request")
	defer operation.Reached(info.FullMethod, "reply")
	r, ok := s.slowCall(filepath.Base(info.FullMethod), req)
	if !ok {
		return next(ctx, req)
	}
	err = s.operations.Track(ctx, r, func(ctx context.Context, _ *operation.Operation) (err error) {
		reply, err = next(ctx, req)
		return err
	})
	return reply, err
}

// errStarting: lists are not true yet.
var errStarting = errors.New("the daemon is starting")

// Starting has the service answer nothing but Why, with Unavailable, until Started:
// it may be served before Restore then.
func (s *Service) Starting() { s.starting.Store(true) }

// Started ends Starting.
func (s *Service) Started() { s.starting.Store(false) }

func (s *Service) notYet() error {
	for _, o := range s.operations.Running() {
		return fmt.Errorf("%w: %s at step %s", errStarting, o.Verb, o.Where())
	}
	return errStarting
}

// slowCall describes a call that may take long for those who ask why; the others
// answer from memory. What becomes an operation of its own is listed as that.
func (s *Service) slowCall(rpc string, req any) (operation.Request, bool) {
	r := operation.Request{Verb: rpc}
	switch rpc {
	case "RunPodSandbox", "CreateContainer", "RestorePod", "StartContainer", "StopContainer", "StopPodSandbox", "RemovePodSandbox", "RemoveContainer",
		"UpdateContainerResources", "UpdatePodSandboxResources", "ReopenContainerLog", "CheckpointContainer", "CheckpointPod", "RemoveImage", "ImageFsInfo":
	case "ExecSync":
		r.Quiet = operation.Endless
		if t, ok := req.(interface{ GetTimeout() int64 }); ok && t.GetTimeout() > 0 {
			r.Quiet = time.Duration(min(t.GetTimeout(), int64(maxGrace/time.Second))) * time.Second
		}
	case "ImportImage", "ExportImage", "CheckImages", "DiskUsage":
		r.Quiet = operation.Endless // an operator waits for it
	default:
		return r, false
	}
	for _, id := range idsOf(req) {
		r.Object = s.nameOf(id)
	}
	return r, true
}

// nameOf is the name of a container or pod, by the beginning of its id; of nothing
// that is there it is what was asked for.
func (s *Service) nameOf(id string) string {
	if c, err := s.Records.Containers.Find(id); err == nil {
		return c.Name
	}
	if sb, err := s.Records.Sandboxes.Find(id); err == nil {
		return sb.Name
	}
	return id
}

// interceptStream does the same for an RPC that answers with a stream.
func (s *Service) interceptStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) (err error) {
	began := time.Now()
	defer func() { err = s.ended(call{info.FullMethod, began, nil, true}, recover(), err) }()
	if s.starting.Load() {
		return s.notYet()
	}
	return next(srv, stream)
}

// call is what the log says of an RPC.
type call struct {
	method string
	began  time.Time
	req    any // nil where the log needs nothing of it
	stream bool
}

// ended turns the outcome of an RPC into the error that its caller gets.
func (s *Service) ended(c call, panicked any, err error) error {
	rpc := filepath.Base(c.method)
	if panicked != nil {
		err = fmt.Errorf("%s: %w", rpc, operation.Recovered(panicked))
	}
	if p := (*operation.PanicError)(nil); errors.As(err, &p) {
		s.logPanic(rpc, p)
	}
	err = statusOf(err)
	took := time.Since(c.began)
	s.metrics.RPC(exporter.RPC{Service: filepath.Base(filepath.Dir(c.method)), Method: rpc, Code: status.Code(err).String(), Took: took, Stream: c.stream})
	if err == nil {
		return nil
	}
	log := s.Log.WithFields(logrus.Fields{"rpc": rpc, "code": status.Code(err).String(), "took": took.Round(time.Millisecond)})
	for key, id := range idsOf(c.req) {
		log = log.WithField(key, readable(id))
	}
	if c := status.Code(err); c == codes.NotFound || c == codes.Unimplemented {
		log.WithError(err).Debug("rpc refused")
	} else {
		log.WithError(err).Warn("rpc failed")
	}
	return err
}

// idsOf names the objects of a request for the log.
func idsOf(req any) map[string]string {
	ids := map[string]string{}
	if r, ok := req.(interface{ GetContainerId() string }); ok && r.GetContainerId() != "" {
		ids["container"] = r.GetContainerId()
	}
	if r, ok := req.(interface{ GetPodSandboxId() string }); ok && r.GetPodSandboxId() != "" {
		ids["sandbox"] = r.GetPodSandboxId()
	}
	if r, ok := req.(interface{ GetImage() *cri.ImageSpec }); ok && r.GetImage().GetImage() != "" {
		ids["image"] = r.GetImage().GetImage()
	}
	return ids
}
