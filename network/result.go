package network

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
)

// errNoAddress: without one the kubelet would take the pod for not started.
var errNoAddress = errors.New("the result has no address for " + IfName)

// take fills in what ADD returned.
func (r *Result) take(result types.Result) error {
	if result == nil {
		return errNoAddress
	}
	raw, err := json.Marshal(result)
	if err != nil {
		return fmt.Errorf("encode the result: %w", err)
	}
	current, err := types100.NewResultFromResult(result)
	if err != nil {
		return fmt.Errorf("read the result: %w", err)
	}
	r.CNI = raw
	for _, i := range current.Interfaces {
		r.Interfaces = append(r.Interfaces, Interface{Name: i.Name, Mac: i.Mac, Sandbox: i.Sandbox})
	}
	r.IPs = podIPs(current)
	if len(r.IPs) == 0 {
		return errNoAddress
	}
	return nil
}

// podIPs lists the addresses of the pod's link in the result's order. Results
// of old versions do not say which link an address is on: then all count.
func podIPs(result *types100.Result) []string {
	var ips, unassigned []string
	for _, ip := range result.IPs {
		switch {
		case ip.Interface == nil:
			unassigned = append(unassigned, ip.Address.IP.String())
		case *ip.Interface < 0 || *ip.Interface >= len(result.Interfaces):
		default:
			if link := result.Interfaces[*ip.Interface]; link.Sandbox != "" && link.Name == IfName {
				ips = append(ips, ip.Address.IP.String())
			}
		}
	}
	if len(ips) == 0 {
		return unassigned
	}
	return ips
}
