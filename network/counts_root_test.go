package network

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestProcessesOfAPod counts what ADD and DEL spawn with a bridge that
// masquerades and a mapped port: each plugin once a verb, and the packet filter's
// tools as the plugins call them. The bounds are what the plugins of release 1.10
// need; a higher count means that berth has begun to run them more often.
func TestProcessesOfAPod(t *testing.T) {
	const plugins = "bridge ADD, host-local ADD, portmap ADD, portmap DEL, bridge DEL, host-local DEL"
	for _, c := range []struct {
		name, masq, portmap string
		port                bool
		limit               int // tools
	}{
		{"plain", ``, ``, false, 4},
		{"masquerading by iptables", `"ipMasq":true,"ipMasqBackend":"iptables"`, ``, false, 24},
		{"masquerading by nftables", `"ipMasq":true,"ipMasqBackend":"nftables"`, ``, false, 17},
		{"masquerading and portmap by nftables", `"ipMasq":true,"ipMasqBackend":"nftables"`, `"backend":"nftables"`, false, 13},
		{"port by nftables", ``, `"backend":"nftables"`, true, 15},
		{"port and masquerading by nftables", `"ipMasq":true,"ipMasqBackend":"nftables"`, `"backend":"nftables"`, true, 28},
		{"port and masquerading by iptables", `"ipMasq":true,"ipMasqBackend":"iptables"`, `"backend":"iptables"`, true, 61},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			tools := n.countTools()
			conf := n.bridgeConf("bt", "1.0.0", "10.88.7.0/28")
			if c.masq != "" {
				conf = strings.Replace(conf, `"isGateway":true`, `"isGateway":true,`+c.masq, 1)
			}
			if c.portmap != "" {
				conf = strings.Replace(conf, `"snat":true`, `"snat":true,`+c.portmap, 1)
			}
			n.writeConf("10-bt.conflist", conf)
			p := n.pod("web")
			if c.port {
				p.PortMappings = []*cri.PortMapping{{HostPort: 18080, ContainerPort: 80}}
			}
			r := n.setup(p)
			added := tools()
			n.teardown(p, r)
			deleted := tools()
			if calls := n.calls(); calls != plugins {
				t.Errorf("plugins ran: %s\n want: %s", calls, plugins)
			}
			t.Logf("6 plugin processes and %d tools in ADD, %d in DEL", added, deleted)
			if added+deleted > c.limit {
				t.Errorf("%d runs of the packet filter's tools, more than %d", added+deleted, c.limit)
			}
		})
	}
}

// countTools puts counting scripts first in PATH and returns a function that
// tells how many runs there were since it was last asked.
func (n *node) countTools() func() int {
	n.t.Helper()
	dir := n.dir + "/tools"
	must(n.t, os.Mkdir(dir, 0o755))
	for _, name := range []string{"iptables", "ip6tables", "nft", "conntrack"} {
		if real, err := exec.LookPath(name); err == nil {
			must(n.t, writeScript(dir+"/"+name, fmt.Sprintf("echo %s >> %s/log\nexec %s \"$@\"", name, dir, real)))
		}
	}
	n.t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return func() int {
		data, _ := os.ReadFile(dir + "/log")
		os.Remove(dir + "/log")
		return strings.Count(string(data), "\n")
	}
}
