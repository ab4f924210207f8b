package stats

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const devHead = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
`

const (
	devLo    = "    lo: 9 9 9 9 0 0 0 0 9 9 9 9 0 0 0 0\n"
	devEth0  = "  eth0: 1000 10 1 2 0 0 0 0 2000 20 3 4 0 0 0 0\n"
	devNet1  = "net1:5 6 7 8 0 0 0 0 1 2 3 4 0 0 0 0\n" // wide numbers leave no blank
	devVeth  = "vethab: 5 6 7 8 0 0 0 0 1 2 3 4 0 0 0 0\n"
	routes   = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
	routes6  = "00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00450003     net1\n"
	noRoute6 = "fd000000000000000000000000000000 08 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth0\n" +
		"00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo\n"
)

func route(name, destination, metric, mask string) string {
	return strings.Join([]string{name, destination, "0100580A", "0003", "0", "0", metric, mask, "0", "0", "0"}, "\t") + "\n"
}

func TestReadNetwork(t *testing.T) {
	for what, c := range map[string]struct {
		files tree
		usual string
		leave map[string]bool
		want  string // default interface, then the others
	}{
		"a pod's":                     {tree{"dev": devHead + devLo + devNet1 + devEth0}, "eth0", nil, "eth0 net1"},
		"no eth0, but a route":        {tree{"dev": devHead + devLo + devNet1 + devVeth, "route": routes + route("net1", "0058580A", "0", "00FFFFFF") + route("vethab", "00000000", "0", "00000000")}, "eth0", nil, "vethab net1"},
		"the route of lowest metric":  {tree{"dev": devHead + devEth0 + devNet1, "route": routes + route("eth0", "00000000", "100", "00000000") + route("net1", "00000000", "20", "00000000")}, "", nil, "net1 eth0"},
		"a route of IPv6":             {tree{"dev": devHead + devEth0 + devNet1, "route": routes, "ipv6_route": noRoute6 + routes6}, "", nil, "net1 eth0"},
		"no default":                  {tree{"dev": devHead + devNet1, "route": routes, "ipv6_route": noRoute6}, "", nil, "- net1"},
		"loopback alone":              {tree{"dev": devHead + devLo}, "eth0", nil, "-"},
		"ends of other pods left out": {tree{"dev": devHead + devEth0 + devVeth, "route": routes + route("eth0", "00000000", "0", "00000000")}, "", map[string]bool{"vethab": true}, "eth0"},
		"but not the default one":     {tree{"dev": devHead + devEth0 + devVeth, "route": routes + route("vethab", "00000000", "0", "00000000")}, "", map[string]bool{"vethab": true, "eth0": true}, "vethab"},
	} {
		network, err := readNetwork(c.files.make(t), c.usual, c.leave)
		if err != nil || network.At.IsZero() {
			t.Errorf("%s: %v", what, err)
			continue
		}
		first, rest := "-", ""
		for _, i := range network.Interfaces {
			if i.Default {
				first = i.Name
			} else {
				rest += " " + i.Name
			}
		}
		if got := first + rest; got != c.want {
			t.Errorf("%s: %q, want %q", what, got, c.want)
		}
	}
	network, err := readNetwork(tree{"dev": devHead + devEth0}.make(t), "eth0", nil)
	want := Interface{Name: "eth0", Received: Traffic{1000, 10, 1, 2}, Sent: Traffic{2000, 20, 3, 4}, Default: true}
	if err != nil || len(network.Interfaces) != 1 || network.Interfaces[0] != want {
		t.Errorf("%s, %v", show(network), err)
	}
}

func TestReadNetworkRefusesWhatItDoesNotKnow(t *testing.T) {
	for _, line := range []string{"eth0: 1 2 3\n", "eth0: 1 2 3 4 0 0 0 0 x 2 3 4 0 0 0 0\n"} {
		if _, err := readNetwork(tree{"dev": devHead + line}.make(t), "eth0", nil); !errors.Is(err, errFormat) {
			t.Errorf("%q: %v", line, err)
		}
	}
	if _, err := readNetwork(filepath.Join(t.TempDir(), "none"), "", nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of nothing: %v", err)
	}
}

// The machine's own network, whatever it has: the two ways agree, but for the
// ends of pods.
func TestReadHostNetwork(t *testing.T) {
	host, err := ReadHostNetwork()
	if err != nil {
		t.Fatal(err)
	}
	here, err := ReadNetwork("")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, i := range here.Interfaces {
		names[i.Name] = true
	}
	for _, i := range host.Interfaces {
		if !names[i.Name] || i.Name == loopback {
			t.Errorf("the host's %s is not among %v", i.Name, names)
		}
	}
}
