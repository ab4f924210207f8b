package network

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/types/create"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestCapabilities(t *testing.T) {
	ports, err := portMappings([]*cri.PortMapping{
		{HostPort: 8080, ContainerPort: 80},
		{HostPort: 53, ContainerPort: 5353, Protocol: cri.Protocol_UDP, HostIp: "127.0.0.1"},
		{HostPort: 99, ContainerPort: 99, Protocol: cri.Protocol_SCTP, HostIp: "0:0::1"},
		{HostPort: 98, ContainerPort: 99, HostIp: "::ffff:10.0.0.1"},
		{HostPort: 0, ContainerPort: 81},
		{HostPort: -1, ContainerPort: 82},
	})
	must(t, err)
	got, err := capabilities(PodNetwork{
		CgroupParent: "/kubepods/pod1",
		Annotations:  map[string]string{annotationIngress: "10M", annotationEgress: "1.5Gi", "x": "y"},
		DNS:          &cri.DNSConfig{Servers: []string{"10.0.0.10"}, Searches: []string{"svc.local"}, Options: []string{"ndots:5"}},
	}, ports)
	must(t, err)
	for name, want := range map[string]string{
		"portMappings":                      `[{"hostPort":8080,"containerPort":80,"protocol":"tcp"},{"hostPort":53,"containerPort":5353,"protocol":"udp","hostIP":"127.0.0.1"},{"hostPort":99,"containerPort":99,"protocol":"sctp","hostIP":"::1"},{"hostPort":98,"containerPort":99,"protocol":"tcp","hostIP":"10.0.0.1"}]`,
		"dns":                               `{"servers":["10.0.0.10"],"searches":["svc.local"],"options":["ndots:5"]}`,
		"bandwidth":                         `{"ingressRate":10000000,"ingressBurst":2147483647,"egressRate":1610612736,"egressBurst":2147483647}`,
		"cgroupPath":                        `"/kubepods/pod1"`,
		"io.kubernetes.cri.pod-annotations": `{"kubernetes.io/egress-bandwidth":"1.5Gi","kubernetes.io/ingress-bandwidth":"10M","x":"y"}`,
	} {
		if string(got[name]) != want {
			t.Errorf("%s = %s\n want %s", name, got[name], want)
		}
	}
	if got, err := capabilities(PodNetwork{DNS: &cri.DNSConfig{}}, nil); err != nil || len(got) != 0 {
		t.Errorf("capabilities of an empty pod: %s, %v", got, err)
	}
}

func TestInvalidPods(t *testing.T) {
	m := &Manager{}
	for name, c := range map[string]struct {
		p    PodNetwork
		want string
	}{
		"host port":       {PodNetwork{PortMappings: []*cri.PortMapping{{ContainerPort: 1}, {HostPort: 65536, ContainerPort: 1}}}, "port_mappings[1].host_port 65536"},
		"container port":  {PodNetwork{PortMappings: []*cri.PortMapping{{HostPort: 1}}}, "port_mappings[0].container_port 0"},
		"protocol":        {PodNetwork{PortMappings: []*cri.PortMapping{{HostPort: 1, ContainerPort: 1, Protocol: 9}}}, "port_mappings[0].protocol 9"},
		"host address":    {PodNetwork{PortMappings: []*cri.PortMapping{{HostPort: 1, ContainerPort: 1, HostIp: "localhost"}}}, `port_mappings[0].host_ip "localhost"`},
		"address of link": {PodNetwork{PortMappings: []*cri.PortMapping{{HostPort: 1, ContainerPort: 1, HostIp: "fe80::1%eth0"}}}, `port_mappings[0].host_ip "fe80::1%eth0"`},
		"unmapped port":   {PodNetwork{PortMappings: []*cri.PortMapping{{HostPort: -1, ContainerPort: 65536}}}, "port_mappings[0].container_port 65536"},
		"unmapped proto":  {PodNetwork{PortMappings: []*cri.PortMapping{{ContainerPort: 1, Protocol: -1}}}, "port_mappings[0].protocol -1"},
		"multicast":       {PodNetwork{PortMappings: []*cri.PortMapping{{HostPort: 1, ContainerPort: 1, HostIp: "224.0.0.1"}}}, `port_mappings[0].host_ip "224.0.0.1" is a multicast`},
		"multicast six":   {PodNetwork{PortMappings: []*cri.PortMapping{{HostPort: 1, ContainerPort: 1, HostIp: "ff02::1"}}}, `port_mappings[0].host_ip "ff02::1" is a multicast`},
		"mapped":          {PodNetwork{PortMappings: []*cri.PortMapping{{HostPort: 1, ContainerPort: 1, HostIp: "::ffff:239.1.1.1"}}}, `is a multicast`},
		"broadcast":       {PodNetwork{PortMappings: []*cri.PortMapping{{HostPort: 1, ContainerPort: 1, HostIp: "255.255.255.255"}}}, `port_mappings[0].host_ip "255.255.255.255" is the broadcast`},
		"no host":         {PodNetwork{PortMappings: []*cri.PortMapping{{HostPort: 1, ContainerPort: 1, HostIp: "0.1.2.3"}}}, `port_mappings[0].host_ip "0.1.2.3" is an address of no host`},
		"ingress":         {PodNetwork{Annotations: map[string]string{annotationIngress: "fast"}}, annotationIngress + `: "fast"`},
		"egress":          {PodNetwork{Annotations: map[string]string{annotationEgress: "1"}}, annotationEgress + `: "1"`},
		"separator":       {PodNetwork{Name: "a;K8S_POD_NAMESPACE=kube-system"}, `pod_name "a;K8S_POD_NAMESPACE=kube-system"`},
		"id":              {PodNetwork{ID: "../x"}, `sandbox id "../x"`},
	} {
		if c.p.ID == "" {
			c.p.ID = "x"
		}
		if _, err := m.Plan(c.p); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want ErrInvalid with %q", name, err, c.want)
		}
	}
}

func TestParseQuantity(t *testing.T) {
	for text, want := range map[string]uint64{
		"1000": 1000, "1k": 1000, "1Ki": 1024, "10M": 1e7, "1.5M": 15e5, "0.5G": 5e8, "1Gi": 1 << 30,
		"1T": 1e12, "1P": 1e15, "1e6": 1e6, "1E6": 1e6, "2e12": 2e12, "1000.9": 1000, "0.001E": 1e15,
	} {
		if got, err := parseQuantity(text); err != nil || got != want {
			t.Errorf("parseQuantity(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "0", "999", "1m", "-1M", "1 M", "M", "1MB", "1.M", "2P", "1E", "1e99", "1e16", "9999999999999999999", "0x10", "1Mi\n"} {
		if got, err := parseQuantity(text); err == nil {
			t.Errorf("parseQuantity(%q) = %d, want an error", text, got)
		}
	}
}

func TestResultAddresses(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"only the pod's link counts": {`{"cniVersion":"1.0.0","interfaces":[{"name":"br0"},{"name":"eth0","sandbox":"/ns"},{"name":"net1","sandbox":"/ns"},{"name":"eth0"}],
			"ips":[{"interface":0,"address":"10.0.0.1/24"},{"interface":2,"address":"10.2.0.1/24"},{"interface":1,"address":"fd00::2/64"},{"interface":3,"address":"10.3.0.1/24"},{"interface":1,"address":"10.0.0.2/24"},{"interface":9,"address":"10.9.0.1/24"}]}`,
			"fd00::2 10.0.0.2"},
		"version 0.3.1 with a link":   {`{"cniVersion":"0.3.1","interfaces":[{"name":"eth0","sandbox":"/ns"}],"ips":[{"version":"4","interface":0,"address":"10.0.0.2/24"}]}`, "10.0.0.2"},
		"version 0.3.1 without links": {`{"cniVersion":"0.3.1","ips":[{"version":"6","address":"fd00::2/64"},{"version":"4","address":"10.0.0.2/24"}]}`, "fd00::2 10.0.0.2"},
		"version 0.2.0":               {`{"cniVersion":"0.2.0","ip4":{"ip":"10.0.0.2/24"}}`, "10.0.0.2"},
		"links without addresses":     {`{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"/ns"}]}`, ""},
		"nothing":                     {``, ""},
	} {
		var result types.Result
		if c.text != "" {
			var err error
			result, err = create.CreateFromBytes([]byte(c.text))
			must(t, err)
		}
		r := &Result{}
		err := r.take(result)
		if got := strings.Join(r.IPs, " "); got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%s: %q, %v; want %q", name, got, err, c.want)
		}
		if c.want != "" && !json.Valid(r.CNI) {
			t.Errorf("%s: recorded result %s", name, r.CNI)
		}
	}
}
