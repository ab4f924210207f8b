package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// between ends the daemon, changes its configuration and starts it again.
func (e *env) between(change func(config string) string) {
	e.Helper()
	if err := e.Terminate(); err != nil {
		e.Fatal(err)
	}
	path := filepath.Join(e.Dir, "config.toml")
	text, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, []byte(change(string(text))), 0o600)
	}
	if err != nil {
		e.Fatal(err)
	}
	e.relaunched()
}

// The configuration is changed while pods run: another network by another plugin,
// another path of the OCI runtime, another root. Pods of before run on, can be used,
// stopped and removed, and give back what they have.
func TestConfigurationChangedUnderPods(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	changes := map[string]func(config string) string{
		"another network": func(config string) string {
			e.useOtherNetwork()
			return config
		},
		"another path of the OCI runtime": func(config string) string {
			there, here := filepath.Join(e.Deps, "bin", "runc"), filepath.Join(e.Dir, "runc-moved")
			data, err := os.ReadFile(there)
			if err == nil {
				err = os.WriteFile(here, data, 0o755)
			}
			if err != nil {
				t.Fatal(err)
			}
			return strings.ReplaceAll(config, there, here)
		},
		"another root": func(config string) string {
			moved := e.Root() + "-moved"
			err := os.Rename(e.Root(), moved)
			if err == nil {
				err = os.Symlink(moved, e.Root()) // for the test's own looks
			}
			if err != nil {
				t.Fatal(err)
			}
			return strings.Replace(config, fmt.Sprintf("root = %q", e.Root()), fmt.Sprintf("root = %q", moved), 1)
		},
		"nothing": func(config string) string { return config },
	}
	for name, change := range changes {
		var pods, containers []string
		for _, pid := range []cri.NamespaceMode{cri.NamespaceMode_CONTAINER, cri.NamespaceMode_POD} {
			config := pidMode(e.sandbox(), pid)
			config.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 18070 + int32(pid)}}
			pod := e.run(config)
			pods = append(pods, pod)
			containers = append(containers, e.startContainer(pod, inPod(command("main", "sleep 100000"), config), config))
			containers = append(containers, e.create(pod, inPod(command("created", "sleep 100000"), config), config))
		}
		leased := len(e.leases())
		e.between(change)
		for i, id := range containers {
			if i%2 == 1 {
				if _, err := e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: id}); err != nil {
					t.Errorf("%s: start: %v", name, err)
				}
			}
			if out := e.exec(id, "echo alive"); out != "alive\n" {
				t.Errorf("%s: a container says %q", name, out)
			}
		}
		if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: containers[0]}); err != nil {
			t.Errorf("%s: stop: %v", name, err)
		}
		e.removePod(e.run(e.sandbox()))
		for _, pod := range pods {
			e.removePod(pod)
		}
		if left := e.leases(); len(left) != 0 || leased != 2 {
			t.Errorf("%s: leases %v are left of %d", name, left, leased)
		}
		e.noRulesFor(name, pods)
	}
}

// noRulesFor checks that the packet filter has nothing of pods, neither by name nor
// by their host ports.
func (e *env) noRulesFor(what string, pods []string) {
	e.Helper()
	out := e.ruleset()
	for _, word := range append([]string{"dport 1807", ": 1807"}, pods...) {
		if strings.Contains(out, word) {
			e.Errorf("%s: the packet filter has %q:\n%s", what, word, out)
		}
	}
}

// A pod whose record is lost gives back all that its network has: address, link,
// host port and rules, by what CNI's cache has of it.
func TestLostPodLeavesNoNetwork(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	for _, lost := range []string{"sandbox.json", "all of it"} {
		config := e.sandbox()
		config.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 18070}}
		pod := e.run(config)
		e.startContainer(pod, command("main", "sleep 100000"), config)
		if err := e.Kill(); err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(e.Root(), "sandboxes", pod)
		err := os.WriteFile(filepath.Join(dir, "sandbox.json"), nil, 0o600)
		if lost == "all of it" {
			err = os.RemoveAll(dir)
		}
		if err != nil {
			t.Fatal(err)
		}
		e.relaunched()
		e.empty(lost)
		if left := e.leases(); len(left) != 0 {
			t.Errorf("%s: leases %v are left", lost, left)
		}
		e.noRulesFor(lost, []string{pod})
		if leaks, err := e.Leaks(); err != nil || len(leaks) != 0 {
			t.Errorf("%s: left: %q, %v", lost, leaks, err)
		}
		e.removePod(e.run(config)) // its host port is free
	}
}

// useOtherNetwork takes the node's network away and puts another one, of another
// plugin, in its place.
func (e *env) useOtherNetwork() {
	e.Helper()
	other := fmt.Sprintf(`{"cniVersion":"1.0.0","name":"other","plugins":[{"type":"ptp","ipam":{"type":"host-local","dataDir":%q,
		"ranges":[[{"subnet":"10.89.7.0/24"}]]}}]}`, e.Leases)
	err := os.Remove(filepath.Join(e.ConfDir, "10-bridge.conflist"))
	if err == nil {
		err = os.WriteFile(filepath.Join(e.ConfDir, "20-other.conflist"), []byte(other), 0o600)
	}
	if err != nil {
		e.Fatal(err)
	}
}
