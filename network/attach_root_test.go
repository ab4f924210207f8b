package network

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"berth/sandbox/namespaces"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestSetupAndTeardown(t *testing.T) {
	n := newNode(t)
	p := n.pod("web")
	r := n.setup(p)
	if calls := n.calls(); calls != "bridge ADD, host-local ADD, portmap ADD" {
		t.Errorf("ADD ran %s", calls)
	}
	if len(r.IPs) != 1 || !strings.HasPrefix(r.IPs[0], "10.88.7.") {
		t.Errorf("addresses %q", r.IPs)
	}
	if got := n.leased(); !slices.Equal(got, r.IPs) {
		t.Errorf("leases %q, want %q", got, r.IPs)
	}
	var eth0 []Interface
	for _, i := range r.Interfaces {
		if i.Name == "eth0" && i.Sandbox == p.NetNS && i.Mac != "" {
			eth0 = append(eth0, i)
		}
	}
	if len(eth0) != 1 {
		t.Errorf("interfaces %+v, want one eth0 in %s", r.Interfaces, p.NetNS)
	}
	stop := n.serve(p, 80)
	if body, err := n.get(r.IPs[0] + ":80"); err != nil || body != "web" {
		t.Errorf("GET: %q, %v", body, err)
	}
	stop()
	for i := range 2 {
		n.teardown(p, r)
		if calls := n.calls(); calls != "portmap DEL, bridge DEL, host-local DEL" {
			t.Errorf("DEL %d ran %s", i, calls)
		}
	}
	if n.ports() != 0 || len(n.leased()) != 0 {
		t.Errorf("%d ports and leases %q are left", n.ports(), n.leased())
	}
}

// TestB59 has addresses of both families in the order in which the plugin gave
// them, also after the record was written and read.
func TestB59(t *testing.T) {
	n := newNode(t)
	ranges := []string{`[{"subnet":"fd00:88:7::/64"}]`, `[{"subnet":"10.88.7.0/28"}]`}
	for i := range 2 {
		slices.Reverse(ranges)
		n.writeConf("10-bt.conflist", fmt.Sprintf(`{"cniVersion":"1.0.0","name":"dual%d","plugins":[{"type":"bridge","bridge":"br%d","isGateway":true,
			"ipam":{"type":"host-local","dataDir":%q,"ranges":[%s]}}]}`, i, i, n.leases, strings.Join(ranges, ",")))
		p := n.pod(fmt.Sprint("dual", i))
		r := n.setup(p)
		first := strings.HasPrefix(ranges[0], `[{"subnet":"10.`)
		if len(r.IPs) != 2 || strings.Contains(r.IPs[0], ".") != first || strings.Contains(r.IPs[1], ".") == first {
			t.Errorf("ranges %q gave %q", ranges, r.IPs)
		}
		n.teardown(p, r)
	}
}

// TestB49 loses, round after round, all that DEL would like to have: the
// namespaces, libcni's cache, the configuration, the daemon. A /28 has 13
// addresses for 25 pods.
func TestB49(t *testing.T) {
	n := newNode(t)
	for round := range 5 {
		var pods []PodNetwork
		var results []*Result
		for i := range 5 {
			p := n.pod(fmt.Sprintf("r%dp%d", round, i))
			pods, results = append(pods, p), append(results, n.setup(p))
		}
		for i, p := range pods {
			if err := namespaces.Release(strings.TrimSuffix(p.NetNS, "/net")); err != nil {
				t.Fatal(err)
			}
			if i == 0 { // a file that is there but is no namespace, as after a reboot
				os.MkdirAll(strings.TrimSuffix(p.NetNS, "/net"), 0o700)
				os.WriteFile(p.NetNS, nil, 0o600)
			}
		}
		must(t, os.RemoveAll(n.cache))
		must(t, os.Rename(n.conf, n.conf+".away"))
		n.restart()
		for i, p := range pods {
			n.teardown(p, results[i])
		}
		if left := n.leased(); len(left) != 0 {
			t.Fatalf("round %d: leases %q are left", round, left)
		}
		must(t, os.Rename(n.conf+".away", n.conf))
	}
}

func TestTeardownUsesTheRecordedConfig(t *testing.T) {
	n := newNode(t)
	p := n.pod("web")
	r := n.setup(p)
	n.writeConf("10-bt.conflist", fmt.Sprintf(`{"cniVersion":"1.0.0","name":"other","plugins":[{"type":"bridge","bridge":"br1",
		"ipam":{"type":"host-local","dataDir":%q,"subnet":"10.89.0.0/24"}}]}`, n.dir+"/elsewhere"))
	if plan := n.plan(p); plan.Network != "other" {
		t.Errorf("Plan right after the change chose %q", plan.Network)
	}
	n.teardown(p, r)
	if len(n.leased()) != 0 || n.ports() != 0 {
		t.Errorf("leases %q, %d ports are left", n.leased(), n.ports())
	}
}

// TestTeardownRestoresPrevResult loses or damages libcni's cache and finds the
// recorded result given to the plugins all the same.
func TestTeardownRestoresPrevResult(t *testing.T) {
	n := newNode(t)
	for name, damage := range map[string]func(file string) error{
		"gone": os.Remove,
		"torn": func(file string) error { return os.WriteFile(file, []byte(`{"kind":"cniC`), 0o600) },
	} {
		n.shimPlugins("portmap")
		p := n.pod(name)
		r := n.setup(p)
		must(t, damage(n.cache+"/results/bt-"+p.ID+"-eth0"))
		n.script("portmap", "cat > "+n.dir+"/stdin")
		n.teardown(p, r)
		if stdin := read(t, n.dir+"/stdin"); !strings.Contains(stdin, `"prevResult"`) || !strings.Contains(stdin, r.IPs[0]) {
			t.Errorf("%s: DEL was given %s", name, stdin)
		}
	}
}

// TestB57 gives a node's port to one pod after another, also when the first one's
// namespace had vanished.
func TestB57(t *testing.T) {
	for _, backend := range []string{"iptables", "nftables"} {
		t.Run(backend, func(t *testing.T) {
			n := newNode(t)
			n.writeConf("10-bt.conflist", strings.Replace(n.bridgeConf("bt", "1.0.0", "10.88.7.0/28"), `"snat":true`, `"snat":true,"backend":"`+backend+`"`, 1))
			mapping := []*cri.PortMapping{{HostPort: 18080, ContainerPort: 80, Protocol: cri.Protocol_TCP}, {ContainerPort: 81}}
			for i := range 3 {
				p := n.pod(fmt.Sprint("pod", i))
				p.PortMappings = mapping
				r := n.setup(p)
				stop := n.serve(p, 80)
				if body, err := n.get("127.0.0.1:18080"); err != nil || body != p.Name {
					t.Errorf("GET from the node's port: %q, %v; want %q", body, err, p.Name)
				}
				if rules := n.run("nft", "list", "ruleset"); strings.Count(rules, "dnat") != 1 || !strings.Contains(rules, r.IPs[0]+":80") {
					t.Errorf("rules with %s up:\n%s", p.Name, rules)
				}
				stop()
				if i == 0 {
					must(t, namespaces.Release(strings.TrimSuffix(p.NetNS, "/net")))
				}
				n.restart()
				n.teardown(PodNetwork{ID: p.ID, NetNS: p.NetNS}, r)
				if rules := n.run("nft", "list", "ruleset"); strings.Contains(rules, "dnat") || strings.Contains(rules, r.IPs[0]) {
					t.Errorf("rules after DEL of %s:\n%s", p.Name, rules)
				}
			}
		})
	}
}

func TestTeardownRetriesOnce(t *testing.T) {
	n := newNode(t)
	p := n.pod("web")
	r := n.setup(p)
	n.calls()
	n.script("portmap", fmt.Sprintf(`echo portmap >> %s/calls; test -e %s/tried || { touch %s/tried; echo '{"code":11,"msg":"try later"}'; exit 1; }`, n.dir, n.dir, n.dir))
	n.teardown(p, r)
	if calls := n.calls(); calls != "portmap, portmap, bridge DEL, host-local DEL" {
		t.Errorf("ran %s", calls)
	}
}

// TestTeardownGoesOnPastAFailure has a plugin that always fails: the others still
// give back what they hold, and the error stays until it is mended.
func TestTeardownGoesOnPastAFailure(t *testing.T) {
	n := newNode(t)
	p := n.pod("web")
	r := n.setup(p)
	n.script("portmap", `echo something odd >&2; echo '{"code":7,"msg":"no way","details":"at all"}'; exit 1`)
	err := n.in(func() error { return n.m.Teardown(context.Background(), p, r) })
	want := "CNI plugin portmap DEL: no way; at all (code 7); stderr: something odd"
	if !errors.Is(err, ErrTeardown) || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %q", err, want)
	}
	if len(n.leased()) != 0 || n.ports() != 0 {
		t.Errorf("leases %q, %d ports are left because portmap fails", n.leased(), n.ports())
	}
	n.shimPlugins("portmap")
	n.teardown(p, r)
}

func TestFailedSetupIsUndone(t *testing.T) {
	n := newNode(t)
	const refuse = `test $CNI_COMMAND = %s || exit 0; echo '{"code":100,"msg":"no %s today"}'; exit 1`
	for _, c := range []struct {
		name, script string
		teardown     bool // the undoing does not succeed either
	}{
		{"ADD", fmt.Sprintf(refuse, "ADD", "ADD"), false},
		{"both", `echo '{"code":100,"msg":"no '$CNI_COMMAND' today"}'; exit 1`, true},
		{"no address", `test $CNI_COMMAND = ADD && echo '{"cniVersion":"1.0.0"}'; exit 0`, false},
		{"not JSON", `test $CNI_COMMAND = ADD || exit 0; echo hello; exit 1`, false},
	} {
		n.script("portmap", c.script)
		p := n.pod(strings.ReplaceAll(c.name, " ", "-"))
		plan := n.plan(p)
		err := n.in(func() error { _, err := n.m.Setup(context.Background(), p, plan); return err })
		if !errors.Is(err, ErrSetup) || errors.Is(err, ErrTeardown) != c.teardown {
			t.Errorf("%s: %v", c.name, err)
		}
		if len(n.leased()) != 0 || n.ports() != 0 {
			t.Errorf("%s: leases %q, %d ports are left", c.name, n.leased(), n.ports())
		}
		if strings.Contains(err.Error(), "failed") || strings.Contains(err.Error(), "\n") != c.teardown {
			t.Errorf("%s: message %q", c.name, err)
		}
	}
}

func TestSetupNeedsANamespace(t *testing.T) {
	n := newNode(t)
	p := n.pod("web")
	plan := n.plan(p)
	for _, path := range []string{"", "/nonexistent", "/proc/self/ns/net", n.conf} {
		p.NetNS = path
		if _, err := n.m.Setup(context.Background(), p, plan); !errors.Is(err, ErrSetup) {
			t.Errorf("Setup in %q: %v", path, err)
		}
	}
	if calls := n.calls(); calls != "" {
		t.Errorf("plugins ran: %s", calls)
	}
}

// TestTeardownNeverEntersTheNode gives the node's own namespace: a plugin sent
// there would remove the node's eth0.
func TestTeardownNeverEntersTheNode(t *testing.T) {
	n := newNode(t)
	n.script("portmap", "echo [$CNI_NETNS] >> "+n.dir+"/calls")
	n.script("bridge", "exit 0")
	p := PodNetwork{ID: "x", NetNS: "/proc/self/ns/net"}
	n.teardown(p, n.plan(p))
	if calls := n.calls(); calls != "[]" {
		t.Errorf("CNI_NETNS = %s, want none", calls)
	}
}

func TestPluginNotFound(t *testing.T) {
	n := newNode(t)
	p := n.pod("web")
	plan := n.plan(p)
	must(t, os.Remove(n.shims+"/portmap"))
	err := n.in(func() error { _, err := n.m.Setup(context.Background(), p, plan); return err })
	if !errors.Is(err, ErrSetup) || !errors.Is(err, ErrPluginNotFound) || errors.Is(err, ErrTeardown) {
		t.Errorf("Setup without portmap: %v", err)
	}
	if len(n.leased()) != 0 || n.ports() != 0 {
		t.Errorf("leases %q, %d ports are left", n.leased(), n.ports())
	}
	n.shimPlugins("portmap")
	r := n.setup(p)
	must(t, os.Remove(n.shims+"/portmap"))
	err = n.in(func() error { return n.m.Teardown(context.Background(), p, r) })
	if !errors.Is(err, ErrTeardown) || !errors.Is(err, ErrPluginNotFound) || !strings.Contains(err.Error(), `"portmap" in `+n.shims) {
		t.Errorf("Teardown without portmap: %v", err)
	}
	if len(n.leased()) != 0 {
		t.Errorf("leases %q are left because portmap is missing", n.leased())
	}
}

func TestTeardownOfNothing(t *testing.T) {
	n := newNode(t)
	for _, r := range []*Result{nil, {}} {
		n.teardown(PodNetwork{ID: "x"}, r)
	}
	p := n.pod("web")
	n.teardown(p, n.plan(p)) // planned, never set up
	if err := n.m.Teardown(context.Background(), p, &Result{Config: []byte("{")}); !errors.Is(err, ErrTeardown) {
		t.Errorf("Teardown of a torn record: %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	must(t, err)
	return string(data)
}
