package network

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/sandbox/leakcheck"
	"berth/sandbox/namespaces"
)

// node is a node of its own for one test: plugins run inside a network namespace
// made for it, so bridges, links and packet filter rules touch nobody else's.
type node struct {
	t                               *testing.T
	dir, conf, cache, leases, shims string
	netns                           string
	m                               *Manager
}

// newNode makes a node with real plugins and a bridge network on a /28.
func newNode(t *testing.T) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{t: t, dir: dir, conf: dir + "/net.d", cache: dir + "/cache", leases: dir + "/leases", shims: dir + "/bin"}
	leakcheck.Start(t, leakcheck.Leases(n.leases))
	n.netns = n.pin("node")
	for _, d := range []string{n.conf, n.shims} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.shimPlugins("bridge", "host-local", "portmap")
	n.writeConf("10-bt.conflist", n.bridgeConf("bt", "1.0.0", "10.88.7.0/28"))
	n.restart()
	t.Cleanup(func() { n.m.Close() })
	return n
}

// restart is what a new daemon begins with.
func (n *node) restart() {
	n.t.Helper()
	if n.m != nil {
		n.m.Close()
	}
	m, err := New(Options{ConfDir: n.conf, BinDirs: []string{n.shims}, CacheDir: n.cache, Timeout: leakcheck.Patience(20 * time.Second)})
	if err != nil {
		n.t.Fatal(err)
	}
	n.m = m
}

// pin makes a network namespace and returns its file.
func (n *node) pin(id string) string {
	n.t.Helper()
	dir := filepath.Join(n.dir, "ns", id)
	if err := namespaces.Pin(namespaces.Spec{Dir: dir, Net: true}); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		if err := namespaces.Release(dir); err != nil {
			n.t.Error(err)
		}
	})
	return namespaces.Path(dir, namespaces.Net)
}

// in runs f, and every plugin that f runs, inside the node.
func (n *node) in(f func() error) error { return namespaces.Enter(n.netns, f) }

func (n *node) bridgeConf(network, version, subnet string) string {
	return fmt.Sprintf(`{"cniVersion":%q,"name":%q,"plugins":[
		{"type":"bridge","bridge":"br0","isGateway":true,"ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":%q}]]}},
		{"type":"portmap","snat":true,"capabilities":{"portMappings":true}}]}`, version, network, n.leases, subnet)
}

func (n *node) writeConf(name, text string) {
	n.t.Helper()
	if err := os.WriteFile(filepath.Join(n.conf, name), []byte(text), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// shimPlugins puts scripts in the place of plugins: each writes its name and verb
// into a log and runs the real one.
func (n *node) shimPlugins(names ...string) {
	for _, name := range names {
		n.script(name, fmt.Sprintf("echo %s $CNI_COMMAND >> %s/calls\nexec %s", name, n.dir, realPlugin(n.t, name)))
	}
}

func realPlugin(t *testing.T, name string) string {
	return filepath.Join(leakcheck.DepsDir(t), "cni", name)
}

// script writes a plugin in shell.
func (n *node) script(name, text string) {
	n.t.Helper()
	if err := writeScript(filepath.Join(n.shims, name), text); err != nil {
		n.t.Fatal(err)
	}
}

// writeScript replaces the file instead of writing into it: it may be running.
func writeScript(file, text string) error {
	if err := os.WriteFile(file+".new", []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// calls returns the log of plugin runs since the last time.
func (n *node) calls() string {
	data, err := os.ReadFile(n.dir + "/calls")
	if err != nil && !os.IsNotExist(err) {
		n.t.Fatal(err)
	}
	os.Remove(n.dir + "/calls")
	return strings.ReplaceAll(strings.TrimSpace(string(data)), "\n", ", ")
}

// pod returns a pod with a fresh network namespace.
func (n *node) pod(name string) PodNetwork {
	n.t.Helper()
	return PodNetwork{ID: name + "-id", Name: name, Namespace: "default", UID: "uid-" + name, NetNS: n.pin("pod-" + name)}
}

// plan plans and sends the Result through JSON, as the record does.
func (n *node) plan(p PodNetwork) *Result {
	n.t.Helper()
	plan, err := n.m.Plan(p)
	if err != nil {
		n.t.Fatal(err)
	}
	return roundTrip(n.t, plan)
}

func (n *node) setup(p PodNetwork) *Result {
	n.t.Helper()
	plan := n.plan(p)
	var result *Result
	err := n.in(func() (err error) { result, err = n.m.Setup(context.Background(), p, plan); return err })
	if err != nil {
		n.t.Fatal(err)
	}
	return roundTrip(n.t, result)
}

func (n *node) teardown(p PodNetwork, r *Result) {
	n.t.Helper()
	if err := n.in(func() error { return n.m.Teardown(context.Background(), p, r) }); err != nil {
		n.t.Fatal(err)
	}
}

// leased lists the addresses that are taken.
func (n *node) leased() []string {
	n.t.Helper()
	var list []string
	files, err := filepath.Glob(n.leases + "/*/*")
	if err != nil {
		n.t.Fatal(err)
	}
	for _, f := range files {
		if net.ParseIP(filepath.Base(f)) != nil {
			list = append(list, filepath.Base(f))
		}
	}
	return list
}

// run runs a command inside the node and returns its output.
func (n *node) run(command ...string) string {
	n.t.Helper()
	var out []byte
	err := n.in(func() (err error) { out, err = exec.Command(command[0], command[1:]...).CombinedOutput(); return err })
	if err != nil {
		n.t.Fatalf("%q: %v: %s", command, err, out)
	}
	return string(out)
}

// ports counts the links on the node's bridge.
func (n *node) ports() int {
	n.t.Helper()
	return strings.Count(n.run("ip", "-o", "link", "show", "type", "veth"), "\n")
}

// serve answers HTTP in the pod with its name, until the returned function is
// called.
func (n *node) serve(p PodNetwork, port int) (stop func()) {
	n.t.Helper()
	var listener net.Listener
	err := namespaces.Enter(p.NetNS, func() (err error) { listener, err = net.Listen("tcp4", fmt.Sprintf(":%d", port)); return err })
	if err != nil {
		n.t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, p.Name) })}
	go server.Serve(listener)
	return func() { server.Close() }
}

// get asks over HTTP from inside the node.
func (n *node) get(address string) (string, error) {
	var body []byte
	err := n.in(func() error {
		// The connection is made here and not by http.Transport, which would do
		// it on a goroutine outside of the node.
		conn, err := net.DialTimeout("tcp4", address, leakcheck.Patience(2*time.Second))
		if err != nil {
			return err
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(leakcheck.Patience(2 * time.Second)))
		fmt.Fprintf(conn, "GET / HTTP/1.0\r\n\r\n")
		body, err = io.ReadAll(conn)
		return err
	})
	_, text, _ := strings.Cut(string(body), "\r\n\r\n")
	return text, err
}

func roundTrip(t *testing.T, r *Result) *Result {
	t.Helper()
	data, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	back := &Result{}
	if err := json.Unmarshal(data, back); err != nil {
		t.Fatal(err)
	}
	return back
}
