package hostport

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
)

// Every way to a port of every address of the node leads to the pod, whether the
// node's packet filter sees what passes a bridge or not.
func TestPortsLeadToThePod(t *testing.T) {
	for _, bridged := range []string{"0", "1"} {
		t.Run("bridge-nf-call "+bridged, func(t *testing.T) {
			n := newNode(t)
			if _, err := os.Stat("/proc/sys/net/bridge"); err == nil {
				n.set("node", "net/bridge/bridge-nf-call-iptables", bridged)
				n.set("node", "net/bridge/bridge-nf-call-ip6tables", bridged)
			} else if bridged == "1" {
				t.Skip("skipped: the kernel has no br_netfilter")
			}
			n.everyWay()
		})
	}
}

func (n *node) everyWay() {
	t := n.t
	ips := n.newPod("web")
	n.newPod("other")
	n.open("id-web", ips, mapping("tcp", "", 8080, 80), mapping("udp", "", 8080, 80))
	for _, network := range []string{"tcp", "udp"} {
		for _, c := range []struct{ from, host, seen string }{
			{"outside", outside4, "192.0.2.2"}, // the client's own address arrives
			{"outside", second4, "192.0.2.2"},
			{"outside", outside6, "2001:db8::2"},
			{"node", outside4, outside4},
			{"node", outside6, outside6},
			{"node", "127.0.0.1", bridge4},
			{"node", "127.8.9.10", bridge4},
			{"node", bridge4, bridge4},
			{"web", outside4, bridge4}, // itself, through the node
			{"web", outside6, bridge6},
			{"web", bridge4, bridge4},
			{"other", outside4, bridge4}, // behind the same bridge
			{"other", outside6, bridge6},
		} {
			pod, seen, err := n.ask(c.from, network, c.host, 8080)
			if pod != "web" || seen != c.seen {
				t.Errorf("%s from %s to %s: answer of %q, which saw %q (%v); want web and %q", network, c.from, c.host, pod, seen, err, c.seen)
			}
		}
	}
	if t.Failed() {
		t.Log(n.rules())
	}
	n.answers("outside", "tcp", outside4, 80, "")
	n.answers("outside", "tcp", ips[0].String(), 80, "")
	must(t, n.Close("id-web"))
	n.gone("Close")
	n.answers("outside", "tcp", outside4, 8080, "")
	n.answers("node", "tcp", "127.0.0.1", 8080, "")
}

// A mapping with an address of the node is for that one only, and goes before one
// without.
func TestHostIP(t *testing.T) {
	n := newNode(t)
	ips := n.newPod("web")
	other := n.newPod("other")
	n.open("a", ips, mapping("tcp", outside4, 8080, 80), mapping("tcp", outside6, 8080, 80), mapping("tcp", "127.0.0.1", 8081, 80),
		mapping("tcp", "0.0.0.0", 8082, 80), mapping("tcp", "::", 8083, 80))
	n.open("b", other, mapping("tcp", second4, 8080, 80))
	for _, c := range []struct {
		from, host string
		port       int
		want       string
	}{
		{"outside", outside4, 8080, "web"}, {"outside", second4, 8080, "other"}, {"outside", outside6, 8080, "web"},
		{"node", outside4, 8080, "web"}, {"node", second4, 8080, "other"}, {"node", "127.0.0.1", 8080, ""}, {"node", bridge4, 8080, ""},
		{"node", "127.0.0.1", 8081, "web"}, {"node", outside4, 8081, ""}, {"outside", outside4, 8081, ""},
		{"outside", outside4, 8082, "web"}, {"node", "127.0.0.1", 8082, "web"}, {"outside", outside6, 8082, ""},
		{"outside", outside6, 8083, "web"}, {"outside", outside4, 8083, ""}, {"node", "::1", 8083, ""},
		{"web", second4, 8080, "other"}, {"web", outside4, 8080, "web"},
	} {
		n.answers(c.from, "tcp", c.host, c.port, c.want)
	}
	must(t, n.Close("a"))
	n.answers("outside", "tcp", second4, 8080, "other")
	n.answers("outside", "tcp", outside4, 8080, "")
	n.open("a2", ips, mapping("tcp", "", 9000, 1), mapping("tcp", outside4, 9000, 80)) // nobody is at port 1
	n.answers("outside", "tcp", outside4, 9000, "web")
	n.answers("outside", "tcp", second4, 9000, "")
	must(t, n.Close("a2"))
	must(t, n.Close("b"))
	n.gone("Close")
}

// Other machines and pods do not reach what listens on the node's loopback only,
// although route_localnet lets the node's packets from there out.
func TestLoopbackStaysClosed(t *testing.T) {
	n := newNode(t)
	ips := n.newPod("web")
	n.open("a", ips, mapping("tcp", "127.0.0.1", 8081, 80))
	if v := n.localnet("br0"); v != "1" {
		t.Errorf("route_localnet of the bridge is %s", v)
	}
	n.newPod("other")
	n.serve("node") // on all addresses, so also on 127.0.0.1
	n.ip("other", "route add 127.0.0.1 via "+bridge4+" table 99")
	n.ip("other", "rule add to 127.0.0.1 pref 0 table 99")
	n.ip("other", "rule del pref 0 table local")
	n.ip("other", "rule add pref 10 table local")
	n.set("other", "net/ipv4/conf/all/route_localnet", "1")
	n.answers("other", "tcp", bridge4, 80, "node") // it does reach the node
	for _, port := range []int{80, 8081} {
		if pod, _, err := n.ask("other", "tcp", "127.0.0.1", port); err == nil {
			t.Errorf("from a pod, %q answers on the node's 127.0.0.1:%d", pod, port)
		}
	}
	// The same without the guard does arrive: the test would see it.
	n.run("node", "nft", "flush", "chain", "inet", "berth-test", "guard")
	n.answers("other", "tcp", "127.0.0.1", 80, "node")
	must(t, n.Close("a"))
	n.gone("Close")
}

func TestTakenPorts(t *testing.T) {
	n := newNode(t)
	ips := n.newPod("web")
	n.open("a", ips, mapping("tcp", "", 8080, 80), mapping("udp", outside4, 53, 80))
	before := n.rules()
	for _, c := range []struct {
		m     Mapping
		taken bool
	}{
		{mapping("tcp", "", 8080, 80), true}, {mapping("tcp", outside4, 8080, 80), true}, {mapping("tcp", "::", 8080, 80), true},
		{mapping("udp", "", 53, 80), true}, {mapping("udp", "0.0.0.0", 53, 80), true}, {mapping("udp", outside4, 53, 81), true},
		{mapping("udp", "", 8080, 80), false}, {mapping("sctp", "", 8080, 80), false}, {mapping("udp", second4, 53, 80), false},
		{mapping("udp", "::", 53, 80), false}, {mapping("tcp", "", 53, 80), false}, {mapping("tcp", "", 8081, 80), false},
	} {
		err := n.Claim("b", []Mapping{mapping("tcp", "", 1, 1), c.m})
		if errors.Is(err, ErrTaken) != c.taken {
			t.Errorf("%s: %v, want taken: %v", c.m, err, c.taken)
		}
		if taken := (*TakenError)(nil); c.taken && (!errors.As(err, &taken) || taken.Owner != "a" || !strings.Contains(err.Error(), c.m.String())) {
			t.Errorf("%s: the error is %v", c.m, err)
		}
		must(t, n.Close("b"))
	}
	must(t, n.Claim("a2", []Mapping{mapping("tcp", "", 1, 1)})) // what was refused claimed nothing
	must(t, n.Close("a2"))
	if after := n.rules(); after != before {
		t.Errorf("claims have changed the rules:\n%s", after)
	}
	must(t, n.Close("a"))
	must(t, n.Claim("b", []Mapping{mapping("tcp", "", 8080, 80)}))
	must(t, n.Close("b"))
	n.gone("Close")
}

// A client that never stops sending reaches the pod that has the port now.
func TestStaleFlowsEnd(t *testing.T) {
	n := newNode(t)
	a, b := n.newPod("a"), n.newPod("b")
	for _, host := range []string{outside4, outside6} {
		c, err := n.dial("outside", "udp", host, 8080)
		must(t, err)
		defer c.Close()
		if pod, _, err := exchange(c); err == nil {
			t.Errorf("%s: %q answers before there is a mapping", host, pod)
		}
		ports := []Mapping{mapping("udp", "", 8080, 80)}
		for _, p := range []struct {
			id  string
			ips []netip.Addr
		}{{"a", a}, {"b", b}, {"a", a}} {
			n.open(p.id, p.ips, ports...)
			if pod, _, err := exchange(c); pod != p.id {
				t.Errorf("%s: %q answers (%v), want %s", host, pod, err, p.id)
			}
			must(t, n.Close(p.id))
			if pod, _, err := exchange(c); err == nil {
				t.Errorf("%s: %q answers after Close of %s", host, pod, p.id)
			}
		}
	}
	n.gone("Close")
}

// What a pod says to a server elsewhere on the same port goes on.
func TestOtherFlowsStay(t *testing.T) {
	n := newNode(t)
	a, b := n.newPod("a"), n.newPod("b")
	n.serve("outside")
	n.ip("outside", "route add 10.88.6.0/24 via "+outside4)
	n.open("a", a, mapping("tcp", "", 1, 1)) // the kernel tracks flows from now on
	c, err := n.dial("a", "udp", "192.0.2.2", 80)
	must(t, err)
	defer c.Close()
	if pod, _, err := exchange(c); pod != "outside" {
		t.Fatalf("%q answers (%v)", pod, err)
	}
	n.open("b", b, mapping("udp", "", 80, 80))
	must(t, n.Close("b"))
	var flows []*netlink.ConntrackFlow
	must(t, n.o.Enter(func() (err error) {
		flows, err = netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		return err
	}))
	if !slices.ContainsFunc(flows, func(f *netlink.ConntrackFlow) bool {
		return f.Forward.Protocol == unix.IPPROTO_UDP && addrOf(f.Forward.SrcIP) == a[0] && f.Forward.DstIP.String() == "192.0.2.2"
	}) {
		t.Errorf("the flow of %s is not among %v", a[0], flows)
	}
	must(t, n.Close("a"))
}

// What an earlier daemon left is brought in line with the pods there are.
func TestRestore(t *testing.T) {
	n := newNode(t)
	a, b := n.newPod("a"), n.newPod("b")
	n.open("a", a, mapping("tcp", "", 8080, 80))
	n.open("b", b, mapping("tcp", "", 8081, 80))
	for name, spoil := range map[string]func(){
		"nothing":           func() {},
		"nft flush ruleset": func() { n.run("node", "nft", "flush", "ruleset") },
		"nft flush table":   func() { n.run("node", "nft", "flush", "table", "inet", "berth-test") },
		"a set of other type": func() {
			n.run("node", "nft", "delete table inet berth-test")
			n.run("node", "nft", "add table inet berth-test; add set inet berth-test localnet { type ipv4_addr; }")
		},
	} {
		t.Run(name, func(t *testing.T) {
			spoil()
			n.Manager = New(n.options())
			must(t, n.Restore([]Pod{{ID: "b", IPs: b, Ports: []Mapping{mapping("tcp", "", 8081, 80)}},
				{ID: "cni", Ports: []Mapping{mapping("tcp", "", 8082, 80)}}}))
			n.answers("outside", "tcp", outside4, 8080, "")
			n.answers("outside", "tcp", outside4, 8081, "b")
			if err := n.Claim("c", []Mapping{mapping("tcp", "", 8082, 1)}); !errors.Is(err, ErrTaken) {
				t.Errorf("a claimed port of an earlier daemon: %v", err)
			}
			n.open("a", a, mapping("tcp", "", 8080, 80)) // the port is free at once
			n.answers("node", "tcp", "127.0.0.1", 8080, "a")
		})
	}
	n.Manager = New(n.options())
	must(t, n.Restore(nil))
	if rules := n.rules(); rules != "" {
		t.Errorf("no pod, but rules:\n%s", rules)
	}
}

// A daemon that finds no pods any more also takes back route_localnet.
func TestRestoreOfNothingSwitchesLocalnetOff(t *testing.T) {
	n := newNode(t)
	n.open("a", n.newPod("a"), mapping("tcp", "", 8080, 80))
	n.Manager = New(n.options())
	must(t, n.Restore(nil))
	n.gone("Restore")
	n.set("node", "net/ipv4/conf/br0/route_localnet", "1") // somebody else's
	n.open("b", n.newPod("b"), mapping("tcp", "", 8080, 80))
	must(t, n.Close("b"))
	if v := n.localnet("br0"); v != "1" {
		t.Errorf("route_localnet, which somebody else had set, is %s", v)
	}
}

// Rules that somebody flushes come back: by Repair, or with the next change.
func TestFlushedRulesComeBack(t *testing.T) {
	n := newNode(t)
	a, b := n.newPod("a"), n.newPod("b")
	if repaired, err := n.Repair(); repaired || err != nil {
		t.Errorf("Repair of nothing: %v, %v", repaired, err)
	}
	n.open("a", a, mapping("tcp", "", 8080, 80))
	n.run("node", "nft", "flush", "ruleset")
	n.answers("outside", "tcp", outside4, 8080, "")
	for _, want := range []bool{true, false} {
		if repaired, err := n.Repair(); repaired != want || err != nil {
			t.Errorf("Repair: %v, %v; want %v", repaired, err, want)
		}
		n.answers("outside", "tcp", outside4, 8080, "a")
	}
	n.run("node", "nft", "flush", "ruleset")
	n.open("b", b, mapping("tcp", "", 8081, 80))
	n.answers("outside", "tcp", outside4, 8080, "a")
	n.answers("outside", "tcp", outside4, 8081, "b")
	n.run("node", "nft", "flush", "ruleset")
	must(t, n.Close("a"))
	n.answers("outside", "tcp", outside4, 8081, "b")
	n.run("node", "nft", "flush", "ruleset")
	must(t, n.Close("b"))
	n.gone("Close")
}

// Two daemons on one node have a table each.
func TestTablesAreApart(t *testing.T) {
	n := newNode(t)
	o := n.options()
	o.Table = "berth/run/another"
	second := New(o)
	must(t, second.Restore(nil))
	n.open("a", n.newPod("a"), mapping("tcp", "", 8080, 80))
	must(t, second.Claim("b", []Mapping{mapping("tcp", "", 8081, 80)}))
	must(t, second.Open("b", n.newPod("b")))
	must(t, second.Restore(nil))
	n.answers("outside", "tcp", outside4, 8080, "a")
	must(t, second.Close("b"))
	must(t, n.Close("a"))
	if rules := n.rules(); rules != "" {
		t.Errorf("left:\n%s", rules)
	}
}

func TestOpenRefuses(t *testing.T) {
	n := newNode(t)
	ips := n.newPod("web")
	for _, c := range []struct {
		m   Mapping
		ips []netip.Addr
	}{{mapping("tcp", outside6, 80, 80), ips[:1]}, {mapping("tcp", "0.0.0.0", 80, 80), ips[1:]}, {mapping("tcp", "", 80, 80), nil}} {
		must(t, n.Claim("a", []Mapping{c.m}))
		if err := n.Open("a", c.ips); !errors.Is(err, ErrNoAddress) || !strings.Contains(err.Error(), c.m.String()) {
			t.Errorf("%s for a pod with %v: %v", c.m, c.ips, err)
		}
		must(t, n.Close("a"))
	}
	n.gone("refusals")
	must(t, n.Open("unclaimed", ips))
	must(t, n.Close("unclaimed"))
	for _, bad := range [][]Mapping{{mapping("tcp", "::1", 80, 80)}, {mapping("tcp", "", 80, 80), mapping("tcp", "0.0.0.0", 80, 81)}} {
		if err := n.Claim("a", bad); !errors.Is(err, ErrInvalid) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	must(t, n.Claim("a", []Mapping{mapping("tcp", "", 80, 80), mapping("tcp", "", 80, 80)})) // said twice
	must(t, n.Open("a", ips))
	n.answers("outside", "tcp", outside4, 80, "web")
	must(t, n.Close("a"))
	n.gone("Close")
}

// As many ports as a node may have, opened and closed one pod after the other,
// and at once by a new daemon.
func TestManyPorts(t *testing.T) {
	n := newNode(t)
	ips := n.newPod("web")
	var pods []Pod
	for i := range 250 {
		p := Pod{ID: fmt.Sprintf("%064d", i), IPs: ips}
		for j := range 4 {
			p.Ports = append(p.Ports, mapping([]string{"tcp", "sctp"}[j%2], "", uint16(20000+4*i+j), 80))
		}
		pods = append(pods, p)
	}
	began := time.Now()
	must(t, n.Claim("first", []Mapping{mapping("tcp", "", 10000, 80)}))
	must(t, n.Open("first", ips))
	t.Logf("opening the first port took %v", time.Since(began))
	began = time.Now()
	must(t, n.Claim("second", []Mapping{mapping("tcp", "", 10001, 80)}))
	must(t, n.Open("second", ips))
	t.Logf("opening the second port took %v", time.Since(began))
	began = time.Now()
	must(t, n.Close("first"))
	t.Logf("closing the first port took %v", time.Since(began))
	must(t, n.Close("second"))
	begin := time.Now()
	for _, p := range pods {
		n.open(p.ID, p.IPs, p.Ports...)
	}
	if took := time.Since(begin); took > leakcheck.Patience(20*time.Second) {
		t.Errorf("opening 1000 ports of 250 pods took %v", took)
	}
	t.Logf("opening a pod took %v", time.Since(begin)/250)
	begin = time.Now()
	n.Manager = New(n.options())
	must(t, n.Restore(pods))
	t.Logf("restoring 250 pods took %v", time.Since(begin))
	n.answers("outside", "tcp", outside4, 20000, "web")
	n.answers("outside", "tcp", outside6, 20000+4*249+2, "web")
	if d := n.Describe(); d.Pods != 250 || d.Ports != 1000 {
		t.Errorf("%+v", d)
	}
	begin = time.Now()
	for _, p := range pods {
		must(t, n.Close(p.ID))
	}
	t.Logf("closing a pod took %v", time.Since(begin)/250)
	n.gone("Close")
}

// A kernel that refuses the table: the pod has no ports, and nothing is changed.
func TestOpenThatTheKernelRefuses(t *testing.T) {
	n := newNode(t)
	ips := n.newPod("web")
	o := n.options()
	o.Table = strings.Repeat("x", 300)
	n.Manager = New(o)
	must(t, n.Claim("a", []Mapping{mapping("tcp", "", 8080, 80)}))
	if err := n.Open("a", ips); err == nil || !strings.Contains(err.Error(), "open host ports of a: write table xxx") {
		t.Errorf("Open: %v", err)
	}
	n.gone("a failed Open")
	must(t, n.Close("a"))
	if err := n.Restore([]Pod{{ID: "a", Ports: []Mapping{mapping("tcp", "", 8080, 80)}, IPs: ips}}); err == nil {
		t.Error("Restore succeeds")
	}
	if repaired, err := n.Repair(); repaired || err == nil {
		t.Errorf("Repair: %v, %v", repaired, err)
	}
	n.Manager = New(n.options())
	n.ip("node", "link set br0 down") // no route leads to the pod
	must(t, n.Claim("a", []Mapping{mapping("tcp", "", 8080, 80)}))
	if err := n.Open("a", ips); err == nil || !strings.Contains(err.Error(), "find the link that leads to "+ips[0].String()) {
		t.Errorf("Open without a route: %v", err)
	}
	if err := n.Restore([]Pod{{ID: "a", Ports: []Mapping{mapping("tcp", "", 8080, 80)}, IPs: ips}}); err == nil || !strings.Contains(err.Error(), "ports of a:") {
		t.Errorf("Restore without a route: %v", err)
	}
	must(t, n.Close("a"))
	n.gone("Close")
}

// Many at once: every pod gets its ports, of a contested one only one pod.
func TestConcurrentPods(t *testing.T) {
	n := newNode(t)
	ips := n.newPod("web")
	var wg sync.WaitGroup
	won := make(chan string, 20)
	for i := range 20 {
		wg.Go(func() {
			id := fmt.Sprint("pod", i)
			err := n.Claim(id, []Mapping{mapping("tcp", "", 8080, 80), mapping("tcp", "", uint16(9000+i), 80)})
			if err == nil {
				won <- id
			} else if err = n.Claim(id, []Mapping{mapping("tcp", "", uint16(9000+i), 80)}); err != nil {
				t.Error(err)
			}
			if err := n.Open(id, ips); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i := range 20 { // each twice
		i -= i % 2
		wg.Go(func() {
			if err := n.Close(fmt.Sprint("pod", i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(won) != 1 {
		t.Errorf("%d pods got one port", len(won))
	}
	for i := range 20 {
		want := "web"
		if i%2 == 0 {
			want = ""
		}
		n.answers("outside", "tcp", outside4, 9000+i, want)
	}
	for i := range 20 {
		must(t, n.Close(fmt.Sprint("pod", i)))
	}
	n.gone("Close")
}
