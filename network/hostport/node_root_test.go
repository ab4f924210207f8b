package hostport

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/sandbox/leakcheck"
	"berth/sandbox/namespaces"
)

// The addresses of a test's node: one to the outside, one on the bridge.
const (
	outside4, outside6 = "192.0.2.1", "2001:db8::1"
	second4            = "192.0.2.9"
	bridge4, bridge6   = "10.88.6.1", "fd00:88:6::1"
)

// node is a small world: a node with a bridge for pods, and a neighbour outside.
type node struct {
	*Manager
	t    *testing.T
	dir  string
	pods int
}

func newNode(t *testing.T) *node {
	t.Helper()
	leakcheck.Start(t)
	n := &node{t: t, dir: t.TempDir()}
	for _, name := range []string{"node", "outside"} {
		n.namespace(name)
	}
	n.ip("node", "link add eth0 type veth peer name eth1")
	n.ip("node", "link set eth1 netns "+n.path("outside"))
	n.ip("node", "link add br0 type bridge")
	n.addresses("node", "eth0", outside4+"/24", second4+"/24", outside6+"/64")
	n.addresses("outside", "eth1", "192.0.2.2/24", "2001:db8::2/64")
	n.addresses("node", "br0", bridge4+"/24", bridge6+"/64")
	n.set("node", "net/ipv4/ip_forward", "1")
	n.set("node", "net/ipv6/conf/all/forwarding", "1")
	n.Manager = New(n.options())
	return n
}

func (n *node) options() Options {
	return Options{Table: "berth-test", Enter: func(f func() error) error { return namespaces.Enter(n.path("node"), f) }}
}

func (n *node) path(name string) string {
	return namespaces.Path(filepath.Join(n.dir, name), namespaces.Net)
}

func (n *node) namespace(name string) {
	n.t.Helper()
	dir := filepath.Join(n.dir, name)
	must(n.t, namespaces.Pin(namespaces.Spec{Dir: dir, Net: true}))
	n.t.Cleanup(func() { must(n.t, namespaces.Release(dir)) })
	for _, scope := range []string{"all", "default"} { // addresses serve at once
		n.set(name, "net/ipv6/conf/"+scope+"/accept_dad", "0")
	}
}

// run runs a command inside and returns its output.
func (n *node) run(where string, command ...string) string {
	n.t.Helper()
	var out []byte
	err := namespaces.Enter(n.path(where), func() (err error) {
		out, err = exec.Command(command[0], command[1:]...).CombinedOutput()
		return err
	})
	if err != nil {
		n.t.Fatalf("%q: %v: %s", command, err, out)
	}
	return string(out)
}

func (n *node) ip(where, args string) {
	n.t.Helper()
	n.run(where, append([]string{"ip"}, strings.Fields(args)...)...)
}

func (n *node) addresses(where, link string, list ...string) {
	n.t.Helper()
	n.ip(where, "link set "+link+" up")
	for _, a := range list {
		nodad := ""
		if strings.Contains(a, ":") {
			nodad = " nodad"
		}
		n.ip(where, "addr add "+a+" dev "+link+nodad)
	}
}

func (n *node) set(where, key, value string) {
	n.t.Helper()
	must(n.t, namespaces.Enter(n.path(where), func() error { return os.WriteFile("/proc/sys/"+key, []byte(value), 0) }))
}

func (n *node) localnet(link string) string {
	n.t.Helper()
	return strings.TrimSpace(n.run("node", "cat", localnetFile(link)))
}

// newPod makes a pod on the bridge that answers on tcp and udp port 80 with its
// name and the address it was asked from.
func (n *node) newPod(name string) []netip.Addr {
	n.t.Helper()
	n.pods++
	n.namespace(name)
	veth := fmt.Sprint("veth", n.pods)
	n.ip("node", fmt.Sprintf("link add %s type veth peer name eth0 netns %s", veth, n.path(name)))
	n.ip("node", "link set "+veth+" master br0 up")
	n.run("node", "bridge", "link", "set", "dev", veth, "hairpin", "on") // as CNI's bridge has it with hairpinMode
	ips := []netip.Addr{netip.MustParseAddr(fmt.Sprintf("10.88.6.%d", 10+n.pods)), netip.MustParseAddr(fmt.Sprintf("fd00:88:6::%d", 10+n.pods))}
	n.addresses(name, "eth0", ips[0].String()+"/24", ips[1].String()+"/64")
	n.ip(name, "route add default via "+bridge4)
	n.ip(name, "route add default via "+bridge6)
	n.serve(name)
	return ips
}

func (n *node) serve(name string) {
	n.t.Helper()
	var tcp net.Listener
	var udp net.PacketConn
	must(n.t, namespaces.Enter(n.path(name), func() (err error) {
		if tcp, err = net.Listen("tcp", ":80"); err != nil {
			return err
		}
		udp, err = net.ListenPacket("udp", ":80")
		return err
	}))
	n.t.Cleanup(func() { tcp.Close(); udp.Close() })
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			fmt.Fprintf(c, "%s %s\n", name, hostOf(c.RemoteAddr()))
			c.Close()
		}
	}()
	go func() {
		buffer := make([]byte, 100)
		for {
			_, from, err := udp.ReadFrom(buffer)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo(fmt.Appendf(nil, "%s %s\n", name, hostOf(from)), from)
		}
	}()
}

func hostOf(a net.Addr) string {
	host, _, _ := net.SplitHostPort(a.String())
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return host
	}
	return ip.Unmap().String()
}

// ask connects from a namespace and returns who answered and whom it saw ask.
// An unreachable or silent port gives an error.
func (n *node) ask(from, network, host string, port int) (pod, seen string, err error) {
	c, err := n.dial(from, network, host, port)
	if err != nil {
		return "", "", err
	}
	defer c.Close()
	return exchange(c)
}

func (n *node) dial(from, network, host string, port int) (c net.Conn, err error) {
	ctx, cancel := context.WithTimeout(n.t.Context(), leakcheck.Patience(2*time.Second))
	defer cancel()
	err = namespaces.Enter(n.path(from), func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, net.JoinHostPort(host, fmt.Sprint(port)))
		return err
	})
	return c, err
}

func exchange(c net.Conn) (pod, seen string, err error) {
	if err := c.SetDeadline(time.Now().Add(leakcheck.Patience(2 * time.Second))); err != nil {
		return "", "", err
	}
	if c.RemoteAddr().Network() == "udp" {
		if _, err := c.Write([]byte("?")); err != nil {
			return "", "", err
		}
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return "", "", err
	}
	pod, seen, _ = strings.Cut(strings.TrimSpace(line), " ")
	return pod, seen, nil
}

// answers checks who answers on a port; "" means nobody.
func (n *node) answers(from, network, host string, port int, want string) {
	n.t.Helper()
	got, _, err := n.ask(from, network, host, port)
	if got != want {
		n.t.Errorf("from %s, %s %s port %d: %q answers (%v), want %q", from, network, host, port, got, err, want)
	}
}

// open claims and opens.
func (n *node) open(id string, ips []netip.Addr, ports ...Mapping) {
	n.t.Helper()
	must(n.t, n.Claim(id, ports))
	must(n.t, n.Open(id, ips))
}

// table is what nft says of it.
func (n *node) rules() string { n.t.Helper(); return n.run("node", "nft", "list", "ruleset") }

// gone checks that nothing is left on the node.
func (n *node) gone(after string) {
	n.t.Helper()
	if rules := n.rules(); rules != "" {
		n.t.Errorf("after %s the rules are:\n%s", after, rules)
	}
	if v := n.localnet("br0"); v != "0" {
		n.t.Errorf("after %s route_localnet of the bridge is %s", after, v)
	}
	if d := n.Describe(); d.Pods != 0 || d.Ports != 0 {
		t := d
		n.t.Errorf("after %s: %+v", after, t)
	}
}

func mapping(protocol, host string, port, container uint16) Mapping {
	m := Mapping{Protocol: protocol, HostPort: port, ContainerPort: container}
	if host != "" {
		m.HostIP = netip.MustParseAddr(host)
	}
	return m
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
