package cases

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	internalapi "k8s.io/cri-api/pkg/apis"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	client "k8s.io/cri-client/pkg"
	"k8s.io/klog/v2"

	"berth/critest/images"
	"berth/critest/node"
)

// kubelet is the kubelet's own client, with its checks of what comes back.
type kubelet struct {
	*env
	rt     internalapi.RuntimeService
	im     internalapi.ImageManagerService
	called map[string]bool // names of the RPCs
}

// connect opens the kubelet's client; streams makes it prefer streaming lists.
func connect(e *env, streams bool) *kubelet {
	e.Helper()
	k := &kubelet{env: e, called: map[string]bool{}}
	endpoint := "unix://" + e.Socket
	klog.SetLogger(logr.Discard()) // the client logs each refusal, at length
	var err error
	if k.rt, err = client.NewRemoteRuntimeService(e.ctx, endpoint, 20*time.Second, noop.NewTracerProvider(), streams); err != nil {
		e.Fatal(err)
	}
	if k.im, err = client.NewRemoteImageService(e.ctx, endpoint, 20*time.Second, noop.NewTracerProvider(), streams); err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { _ = k.rt.Close(context.Background()); _ = k.im.Close(context.Background()) })
	return k
}

// ok notes a call, which must have succeeded with something in its reply.
func (k *kubelet) ok(rpc string, err error, holds bool) {
	k.Helper()
	k.called[rpc] = true
	if err != nil || !holds {
		k.Errorf("%s: %v, or its reply lacks what the kubelet needs", rpc, err)
	}
}

// code notes a call, which must have been refused.
func (k *kubelet) code(rpc string, err error, code codes.Code) {
	k.Helper()
	k.called[rpc] = true
	if status.Code(err) != code {
		k.Errorf("%s: %v, want code %s", rpc, err, code)
	}
}

// TestKubeletsClient has the kubelet's client call every RPC there is, once with
// plain lists and once with streaming ones.
func TestKubeletsClient(t *testing.T) {
	for _, streams := range []bool{false, true} {
		t.Run(fmt.Sprintf("streaming=%v", streams), func(t *testing.T) {
			k := connect(start(t, node.Options{}), streams)
			k.node()
			k.images()
			k.life()
			k.strangers()
			for _, service := range []string{"runtime.v1.RuntimeService", "runtime.v1.ImageService"} {
				for _, rpc := range rpcs(service) {
					list := strings.HasPrefix(rpc, "Stream") || slices.Contains([]string{"ListPodSandbox", "ListContainers", "ListContainerStats", "ListPodSandboxStats", "ListPodSandboxMetrics", "ListImages"}, rpc)
					if !list && !k.called[rpc] {
						t.Errorf("%s was never called", rpc)
					}
				}
			}
		})
	}
}

// rpcs are the names of a service's methods.
func rpcs(service string) []string {
	desc := cri.RuntimeService_ServiceDesc
	if service == "runtime.v1.ImageService" {
		desc = cri.ImageService_ServiceDesc
	}
	var names []string
	for _, m := range desc.Methods {
		names = append(names, m.MethodName)
	}
	for _, s := range desc.Streams {
		names = append(names, s.StreamName)
	}
	return names
}

// node is what a kubelet asks when it starts.
func (k *kubelet) node() {
	version, err := k.rt.Version(k.ctx, "0.1.0")
	k.ok("Version", err, version.GetRuntimeName() == "berth" && version.GetRuntimeApiVersion() == "v1")
	state, err := k.rt.Status(k.ctx, true)
	k.ok("Status", err, len(state.GetStatus().GetConditions()) >= 2 && state.GetFeatures().GetSupplementalGroupsPolicy() && len(state.GetInfo()) > 0)
	config, err := k.rt.RuntimeConfig(k.ctx)
	k.ok("RuntimeConfig", err, config.GetLinux() != nil)
	err = k.rt.UpdateRuntimeConfig(k.ctx, &cri.RuntimeConfig{NetworkConfig: &cri.NetworkConfig{PodCidr: "10.88.200.0/24"}})
	k.ok("UpdateRuntimeConfig", err, true)
	_, err = k.rt.PodSandboxStats(k.ctx, "")
	k.code("PodSandboxStats", err, codes.NotFound)
	metrics, err := k.rt.ListMetricDescriptors(k.ctx)
	k.ok("ListMetricDescriptors", err, len(metrics) >= 50)
}

// images is what the image manager asks.
func (k *kubelet) images() {
	ref := &cri.ImageSpec{Image: images.Pause}
	none, err := k.im.ImageStatus(k.ctx, ref, false)
	k.ok("ImageStatus", err, none.GetImage() == nil)
	_, err = k.im.PullImage(k.ctx, &cri.ImageSpec{Image: images.Pause, RuntimeHandler: "nope"}, nil, nil)
	k.code("PullImage", err, codes.InvalidArgument)
	id, err := k.im.PullImage(k.ctx, ref, &cri.AuthConfig{}, nil)
	k.ok("PullImage", err, strings.HasPrefix(id, "sha256:"))
	have, err := k.im.ImageStatus(k.ctx, ref, true)
	k.ok("ImageStatus", err, have.GetImage().GetId() == id && have.GetImage().GetSize() > 0 && len(have.GetInfo()) > 0)
	list, err := k.im.ListImages(k.ctx, nil)
	k.ok("ListImages", err, len(list) == 1 && list[0].GetId() == id)
	fs, err := k.im.ImageFsInfo(k.ctx)
	k.ok("ImageFsInfo", err, len(fs.GetImageFilesystems()) > 0 && fs.GetImageFilesystems()[0].GetUsedBytes().GetValue() > 0)
	k.ok("RemoveImage", k.im.RemoveImage(k.ctx, ref), true)
	k.ok("RemoveImage", k.im.RemoveImage(k.ctx, ref), true)
}

// life is a pod from its birth to its end, asked about at each step.
func (k *kubelet) life() {
	if _, err := k.im.PullImage(k.ctx, &cri.ImageSpec{Image: images.Busybox}, nil, nil); err != nil {
		k.Fatal(err)
	}
	events := make(chan *cri.ContainerEventResponse, 64)
	watching, stop := context.WithCancel(k.ctx)
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- k.rt.GetContainerEvents(watching, events, func(cri.RuntimeService_GetContainerEventsClient) { close(ready) })
	}()
	<-ready
	config := k.sandbox()
	pod, err := k.rt.RunPodSandbox(k.ctx, config, "")
	k.ok("RunPodSandbox", err, pod != "")
	container := command("main", "echo hello; sleep 1000")
	container.Stdin = true
	id, err := k.rt.CreateContainer(k.ctx, pod, container, config)
	k.ok("CreateContainer", err, id != "")
	k.ok("StartContainer", k.rt.StartContainer(k.ctx, id), true)
	k.asked(pod, id)
	k.used(pod, id)
	k.ok("StopContainer", k.rt.StopContainer(k.ctx, id, 0), true)
	k.ok("RemoveContainer", k.rt.RemoveContainer(k.ctx, id), true)
	k.ok("StopPodSandbox", k.rt.StopPodSandbox(k.ctx, pod), true)
	k.ok("RemovePodSandbox", k.rt.RemovePodSandbox(k.ctx, pod), true)
	var kinds []cri.ContainerEventType
	k.eventually("the container's four events", func() bool {
		for {
			select {
			case e := <-events:
				if e.GetContainerId() == id {
					kinds = append(kinds, e.GetContainerEventType())
				}
			default:
				return len(kinds) == 4
			}
		}
	})
	want := []cri.ContainerEventType{0, 1, 2, 3}
	stop()
	<-ended
	k.ok("GetContainerEvents", nil, slices.Equal(kinds, want))
}

// asked is what the kubelet reads of a pod that runs.
func (k *kubelet) asked(pod, id string) {
	pods, err := k.rt.ListPodSandbox(k.ctx, &cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{}})
	k.ok("ListPodSandbox", err, len(pods) == 1 && pods[0].GetId() == pod)
	sandbox, err := k.rt.PodSandboxStatus(k.ctx, pod, true)
	k.ok("PodSandboxStatus", err, sandbox.GetStatus().GetNetwork().GetIp() != "")
	containers, err := k.rt.ListContainers(k.ctx, &cri.ContainerFilter{PodSandboxId: pod})
	k.ok("ListContainers", err, len(containers) == 1 && containers[0].GetId() == id)
	state, err := k.rt.ContainerStatus(k.ctx, id, true)
	k.ok("ContainerStatus", err, state.GetStatus().GetState() == cri.ContainerState_CONTAINER_RUNNING && state.GetStatus().GetImageId() == containers[0].GetImageId())
	one, err := k.rt.ContainerStats(k.ctx, id)
	k.ok("ContainerStats", err, one.GetMemory().GetWorkingSetBytes() != nil && one.GetWritableLayer().GetFsId().GetMountpoint() != "")
	all, err := k.rt.ListContainerStats(k.ctx, nil)
	k.ok("ListContainerStats", err, len(all) == 1)
	stats, err := k.rt.PodSandboxStats(k.ctx, pod)
	k.ok("PodSandboxStats", err, stats.GetLinux().GetNetwork().GetDefaultInterface().GetName() == "eth0")
	podStats, err := k.rt.ListPodSandboxStats(k.ctx, nil)
	k.ok("ListPodSandboxStats", err, len(podStats) == 1 && len(podStats[0].GetLinux().GetContainers()) == 1)
	metrics, err := k.rt.ListPodSandboxMetrics(k.ctx)
	k.ok("ListPodSandboxMetrics", err, len(metrics) == 1 && len(metrics[0].GetContainerMetrics()) == 1)
}

// used is what the kubelet does to a pod that runs.
func (k *kubelet) used(pod, id string) {
	stdout, _, err := k.rt.ExecSync(k.ctx, id, []string{"echo", "-n", "hi"}, 10*time.Second)
	k.ok("ExecSync", err, bytes.Equal(stdout, []byte("hi")))
	_, _, err = k.rt.ExecSync(k.ctx, id, []string{"sleep", "60"}, time.Second)
	k.ok("ExecSync", nil, err != nil && strings.Contains(err.Error(), "timed out")) // the client's own words for DeadlineExceeded
	exec, err := k.rt.Exec(k.ctx, &cri.ExecRequest{ContainerId: id, Cmd: []string{"true"}, Stdout: true})
	k.ok("Exec", err, strings.HasPrefix(exec.GetUrl(), "http://127.0.0.1:"))
	attach, err := k.rt.Attach(k.ctx, &cri.AttachRequest{ContainerId: id, Stdout: true})
	k.ok("Attach", err, attach.GetUrl() != "")
	forward, err := k.rt.PortForward(k.ctx, &cri.PortForwardRequest{PodSandboxId: pod, Port: []int32{80}})
	k.ok("PortForward", err, forward.GetUrl() != "")
	err = k.rt.UpdateContainerResources(k.ctx, id, &cri.ContainerResources{Linux: &cri.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 64 << 20}})
	k.ok("UpdateContainerResources", err, true)
	_, err = k.rt.UpdatePodSandboxResources(k.ctx, &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: pod, Resources: &cri.LinuxContainerResources{CpuShares: 512}})
	k.ok("UpdatePodSandboxResources", err, true)
	k.ok("ReopenContainerLog", k.rt.ReopenContainerLog(k.ctx, id), true)
	limited, cancel := context.WithTimeout(k.ctx, time.Minute)
	defer cancel()
	if k.checkpoints() != "" { // what follows where they are possible is tested in the guest
		k.code("CheckpointContainer", k.rt.CheckpointContainer(limited, &cri.CheckpointContainerRequest{ContainerId: id, Location: k.Dir + "/checkpoint.tar"}), codes.Unimplemented)
	}
	k.code("CheckpointContainer", k.rt.CheckpointContainer(limited, &cri.CheckpointContainerRequest{ContainerId: "nope", Location: k.Dir + "/checkpoint.tar"}), codes.NotFound)
	k.code("CheckpointPod", k.rt.CheckpointPod(limited, &cri.CheckpointPodRequest{PodSandboxId: pod, OutputPath: "relative", ContainerIds: []string{id}}), codes.InvalidArgument)
	_, err = k.rt.RestorePod(limited, &cri.RestorePodRequest{CheckpointPath: k.Dir, Config: k.sandbox(), ContainerConfigs: []*cri.ContainerConfig{command("main", "true")}})
	k.code("RestorePod", err, codes.InvalidArgument)
}

// strangers are ids that the kubelet remembers and berth does not.
func (k *kubelet) strangers() {
	const gone = "0123456789abcdef"
	_, err := k.rt.PodSandboxStatus(k.ctx, gone, false)
	k.code("PodSandboxStatus", err, codes.NotFound)
	_, err = k.rt.ContainerStatus(k.ctx, gone, false)
	k.code("ContainerStatus", err, codes.NotFound)
	_, err = k.rt.ContainerStats(k.ctx, gone)
	k.code("ContainerStats", err, codes.NotFound)
	k.ok("StopContainer", k.rt.StopContainer(k.ctx, gone, 0), true)
	k.ok("RemoveContainer", k.rt.RemoveContainer(k.ctx, gone), true)
	k.ok("StopPodSandbox", k.rt.StopPodSandbox(k.ctx, gone), true)
	k.ok("RemovePodSandbox", k.rt.RemovePodSandbox(k.ctx, gone), true)
	k.code("StartContainer", k.rt.StartContainer(k.ctx, gone), codes.NotFound)
	k.code("ReopenContainerLog", k.rt.ReopenContainerLog(k.ctx, gone), codes.NotFound)
	_, _, err = k.rt.ExecSync(k.ctx, gone, []string{"true"}, 0)
	k.code("ExecSync", err, codes.NotFound)
	_, err = k.rt.Exec(k.ctx, &cri.ExecRequest{ContainerId: gone, Cmd: []string{"true"}, Stdout: true})
	k.code("Exec", err, codes.NotFound)
	_, err = k.rt.PortForward(k.ctx, &cri.PortForwardRequest{PodSandboxId: gone, Port: []int32{80}})
	k.code("PortForward", err, codes.NotFound)
}
