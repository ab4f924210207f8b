package admin

import (
	"context"
	"errors"
	"io"
	"iter"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/structpb"
)

// serviceName is the gRPC service.
const serviceName = "berth.v1.Admin"

// Method is a call with one answer, by its name. Req and Reply are structs with
// a JSON form.
type Method[Req, Reply any] string

// Stream is a call that answers with a stream of Reply.
type Stream[Req, Reply any] string

// Call asks the daemon behind conn. It blocks until the answer is there or ctx
// ends. The error has a gRPC code (ErrInvalid for a request that has no JSON
// form or a reply of another shape).
func (m Method[Req, Reply]) Call(ctx context.Context, conn grpc.ClientConnInterface, req Req) (*Reply, error) {
	in, err := encode(req)
	if err != nil {
		return nil, err
	}
	out, reply := new(structpb.Struct), new(Reply)
	if err := conn.Invoke(ctx, path(string(m)), in, out); err != nil {
		return nil, err
	}
	return reply, decode(out, reply, false)
}

// Call asks the daemon behind conn and gives its answers one after another; an
// error is the last of them. Leaving the loop ends the call.
func (s Stream[Req, Reply]) Call(ctx context.Context, conn grpc.ClientConnInterface, req Req) iter.Seq2[*Reply, error] {
	return func(yield func(*Reply, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		in, err := encode(req)
		if err != nil {
			yield(nil, err)
			return
		}
		stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, path(string(s)))
		if err != nil {
			yield(nil, err)
			return
		}
		answers := grpc.GenericClientStream[structpb.Struct, structpb.Struct]{ClientStream: stream}
		if err = stream.SendMsg(in); err == nil {
			err = stream.CloseSend()
		}
		for err == nil {
			var out *structpb.Struct
			reply := new(Reply)
			if out, err = answers.Recv(); err == nil {
				err = decode(out, reply, false)
			}
			if err == nil && !yield(reply, nil) {
				return
			}
		}
		if !errors.Is(err, io.EOF) {
			yield(nil, err)
		}
	}
}

func path(method string) string { return "/" + serviceName + "/" + method }

// Verb is a method with what answers it.
type Verb struct {
	unary  *grpc.MethodDesc
	stream *grpc.StreamDesc
}

// Serve has f of a service S answer m.
func Serve[S, Req, Reply any](m Method[Req, Reply], f func(S, context.Context, *Req) (*Reply, error)) Verb {
	handler := func(srv any, ctx context.Context, receive func(any) error, through grpc.UnaryServerInterceptor) (any, error) {
		in := new(structpb.Struct)
		if err := receive(in); err != nil {
			return nil, err
		}
		call := func(ctx context.Context, in any) (any, error) {
			req := new(Req)
			if err := decode(in.(*structpb.Struct), req, true); err != nil {
				return nil, err
			}
			reply, err := f(srv.(S), ctx, req)
			if err != nil {
				return nil, err
			}
			return encode(reply)
		}
		return through(ctx, in, &grpc.UnaryServerInfo{Server: srv, FullMethod: path(string(m))}, call)
	}
	return Verb{unary: &grpc.MethodDesc{MethodName: string(m), Handler: handler}}
}

// ServeStream has f of a service S answer s: f calls send for each answer and
// returns when the stream shall end, at the latest when ctx does.
func ServeStream[S, Req, Reply any](s Stream[Req, Reply], f func(srv S, ctx context.Context, req *Req, send func(*Reply) error) error) Verb {
	handler := func(srv any, stream grpc.ServerStream) error {
		in, req := new(structpb.Struct), new(Req)
		if err := stream.RecvMsg(in); err != nil {
			return err
		}
		if err := decode(in, req, true); err != nil {
			return err
		}
		return f(srv.(S), stream.Context(), req, func(reply *Reply) error {
			out, err := encode(reply)
			if err != nil {
				return err
			}
			return stream.SendMsg(out)
		})
	}
	return Verb{stream: &grpc.StreamDesc{StreamName: string(s), Handler: handler, ServerStreams: true}}
}

// Service describes the gRPC service of these verbs. The server must have a
// unary interceptor.
func Service(verbs ...Verb) *grpc.ServiceDesc {
	d := &grpc.ServiceDesc{ServiceName: serviceName, HandlerType: (*any)(nil)}
	for _, v := range verbs {
		if v.unary != nil {
			d.Methods = append(d.Methods, *v.unary)
		} else {
			d.Streams = append(d.Streams, *v.stream)
		}
	}
	return d
}
