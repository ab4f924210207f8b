package streaming

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"berth/oci"
)

const spdyRequest = "POST PATH HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n"

const socketRequest = "GET PATH HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" +
	"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: v5.channel.k8s.io\r\n\r\n"

// Clients that go away at any point leave nothing: newServer counts.
func TestClientGone(t *testing.T) {
	s := newServer(t, Options{})
	run, ended := waiter()
	want := Want{Stdin: true, Stdout: true, Stderr: true}
	for name, text := range map[string]string{"SPDY": spdyRequest, "WebSocket": socketRequest} {
		for cut := 1; cut < len(text)+4; cut += 7 { // cut off in each part of the handshake
			c := rawDial(t, must(s.Attach(want, run))(t), text[:min(cut, len(text))])
			_ = c.Close()
		}
		// The whole handshake, but no streams; the answer is not even read.
		for range 20 {
			c := rawDial(t, must(s.Attach(want, run))(t), text)
			if name == "WebSocket" {
				eventually(t, "the session is there", func() bool { return s.Sessions() > 0 })
			}
			_ = c.Close()
		}
		eventually(t, name+": no session is open", func() bool { return s.Sessions() == 0 })
	}
	for range 20 { // some of the streams
		c := must(dialSPDY(t, must(s.Attach(want, run))(t), "v4.channel.k8s.io"))(t)
		open(t, c, "error", "stdout")
		_ = c.Close()
	}
	eventually(t, "no session is open", func() bool { return s.Sessions() == 0 })
	for range 20 { // all of them
		c := must(dialSPDY(t, must(s.Attach(want, run))(t), "v4.channel.k8s.io"))(t)
		open(t, c, "error", "stdin", "stdout", "stderr")
		eventually(t, "the session is there", func() bool { return s.Sessions() > 0 })
		_ = c.Close()
	}
	eventually(t, "no session is open", func() bool { return s.Sessions() == 0 })
	for len(ended) > 0 {
		if err := <-ended; !errors.Is(err, errGone) {
			t.Errorf("a command ended by %v, want errGone", err)
		}
	}
}

// What is no protocol at all ends its session and nothing else.
func TestGarbage(t *testing.T) {
	s := newServer(t, Options{})
	run, _ := waiter()
	random := make([]byte, 4096)
	dial := newPod(t, func(*net.TCPConn) {})
	forward := strings.Replace(spdyRequest, "v4.channel.k8s.io", forwardVersion, 1)
	for i := range 40 {
		_, _ = rand.Read(random)
		random[0] = []byte{0x80, 0x00, 0x82, random[0]}[i%4] // a control frame, a data frame, a binary message, anything
		for name, c := range map[string]net.Conn{
			"SPDY":         rawDial(t, must(s.Exec(Want{Stdin: true, Stdout: true}, run))(t), spdyRequest),
			"port-forward": rawDial(t, must(s.Forward(t.Context(), nil, dial))(t), forward),
			"WebSocket":    rawDial(t, must(s.Exec(Want{Stdin: true, Stdout: true}, run))(t), socketRequest),
		} {
			answer := make([]byte, 12)
			if _, err := io.ReadFull(c, answer); err != nil || string(answer) != "HTTP/1.1 101" {
				t.Fatalf("%s: %q, %v", name, answer, err)
			}
			_, _ = c.Write(random)
			_ = c.Close()
		}
	}
	eventually(t, "no session is open", func() bool { return s.Sessions() == 0 })
}

// A client that hangs up while nobody reads from it is noticed all the same.
func TestClientGoneWhileItsInputIsBlocked(t *testing.T) {
	s := newServer(t, Options{})
	run, ended := waiter()
	ws, _, err := dialSocket(t, must(s.Exec(Want{Stdin: true, Stdout: true}, run))(t), "v5.channel.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	for range 3 { // more than the read loop can give away, less than the kernel keeps
		if err := ws.WriteMessage(websocket.BinaryMessage, append([]byte{0}, bytes.Repeat([]byte{'x'}, 8<<10)...)); err != nil {
			t.Fatal(err)
		}
	}
	_ = ws.NetConn().Close()
	if err := await(t, "the command ends", ended); !errors.Is(err, errGone) {
		t.Errorf("it ended by %v, want errGone", err)
	}
}

// A client that does not read holds up its command, and nothing once it has gone.
func TestClientGoneWhileOutputIsBlocked(t *testing.T) {
	s := newServer(t, Options{})
	ended := make(chan error, 1)
	flood := func(_ context.Context, st oci.Streams) (int32, error) {
		b := make([]byte, 64<<10)
		for {
			if _, err := st.Stdout.Write(b); err != nil {
				ended <- err
				return 0, err
			}
		}
	}
	c := must(dialSPDY(t, must(s.Exec(Want{Stdout: true}, flood))(t), "v4.channel.k8s.io"))(t)
	open(t, c, "error", "stdout") // and never reads
	time.Sleep(200 * time.Millisecond)
	go c.Close() // its own close waits for the reader that there is not
	await(t, "the writes fail", ended)
}

func TestIdleSessionEnds(t *testing.T) {
	s := newServer(t, Options{Idle: 1500 * time.Millisecond})
	run, ended := waiter()
	c := must(dialSPDY(t, must(s.Attach(Want{Stdout: true}, run))(t), "v4.channel.k8s.io"))(t)
	defer c.Close()
	open(t, c, "error", "stdout")
	if err := await(t, "the session ends", ended); !errors.Is(err, errIdle) {
		t.Errorf("it ended by %v, want errIdle", err)
	}
}

func TestCloseEndsSessions(t *testing.T) {
	s := newServer(t, Options{})
	wait, ended := waiter()
	run, begun := announced(wait)
	c := must(dialSPDY(t, must(s.Attach(Want{Stdout: true}, run))(t), "v4.channel.k8s.io"))(t)
	defer c.Close()
	st := open(t, c, "error", "stdout")
	ws, _, err := dialSocket(t, must(s.Attach(Want{Stdin: true, Stdout: true}, wait))(t), "v5.channel.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	to := must(s.Attach(Want{Stdout: true}, run))(t)
	_ = await(t, "the command runs", begun)
	s.Close()
	if got := decode(t, readAll(t, st["error"])); got.Status != "Failure" || got.Message != ErrClosed.Error() {
		t.Errorf("the client is told %+v", got)
	}
	if got, err := messages(ws); err != nil || decode(t, got[3]).Message != ErrClosed.Error() {
		t.Errorf("the other client is told %q, %v", got, err)
	}
	_ = ws.Close()
	if len(ended) != 2 {
		t.Error("Close returned before the commands had ended")
	}
	if _, err := dialSPDY(t, to, "v4.channel.k8s.io"); err == nil {
		t.Error("a closed server answers")
	}
	if _, err := s.Exec(Want{Stdout: true}, run); !errors.Is(err, ErrClosed) {
		t.Errorf("a URL of a closed server: %v, want ErrClosed", err)
	}
}

func TestTLS(t *testing.T) {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der := must(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))(t)
	s := newServer(t, Options{TLS: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}})
	trusted := x509.NewCertPool()
	trusted.AddCert(must(x509.ParseCertificate(der))(t))
	run, ended := waiter()
	to := must(s.Exec(Want{Stdin: true, Stdout: true}, echo(0)))(t)
	if !strings.HasPrefix(to, "https://127.0.0.1:") {
		t.Errorf("URL %s, want https", to)
	}
	d := websocket.Dialer{Subprotocols: []string{"v5.channel.k8s.io"}, TLSClientConfig: &tls.Config{RootCAs: trusted, NextProtos: []string{"h2", "http/1.1"}}}
	ws, _, err := d.Dial(strings.Replace(to, "https", "wss", 1), nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = ws.WriteMessage(websocket.BinaryMessage, []byte("\x00hello"))
	_ = ws.WriteMessage(websocket.BinaryMessage, []byte("\xff\x00"))
	if got, err := messages(ws); err != nil || got[1] != "hello" {
		t.Errorf("%q, %v", got, err)
	}
	_ = ws.Close()
	ws, _, err = d.Dial(strings.Replace(must(s.Exec(Want{Stdin: true}, run))(t), "https", "wss", 1), nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = ws.NetConn().(*tls.Conn).NetConn().Close()
	if err := await(t, "the command ends", ended); !errors.Is(err, errGone) {
		t.Errorf("it ended by %v, want errGone", err)
	}
	plain := must(http.NewRequest(http.MethodGet, "http://"+s.Addr()+"/", nil))(t)
	res := must(http.DefaultTransport.RoundTrip(plain))(t)
	_, _ = io.Copy(io.Discard, res.Body)
	if _ = res.Body.Close(); res.StatusCode != http.StatusBadRequest {
		t.Errorf("plain HTTP: %s, want 400", res.Status)
	}
	http.DefaultClient.CloseIdleConnections()
}
