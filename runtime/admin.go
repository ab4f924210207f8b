package runtime

import (
	"context"
	"fmt"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// The operator's own calls travel over the CRI socket beside CRI's services,
// with protobuf's well-known types as messages, so that no second socket and
// no generated code is needed. Whoever may use the socket may use them.
const (
	adminService      = "berth.v1.Admin"
	methodImportImage = "/" + adminService + "/ImportImage"
)

type adminServer interface {
	importImage(ctx context.Context, path *wrapperspb.StringValue) (*structpb.ListValue, error)
}

var adminDesc = grpc.ServiceDesc{
	ServiceName: adminService,
	HandlerType: (*adminServer)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "ImportImage", Handler: func(srv any, ctx context.Context, decode func(any) error, through grpc.UnaryServerInterceptor) (any, error) {
		path := new(wrapperspb.StringValue)
		if err := decode(path); err != nil {
			return nil, err
		}
		call := func(ctx context.Context, req any) (any, error) {
			return srv.(adminServer).importImage(ctx, req.(*wrapperspb.StringValue))
		}
		return through(ctx, path, &grpc.UnaryServerInfo{Server: srv, FullMethod: methodImportImage}, call)
	}}},
}

// importImage reads a docker or OCI archive that lies on the node and returns
// the names it brought.
func (s *Service) importImage(ctx context.Context, path *wrapperspb.StringValue) (*structpb.ListValue, error) {
	if !filepath.IsAbs(path.GetValue()) {
		return nil, fmt.Errorf("%w: path %q is not absolute", errInvalid, path.GetValue())
	}
	names, err := s.Images.Import(ctx, path.GetValue())
	if err != nil {
		return nil, fmt.Errorf("import %s: %w", path.GetValue(), err)
	}
	out := &structpb.ListValue{}
	for _, n := range names {
		out.Values = append(out.Values, structpb.NewStringValue(n))
	}
	return out, nil
}

// ImportImage asks the daemon behind conn to import an archive by its absolute
// path and returns the names or ids it brought.
func ImportImage(ctx context.Context, conn *grpc.ClientConn, path string) ([]string, error) {
	reply := new(structpb.ListValue)
	if err := conn.Invoke(ctx, methodImportImage, wrapperspb.String(path), reply); err != nil {
		return nil, err
	}
	var names []string
	for _, v := range reply.GetValues() {
		names = append(names, v.GetStringValue())
	}
	return names, nil
}
