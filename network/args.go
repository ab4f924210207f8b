package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/big"
	"net/netip"
	"regexp"
	"strings"

	"github.com/containernetworking/cni/pkg/utils"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Capabilities by the names that CNI's conventions give them.
const (
	capPortMappings   = "portMappings"
	capDNS            = "dns"
	capBandwidth      = "bandwidth"
	capCgroupPath     = "cgroupPath"
	capPodAnnotations = "io.kubernetes.cri.pod-annotations"
)

// The annotations that limit a pod's bandwidth, in bits per second.
const (
	annotationIngress = "kubernetes.io/ingress-bandwidth"
	annotationEgress  = "kubernetes.io/egress-bandwidth"
)

// PortMapping leads a port of the node to one of the pod, in the form of CNI's
// portMappings capability.
type PortMapping struct {
	HostPort      uint16 `json:"hostPort"`
	ContainerPort uint16 `json:"containerPort"`
	Protocol      string `json:"protocol"`         // tcp, udp or sctp
	HostIP        string `json:"hostIP,omitempty"` // an address; empty: every one of the node
}

type dnsCapability struct {
	Servers  []string `json:"servers,omitempty"`
	Searches []string `json:"searches,omitempty"`
	Options  []string `json:"options,omitempty"`
}

type bandwidth struct {
	IngressRate  uint64 `json:"ingressRate,omitempty"`
	IngressBurst uint64 `json:"ingressBurst,omitempty"`
	EgressRate   uint64 `json:"egressRate,omitempty"`
	EgressBurst  uint64 `json:"egressBurst,omitempty"`
}

// cniArgs returns CNI_ARGS. They travel as "key=value;key=value", so a value
// that holds a separator is refused: it could set another key.
func cniArgs(p PodNetwork) ([][2]string, error) {
	args := [][2]string{
		{"IgnoreUnknown", "1"},
		{"K8S_POD_NAMESPACE", p.Namespace},
		{"K8S_POD_NAME", p.Name},
		{"K8S_POD_INFRA_CONTAINER_ID", p.ID},
		{"K8S_POD_UID", p.UID},
	}
	if err := utils.ValidateContainerID(p.ID); err != nil {
		return nil, fmt.Errorf("%w: sandbox id %q: %w", ErrInvalid, p.ID, err)
	}
	for _, a := range args {
		if strings.ContainsAny(a[1], ";=\x00\n") {
			return nil, fmt.Errorf("%w: %s %q holds a separator", ErrInvalid, strings.ToLower(strings.TrimPrefix(a[0], "K8S_")), a[1])
		}
	}
	return args, nil
}

// capabilities returns what plugins may ask for, as JSON by capability. libcni
// gives each plugin only those that its configuration names.
func capabilities(p PodNetwork, ports []PortMapping) (map[string]json.RawMessage, error) {
	limits, err := bandwidthOf(p.Annotations)
	if err != nil {
		return nil, err
	}
	all := map[string]any{}
	if len(ports) > 0 {
		all[capPortMappings] = ports
	}
	if d := p.DNS; d != nil && len(d.Servers)+len(d.Searches)+len(d.Options) > 0 {
		all[capDNS] = dnsCapability{Servers: d.Servers, Searches: d.Searches, Options: d.Options}
	}
	if limits != nil {
		all[capBandwidth] = limits
	}
	if p.CgroupParent != "" {
		all[capCgroupPath] = p.CgroupParent
	}
	if len(p.Annotations) > 0 {
		all[capPodAnnotations] = p.Annotations
	}
	encoded := make(map[string]json.RawMessage, len(all))
	for name, value := range all {
		if encoded[name], err = json.Marshal(value); err != nil {
			return nil, fmt.Errorf("encode capability %s: %w", name, err)
		}
	}
	return encoded, nil
}

// CheckPorts refuses port mappings that cannot be, by field. ErrInvalid.
func CheckPorts(list []*cri.PortMapping) error {
	_, err := portMappings(list)
	return err
}

// portMappings leaves out the ports that map nothing on the node.
func portMappings(list []*cri.PortMapping) ([]PortMapping, error) {
	var ports []PortMapping
	for i, m := range list {
		field := fmt.Sprintf("port_mappings[%d]", i)
		name, known := cri.Protocol_name[int32(m.GetProtocol())]
		switch {
		case !known:
			return nil, fmt.Errorf("%w: %s.protocol %d is unknown", ErrInvalid, field, m.GetProtocol())
		case m.GetHostPort() > math.MaxUint16:
			return nil, fmt.Errorf("%w: %s.host_port %d is above 65535", ErrInvalid, field, m.GetHostPort())
		case m.GetContainerPort() <= 0 || m.GetContainerPort() > math.MaxUint16:
			return nil, fmt.Errorf("%w: %s.container_port %d is not between 1 and 65535", ErrInvalid, field, m.GetContainerPort())
		}
		host, err := hostAddress(m.GetHostIp())
		if err != nil {
			return nil, fmt.Errorf("%w: %s.host_ip %q %w", ErrInvalid, field, m.GetHostIp(), err)
		}
		if m.GetHostPort() <= 0 {
			continue
		}
		ports = append(ports, PortMapping{
			HostPort: uint16(m.GetHostPort()), ContainerPort: uint16(m.GetContainerPort()), Protocol: strings.ToLower(name), HostIP: host,
		})
	}
	return ports, nil
}

// hostAddress takes an address that one node can have; empty means all of its.
func hostAddress(text string) (string, error) {
	if text == "" {
		return "", nil
	}
	ip, err := netip.ParseAddr(text)
	switch ip = ip.Unmap(); {
	case err != nil || ip.Zone() != "":
		return "", errors.New("is not an address")
	case ip.IsMulticast():
		return "", errors.New("is a multicast address")
	case ip == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "", errors.New("is the broadcast address")
	case ip.Is4() && ip.As4()[0] == 0 && !ip.IsUnspecified():
		return "", errors.New("is an address of no host")
	}
	return ip.String(), nil
}

// bandwidthOf reads the annotations; nil when there are none. The burst is as
// large as the plugin allows, so that only the rate limits.
func bandwidthOf(annotations map[string]string) (*bandwidth, error) {
	const burst = math.MaxInt32
	var limits bandwidth
	if value, ok := annotations[annotationIngress]; ok {
		rate, err := parseQuantity(value)
		if err != nil {
			return nil, fmt.Errorf("%w: annotation %s: %w", ErrInvalid, annotationIngress, err)
		}
		limits.IngressRate, limits.IngressBurst = rate, burst
	}
	if value, ok := annotations[annotationEgress]; ok {
		rate, err := parseQuantity(value)
		if err != nil {
			return nil, fmt.Errorf("%w: annotation %s: %w", ErrInvalid, annotationEgress, err)
		}
		limits.EgressRate, limits.EgressBurst = rate, burst
	}
	if limits == (bandwidth{}) {
		return nil, nil
	}
	return &limits, nil
}

var quantity = regexp.MustCompile(`^([0-9]{1,18}(?:\.[0-9]{1,9})?)(k|[MGTPE]|[KMGTPE]i|[eE]1?[0-9])?$`)

// parseQuantity reads a Kubernetes quantity that means bits per second: between
// 1k and 1P, as the kubelet's own check has it.
func parseQuantity(text string) (uint64, error) {
	match := quantity.FindStringSubmatch(text)
	if match == nil {
		return 0, fmt.Errorf("%q is not a quantity", text)
	}
	value, ok := new(big.Rat).SetString(match[1])
	if !ok {
		return 0, fmt.Errorf("%q is not a quantity", text)
	}
	value.Mul(value, new(big.Rat).SetInt(factor(match[2])))
	whole := new(big.Int).Quo(value.Num(), value.Denom())
	if whole.Cmp(big.NewInt(1000)) < 0 || whole.Cmp(big.NewInt(1e15)) > 0 {
		return 0, fmt.Errorf("%q is not between 1k and 1P", text)
	}
	return whole.Uint64(), nil
}

func factor(suffix string) *big.Int {
	if exponent, ok := strings.CutPrefix(strings.ToLower(suffix), "e"); ok && exponent != "" && exponent != "i" {
		n, _ := new(big.Int).SetString(exponent, 10)
		return n.Exp(big.NewInt(10), n, nil)
	}
	base := big.NewInt(1000)
	unit, binary := strings.CutSuffix(suffix, "i")
	if binary {
		base = big.NewInt(1024)
	}
	power := strings.Index("kMGTPE", strings.Replace(unit, "K", "k", 1)) + 1
	if unit == "" {
		power = 0
	}
	return base.Exp(base, big.NewInt(int64(power)), nil)
}
