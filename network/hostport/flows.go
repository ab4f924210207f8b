package hostport

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// UDP has no end of a connection that the kernel could see: a client that goes on
// sending keeps its conntrack entry, and with it the translation that was right
// when it began, alive for ever. So entries are deleted that began before a port
// was opened, and those of a pod whose port is closed.

// stale matches the flows to forget.
type stale struct {
	pod   *pod
	own   map[netip.Addr]bool // addresses of the node; nil: match flows to the pod instead
	ports map[uint16]bool
}

// MatchConntrackFlow implements netlink's interface.
func (s *stale) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	if f.Forward.Protocol != unix.IPPROTO_UDP || !s.ports[f.Forward.DstPort] {
		return false
	}
	to, answers := addrOf(f.Forward.DstIP), addrOf(f.Reverse.SrcIP)
	leadsHere := false
	for _, e := range s.pod.ends {
		leadsHere = leadsHere || e.addr == answers
	}
	if s.own == nil {
		return leadsHere && to != answers
	}
	return !leadsHere && s.own[to]
}

func addrOf(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// forgetFlows deletes the UDP flows that must not go on: when a pod is closed,
// those that were led to it, and when it was opened, those to its ports on the
// node that lead elsewhere. For a pod without UDP ports it does nothing.
func forgetFlows(p *pod, closed bool) error {
	s := &stale{pod: p, ports: map[uint16]bool{}}
	for _, m := range p.ports {
		if m.Protocol == "udp" {
			s.ports[m.HostPort] = true
		}
	}
	if len(s.ports) == 0 {
		return nil
	}
	if !closed {
		var err error
		if s.own, err = nodeAddresses(); err != nil {
			return err
		}
	}
	for _, e := range p.ends {
		family := netlink.InetFamily(unix.AF_INET)
		if e.addr.Is6() {
			family = unix.AF_INET6
		}
		if err := deleteFlows(family, s); err != nil {
			return fmt.Errorf("delete old UDP flows: %w", err)
		}
	}
	return nil
}

// deleteFlows tries again when the table of flows has changed below the listing.
// A kernel that has no interface to conntrack keeps its entries.
func deleteFlows(family netlink.InetFamily, s *stale) error {
	var err error
	for range 5 {
		_, err = netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, s)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil
	}
	return err
}

func nodeAddresses() (map[netip.Addr]bool, error) {
	list, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list the node's addresses: %w", err)
	}
	own := map[netip.Addr]bool{}
	for _, a := range list {
		own[addrOf(a.IP)] = true
	}
	return own, nil
}
