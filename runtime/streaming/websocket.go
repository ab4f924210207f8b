package streaming

import (
	"context"
	"encoding/base64"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gorilla/websocket"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

// Versions of the command protocol over WebSockets: 5 can close a stream, from 4
// on the status is JSON, and the two base64 forms are for clients that cannot
// send bytes. No version at all means the first.
const (
	base64V4 = "v4.base64.channel.k8s.io"
	base64V1 = "base64.channel.k8s.io"
)

var socketVersions = []string{remotecommand.StreamProtocolV5Name, remotecommand.StreamProtocolV4Name, base64V4,
	remotecommand.StreamProtocolV1Name, base64V1}

// goodbyeLimit bounds the wait for a client to take the close message.
const goodbyeLimit = time.Second

// socket is a WebSocket that carries channels: each message begins with the
// channel's number, as a byte or, in the base64 forms, as a digit.
type socket struct {
	ws     *websocket.Conn
	base64 bool
	closes bool // 255 and a channel's number close that channel

	write sync.Mutex
	in    []*io.PipeWriter // by channel; nil: what comes is dropped
}

// upgradeSocket answers the handshake with the client's first version that is
// in versions; nil when there is none.
func (x *session) upgradeSocket(versions []string) *socket {
	asked := websocket.Subprotocols(x.request)
	u := websocket.Upgrader{HandshakeTimeout: headerLimit,
		CheckOrigin: func(*http.Request) bool { return true }, // the token is what counts
		Error:       func(w http.ResponseWriter, _ *http.Request, code int, err error) { http.Error(w, err.Error(), code) }}
	if len(asked) > 0 {
		i := slices.IndexFunc(asked, func(v string) bool { return slices.Contains(versions, v) })
		if i < 0 {
			http.Error(x.w, "no common WebSocket subprotocol; berth speaks "+strings.Join(versions, ", "), http.StatusForbidden)
			return nil
		}
		u.Subprotocols = []string{asked[i]}
	}
	ws, err := u.Upgrade(x.w, x.request, nil)
	if err != nil {
		return nil // the client is told
	}
	v := ws.Subprotocol()
	return &socket{ws: ws, base64: strings.Contains(v, "base64."), closes: v == remotecommand.StreamProtocolV5Name}
}

// reader makes a channel readable. To be called before run.
func (k *socket) reader(channel int) *io.PipeReader {
	r, w := io.Pipe()
	for len(k.in) <= channel {
		k.in = append(k.in, nil)
	}
	k.in[channel] = w
	return r
}

// run reads messages until the connection or ctx ends, which ends every channel.
func (k *socket) run(ctx context.Context) {
	stop := context.AfterFunc(ctx, k.endInputs) // also while nobody reads a channel
	defer stop()
	defer k.endInputs()
	for {
		_, r, err := k.ws.NextReader()
		if err != nil {
			return
		}
		var head [1]byte
		if _, err := io.ReadFull(r, head[:]); err != nil {
			continue // an empty message
		}
		k.message(head[0], r)
	}
}

func (k *socket) endInputs() {
	for _, w := range k.in {
		if w != nil {
			_ = w.Close()
		}
	}
}

func (k *socket) message(channel byte, r io.Reader) {
	if k.closes && channel == remotecommand.StreamClose {
		var which [1]byte
		if _, err := io.ReadFull(r, which[:]); err == nil {
			if w := k.input(which[0]); w != nil {
				_ = w.Close()
			}
		}
		return
	}
	if k.base64 {
		channel -= '0'
		r = base64.NewDecoder(base64.StdEncoding, r)
	}
	if w := k.input(channel); w != nil {
		_, _ = io.Copy(w, r) // fails when nobody reads it any more
	}
	// NextReader skips what is left of the message.
}

func (k *socket) input(channel byte) *io.PipeWriter {
	if int(channel) < len(k.in) {
		return k.in[channel]
	}
	return nil
}

// writer makes a channel writable.
func (k *socket) writer(channel byte) io.Writer { return &socketWriter{k, channel} }

type socketWriter struct {
	k       *socket
	channel byte
}

func (w *socketWriter) Write(b []byte) (int, error) {
	w.k.write.Lock()
	defer w.k.write.Unlock()
	kind, head, body := websocket.BinaryMessage, w.channel, b
	if w.k.base64 {
		kind, head = websocket.TextMessage, '0'+w.channel
		body = base64.StdEncoding.AppendEncode(nil, b)
	}
	m, err := w.k.ws.NextWriter(kind)
	if err != nil {
		return 0, err
	}
	if _, err = m.Write([]byte{head}); err == nil {
		_, err = m.Write(body)
	}
	if cerr := m.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return 0, err
	}
	return len(b), nil
}

// finish says goodbye: everything has been written.
func (k *socket) finish() {
	_ = k.ws.WriteControl(websocket.CloseMessage, websocket.FormatCloseMessage(websocket.CloseNormalClosure, ""), time.Now().Add(goodbyeLimit))
}

// websocketChannels upgrades to the channels of a command; nil when the client
// cannot.
func (x *session) websocketChannels(w Want) *channels {
	k := x.upgradeSocket(socketVersions)
	if k == nil {
		return nil
	}
	v := k.ws.Subprotocol()
	c := &channels{status: k.writer(remotecommand.StreamErr), finish: k.finish,
		structured: v == remotecommand.StreamProtocolV5Name || v == remotecommand.StreamProtocolV4Name || v == base64V4}
	hello := c.status
	if w.Stdin {
		c.stdin = k.reader(remotecommand.StreamStdIn)
	}
	if w.Stderr {
		c.stderr = k.writer(remotecommand.StreamStdErr)
		hello = c.stderr
	}
	if w.Stdout {
		c.stdout = k.writer(remotecommand.StreamStdOut)
		hello = c.stdout
	}
	if w.Terminal {
		c.resize = k.reader(remotecommand.StreamResize)
	}
	go k.run(x.ctx)
	_, _ = hello.Write(nil) // clients take an empty message as "connected"
	return c
}
