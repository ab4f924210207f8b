package runtime

import (
	"context"
	"errors"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"berth/image"
	"berth/image/rootfs"
	"berth/network"
	"berth/network/hostport"
	"berth/oci"
	"berth/oci/checkpoint"
	"berth/oci/spec"
	"berth/runtime/admin"
	"berth/runtime/nri"
	"berth/runtime/operation"
	"berth/runtime/streaming"
	"berth/sandbox"
	"berth/sandbox/namespaces"
)

// Sentinels of the flows themselves.
var (
	errInvalid      = spec.ErrInvalid // one sentinel for what a request does wrong
	errPrecondition = errors.New("failed precondition")
)

// codeOf is the one table from berth's errors to gRPC codes. The first row
// that fits counts. Codes the kubelet relies on: NotFound, DeadlineExceeded,
// and Unknown for registry errors that begin with their reason.
var codeOf = []struct {
	err  error
	code codes.Code
}{
	{operation.ErrPanic, codes.Internal},      // ours alone, whatever it was about
	{operation.ErrClosing, codes.Unavailable}, // and not what breaking it off made of it
	{image.ErrRegistryUnavailable, codes.Unknown},
	{image.ErrSignature, codes.Unknown},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{context.Canceled, codes.Canceled},
	{oci.ErrExecTimeout, codes.DeadlineExceeded},
	{image.ErrNoSpace, codes.ResourceExhausted},
	{streaming.ErrTooMany, codes.ResourceExhausted},
	{streaming.ErrClosed, codes.Unavailable},
	{syscall.ENOSPC, codes.ResourceExhausted},
	{syscall.EDQUOT, codes.ResourceExhausted},
	{syscall.EROFS, codes.FailedPrecondition}, // of the node; a disk with errors is made so by the kernel
	// Paths of requests that lead to something else than they should.
	{syscall.ENAMETOOLONG, codes.InvalidArgument},
	{syscall.ELOOP, codes.InvalidArgument},
	{syscall.EISDIR, codes.InvalidArgument},
	{syscall.ENOTDIR, codes.InvalidArgument},
	{syscall.ENXIO, codes.InvalidArgument},
	{nri.ErrRefused, codes.FailedPrecondition}, // whatever a plugin asked for, the request was right
	{errInvalid, codes.InvalidArgument},
	{admin.ErrInvalid, codes.InvalidArgument},
	{spec.ErrUnsupported, codes.Unimplemented},
	{oci.ErrUnsupported, codes.Unimplemented},
	{oci.ErrLimit, codes.InvalidArgument},
	{oci.ErrProgram, codes.InvalidArgument}, // of a container and of an exec; the kubelet takes any code for a failed probe
	{oci.ErrRefused, codes.FailedPrecondition},
	{oci.ErrNoCheckpoint, codes.Unimplemented},
	{checkpoint.ErrExists, codes.AlreadyExists},
	{checkpoint.ErrInvalid, codes.InvalidArgument},
	{namespaces.ErrInvalid, codes.InvalidArgument},
	{network.ErrInvalid, codes.InvalidArgument},
	{image.ErrInvalidReference, codes.InvalidArgument},
	{sandbox.ErrAmbiguous, codes.InvalidArgument},
	{sandbox.ErrNotFound, codes.NotFound},
	{image.ErrNotFound, codes.NotFound},
	{oci.ErrNotFound, codes.NotFound},
	{errPrecondition, codes.FailedPrecondition},
	{oci.ErrNotRunning, codes.FailedPrecondition},
	{sandbox.ErrNameInUse, codes.AlreadyExists},
	{oci.ErrExists, codes.AlreadyExists},
	{image.ErrFileExists, codes.AlreadyExists},
	{image.ErrPinnedByConfig, codes.FailedPrecondition},
	{image.ErrUnauthorized, codes.Unauthenticated},
	{image.ErrInvalidImage, codes.InvalidArgument},
	{image.ErrRegistryConfig, codes.FailedPrecondition},
	{network.ErrNotReady, codes.Unavailable},
	{network.ErrTemplate, codes.FailedPrecondition},
	{hostport.ErrInvalid, codes.InvalidArgument},
	{hostport.ErrTaken, codes.FailedPrecondition},
	{hostport.ErrNoAddress, codes.FailedPrecondition},
	{hostport.ErrUnavailable, codes.FailedPrecondition},
	{oci.ErrMonitorUnavailable, codes.Unavailable},
	{errClosing, codes.Unavailable},
	{errStarting, codes.Unavailable},
	{rootfs.ErrTooManyLayers, codes.InvalidArgument},
}

// statusOf turns an error into one with a gRPC code; nil stays nil, and an
// error that has a code keeps it.
func statusOf(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	for _, row := range codeOf {
		if errors.Is(err, row.err) {
			return status.Error(row.code, readable(err.Error()))
		}
	}
	return status.Error(codes.Unknown, readable(err.Error()))
}
