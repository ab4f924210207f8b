package admin

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/structpb"
)

// serviceName is the gRPC service.
const serviceName = "berth.v1.Admin"

// Method is a call with one answer, by its name. Req and Reply are structs with
// a JSON form.
type Method[Req, Reply any] string

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

func path(method string) string { return "/" + serviceName + "/" + method }

// Verb is a method with what answers it.
type Verb grpc.MethodDesc

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
	return Verb{MethodName: string(m), Handler: handler}
}

// Service describes the gRPC service of these verbs. The server must have a
// unary interceptor.
func Service(verbs ...Verb) *grpc.ServiceDesc {
	d := &grpc.ServiceDesc{ServiceName: serviceName, HandlerType: (*any)(nil)}
	for _, v := range verbs {
		d.Methods = append(d.Methods, grpc.MethodDesc(v))
	}
	return d
}
