package cases

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/sandbox/leakcheck"
)

// within runs f in the network namespace of a file; "" is the node's own. What f
// dials or listens on stays there.
func (e *env) within(netns string, f func() error) error {
	e.Helper()
	if netns == "" {
		return f()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		fd, err := unix.Open(netns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Setns(fd, unix.CLONE_NEWNET)
			_ = unix.Close(fd)
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// netns is the file of a pod's network namespace.
func (e *env) netns(pod string) string {
	return filepath.Join(e.State(), "namespaces", pod, "net")
}

// fetch asks a TCP port by HTTP, a UDP port with a datagram, and returns the answer.
func (e *env) fetch(from, network, host string, port int) (string, error) {
	e.Helper()
	var text []byte
	err := e.within(from, func() error {
		c, err := net.DialTimeout(network, net.JoinHostPort(host, fmt.Sprint(port)), leakcheck.Patience(3*time.Second))
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(leakcheck.Patience(3 * time.Second))); err != nil {
			return err
		}
		if _, err := io.WriteString(c, "GET /name HTTP/1.0\r\n\r\n"); err != nil {
			return err
		}
		if network == "udp" {
			text = make([]byte, 100)
			n, err := c.Read(text)
			text = text[:n]
			return err
		}
		text, err = io.ReadAll(c)
		return err
	})
	_, body, http := strings.Cut(string(text), "\r\n\r\n")
	if !http {
		body = string(text)
	}
	return strings.TrimSpace(body), err
}

// reaches checks who answers on a port; "" means nobody.
func (e *env) reaches(from, network, host string, port int, want string) {
	e.Helper()
	got, err := e.fetch(from, network, host, port)
	if got != want {
		e.Errorf("%s to %s port %d: %q answers (%v), want %q", network, host, port, got, err, want)
	}
}

// serving runs a pod with a container that answers HTTP on port 80 with the pod's
// name, and a server that answers datagrams on port 53 with it.
func (e *env) serving(c *cri.PodSandboxConfig, ports ...*cri.PortMapping) string {
	e.Helper()
	e.pull(images.Busybox)
	c.PortMappings = ports
	name := c.GetMetadata().GetName()
	pod := e.run(c)
	web := command("web", "mkdir /tmp/w && echo "+name+" > /tmp/w/name && exec httpd -f -p 80 -h /tmp/w")
	web.Linux.SecurityContext.NamespaceOptions.Pid = c.Linux.SecurityContext.NamespaceOptions.Pid
	e.startContainer(pod, web, c)
	var udp net.PacketConn
	if err := e.within(e.netns(pod), func() (err error) { udp, err = net.ListenPacket("udp", ":53"); return err }); err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { udp.Close() })
	go func() {
		buffer := make([]byte, 100)
		for {
			_, from, err := udp.ReadFrom(buffer)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo([]byte(name), from)
		}
	}()
	e.eventually("the pod's server listens", func() bool {
		got, _ := e.fetch(e.netns(pod), "tcp", "127.0.0.1", 80)
		return got == name
	})
	return pod
}

// plainConflist is a dual-stack bridge none of whose plugins maps ports.
func (e *env) plainConflist() string {
	six := strings.NewReplacer("10.88.", "fd00:88:", ".0/24", "::/64").Replace(e.Subnet)
	return fmt.Sprintf(`{"cniVersion":"1.0.0","name":"plain","plugins":[
		{"type":"bridge","bridge":%q,"isGateway":true,"ipMasq":true,"ipMasqBackend":"nftables","hairpinMode":true,
		 "ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":%q}],[{"subnet":%q}]],"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]}}]}`,
		e.Bridge, e.Leases, e.Subnet, six)
}

// useConflist puts a network in the place of the node's.
func (e *env) useConflist(text string) {
	e.Helper()
	if err := os.WriteFile(filepath.Join(e.ConfDir, "10-bridge.conflist"), []byte(text), 0o600); err != nil {
		e.Fatal(err)
	}
}

// ruleset is the packet filter of the node.
func (e *env) ruleset() string {
	e.Helper()
	out, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
	if err != nil {
		e.Fatalf("nft list ruleset: %v: %s", err, out)
	}
	return string(out)
}

const near4, near6 = "198.51.100.1", "2001:db8:5::1"

// neighbour makes another machine beside the node and returns its network
// namespace; the node has the addresses near4 and near6 towards it.
func (e *env) neighbour() string {
	e.Helper()
	machine := exec.Command("sleep", "600")
	machine.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := machine.Start(); err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() {
		_ = exec.Command("ip", "link", "del", "out0").Run() // gone with the namespace, where that was first
		_ = machine.Process.Kill()
		_ = machine.Wait()
	})
	pid := fmt.Sprint(machine.Process.Pid)
	for _, line := range []string{
		"ip link add out0 type veth peer name out1 netns " + pid,
		"ip link set out0 up",
		"ip addr add " + near4 + "/24 dev out0",
		"ip addr add " + near6 + "/64 dev out0 nodad",
		"nsenter -n -t " + pid + " ip link set out1 up",
		"nsenter -n -t " + pid + " ip addr add 198.51.100.2/24 dev out1",
		"nsenter -n -t " + pid + " ip addr add 2001:db8:5::2/64 dev out1 nodad",
	} {
		f := strings.Fields(line)
		if out, err := exec.Command(f[0], f[1:]...).CombinedOutput(); err != nil {
			e.Fatalf("%s: %v: %s", line, err, out)
		}
	}
	return "/proc/" + pid + "/ns/net"
}

// Host ports without a plugin that maps them: from another machine, from the
// node, from its loopback, over IPv4 and IPv6, TCP and UDP, for all addresses or
// one.
func TestHostPortsByBerthsOwnRules(t *testing.T) {
	e := start(t, node.Options{})
	e.useConflist(e.plainConflist())
	outside := e.neighbour()
	a := e.serving(e.sandbox(), &cri.PortMapping{HostPort: 18080, ContainerPort: 80}, &cri.PortMapping{ContainerPort: 81},
		&cri.PortMapping{HostPort: 10053, ContainerPort: 53, Protocol: cri.Protocol_UDP},
		&cri.PortMapping{HostPort: 18081, ContainerPort: 80, HostIp: near4},
		&cri.PortMapping{HostPort: 18082, ContainerPort: 80, HostIp: "127.0.0.1"})
	b := e.serving(e.sandbox(), &cri.PortMapping{HostPort: 18083, ContainerPort: 80})
	for _, c := range []struct {
		from, network, host string
		port                int
		want                string
	}{
		{outside, "tcp", near4, 18080, "pod1"}, {outside, "tcp", near6, 18080, "pod1"}, {outside, "udp", near4, 10053, "pod1"},
		{outside, "udp", near6, 10053, "pod1"}, {outside, "tcp", near4, 18083, "pod2"}, {outside, "tcp", near4, 18081, "pod1"},
		{"", "tcp", near4, 18080, "pod1"}, {"", "tcp", near6, 18080, "pod1"}, {"", "tcp", "127.0.0.1", 18080, "pod1"},
		{"", "udp", "127.0.0.1", 10053, "pod1"}, {"", "tcp", "127.0.0.1", 18082, "pod1"}, {"", "tcp", near4, 18081, "pod1"},
		{e.netns(a), "tcp", near4, 18080, "pod1"}, {e.netns(b), "tcp", near4, 18080, "pod1"}, {e.netns(b), "tcp", near6, 18080, "pod1"},
		{outside, "tcp", near4, 18082, ""}, {"", "tcp", "127.0.0.1", 18081, ""}, {outside, "tcp", near4, 81, ""}, {"", "udp", near4, 18080, ""},
	} {
		e.reaches(c.from, c.network, c.host, c.port, c.want)
	}
	if rules := e.ruleset(); !strings.Contains(rules, "table inet berth"+e.State()+" {") || !strings.Contains(rules, a) {
		t.Errorf("no table of this daemon, or none that names pod %s:\n%s", a, rules)
	}

	config := e.sandbox()
	config.PortMappings = []*cri.PortMapping{{HostPort: 18080, ContainerPort: 80}}
	_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: config})
	e.refused("a port that is taken", err, codes.FailedPrecondition, "18080/tcp", a, "pod1_cases")

	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	e.reaches(outside, "tcp", near4, 18080, "pod1") // no daemon is needed
	if out, err := exec.Command("nft", "delete", "table", "inet", "berth"+e.State()).CombinedOutput(); err != nil {
		t.Fatalf("delete the table: %v: %s", err, out)
	}
	e.reaches(outside, "tcp", near4, 18080, "")
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	e.reaches(outside, "tcp", near4, 18080, "pod1")
	e.reaches("", "tcp", "127.0.0.1", 18083, "pod2")
	e.removePod(a)
	e.reaches(outside, "tcp", near4, 18080, "")
	e.reaches(outside, "tcp", near4, 18083, "pod2")
	e.removePod(b)
	if rules := e.ruleset(); strings.Contains(rules, "berth") {
		t.Errorf("rules are left:\n%s", rules)
	}
}

// pausePID is the process that holds a pod's PID namespace.
func (e *env) pausePID(pod string) int {
	e.Helper()
	res, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod, Verbose: true})
	if err != nil {
		e.Fatal(err)
	}
	var info struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal([]byte(res.GetInfo()["info"]), &info); err != nil || info.PID == 0 {
		e.Fatalf("pod %s tells no process: %v: %s", pod, err, res.GetInfo()["info"])
	}
	return info.PID
}

// B57: a pod that dies while there is no daemon leaves no rule behind that could
// shadow the next one's: the port is free at once.
func TestB57HostPortIsFreeAtOnce(t *testing.T) {
	for _, kind := range []string{"portmap", "own rules"} {
		t.Run(kind, func(t *testing.T) {
			e := start(t, node.Options{})
			if kind == "own rules" {
				e.useConflist(e.plainConflist())
			}
			port := &cri.PortMapping{HostPort: 18080, ContainerPort: 80}
			for range 3 {
				a := e.serving(pidMode(e.sandbox(), cri.NamespaceMode_POD), port)
				e.reaches("", "tcp", "127.0.0.1", 18080, fmt.Sprint("pod", e.pod))
				pause, old := e.pausePID(a), e.ips(a)[0]
				if err := e.Kill(); err != nil {
					t.Fatal(err)
				}
				if err := syscall.Kill(pause, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				if err := e.Launch(e.ctx); err != nil {
					t.Fatal(err)
				}
				e.removePod(a)
				if rules := e.ruleset(); strings.Contains(rules, "18080") || strings.Contains(rules, old) {
					t.Errorf("rules of the dead pod %s:\n%s", old, rules)
				}
				b := e.serving(e.sandbox(), port)
				e.reaches("", "tcp", "127.0.0.1", 18080, fmt.Sprint("pod", e.pod))
				if rules := e.ruleset(); !strings.Contains(rules, e.ips(b)[0]) || strings.Contains(rules, old) {
					t.Errorf("the rules are not those of %s alone:\n%s", e.ips(b)[0], rules)
				}
				e.removePod(b)
			}
		})
	}
}
