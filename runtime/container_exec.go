package runtime

import (
	"context"
	"errors"
	"fmt"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/oci/spec"
	"berth/runtime/operation"
)

// execOutput is how much of each stream ExecSync keeps; the rest is dropped, as
// CRI says. execReply bounds both together: the kubelet and crictl take no
// message of more than 16 MiB, its framing included.
const (
	execOutput = 16 << 20
	execReply  = 16<<20 - 4<<10
)

// ExecSync runs a command in a container to its end. When timeout seconds
// (0: none) have passed, every process of the command is killed and the error
// is DeadlineExceeded. It also ends when its main process has ended while a
// child still holds the output.
func (s *Service) ExecSync(ctx context.Context, req *cri.ExecSyncRequest) (*cri.ExecSyncResponse, error) {
	if err := checkCommand(req.GetCmd()); err != nil {
		return nil, err
	}
	if req.GetTimeout() < 0 {
		return nil, fmt.Errorf("%w: timeout %d is negative", errInvalid, req.GetTimeout())
	}
	c, err := s.runningContainer(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	rt, err := s.runtimeOf(c)
	if err != nil {
		return nil, err
	}
	base, err := oci.ReadProcess(s.bundleDir(c.ID))
	if err != nil {
		return nil, err
	}
	operation.From(ctx).Step("run the command")
	r, err := rt.Exec(ctx, c.ID, oci.ExecRequest{
		Process: spec.ExecProcess(base, req.GetCmd()),
		Timeout: time.Duration(req.GetTimeout()) * time.Second,
		Limit:   execOutput,
		Root:    s.rootOf(c),
	})
	if err != nil {
		if errors.Is(err, oci.ErrExecTimeout) {
			return nil, fmt.Errorf("command %q in container %s timed out after %d s: %w", req.GetCmd(), c.ID, req.GetTimeout(), err)
		}
		return nil, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	stdout, stderr := fitReply(r.Stdout, r.Stderr, execReply)
	return &cri.ExecSyncResponse{Stdout: stdout, Stderr: stderr, ExitCode: r.ExitCode}, nil
}

// fitReply cuts two streams so that together they are at most room bytes. The
// shorter one stays whole when it takes no more than half of it.
func fitReply(stdout, stderr []byte, room int) ([]byte, []byte) {
	if len(stdout)+len(stderr) <= room {
		return stdout, stderr
	}
	stdout = stdout[:min(len(stdout), room-min(len(stderr), room/2))]
	return stdout, stderr[:min(len(stderr), room-len(stdout))]
}
