package streaming

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

const forwardVersion = "portforward.k8s.io"

// pairOf opens the streams of one connection, as clients do: error first.
func pairOf(t *testing.T, c httpstream.Connection, id string, port int) (data, report httpstream.Stream) {
	t.Helper()
	h := http.Header{"Port": []string{fmt.Sprint(port)}, "Requestid": []string{id}, "Streamtype": []string{"error"}}
	report = must(c.CreateStream(h))(t)
	_ = report.Close()
	h.Set("streamType", "data")
	return must(c.CreateStream(h))(t), report
}

// viaSPDY and viaTunnel are the two ways to a SPDY session.
func viaSPDY(t *testing.T, to string) httpstream.Connection {
	t.Helper()
	return must(dialSPDY(t, to, forwardVersion))(t)
}

func viaTunnel(t *testing.T, to string) httpstream.Connection {
	t.Helper()
	ws, _, err := dialSocket(t, to, "SPDY/3.1+"+forwardVersion)
	if err != nil {
		t.Fatal(err)
	}
	c := &conn{Conn: ws.NetConn(), gone: func(error) {}}
	return must(spdy.NewClientConnection(&tunnel{conn: c, ws: ws}))(t)
}

var ways = map[string]func(*testing.T, string) httpstream.Connection{"SPDY": viaSPDY, "SPDY in a WebSocket": viaTunnel}

// A client that has sent everything still gets the whole answer.
func TestForward(t *testing.T) {
	dial := newPod(t, func(c *net.TCPConn) {
		h := sha256.New()
		n, _ := io.Copy(h, c)
		fmt.Fprintf(c, "%d %x", n, h.Sum(nil))
		_, _ = io.CopyN(c, rand.NewChaCha8([32]byte{}), 8<<20)
	})
	for way, connect := range ways {
		t.Run(way, func(t *testing.T) {
			s := newServer(t, Options{})
			c := connect(t, must(s.Forward(t.Context(), nil, dial))(t))
			defer c.Close()
			var work sync.WaitGroup
			for i := range 5 {
				data, report := pairOf(t, c, fmt.Sprint(i), 80)
				work.Go(func() {
					sent := bytes.Repeat([]byte{byte(i)}, 3<<20)
					if _, err := data.Write(sent); err != nil {
						t.Errorf("send: %v", err)
					}
					_ = data.Close()
					got := readAll(t, data)
					want := fmt.Sprintf("%d %x", len(sent), sha256.Sum256(sent))
					if !strings.HasPrefix(got, want) || len(got) != len(want)+8<<20 {
						t.Errorf("answer of %d bytes, want %s and 8 MiB", len(got), want)
					}
					if text := readAll(t, report); text != "" {
						t.Errorf("error stream: %q", text)
					}
				})
			}
			work.Wait()
			data, report := pairOf(t, c, "closed", 81)
			if text := readAll(t, report); !strings.Contains(text, "port 81") || !strings.Contains(text, "refused") {
				t.Errorf("a closed port: %q", text)
			}
			if got := readAll(t, data); got != "" {
				t.Errorf("data of a closed port: %q", got)
			}
		})
	}
}

// The pod's end closes first: the client hears of it at once, and may still send.
func TestForwardPodClosesFirst(t *testing.T) {
	heard := make(chan string, 1)
	dial := newPod(t, func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "bye")
		_ = c.CloseWrite()
		b, _ := io.ReadAll(c)
		heard <- string(b)
	})
	s := newServer(t, Options{})
	c := viaSPDY(t, must(s.Forward(t.Context(), nil, dial))(t))
	defer c.Close()
	data, report := pairOf(t, c, "1", 80)
	if got, text := readAll(t, data), readAll(t, report); got != "bye" || text != "" {
		t.Errorf("data %q, error stream %q", got, text)
	}
	_, _ = io.WriteString(data, "still here")
	_ = data.Close()
	select {
	case got := <-heard:
		if got != "still here" {
			t.Errorf("the pod heard %q", got)
		}
	case <-time.After(patience):
		t.Error("the pod hears no end")
	}
}

func TestForwardRefusesStreams(t *testing.T) {
	s := newServer(t, Options{})
	c := viaSPDY(t, must(s.Forward(t.Context(), nil, newPod(t, func(*net.TCPConn) {})))(t))
	defer c.Close()
	for name, h := range map[string]http.Header{
		"no port":      {"Requestid": {"1"}, "Streamtype": {"data"}},
		"port 0":       {"Port": {"0"}, "Requestid": {"1"}, "Streamtype": {"data"}},
		"port 65536":   {"Port": {"65536"}, "Requestid": {"1"}, "Streamtype": {"data"}},
		"no request":   {"Port": {"80"}, "Streamtype": {"data"}},
		"unknown type": {"Port": {"80"}, "Requestid": {"2"}, "Streamtype": {"other"}},
	} {
		if x, err := c.CreateStream(h); err == nil {
			if _, err := x.Read(make([]byte, 1)); err == nil {
				t.Errorf("%s: accepted", name)
			}
		}
	}
	if _, err := dialSPDY(t, must(s.Forward(t.Context(), nil, nil))(t), "portforward.k8s.example"); err == nil {
		t.Error("an unknown version is accepted")
	}
}

// The pod stops: every session to it ends, with what it carries.
func TestForwardEndsWithItsPod(t *testing.T) {
	begun, over := make(chan error, 2), make(chan error, 2)
	dial := newPod(t, func(c *net.TCPConn) {
		_, err := io.ReadFull(c, make([]byte, 1))
		begun <- err
		_, err = io.Copy(io.Discard, c)
		over <- err
	})
	s := newServer(t, Options{})
	ctx, stop := context.WithCancelCause(t.Context())
	busy, idle := viaSPDY(t, must(s.Forward(ctx, nil, dial))(t)), viaTunnel(t, must(s.Forward(ctx, nil, dial))(t))
	data, _ := pairOf(t, busy, "1", 80)
	_, _ = io.WriteString(data, "x")
	if err := await(t, "the pod is connected", begun); err != nil {
		t.Fatal(err)
	}
	eventually(t, "two sessions", func() bool { return s.Sessions() == 2 })
	stop(errors.New("the pod is stopped"))
	for name, c := range map[string]httpstream.Connection{"busy": busy, "idle": idle} {
		select {
		case <-c.CloseChan():
		case <-time.After(patience):
			t.Errorf("%s: the session goes on", name)
		}
		_ = c.Close()
	}
	_ = await(t, "the pod sees the end", over)
	late, err := dialSPDY(t, must(s.Forward(ctx, nil, dial))(t), forwardVersion)
	if err == nil {
		select {
		case <-late.CloseChan():
		case <-time.After(patience):
			t.Error("a session that comes later goes on")
		}
		_ = late.Close()
	}
}

// The older WebSocket protocol: a pair of channels for each port of the request.
func TestForwardOverChannels(t *testing.T) {
	dial := newPod(t, func(c *net.TCPConn) {
		text, _ := bufio.NewReader(c).ReadString('\n')
		_, _ = io.WriteString(c, strings.ToUpper(text))
	})
	s := newServer(t, Options{})
	ws, _, err := dialSocket(t, must(s.Forward(t.Context(), []uint16{80, 81}, dial))(t), "v4.channel.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	defer ws.Close()
	_ = ws.WriteMessage(websocket.BinaryMessage, []byte("\x00hello\n"))
	got, err := messages(ws)
	port := func(p uint16) string { return string(binary.LittleEndian.AppendUint16(nil, p)) }
	if err != nil || got[0] != port(80)+"HELLO\n" || got[1] != port(80) || got[2] != port(81) || !strings.HasPrefix(got[3], port(81)+"forward port 81: ") {
		t.Errorf("%q, %v", got, err)
	}
}
