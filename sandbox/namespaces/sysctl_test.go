package namespaces

import (
	"errors"
	"strings"
	"testing"
)

func TestSysctlNames(t *testing.T) {
	all := Spec{Dir: "/x", Net: true, IPC: true, UTS: true}
	for name, want := range map[string]string{
		"net.ipv4.ip_forward":              "net/ipv4/ip_forward",
		"net/ipv4/ip_forward":              "net/ipv4/ip_forward",
		"net.ipv4.conf.eth0/1.forwarding":  "net/ipv4/conf/eth0.1/forwarding",
		"net/ipv4/conf/eth0.1/forwarding":  "net/ipv4/conf/eth0.1/forwarding",
		"net.ipv4.neigh.veth0@if5.mcast_x": "net/ipv4/neigh/veth0@if5/mcast_x",
		"kernel.shm_rmid_forced":           "kernel/shm_rmid_forced",
		"kernel.msgmax":                    "kernel/msgmax",
		"kernel.sem":                       "kernel/sem",
		"fs.mqueue.msg_max":                "fs/mqueue/msg_max",
	} {
		all.Sysctls = map[string]string{name: "1"}
		got, err := parseSysctls(all)
		if err != nil || len(got) != 1 || strings.Join(got[0].path, "/") != want {
			t.Errorf("%s: %+v, %v; want path %s", name, got, err, want)
		}
	}
}

func TestSysctlRefused(t *testing.T) {
	own := Spec{Dir: "/x", Net: true, IPC: true, UTS: true}
	hostNet := Spec{Dir: "/x", IPC: true}
	hostIPC := Spec{Dir: "/x", Net: true}
	for _, c := range []struct {
		spec        Spec
		name, value string
		reason      string
	}{
		{own, "kernel.core_pattern", "|/x", "belongs to the node"},
		{own, "kernel.sem_x", "1", "belongs to the node"},
		{own, "kernel.shm.x", "1", "belongs to the node"},
		{own, "vm.overcommit_memory", "1", "belongs to the node"},
		{own, "fs.mqueue", "1", "belongs to the node"},
		{own, "net", "1", "belongs to the node"},
		{own, "kernel.hostname", "x", "hostname field"},
		{own, "kernel.domainname", "x", "hostname field"},
		{own, "", "1", "not a sysctl name"},
		{own, ".", "1", "not a sysctl name"},
		{own, "net.ipv4.", "1", "not a sysctl name"},
		{own, "net..ipv4", "1", "not a sysctl name"},
		{own, "/net/ipv4/ip_forward", "1", "not a sysctl name"},
		{own, "net/../kernel/core_pattern", "1", "not a sysctl name"},
		{own, "net/ipv4/../../kernel/core_pattern", "1", "not a sysctl name"},
		{own, "net.ipv4/../../kernel.core_pattern", "1", "not a sysctl name"},
		{own, "kernel.shm/../core_pattern", "1", "not a sysctl name"},
		{own, "net/./ipv4", "1", "not a sysctl name"},
		{own, "net.ipv4.ip_forward=1+kernel.core_pattern", "1", "not a sysctl name"},
		{own, "net.ipv4.ip_forward\n", "1", "not a sysctl name"},
		{own, "net.ipv4.ip_forward\x00", "1", "not a sysctl name"},
		{own, "net.ipv4.ip forward", "1", "not a sysctl name"},
		{own, "net.ipv4.ïp_forward", "1", "not a sysctl name"},
		{own, "net.ipv4.ip_forward", "", "value is empty"},
		{own, "net.ipv4.ip_forward", "1\n", "control characters"},
		{own, "net.ipv4.ip_forward", "1\nkernel.core_pattern=|/x", "control characters"},
		{own, "net.ipv4.ip_forward", "1\x00", "control characters"},
		{hostNet, "net.ipv4.ip_forward", "1", "shares the node's network"},
		{hostIPC, "kernel.shm_rmid_forced", "1", "shares the node's IPC"},
		{hostIPC, "fs.mqueue.msg_max", "1", "shares the node's IPC"},
		{Spec{}, "kernel.msgmax", "1", "shares the node's IPC"},
	} {
		c.spec.Sysctls = map[string]string{c.name: c.value}
		_, err := parseSysctls(c.spec)
		if !errors.Is(err, ErrBadSysctl) || !errors.Is(err, ErrInvalid) {
			t.Errorf("%q=%q: error %v, want ErrBadSysctl", c.name, c.value, err)
		} else if !strings.Contains(err.Error(), c.reason) {
			t.Errorf("%q=%q: %v; want reason %q", c.name, c.value, err, c.reason)
		}
	}
}

func TestSysctlGivenTwice(t *testing.T) {
	_, err := parseSysctls(Spec{Net: true, Sysctls: map[string]string{"net.ipv4.ip_forward": "1", "net/ipv4/ip_forward": "0"}})
	if !errors.Is(err, ErrBadSysctl) || !strings.Contains(err.Error(), "net/ipv4/ip_forward") || !strings.Contains(err.Error(), "twice") {
		t.Errorf("error %v, want both names", err)
	}
}

func TestSysctlOrder(t *testing.T) {
	got, err := parseSysctls(Spec{Net: true, DefaultSysctls: true, Sysctls: map[string]string{
		"net.ipv4.conf.default.rp_filter":     "1",
		"net.ipv4.conf.all.accept_redirects":  "0",
		"net.ipv4.conf.eth0.rp_filter":        "2",
		"net.ipv4.ip_forward":                 "1",
		"net.ipv4.ip_unprivileged_port_start": "80",
	}})
	if err != nil {
		t.Fatal(err)
	}
	var order, late []string
	for _, c := range got {
		order = append(order, c.path[len(c.path)-1]+"="+c.value)
		if c.ofLink() {
			late = append(late, c.name)
		}
	}
	want := "ip_forward=1 ip_unprivileged_port_start=80 ping_group_range=0 2147483647 accept_redirects=0 rp_filter=1 rp_filter=2"
	if s := strings.Join(order, " "); s != want {
		t.Errorf("order %s\n want %s", s, want)
	}
	if len(late) != 1 || late[0] != "net.ipv4.conf.eth0.rp_filter" {
		t.Errorf("settings of links: %q", late)
	}
}

func TestSpecRefused(t *testing.T) {
	for _, s := range []Spec{
		{Dir: "relative", Net: true},
		{Dir: "", IPC: true},
		{Dir: "/x", Net: true, Hostname: "web"},
		{Dir: "/x", UTS: true, Hostname: strings.Repeat("a", 65)},
	} {
		if err := Pin(s); !errors.Is(err, ErrInvalid) {
			t.Errorf("Pin(%+v) = %v, want ErrInvalid", s, err)
		}
	}
	if err := Pin(Spec{Dir: "/nonexistent/x"}); err != nil {
		t.Errorf("Pin with the node's namespaces only = %v", err)
	}
}

func FuzzSysctl(f *testing.F) {
	f.Add("net.ipv4.conf.eth0/1.forwarding", "1")
	f.Add("kernel.shm/../core_pattern", "|/x")
	f.Add("net/ipv4/../../kernel/core_pattern", "1\n2")
	f.Fuzz(func(t *testing.T, name, value string) {
		got, err := parseSysctls(Spec{Net: true, IPC: true, Sysctls: map[string]string{name: value}})
		if err != nil {
			if !errors.Is(err, ErrBadSysctl) {
				t.Fatalf("error %v is no ErrBadSysctl", err)
			}
			return
		}
		file := "/" + strings.Join(got[0].path, "/")
		if strings.Contains(file, "..") || strings.Contains(file, "//") || strings.ContainsAny(file+got[0].value, "\x00\n") {
			t.Fatalf("%q = %q was taken as %q", name, value, file)
		}
		ipc := strings.HasPrefix(file, "/kernel/shm") || strings.HasPrefix(file, "/kernel/msg") || file == "/kernel/sem" || strings.HasPrefix(file, "/fs/mqueue/")
		if !ipc && !strings.HasPrefix(file, "/net/") {
			t.Fatalf("%q was taken as %q, which no namespace isolates", name, file)
		}
	})
}
