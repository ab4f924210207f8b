package runtime

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// podResources reads what verbose PodSandboxStatus tells of a pod as a whole.
func (n *node) podResources(id string) (overhead, resources string) {
	n.t.Helper()
	res, err := n.PodSandboxStatus(n.t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	must(n.t, err)
	var info struct{ Overhead, Resources json.RawMessage }
	must(n.t, json.Unmarshal([]byte(res.GetInfo()["info"]), &info))
	return strings.ReplaceAll(string(info.Overhead), " ", ""), strings.ReplaceAll(string(info.Resources), " ", "")
}

func TestUpdatePodSandboxResources(t *testing.T) {
	n := newNode(t)
	request := n.hostPod("web")
	request.Config.Linux.Overhead = &cri.LinuxContainerResources{CpuShares: 10}
	id := n.runPod(request)
	update := func(id string, overhead, resources *cri.LinuxContainerResources) error {
		_, err := n.UpdatePodSandboxResources(t.Context(), &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: id, Overhead: overhead, Resources: resources})
		return err
	}
	shows := func(when, wantOverhead, wantResources string) {
		t.Helper()
		if o, r := n.podResources(id); o != wantOverhead || r != wantResources {
			t.Errorf("%s: overhead %s, resources %s; want %s and %s", when, o, r, wantOverhead, wantResources)
		}
	}
	shows("as run", `{"cpuShares":"10"}`, "")
	must(t, update(id, nil, &cri.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 1 << 20}))
	shows("resources", `{"cpuShares":"10"}`, `{"cpuShares":"512","memoryLimitInBytes":"1048576"}`)
	must(t, update(id[:12], &cri.LinuxContainerResources{CpuShares: 20}, nil))
	shows("overhead", `{"cpuShares":"20"}`, `{"cpuShares":"512","memoryLimitInBytes":"1048576"}`)
	must(t, update(id, nil, nil))
	n.restart(nil)
	shows("a restart", `{"cpuShares":"20"}`, `{"cpuShares":"512","memoryLimitInBytes":"1048576"}`)

	n.refused("an unknown pod", update("nosuch", nil, nil), codes.NotFound, "nosuch")
	must(t, n.stopPod(id))
	n.refused("a stopped pod", update(id, nil, nil), codes.FailedPrecondition, id, "not ready")
	n.removePod(id)
	n.refused("a removed pod", update(id, nil, nil), codes.NotFound, id)
	n.empty("removal")
}

// The template's network is there once the kubelet has told the pod CIDR.
func TestUpdateRuntimeConfig(t *testing.T) {
	n := newNode(t)
	tell := func(cidr string) error {
		_, err := n.UpdateRuntimeConfig(t.Context(), &cri.UpdateRuntimeConfigRequest{RuntimeConfig: &cri.RuntimeConfig{NetworkConfig: &cri.NetworkConfig{PodCidr: cidr}}})
		return err
	}
	own := n.dir + "/net.d/10-bt.conflist"
	text, err := os.ReadFile(own)
	must(t, err)
	must(t, tell("10.88.10.0/24")) // no template
	n.cfg.CNI.ConfTemplate = n.dir + "/template"
	must(t, os.WriteFile(n.cfg.CNI.ConfTemplate, []byte(strings.Replace(string(text), "10.88.9.0/28", "{{.PodCIDR}}", 1)), 0o600))
	n.restart(nil)
	must(t, tell("10.88.10.0/24")) // there is another network
	must(t, tell(""))
	if _, err := n.UpdateRuntimeConfig(t.Context(), &cri.UpdateRuntimeConfigRequest{}); err != nil {
		t.Errorf("an empty request: %v", err)
	}
	n.refused("no CIDR", tell("pods"), codes.InvalidArgument, "runtime_config.network_config", `pod_cidr "pods"`)
	must(t, os.Remove(own))
	_, err = n.RunPodSandbox(t.Context(), n.bridgePod("early"))
	n.refused("no network", err, codes.Unavailable)
	must(t, tell("10.88.10.0/24"))
	id := n.runPod(n.bridgePod("web"))
	res, err := n.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: id})
	must(t, err)
	if ip := res.GetStatus().GetNetwork().GetIp(); !strings.HasPrefix(ip, "10.88.10.") {
		t.Errorf("the pod has %s", ip)
	}
	must(t, os.WriteFile(n.cfg.CNI.ConfTemplate, []byte("{{"), 0o600))
	n.refused("a broken template", tell("10.88.11.0/24"), codes.FailedPrecondition, n.cfg.CNI.ConfTemplate)
	n.removePod(id)
	n.empty("removal")
}

// GC is run at start where the operator wants it, before a pod can be made.
func TestGCAtStart(t *testing.T) {
	n := newNode(t)
	conf := n.dir + "/net.d/10-bt.conflist"
	text, err := os.ReadFile(conf)
	must(t, err)
	must(t, os.WriteFile(conf, []byte(strings.Replace(string(text), "1.0.0", "1.1.0", 1)), 0o600))
	n.restart(nil)
	if n.calls("GC") != 0 {
		t.Error("GC ran although nobody asked for it")
	}
	n.cfg.CNI.GCAtStart = true
	id := n.runPod(n.bridgePod("web"))
	n.restart(nil)
	if n.calls("GC") != 1 || len(n.leased()) != 1 {
		t.Errorf("GC ran %d times, leases %q", n.calls("GC"), n.leased())
	}
	mend := n.tell("fail-GC")
	n.restart(nil) // a plugin that fails does not keep the daemon from starting
	mend()
	n.removePod(id)
	n.empty("removal")
}
