package hostport

import (
	"fmt"
	"net/netip"
)

// key is what a packet's destination is looked up by.
type key struct {
	six      bool
	addr     netip.Addr // invalid: every address of the family
	protocol string
	port     uint16
}

// keys are one for a mapping with an address, and one for each family else.
func (m Mapping) keys() []key {
	four := key{protocol: m.Protocol, port: m.HostPort}
	six := four
	six.six = true
	switch {
	case !m.HostIP.IsValid():
		return []key{four, six}
	case m.HostIP == netip.IPv4Unspecified():
		return []key{four}
	case m.HostIP == netip.IPv6Unspecified():
		return []key{six}
	case m.HostIP.Is4():
		four.addr = m.HostIP
		return []key{four}
	default:
		six.addr = m.HostIP
		return []key{six}
	}
}

// overlaps tells whether one packet could be meant for both, as two sockets
// could not be bound to both.
func (m Mapping) overlaps(other Mapping) bool {
	if m.Protocol != other.Protocol || m.HostPort != other.HostPort {
		return false
	}
	for _, a := range m.keys() {
		for _, b := range other.keys() {
			if a.six == b.six && (a.addr == b.addr || !a.addr.IsValid() || !b.addr.IsValid()) {
				return true
			}
		}
	}
	return false
}

// consistent refuses ::1, which cannot be led anywhere, and mappings of one pod
// that lead the same port to two places. A port with an address beside the same
// port without one is none of these: the first is the more precise.
func consistent(ports []Mapping) error {
	seen := map[key]Mapping{}
	for _, p := range ports {
		if p.HostIP == netip.IPv6Loopback() {
			return fmt.Errorf("%w: %s: the kernel forwards nothing from or to ::1", ErrInvalid, p)
		}
		for _, k := range p.keys() {
			if other, ok := seen[k]; ok && other.ContainerPort != p.ContainerPort {
				return fmt.Errorf("%w: %s leads to container port %d, and %s to %d", ErrInvalid, other, other.ContainerPort, p, p.ContainerPort)
			}
			seen[k] = p
		}
	}
	return nil
}

// target is one entry of the table: a destination and where it leads.
type target struct {
	key
	end  end
	port uint16
}

// targets are a mapping's in the families that the pod has.
func (p *pod) targets(m Mapping) []target {
	var out []target
	for _, k := range m.keys() {
		for _, e := range p.ends {
			if e.addr.Is6() == k.six {
				out = append(out, target{key: k, end: e, port: m.ContainerPort})
			}
		}
	}
	return out
}
