package runtime

import (
	"context"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
)

// panicking is an OCI runtime with a fault of berth's in each call that is on.
type panicking struct {
	oci.Runtime
	on map[string]bool
}

func (p *panicking) may(call string) {
	if p.on[call] {
		panic("fault in " + call)
	}
}

func (p *panicking) Create(ctx context.Context, r oci.CreateRequest) (oci.Process, error) {
	p.may("create")
	return p.Runtime.Create(ctx, r)
}

func (p *panicking) Start(ctx context.Context, id string) error {
	p.may("start")
	return p.Runtime.Start(ctx, id)
}

func (p *panicking) KillAll(ctx context.Context, id string) error {
	p.may("kill")
	return p.Runtime.KillAll(ctx, id)
}

// A panic in an operation is an Internal error of that call alone: the same
// object can be made, started, stopped and removed afterwards.
func TestPanicWedgesNothing(t *testing.T) {
	n := newNode(t)
	p := &panicking{Runtime: n.Handlers["runc"], on: map[string]bool{}}
	n.Handlers["runc"] = p
	faulty := func(call string, f func() error) {
		t.Helper()
		p.on[call] = true
		n.refused(call, f(), codes.Internal, "fault in "+call)
		p.on[call] = false
	}
	request := sharedPIDs(n.bridgePod("web"))
	faulty("create", func() error { _, err := n.RunPodSandbox(t.Context(), request); return err })
	pod := n.runPod(request)
	create := n.container(pod, "c", forever)
	faulty("create", func() error { _, err := n.CreateContainer(t.Context(), create); return err })
	id := n.create(create)
	faulty("start", func() error {
		_, err := n.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: id})
		return err
	})
	n.start(id)
	faulty("kill", func() error {
		_, err := n.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: pod})
		return err
	})
	must(t, n.stopPod(pod))
	n.removePod(pod)
	n.empty("removal")
}
