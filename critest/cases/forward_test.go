package cases

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/cri-tools/pkg/common"

	"berth/critest/node"
)

// writeCertificate makes a key and a certificate of its own.
func writeCertificate(t *testing.T, cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv6loopback}}
	c, err := x509.CreateCertificate(rand.Reader, template, template, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	p, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: c}, key: {Type: "PRIVATE KEY", Bytes: p}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// listenIn makes a listener in a pod's network namespace, as a program in the pod
// would; without a pod, on the host.
func (e *env) listenIn(pod, address string) net.Listener {
	e.Helper()
	type result struct {
		l   net.Listener
		err error
	}
	made := make(chan result, 1)
	go func() {
		if pod != "" {
			goruntime.LockOSThread() // and never unlocked: the thread ends with this
			fd, err := unix.Open(filepath.Join(e.State(), "namespaces", pod, "net"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err == nil {
				err = unix.Setns(fd, unix.CLONE_NEWNET)
				_ = unix.Close(fd)
			}
			if err != nil {
				made <- result{nil, err}
				return
			}
		}
		l, err := net.Listen("tcp", address)
		made <- result{l, err}
	}()
	r := <-made
	if r.err != nil {
		e.Fatalf("listen on %s in pod %q: %v", address, pod, r.err)
	}
	e.Cleanup(func() { _ = r.l.Close() })
	return r.l
}

// serve handles each connection of a listener by f.
func serve(l net.Listener, f func(*net.TCPConn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			f(c.(*net.TCPConn))
		}()
	}
}

// answer answers all it got with its size and digest, and the same bytes again:
// only whoever closes their half hears it.
func answer(c *net.TCPConn) {
	b, _ := io.ReadAll(c)
	fmt.Fprintf(c, "%d %x\n", len(b), sha256.Sum256(b))
	_, _ = c.Write(b)
}

// forward is a client like kubectl port-forward. It returns the local port and
// the session's end.
func (e *env) forward(transport, pod string, port int) (local uint16, ended chan error) {
	e.Helper()
	res, err := e.rt.PortForward(e.ctx, &cri.PortForwardRequest{PodSandboxId: pod, Port: []int32{int32(port)}})
	if err != nil {
		e.Fatalf("port-forward: %v", err)
	}
	u, err := url.Parse(res.GetUrl())
	if err != nil {
		e.Fatal(err)
	}
	dialer, err := common.GetDialer(transport, u, &rest.TLSClientConfig{Insecure: true})
	if err != nil {
		e.Fatal(err)
	}
	stop, ready := make(chan struct{}), make(chan struct{})
	var said node.Screen
	f, err := portforward.NewForStreaming(dialer, []string{fmt.Sprintf("0:%d", port)}, stop, ready, &said, &said)
	if err != nil {
		e.Fatal(err)
	}
	ended = make(chan error, 1)
	go func() { ended <- f.ForwardPorts() }()
	e.Cleanup(func() { close(stop) })
	select {
	case <-ready:
	case err := <-ended:
		e.Fatalf("port-forward: %v, %s", err, said.String())
	}
	ports, err := f.GetPorts()
	if err != nil {
		e.Fatal(err)
	}
	return ports[0].Local, ended
}

// ask sends bytes to a local port, closes that half and checks the answer.
func (e *env) ask(local uint16, size int) {
	e.Helper()
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", local))
	if err != nil {
		e.Error(err)
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	sent := bytes.Repeat([]byte("berth"), size/5)
	if _, err := c.Write(sent); err != nil {
		e.Error(err)
		return
	}
	_ = c.(*net.TCPConn).CloseWrite()
	r := bufio.NewReader(c)
	head, err := r.ReadString('\n')
	if want := fmt.Sprintf("%d %x\n", len(sent), sha256.Sum256(sent)); err != nil || head != want {
		e.Errorf("the pod answers %q (%v), want %q", head, err, want)
		return
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, sent) {
		e.Errorf("the pod's answer has %d bytes (%v), want %d", len(got), err, len(sent))
	}
}

func TestPortForward(t *testing.T) {
	e := start(t, node.Options{})
	hostConfig := e.sandbox()
	hostConfig.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	pods := map[string]string{"own network": e.run(e.sandbox()), "host network": e.run(hostConfig)}
	for kind, pod := range pods {
		inside := pod
		if kind == "host network" {
			inside = ""
		}
		for _, family := range []string{"127.0.0.1:0", "[::1]:0"} {
			l := e.listenIn(inside, family)
			go serve(l, answer)
			port := l.Addr().(*net.TCPAddr).Port
			for _, transport := range transports {
				local, ended := e.forward(transport, pod, port)
				for _, size := range []int{5, 20 << 20} {
					e.ask(local, size)
				}
				if len(ended) > 0 {
					t.Errorf("%s, %s, %s: the session has ended: %v", kind, family, transport, <-ended)
				}
			}
			_ = l.Close()
		}
	}
	// Nobody listens: the connection ends at once; this client then gives up its
	// whole session.
	local, ended := e.forward(common.TransportSpdy, pods["own network"], 9)
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", local))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if n, err := io.Copy(io.Discard, c); n != 0 || err != nil && !strings.Contains(err.Error(), "reset") {
		t.Errorf("a closed port gave %d bytes, %v", n, err)
	}
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("the session of a client that has closed it goes on")
	}
}

// A program of the pod that cuts a connection off ends that one alone
// (kubernetes#74551, containerd#9875).
func TestPortForwardOutlivesAReset(t *testing.T) {
	e := start(t, node.Options{})
	pod := e.run(e.sandbox())
	l := e.listenIn(pod, "127.0.0.1:0")
	go serve(l, func(c *net.TCPConn) {
		b := make([]byte, 5)
		_, _ = io.ReadFull(c, b)
		if string(b) == "berth" {
			rest, _ := io.ReadAll(c)
			all := append(b, rest...)
			fmt.Fprintf(c, "%d %x\n", len(all), sha256.Sum256(all))
			_, _ = c.Write(all)
			return
		}
		_ = c.SetLinger(0) // what follows is a reset
	})
	for _, transport := range transports {
		local, ended := e.forward(transport, pod, l.Addr().(*net.TCPAddr).Port)
		for range 10 {
			c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", local))
			if err != nil {
				t.Fatalf("%s: after a reset: %v", transport, err)
			}
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			_, _ = io.WriteString(c, "reset")
			if n, err := io.Copy(io.Discard, c); n != 0 || err != nil && !strings.Contains(err.Error(), "reset") {
				t.Errorf("%s: a connection that is reset gave %d bytes, %v", transport, n, err)
			}
			_ = c.Close()
		}
		e.ask(local, 1<<20)
		if len(ended) > 0 {
			t.Errorf("%s: the session has ended: %v", transport, <-ended)
		}
	}
}

// The pod stops: so does what is forwarded to it, and nothing keeps its network.
func TestPortForwardEndsWithItsPod(t *testing.T) {
	e := start(t, node.Options{})
	for _, transport := range transports {
		pod := e.run(e.sandbox())
		l := e.listenIn(pod, "127.0.0.1:0")
		over := make(chan error, 1)
		go serve(l, func(c *net.TCPConn) {
			_, _ = io.WriteString(c, "hello\n")
			_, err := io.Copy(io.Discard, c)
			over <- err
		})
		local, ended := e.forward(transport, pod, l.Addr().(*net.TCPAddr).Port)
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", local))
		if err != nil {
			t.Fatal(err)
		}
		if text, err := bufio.NewReader(c).ReadString('\n'); text != "hello\n" {
			t.Fatalf("%q, %v", text, err)
		}
		if _, err := e.rt.StopPodSandbox(e.ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(e.ctx, 20*time.Second)
		for what, c := range map[string]chan error{"the session": ended, "the pod's connection": over} {
			select {
			case <-c:
			case <-ctx.Done():
				t.Errorf("%s: %s outlives its pod", transport, what)
			}
		}
		cancel()
		_, _ = c.Close(), l.Close()
	}
}
