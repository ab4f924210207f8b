package cases

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// knobs reads settings of the machine and of the test's network namespace.
func knobs(t *testing.T, names ...string) map[string]string {
	t.Helper()
	values := map[string]string{}
	for _, name := range names {
		value, err := os.ReadFile(filepath.Join("/proc/sys", name))
		if err != nil {
			t.Fatal(err)
		}
		values[name] = string(value)
	}
	return values
}

// B61: a sysctl sets what it names, in the pod's own namespaces, or the pod is
// refused; nothing in a name or a value reaches another knob.
func TestB61SysctlsStayInThePod(t *testing.T) {
	e := start(t, node.Options{})
	watched := []string{"kernel/core_pattern", "kernel/shm_rmid_forced", "kernel/randomize_va_space", "kernel/hostname", "kernel/sem",
		"net/ipv4/ip_forward", "net/ipv4/ip_local_port_range", "net/core/somaxconn"}
	before := knobs(t, watched...)
	node, pod := cri.NamespaceMode_NODE, cri.NamespaceMode_POD
	for _, c := range []struct {
		network, ipc cri.NamespaceMode
		name, value  string
	}{
		{pod, pod, "kernel.shm_rmid_forced", "1+kernel.core_pattern=|/x"},
		{pod, pod, "kernel.shm_rmid_forced", "1\nkernel.core_pattern=|/x"},
		{pod, pod, "kernel.shm_rmid_forced=1+kernel.core_pattern", "|/x"},
		{pod, pod, "kernel.shm_rmid_forced;kernel.core_pattern", "|/x"},
		{pod, pod, "kernel.core_pattern", "|/x"},
		{pod, pod, "kernel/core_pattern", "|/x"},
		{pod, pod, "kernel.randomize_va_space", "0"},
		{pod, pod, "kernel.hostname", "x"},
		{pod, pod, "net/../kernel/core_pattern", "|/x"},
		{pod, pod, "net.ipv4/../../kernel/core_pattern", "|/x"},
		{pod, pod, "net.ipv4.../../kernel.core_pattern", "|/x"},
		{pod, pod, "fs.mqueue/../../kernel/core_pattern", "|/x"},
		{pod, pod, "/net/ipv4/ip_forward", "1"},
		{pod, pod, "", "1"},
		{node, pod, "net.ipv4.ip_forward", "1"},
		{node, pod, "net/ipv4/ip_local_port_range", "1024 2048"},
		{node, pod, "net.core.somaxconn", "77"},
		{pod, node, "kernel.shm_rmid_forced", "1"},
		{pod, node, "kernel.sem", "1 2 3 4"},
	} {
		config := e.sandbox()
		config.Linux.SecurityContext.NamespaceOptions.Network, config.Linux.SecurityContext.NamespaceOptions.Ipc = c.network, c.ipc
		config.Linux.Sysctls = map[string]string{c.name: c.value}
		_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: config})
		e.refused(c.name+" = "+c.value, err, codes.InvalidArgument, strings.TrimPrefix(c.name, "/"))
		if after := knobs(t, watched...); !maps.Equal(before, after) {
			t.Fatalf("%s = %q has changed %v to %v", c.name, c.value, before, after)
		}
	}
	e.empty("refusals")

	config := e.sandbox()
	config.Linux.Sysctls = map[string]string{"kernel.shm_rmid_forced": "1", "net/ipv4/ip_local_port_range": "1024 2048", "net.core.somaxconn": "77"}
	e.pull(images.Busybox)
	id := e.run(config)
	out := e.output(id, command("show", "cd /proc/sys && cat kernel/shm_rmid_forced net/ipv4/ip_local_port_range net/core/somaxconn"), config)
	if got := strings.Join(strings.Fields(out), " "); got != "1 1024 2048 77" {
		t.Errorf("inside, the sysctls are %q", got)
	}
	if after := knobs(t, watched...); !maps.Equal(before, after) {
		t.Errorf("a pod's sysctls have changed the node's: %v to %v", before, after)
	}
}
