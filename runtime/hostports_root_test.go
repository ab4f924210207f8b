package runtime

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox"
	"berth/sandbox/leakcheck"
	"berth/sandbox/namespaces"
)

// withPorts asks for a pod whose port 80 is a port of the node.
func (n *node) withPorts(name string, ports ...int32) *cri.RunPodSandboxRequest {
	r := n.bridgePod(name)
	for _, p := range ports {
		r.Config.PortMappings = append(r.Config.PortMappings, &cri.PortMapping{HostPort: p, ContainerPort: 80})
	}
	return r
}

// rules is the packet filter of the test's node.
func (n *node) rules() string {
	n.t.Helper()
	var out []byte
	must(n.t, namespaces.Enter(n.netns, func() (err error) {
		out, err = exec.Command("nft", "list", "ruleset").CombinedOutput()
		return err
	}))
	return string(out)
}

func (n *node) flush() {
	n.t.Helper()
	must(n.t, namespaces.Enter(n.netns, func() error { return exec.Command("nft", "flush", "ruleset").Run() }))
}

// answer says who answers on a port of the node's loopback; nobody: "".
func (n *node) answer(port int) string {
	n.t.Helper()
	var text []byte
	_ = namespaces.Enter(n.netns, func() error {
		c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), leakcheck.Patience(2*time.Second))
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(leakcheck.Patience(2 * time.Second)))
		text, err = io.ReadAll(c)
		return err
	})
	return string(text)
}

// serve answers in a pod with a name.
func (n *node) serve(pod, name string) {
	n.t.Helper()
	var l net.Listener
	must(n.t, namespaces.Enter(namespaces.Path(n.namespaceDir(pod), namespaces.Net), func() (err error) {
		l, err = net.Listen("tcp", ":80")
		return err
	}))
	n.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, name)
			c.Close()
		}
	}()
}

func (n *node) stopPod(id string) error {
	_, err := n.StopPodSandbox(n.t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: id})
	return err
}

// A pod's ports lead to it from RunPodSandbox to StopPodSandbox, also over a
// restart of the daemon that finds the rules gone.
func TestHostPorts(t *testing.T) {
	n := newNode(t)
	id := n.runPod(n.withPorts("a", 8080, 0, -1))
	n.serve(id, "a")
	for name, meanwhile := range map[string]func(){"": nil, "restart": func() {}, "flush": n.flush} {
		if meanwhile != nil {
			n.restart(meanwhile)
		}
		if got := n.answer(8080); got != "a" {
			t.Errorf("%s: %q answers; the rules are:\n%s", name, got, n.rules())
		}
	}
	if rules := n.rules(); strings.Count(rules, `tcp . 8080 comment "`+id+`"`) == 0 {
		t.Errorf("the rules do not name the pod:\n%s", rules)
	}
	n.flush()
	n.repairPorts()
	if got := n.answer(8080); got != "a" {
		t.Errorf("after a repair %q answers", got)
	}
	info := n.statusInfo()["hostports"]
	if !strings.Contains(info, `"pods":1,"ports":1`) {
		t.Errorf("status tells %s", info)
	}
	must(t, n.stopPod(id))
	if rules := n.rules(); rules != "" {
		t.Errorf("rules of a stopped pod:\n%s", rules)
	}
	n.removePod(id)
	n.empty("removal")
}

// The second of two pods that want a port is refused before it has an effect; a
// pod that is dead, or stopped, or could not be made, has none.
func TestHostPortsAreOnePods(t *testing.T) {
	n := newNode(t)
	a := n.runPod(sharedPIDs(n.withPorts("a", 8080)))
	adds := n.calls("ADD")
	_, err := n.RunPodSandbox(t.Context(), n.withPorts("b", 8081, 8080))
	n.refused("a port that is taken", err, codes.FailedPrecondition, "port_mappings", "8080/tcp", a, "a_default_uid-a_0")
	if n.calls("ADD") != adds || len(n.pods()) != 1 {
		t.Errorf("%d runs of ADD, pods %q", n.calls("ADD")-adds, n.pods())
	}
	n.removePod(n.runPod(n.withPorts("c", 8081)))

	sb, err := n.Records.Sandboxes.Get(a)
	must(t, err)
	must(t, syscall.Kill(sb.Pause.PID, syscall.SIGKILL))
	eventually(t, "the pod is not ready", func() bool { return n.podState(a) == cri.PodSandboxState_SANDBOX_NOTREADY })
	b := n.runPod(n.withPorts("b", 8080))
	n.serve(b, "b")
	n.removePod(a)
	if got := n.answer(8080); got != "b" {
		t.Errorf("%q answers", got)
	}

	mend := n.tell("fail-DEL")
	n.refused("stop", n.stopPod(b), codes.Unknown, "fail-DEL was told to")
	d := n.runPod(n.withPorts("d", 8080)) // b keeps its address, but not its port
	mend()
	n.removePod(b)
	n.removePod(d)

	mend = n.tell("fail-ADD")
	if _, err := n.RunPodSandbox(t.Context(), n.withPorts("e", 8080)); err == nil {
		t.Error("a run that was told to fail succeeded")
	}
	mend()
	readOnly := n.readOnly("root/sandboxes")
	_, err = n.RunPodSandbox(t.Context(), n.withPorts("e", 8080))
	n.refused("no record", err, codes.FailedPrecondition, "write record")
	readOnly()
	n.removePod(n.runPod(n.withPorts("f", 8080)))
	n.empty("removal")
}

// What RunPodSandbox refuses in ports, and what it does not look at.
func TestBadHostPorts(t *testing.T) {
	n := newNode(t)
	for _, tc := range []struct {
		ports []*cri.PortMapping
		code  codes.Code
		words []string
	}{
		{[]*cri.PortMapping{{ContainerPort: 1}, {HostPort: 70000, ContainerPort: 80}}, codes.InvalidArgument, []string{"port_mappings[1].host_port 70000"}},
		{[]*cri.PortMapping{{HostPort: 80}}, codes.InvalidArgument, []string{"port_mappings[0].container_port 0"}},
		{[]*cri.PortMapping{{HostPort: 80, ContainerPort: 80, Protocol: 7}}, codes.InvalidArgument, []string{"port_mappings[0].protocol 7"}},
		{[]*cri.PortMapping{{HostPort: 80, ContainerPort: 80, HostIp: "a"}}, codes.InvalidArgument, []string{`port_mappings[0].host_ip "a"`}},
		{[]*cri.PortMapping{{HostPort: 80, ContainerPort: 80}, {HostPort: 80, ContainerPort: 81}}, codes.InvalidArgument, []string{"port_mappings", "80/tcp", "81"}},
		{[]*cri.PortMapping{{HostPort: 80, ContainerPort: 80, HostIp: "::1"}}, codes.InvalidArgument, []string{"port_mappings", "::1"}},
		{[]*cri.PortMapping{{HostPort: 80, ContainerPort: 80, HostIp: "fd00::1"}}, codes.FailedPrecondition, []string{"open host ports", "fd00::1", "10.88.9."}},
	} {
		r := n.bridgePod("bad")
		r.Config.PortMappings = tc.ports
		_, err := n.RunPodSandbox(t.Context(), r)
		n.refused(fmt.Sprint(tc.ports), err, tc.code, tc.words...)
		n.empty("a refusal")
	}
	host := n.hostPod("host") // the kubelet sends the ports of such a pod along
	host.Config.PortMappings = []*cri.PortMapping{{HostPort: 80, ContainerPort: 80}}
	first := n.runPod(host)
	second := n.hostPod("host2")
	second.Config.PortMappings = host.Config.PortMappings
	n.removePod(n.runPod(second))
	n.removePod(first)
	n.empty("removal")
}

// After a crash the rules of a pod that was half made, or is gone, are removed.
func TestHostPortsAfterACrash(t *testing.T) {
	n := newNode(t)
	half, gone, whole := n.runPod(n.withPorts("half", 8080)), n.runPod(n.withPorts("gone", 8081)), n.runPod(n.withPorts("whole", 8082))
	n.serve(whole, "whole")
	n.restart(func() {
		_, err := n.Records.Sandboxes.Update(half, func(sb *sandbox.Sandbox) { sb.ReadyAt = 0 })
		must(t, err)
		must(t, namespaces.Release(n.namespaceDir(gone)))
	})
	rules := n.rules()
	if strings.Contains(rules, half) || strings.Contains(rules, gone) || n.answer(8082) != "whole" {
		t.Errorf("whole is %s, but the rules are:\n%s", whole, rules)
	}
	for _, port := range []int32{8080, 8081} {
		n.removePod(n.runPod(n.withPorts(fmt.Sprint("next", port), port)))
	}
	n.removePod(gone)
	n.removePod(whole)
	n.empty("removal")
}

// Where a plugin maps the ports, berth makes no rules, and a pod has its ports
// until DEL.
func TestPortsThatAPluginMaps(t *testing.T) {
	n := newNode(t)
	conf := n.dir + "/net.d/10-bt.conflist"
	text, err := os.ReadFile(conf)
	must(t, err)
	mapped := strings.Replace(string(text), `"type":"bridge",`, `"type":"bridge","capabilities":{"portMappings":true},`, 1)
	must(t, os.WriteFile(conf, []byte(mapped), 0o600))
	a := n.runPod(n.withPorts("a", 8080))
	if rules := n.rules(); rules != "" {
		t.Errorf("rules beside a plugin that maps ports:\n%s", rules)
	}
	mend := n.tell("fail-DEL")
	n.refused("stop", n.stopPod(a), codes.Unknown, "fail-DEL was told to")
	for range 2 {
		_, err := n.RunPodSandbox(t.Context(), n.withPorts("b", 8080))
		n.refused("a port that is mapped still", err, codes.FailedPrecondition, "8080/tcp", "a_default_uid-a_0")
		n.restart(nil)
	}
	mend()
	must(t, n.stopPod(a))
	n.removePod(n.runPod(n.withPorts("b", 8080)))
	n.removePod(a)
	n.empty("removal")
}
