package cases

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/node"
)

// leases lists the addresses that host-local has given away.
func (e *env) leases() []string {
	e.Helper()
	var found []string
	files, err := filepath.Glob(filepath.Join(e.Leases, "*", "*"))
	if err != nil {
		e.Fatal(err)
	}
	for _, f := range files {
		if net.ParseIP(filepath.Base(f)) != nil {
			found = append(found, filepath.Base(f))
		}
	}
	return found
}

// ips are a pod's addresses, the first one first.
func (e *env) ips(pod string) []string {
	e.Helper()
	res, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod})
	if err != nil {
		e.Fatalf("status of pod %s: %v", pod, err)
	}
	ips := []string{res.GetStatus().GetNetwork().GetIp()}
	for _, a := range res.GetStatus().GetNetwork().GetAdditionalIps() {
		ips = append(ips, a.GetIp())
	}
	return ips
}

// B49: after a reboot, when the namespaces are gone, addresses are given back
// all the same; a range of 13 addresses never runs out.
func TestB49AddressesComeBackAfterAReboot(t *testing.T) {
	e := start(t, node.Options{})
	small := strings.Replace(e.Conflist(), e.Subnet, strings.Replace(e.Subnet, ".0/24", ".0/28", 1), 1)
	if err := os.WriteFile(filepath.Join(e.ConfDir, "10-bridge.conflist"), []byte(small), 0o600); err != nil {
		t.Fatal(err)
	}
	time.Sleep(1200 * time.Millisecond) // the daemon follows the directory
	for round := range 4 {
		for range 5 {
			e.run(e.sandbox())
		}
		if got := len(e.leases()); got != 5 {
			t.Fatalf("round %d: %d leases for 5 pods", round, got)
		}
		if err := e.LoseState(); err != nil {
			t.Fatal(err)
		}
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
		pods, err := e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if len(pods.GetItems()) != 5 {
			t.Errorf("round %d: %d pods after the reboot, want 5 to clean up", round, len(pods.GetItems()))
		}
		for _, p := range pods.GetItems() {
			if p.GetState() != cri.PodSandboxState_SANDBOX_NOTREADY {
				t.Errorf("round %d: pod %s is %s after a reboot", round, p.GetMetadata().GetName(), p.GetState())
			}
			e.removePod(p.GetId())
		}
		if left := e.leases(); len(left) != 0 {
			t.Fatalf("round %d: leases %v are left", round, left)
		}
	}
}

// network reads the NetworkReady condition.
func (e *env) network() *cri.RuntimeCondition {
	e.Helper()
	res, err := e.rt.Status(e.ctx, &cri.StatusRequest{})
	if err != nil {
		e.Fatalf("status: %v", err)
	}
	for _, c := range res.GetStatus().GetConditions() {
		if c.GetType() == cri.NetworkReady {
			return c
		}
	}
	e.Fatal("Status has no NetworkReady")
	return nil
}

// networkWithin waits at most 5 s until NetworkReady is what it should be.
func (e *env) networkWithin(want bool, when string) {
	e.Helper()
	end := time.Now().Add(5 * time.Second)
	for e.network().GetStatus() != want {
		if time.Now().After(end) {
			e.Errorf("%s: NetworkReady is %v 5 s later: %s", when, !want, e.network().GetMessage())
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	if c := e.network(); !want && (c.GetReason() == "" || c.GetMessage() == "") {
		e.Errorf("%s: NetworkReady is false without reason and message: %v", when, c)
	}
}

// B53: NetworkReady follows the directory, also when it is removed and made
// again, is a link that moves, or appears only after the daemon.
func TestB53NetworkReadyFollowsTheDirectory(t *testing.T) {
	write := func(t *testing.T, e *env, dir string) {
		t.Helper()
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "10-bridge.conflist"), []byte(e.Conflist()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("removed and made again", func(t *testing.T) {
		e := start(t, node.Options{})
		for range 2 {
			if err := os.RemoveAll(e.ConfDir); err != nil {
				t.Fatal(err)
			}
			e.networkWithin(false, "directory removed")
			write(t, e, e.ConfDir)
			e.networkWithin(true, "directory made again")
		}
		e.run(e.sandbox())
	})
	t.Run("missing at start", func(t *testing.T) {
		e := start(t, node.Options{NoCNI: true})
		e.networkWithin(false, "no directory")
		if _, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: e.sandbox()}); err == nil || !strings.Contains(err.Error(), e.ConfDir) {
			t.Errorf("a pod without a network configuration: %v; want an error that names %s", err, e.ConfDir)
		}
		write(t, e, e.ConfDir)
		e.networkWithin(true, "directory made")
		e.run(e.sandbox())
	})
	t.Run("a link that moves", func(t *testing.T) {
		e := start(t, node.Options{NoCNI: true})
		empty, full := filepath.Join(e.Dir, "empty"), filepath.Join(e.Dir, "full")
		if err := os.Mkdir(empty, 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, e, full)
		for _, target := range []string{empty, full, empty, full} {
			next := filepath.Join(e.Dir, "next")
			if err := os.Symlink(target, next); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(next, e.ConfDir); err != nil {
				t.Fatal(err)
			}
			e.networkWithin(target == full, "link to "+filepath.Base(target))
		}
		e.run(e.sandbox())
	})
	t.Run("broken file", func(t *testing.T) {
		e := start(t, node.Options{})
		file := filepath.Join(e.ConfDir, "10-bridge.conflist")
		if err := os.WriteFile(file, []byte(`{"cniVersion": "1.0.0", "name": "x", "plugins": [`), 0o600); err != nil {
			t.Fatal(err)
		}
		e.networkWithin(false, "a torn file")
		if m := e.network().GetMessage(); !strings.Contains(m, "10-bridge.conflist") {
			t.Errorf("the message does not name the file: %q", m)
		}
		write(t, e, e.ConfDir)
		e.networkWithin(true, "the file mended")
	})
}

// B59: a pod's addresses, namespace and labels are known again after the
// daemon was killed right behind RunPodSandbox.
func TestB59AddressesSurviveTheDaemon(t *testing.T) {
	e := start(t, node.Options{})
	var pods []string
	for range 3 {
		pods = append(pods, e.run(e.sandbox()))
	}
	config := e.sandbox()
	config.PortMappings = []*cri.PortMapping{{HostPort: 18080, ContainerPort: 80}}
	last := e.run(config)
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	leases := e.leases()
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, pod := range append(pods, last) {
		ips := e.ips(pod)
		if len(ips) != 1 || !slices.Contains(leases, ips[0]) || seen[ips[0]] {
			t.Errorf("pod %s has addresses %v; the leases are %v", pod, ips, leases)
		}
		seen[ips[0]] = true
	}
	res, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: last, Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	s := res.GetStatus()
	if s.GetState() != cri.PodSandboxState_SANDBOX_READY || s.GetLabels()["app"] != config.Labels["app"] || s.GetMetadata().GetUid() != config.Metadata.Uid {
		t.Errorf("after the restart the pod is %v", s)
	}
	if netns := fmt.Sprintf("%q:%q", "netns", filepath.Join(e.State(), "namespaces", last, "net")); !strings.Contains(strings.ReplaceAll(res.GetInfo()["info"], `": "`, `":"`), netns) {
		t.Errorf("the verbose status lacks %s: %s", netns, res.GetInfo()["info"])
	}
}

// The node's network is made from the template once the kubelet has told its pod
// CIDR, and follows it over a restart of the daemon.
func TestNetworkFromTheTemplate(t *testing.T) {
	template := filepath.Join(t.TempDir(), "template")
	if err := os.WriteFile(template, []byte(`{"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "loopback"}]}`), 0o600); err != nil { // one must be there from the start
		t.Fatal(err)
	}
	e := start(t, node.Options{NoCNI: true, Settings: map[string]string{"cni": fmt.Sprintf("conf_template = %q", template)}})
	text := strings.Replace(e.Conflist(), fmt.Sprintf("%q", e.Subnet), `"{{.PodCIDR}}"`, 1)
	if err := os.WriteFile(template, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	tell := func(cidr string) error {
		_, err := e.rt.UpdateRuntimeConfig(e.ctx, &cri.UpdateRuntimeConfigRequest{RuntimeConfig: &cri.RuntimeConfig{NetworkConfig: &cri.NetworkConfig{PodCidr: cidr}}})
		return err
	}
	e.refused("no CIDR", tell("10.0.0.0/99"), codes.InvalidArgument, "pod_cidr", "10.0.0.0/99")
	e.networkWithin(false, "before the kubelet told the CIDR")
	for range 2 {
		if err := tell(e.Subnet); err != nil {
			t.Fatal(err)
		}
		if c := e.network(); !c.GetStatus() {
			t.Errorf("NetworkReady is false right behind UpdateRuntimeConfig: %s", c.GetMessage())
		}
		pod := e.run(e.sandbox())
		if ip := e.ips(pod)[0]; !strings.HasPrefix(ip, strings.TrimSuffix(e.Subnet, "0/24")) {
			t.Errorf("the pod has %s, which is not of %s", ip, e.Subnet)
		}
		e.removePod(pod)
		if err := e.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// The pods of a handler with a CNI directory of its own are on its network, and
// are taken down when the handler is gone.
func TestNetworkOfAHandler(t *testing.T) {
	dir, subnet := t.TempDir(), "10.90.7.0/24"
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	handler := fmt.Sprintf("path = %q\ncni_conf_dir = %q", deps+"/bin/runc", dir)
	e := start(t, node.Options{Settings: map[string]string{"runtime.handlers.apart": handler}})
	run := func(handler string) (string, error) {
		res, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: e.sandbox(), RuntimeHandler: handler})
		return res.GetPodSandboxId(), err
	}
	_, err = run("apart")
	e.refused("a handler without a network", err, codes.Unavailable, dir)
	if c := e.network(); !c.GetStatus() {
		t.Errorf("the node's network is not ready: %s", c.GetMessage())
	}
	text := strings.NewReplacer(e.Subnet, subnet, fmt.Sprintf("%q", e.Bridge), fmt.Sprintf("%q", e.Bridge+"h")).Replace(e.Conflist())
	if err := os.WriteFile(filepath.Join(dir, "10-apart.conflist"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", e.Bridge+"h").Run() })
	for handler, want := range map[string]string{"apart": "10.90.7.", "runc": strings.TrimSuffix(e.Subnet, "0/24")} {
		id, err := run(handler)
		if err != nil {
			t.Fatal(err)
		}
		if ip := e.ips(id)[0]; !strings.HasPrefix(ip, want) {
			t.Errorf("a pod of handler %s has address %s, want one of %s", handler, ip, want)
		}
		if handler == "apart" {
			file := filepath.Join(e.Dir, "config.toml")
			config, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			before, _, _ := strings.Cut(string(config), "\n[runtime.handlers.apart]")
			if err := os.WriteFile(file, []byte(before), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := e.Terminate(); err != nil {
				t.Fatal(err)
			}
			if err := e.Launch(e.ctx); err != nil {
				t.Fatal(err)
			}
		}
		e.removePod(id)
	}
	if left := e.leases(); len(left) != 0 {
		t.Errorf("leases %q are left", left)
	}
}
