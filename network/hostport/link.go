package hostport

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
)

// findEnds takes the first address of each family and asks the kernel over which
// link it is reached. A pod that is only reached over the default route, such as
// one whose routes come later, has no known near link: it can then not be reached
// from the node's loopback, nor from itself through the node.
func findEnds(ips []netip.Addr) ([]end, error) {
	var ends []end
	for _, ip := range ips {
		ip = ip.Unmap()
		if len(ends) > 0 && ends[0].addr.Is6() == ip.Is6() || len(ends) == 2 {
			continue
		}
		link, err := nearLink(ip)
		if err != nil {
			return nil, fmt.Errorf("find the link that leads to %s: %w", ip, err)
		}
		ends = append(ends, end{addr: ip, link: link})
	}
	return ends, nil
}

func nearLink(ip netip.Addr) (string, error) {
	routes, err := netlink.RouteGetWithOptions(net.IP(ip.AsSlice()), &netlink.RouteGetOptions{FIBMatch: true})
	if err != nil {
		return "", err
	}
	for _, r := range routes {
		if r.Dst == nil || r.LinkIndex == 0 {
			continue
		}
		if ones, _ := r.Dst.Mask.Size(); ones == 0 {
			continue
		}
		link, err := netlink.LinkByIndex(r.LinkIndex)
		if err != nil {
			return "", err
		}
		return link.Attrs().Name, nil
	}
	return "", nil
}

// localnetFile is the setting that lets packets from 127.0.0.0/8 leave through a
// link. Tests replace the directory.
func localnetFile(link string) string {
	return filepath.Join("/proc/sys/net/ipv4/conf", link, "route_localnet")
}

// settleLocalnet switches route_localnet off on links that no pod is behind any
// more, if it was switched on here, and adds those to be switched on. A link
// that is gone has no setting, and one where it is on already is another's.
func settleLocalnet(localnet map[string]bool, pods map[string]*pod) {
	used := map[string]bool{}
	for _, p := range pods {
		for _, e := range p.ends {
			if e.addr.Is4() && e.link != "" {
				used[e.link] = true
			}
		}
	}
	for link := range localnet {
		if !used[link] {
			_ = os.WriteFile(localnetFile(link), []byte("0"), 0) // only fails when the link is gone
			delete(localnet, link)
		}
	}
	for link := range used {
		if now, err := os.ReadFile(localnetFile(link)); err == nil && bytes.Equal(bytes.TrimSpace(now), []byte("0")) {
			localnet[link] = true
		}
	}
}

// switchOn is called once the table with its guard is there.
func switchOn(localnet map[string]bool) error {
	for link := range localnet {
		err := os.WriteFile(localnetFile(link), []byte("1"), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("let packets from 127.0.0.0/8 leave through %s: %w", link, err)
		}
	}
	return nil
}
