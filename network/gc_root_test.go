package network

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/sandbox/leakcheck"
)

// GC is run with the pods to keep, only where the network knows and allows it.
func TestGC(t *testing.T) {
	n := newNode(t)
	const onlyGC = `test $CNI_COMMAND = GC || exit 0; echo `
	n.script("bridge", onlyGC+`bridge >> `+n.dir+`/calls; cat > `+n.dir+`/stdin`)
	n.script("portmap", onlyGC+`portmap >> `+n.dir+`/calls`)
	for _, c := range []struct{ version, extra, calls string }{
		{"1.0.0", "", ""}, {"1.1.0", `"disableGC":true,`, ""}, {"1.1.0", "", "bridge, portmap"},
	} {
		conf := n.bridgeConf("bt", c.version, "10.88.7.0/28")
		n.writeConf("10-bt.conflist", strings.Replace(conf, `"plugins"`, c.extra+`"plugins"`, 1))
		must(t, n.in(func() error { return n.m.GC(context.Background(), []string{"a", "b"}) }))
		if calls := n.calls(); calls != c.calls {
			t.Errorf("version %s %s: ran %q, want %q", c.version, c.extra, calls, c.calls)
		}
	}
	want := `"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"},{"containerID":"b","ifname":"eth0"}]`
	if stdin := read(t, n.dir+"/stdin"); !strings.Contains(stdin, want) {
		t.Errorf("the plugin was given %s, want %s in it", stdin, want)
	}
	n.script("bridge", `echo '{"code":7,"msg":"not today"}'; exit 1`)
	err := n.in(func() error { return n.m.GC(context.Background(), nil) })
	if !errors.Is(err, ErrGC) || !strings.Contains(err.Error(), `network "bt": CNI plugin bridge GC: not today`) {
		t.Errorf("a plugin that refuses: %v", err)
	}
	must(t, os.RemoveAll(n.conf))
	must(t, n.m.GC(context.Background(), nil))
}

// A real plugin gives back the addresses of pods that are not there, and no others.
func TestGCGivesAddressesBack(t *testing.T) {
	n := newNode(t)
	n.writeConf("10-bt.conflist", `{"cniVersion":"1.1.0","name":"bt","plugins":[{"type":"host-local",
		"ipam":{"type":"host-local","dataDir":"`+n.leases+`","ranges":[[{"subnet":"10.88.7.0/28"}]]}}]}`)
	kept := n.pod("kept")
	r := n.setup(kept)
	must(t, os.WriteFile(n.leases+"/bt/10.88.7.9", []byte("nobody\r\neth0"), 0o600))
	must(t, n.in(func() error { return n.m.GC(context.Background(), []string{kept.ID}) }))
	if left := n.leased(); !slices.Equal(left, r.IPs) {
		t.Errorf("leases %q, want %q", left, r.IPs)
	}
	n.teardown(kept, r)
}

func TestGCHangs(t *testing.T) {
	n := newNode(t)
	n.writeConf("10-bt.conflist", n.bridgeConf("bt", "1.1.0", "10.88.7.0/28"))
	n.script("bridge", "test $CNI_COMMAND = STATUS || sleep 600")
	m, err := New(Options{ConfDir: n.conf, BinDirs: []string{n.shims}, CacheDir: n.cache, Timeout: time.Second})
	must(t, err)
	defer m.Close()
	begin := time.Now()
	err = n.in(func() error { return m.GC(context.Background(), nil) })
	if !errors.Is(err, ErrGC) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a plugin that hangs: %v", err)
	}
	if took := time.Since(begin); took > leakcheck.Patience(10*time.Second) {
		t.Errorf("GC took %v", took)
	}
}

// Two Managers with a directory each and one cache do not meet: a pod of one is
// taken down by it although the other has a network of the same name.
func TestManagersShareACache(t *testing.T) {
	n := newNode(t)
	second := n.dir + "/second.d"
	must(t, os.Mkdir(second, 0o755))
	must(t, os.WriteFile(second+"/10-bt.conflist", []byte(strings.Replace(n.bridgeConf("bt", "1.0.0", "10.88.8.0/28"), "br0", "br1", 1)), 0o600))
	other, err := New(Options{ConfDir: second, BinDirs: []string{n.shims}, CacheDir: n.cache, Timeout: leakcheck.Patience(20 * time.Second)})
	must(t, err)
	defer other.Close()
	a, b := n.pod("a"), n.pod("b")
	ra := n.setup(a)
	first := n.m
	n.m = other
	rb := n.setup(b)
	if !strings.HasPrefix(ra.IPs[0], "10.88.7.") || !strings.HasPrefix(rb.IPs[0], "10.88.8.") {
		t.Errorf("addresses %q and %q", ra.IPs, rb.IPs)
	}
	n.teardown(a, ra) // by the other one, as after a change of configuration
	n.m = first
	n.teardown(b, rb)
	if left := n.leased(); len(left) != 0 || n.ports() != 0 {
		t.Errorf("leases %q and %d ports are left", left, n.ports())
	}
}
