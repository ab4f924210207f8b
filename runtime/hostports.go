package runtime

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"berth/network"
	"berth/network/hostport"
	"berth/sandbox"
)

// Host ports are claimed before a pod has any effect, so that of two pods that
// want the same one the second is refused. Where no plugin of the network maps
// them, berth does, behind ADD, and takes them back before DEL.

// networkOf reads what a pod's record keeps of its network; nil when it has none.
func networkOf(sb *sandbox.Sandbox) (*network.Result, error) {
	if sb.Network == nil {
		return nil, nil
	}
	r := new(network.Result)
	if err := json.Unmarshal(sb.Network, r); err != nil {
		return nil, fmt.Errorf("read network of %s: %w", sb.ID, err)
	}
	return r, nil
}

func hostPortsOf(r *network.Result) []hostport.Mapping {
	var out []hostport.Mapping
	for _, p := range r.Ports {
		m := hostport.Mapping{Protocol: p.Protocol, HostPort: p.HostPort, ContainerPort: p.ContainerPort}
		if p.HostIP != "" {
			m.HostIP = netip.MustParseAddr(p.HostIP) // Plan wrote it
		}
		out = append(out, m)
	}
	return out
}

// claimPorts refuses a pod whose ports another one has, naming it.
func (s *Service) claimPorts(sb *sandbox.Sandbox, plan *network.Result) error {
	if plan.UnmappedPorts {
		if err := s.HostPorts.Available(); err != nil {
			return fmt.Errorf("port_mappings: no plugin of network %q maps ports: %w", plan.Network, err)
		}
	}
	err := s.HostPorts.Claim(sb.ID, hostPortsOf(plan))
	taken := new(hostport.TakenError)
	for errors.As(err, &taken) {
		owner, rerr := s.Records.Sandboxes.Get(taken.Owner)
		if rerr == nil && !s.deadPorts(owner) {
			return fmt.Errorf("port_mappings: %w: pod %s", err, owner.Name)
		}
		s.Log.WithField("sandbox", taken.Owner).Info("its host ports go to another pod, for it is dead")
		if err := s.HostPorts.Close(taken.Owner); err != nil {
			return err
		}
		err = s.HostPorts.Claim(sb.ID, hostPortsOf(plan))
	}
	if err != nil {
		return fmt.Errorf("port_mappings: %w", err)
	}
	return nil
}

// deadPorts tells whether a pod can do without its ports: it is not ready and
// will not be again. What a plugin has mapped stays until DEL.
func (s *Service) deadPorts(sb *sandbox.Sandbox) bool {
	if !visibleSandbox(sb) || sb.Ready(s.bootID) {
		return false
	}
	r, err := networkOf(sb)
	return err == nil && (r == nil || r.UnmappedPorts || sb.BootID != s.bootID)
}

func (s *Service) openPorts(id string, r *network.Result) error {
	var ips []netip.Addr
	for _, text := range r.IPs {
		ip, err := netip.ParseAddr(text)
		if err != nil {
			return fmt.Errorf("open host ports of %s: address of the pod: %w", id, err)
		}
		ips = append(ips, ip)
	}
	return s.HostPorts.Open(id, ips)
}

// restorePorts claims and opens the ports of the pods that are there, and
// removes those of pods that are not. A pod whose ports cannot be opened stays:
// what else it does goes on.
func (s *Service) restorePorts() {
	var pods []hostport.Pod
	for _, sb := range s.Records.Sandboxes.List() {
		r, err := networkOf(sb)
		if err != nil || r == nil || len(r.Ports) == 0 || sb.BootID != s.bootID || s.deadPorts(sb) {
			continue
		}
		p := hostport.Pod{ID: sb.ID, Ports: hostPortsOf(r)}
		for _, text := range r.IPs {
			if ip, err := netip.ParseAddr(text); err == nil && r.UnmappedPorts {
				p.IPs = append(p.IPs, ip)
			}
		}
		pods = append(pods, p)
	}
	if err := s.HostPorts.Restore(pods); err != nil {
		s.Log.WithError(err).Warn("host ports of pods of an earlier daemon")
	}
}

// repairPorts puts back what somebody has flushed.
func (s *Service) repairPorts() {
	repaired, err := s.HostPorts.Repair()
	if err != nil {
		s.Log.WithError(err).Warn("host ports")
	}
	if repaired {
		s.Log.Warn("somebody had removed the nftables rules of host ports; they are back")
	}
}
