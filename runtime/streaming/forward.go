package streaming

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gorilla/websocket"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// maxPairs bounds the connections forwarded at a time over one session.
const maxPairs = 512

// lingerLimit is how long a client may still send when the pod's end has closed.
const lingerLimit = 10 * time.Second

// forwardVersions over WebSockets: SPDY inside binary messages, or a pair of
// channels for each port.
var forwardVersions = []string{portforward.WebsocketsSPDYTunnelingPortForwardV1, "v4.channel.k8s.io", base64V4}

// serveForward forwards ports over the request's protocol until the client goes.
func (x *session) serveForward(ports []uint16, dial Dial) {
	f := &forwarding{x: x, dial: dial, began: make(chan struct{}), pairs: map[string]*pair{}}
	switch {
	case websocket.IsWebSocketUpgrade(x.request):
		k := x.upgradeSocket(forwardVersions)
		if k == nil {
			return
		}
		if !strings.HasPrefix(k.ws.Subprotocol(), portforward.WebsocketsSPDYTunnelingPrefix) {
			f.overChannels(k, ports)
			return
		}
		sc, err := spdy.NewServerConnection(&tunnel{conn: x.conn, ws: k.ws}, f.add)
		if err == nil {
			f.overSPDY(sc)
		}
	case isUpgrade(x.request, spdy.HeaderSpdy31):
		if _, err := httpstream.Handshake(x.request, x.w, portforward.SupportedProtocols); err != nil {
			return // the client is told
		}
		if sc := spdy.NewResponseUpgrader().UpgradeResponse(x.w, x.request, f.add); sc != nil {
			f.overSPDY(sc)
		}
	default:
		refuseUpgrade(x.w)
	}
}

// forwarding is one session: any number of connections to the pod.
type forwarding struct {
	x    *session
	dial Dial
	work sync.WaitGroup
	sc   httpstream.Connection // set before began is closed; nil without SPDY

	began chan struct{}
	mu    sync.Mutex
	pairs map[string]*pair // by request, guarded by mu
	over  bool             // guarded by mu
}

// pair are the streams of one connection over SPDY.
type pair struct {
	port        uint16
	data, error httpstream.Stream
	replies     []<-chan struct{}
	late        *time.Timer // resets a pair that stays incomplete
}

// overSPDY serves the streams that add takes until the session ends.
func (f *forwarding) overSPDY(sc httpstream.Connection) {
	f.sc = sc
	close(f.began)
	defer f.end()
	select {
	case <-f.x.ctx.Done():
	case <-sc.CloseChan():
		f.x.end(errGone)
	}
}

func (f *forwarding) end() {
	f.mu.Lock()
	f.over = true
	for _, p := range f.pairs {
		p.late.Stop()
	}
	f.mu.Unlock()
	f.x.end(nil)
	_ = f.sc.Close()
	f.work.Wait()
}

// add takes a stream that the client opens. It never waits.
func (f *forwarding) add(s httpstream.Stream, replied <-chan struct{}) error {
	h := s.Headers()
	port, err := strconv.ParseUint(h.Get(portforward.PortHeader), 10, 16)
	if err != nil || port == 0 {
		return fmt.Errorf("header %s: %q is no port", portforward.PortHeader, h.Get(portforward.PortHeader))
	}
	id, kind := h.Get(portforward.PortForwardRequestIDHeader), h.Get(portforward.StreamType)
	if id == "" {
		return fmt.Errorf("header %s is missing", portforward.PortForwardRequestIDHeader)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.pairs[id]
	switch {
	case f.over:
		return errGone
	case p == nil && len(f.pairs) >= maxPairs:
		return fmt.Errorf("more than %d connections at a time", maxPairs)
	case p == nil:
		p = &pair{port: uint16(port)}
		p.late = time.AfterFunc(creationLimit, func() { f.expire(id, p) })
		f.pairs[id] = p
	}
	switch {
	case kind == portforward.StreamTypeData && p.data == nil:
		p.data = s
	case kind == portforward.StreamTypeError && p.error == nil:
		p.error = s
	default:
		return fmt.Errorf("request %s: stream type %q is unknown or there already", id, kind)
	}
	p.replies = append(p.replies, replied)
	if p.data != nil && p.error != nil {
		p.late.Stop()
		f.work.Go(func() { f.serve(id, p) })
	}
	return nil
}

// expire gives up a pair whose second stream never came.
func (f *forwarding) expire(id string, p *pair) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pairs[id] != p || p.data != nil && p.error != nil {
		return
	}
	delete(f.pairs, id)
	for _, s := range []httpstream.Stream{p.data, p.error} {
		if s != nil {
			_ = s.Reset()
		}
	}
}

// serve forwards one connection to its end.
func (f *forwarding) serve(id string, p *pair) {
	defer func() {
		_ = p.data.Reset()
		_ = p.error.Reset()
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.pairs, id)
	}()
	for _, open := range append(p.replies, f.began) {
		select {
		case <-open:
		case <-f.x.ctx.Done():
			return
		}
	}
	defer f.sc.RemoveStreams(p.data, p.error) // else they are kept as long as the session
	f.connect(p.port, p.data, p.error)
}

// connect joins a client's data to a port of the pod. What goes wrong is told on
// its error stream, whose end tells the client that nothing more will.
func (f *forwarding) connect(port uint16, data io.ReadWriteCloser, report io.WriteCloser) {
	ctx, cancel := context.WithCancel(f.x.ctx)
	defer cancel()
	c, err := f.dial(ctx, port)
	if err != nil {
		_, _ = fmt.Fprintf(report, "forward port %d: %v", port, err)
		_ = report.Close()
		return
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	sent := make(chan struct{})
	f.work.Go(func() {
		defer close(sent)
		_, err := io.Copy(c, data)
		if w, ok := c.(interface{ CloseWrite() error }); ok {
			_ = w.CloseWrite()
		}
		if err != nil { // the pod takes no more; the client may send more
			_, _ = io.Copy(io.Discard, data)
		}
	})
	if _, err = io.Copy(data, c); err != nil && ctx.Err() == nil && !ordinary(err) {
		_, _ = fmt.Fprintf(report, "forward port %d: %v", port, err)
	}
	// Both at once: common clients hang up when they see the second.
	_ = data.Close()
	_ = report.Close()
	linger := time.NewTimer(lingerLimit)
	defer linger.Stop()
	select {
	case <-sent:
	case <-linger.C:
	case <-ctx.Done():
	}
}

// ordinary are ends of a connection that are no failure of the forwarding: common
// clients give up the whole session when they are told of one.
func ordinary(err error) bool {
	return errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// overChannels serves each port once over its pair of channels, whose first
// message names the port.
func (f *forwarding) overChannels(k *socket, ports []uint16) {
	ports = slices.Clone(ports)[:min(len(ports), 100)] // channels are numbered by a byte
	type ends struct {
		data   *channelPair
		report io.WriteCloser
	}
	all := make([]ends, len(ports))
	for i := range ports {
		data := &channelPair{PipeReader: k.reader(2 * i), Writer: k.writer(byte(2 * i))}
		all[i] = ends{data, nopCloser{k.writer(byte(2*i + 1))}}
	}
	go k.run(f.x.ctx)
	for i, e := range all {
		head := binary.LittleEndian.AppendUint16(nil, ports[i])
		_, _ = e.data.Write(head)
		_, _ = e.report.Write(head)
		f.work.Go(func() { f.connect(ports[i], e.data, e.report) })
	}
	f.work.Wait()
	k.finish()
}

// channelPair is a channel in both directions. This protocol cannot close one.
type channelPair struct {
	*io.PipeReader
	io.Writer
}

func (p *channelPair) Close() error { return p.PipeReader.Close() }

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

// tunnel is the connection that the binary messages of a WebSocket make.
type tunnel struct {
	*conn
	ws *websocket.Conn
	r  io.Reader // the message being read
}

func (t *tunnel) Read(b []byte) (int, error) {
	for {
		if t.r == nil {
			_, r, err := t.ws.NextReader()
			if err != nil {
				return 0, io.EOF
			}
			t.r = r
		}
		n, err := t.r.Read(b)
		if err == io.EOF {
			t.r, err = nil, nil
		}
		if n > 0 || err != nil || len(b) == 0 {
			return n, err
		}
	}
}

func (t *tunnel) Write(b []byte) (int, error) {
	if err := t.ws.WriteMessage(websocket.BinaryMessage, b); err != nil {
		return 0, err
	}
	return len(b), nil
}
