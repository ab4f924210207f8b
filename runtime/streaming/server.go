package streaming

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"sync"
	"time"

	"berth/oci"
)

// Sentinels of the package; test with errors.Is.
var (
	// ErrTooMany: more URLs are waiting for their clients than the server keeps.
	ErrTooMany = errors.New("too many streaming URLs wait for a client")
	// ErrClosed: the server was closed.
	ErrClosed = errors.New("berth is stopping")
)

// Limits that no operator needs to choose.
const (
	headerLimit   = 10 * time.Second // for a request to arrive
	creationLimit = 30 * time.Second // for a client to open its SPDY streams
	maxHeader     = 64 << 10         // bytes of a request's header
)

// Options of a Server.
type Options struct {
	Address  string        // host:port to listen on; port 0: any free one
	TLS      *tls.Config   // nil: plain HTTP
	Lifetime time.Duration // of a URL that nobody dials
	Idle     time.Duration // without a byte in either direction, after which a session ends
}

// Want says which streams a client asked for.
type Want struct{ Stdin, Stdout, Stderr, Terminal bool }

// Command is an exec or an attach: it serves the streams and returns the exit
// code. Its context ends when the client has gone; the streams fail from then on.
type Command func(ctx context.Context, s oci.Streams) (int32, error)

// Dial connects to a port of a pod. Its context is the session's.
type Dial func(ctx context.Context, port uint16) (net.Conn, error)

// Server hands out URLs and serves them. Its methods may be called from many
// goroutines.
type Server struct {
	o       Options
	base    url.URL
	http    *http.Server
	ctx     context.Context // of all sessions
	end     context.CancelCauseFunc
	tickets tickets

	mu       sync.Mutex
	closed   bool // guarded by mu
	open     int  // sessions, guarded by mu
	sessions sync.WaitGroup
	served   chan struct{} // closed when the listener is done with
}

// New listens and serves until Close.
func New(o Options) (*Server, error) {
	network := "tcp"
	if a, err := netip.ParseAddrPort(o.Address); err == nil && a.Addr().Is4() {
		network = "tcp4" // 0.0.0.0 would be IPv6, too
	}
	l, err := net.Listen(network, o.Address)
	if err != nil {
		return nil, fmt.Errorf("listen for streaming: %w", err)
	}
	s := &Server{o: o, served: make(chan struct{}), tickets: tickets{lifetime: o.Lifetime, open: map[string]ticket{}}}
	s.ctx, s.end = context.WithCancelCause(context.Background())
	s.base = url.URL{Scheme: "http", Host: dialable(l.Addr().(*net.TCPAddr))}
	if o.TLS != nil {
		s.base.Scheme = "https"
		l = tls.NewListener(l, o.TLS)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/{kind}/{token}", s.serve)
	s.http = &http.Server{Handler: mux, ReadHeaderTimeout: headerLimit, IdleTimeout: headerLimit, MaxHeaderBytes: maxHeader,
		ErrorLog: log.New(io.Discard, "", 0)} // it tells of single clients
	go func() {
		defer close(s.served)
		_ = s.http.Serve(l)
	}()
	return s, nil
}

// dialable is a listener's address as somebody on the node can dial it.
func dialable(a *net.TCPAddr) string {
	host := a.IP.String()
	if a.IP.IsUnspecified() {
		if host = "127.0.0.1"; a.IP.To4() == nil {
			host = "::1"
		}
	}
	return net.JoinHostPort(host, fmt.Sprint(a.Port))
}

// Addr is where the server can be dialled, host:port.
func (s *Server) Addr() string { return s.base.Host }

// Sessions is how many sessions are open.
func (s *Server) Sessions() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open
}

// Close ends every session, tells its client so, and returns when they are over.
// Idempotent.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.end(ErrClosed)
	_ = s.http.Close()
	<-s.served
	s.sessions.Wait()
}

// Exec returns the URL of a session that runs command.
func (s *Server) Exec(w Want, command Command) (string, error) {
	return s.issue("exec", func(x *session) { x.serveCommand(w, command) })
}

// Attach is Exec under another name in the URL.
func (s *Server) Attach(w Want, command Command) (string, error) {
	return s.issue("attach", func(x *session) { x.serveCommand(w, command) })
}

// Forward returns the URL of a session that forwards to what dial reaches, until
// ctx ends. The ports are those of a WebSocket client, whose protocol names none
// itself.
func (s *Server) Forward(ctx context.Context, ports []uint16, dial Dial) (string, error) {
	return s.issue("portforward", func(x *session) {
		stop := context.AfterFunc(ctx, func() { x.end(context.Cause(ctx)) })
		defer stop()
		x.serveForward(ports, dial)
	})
}

// issue makes a ticket. ErrTooMany, ErrClosed.
func (s *Server) issue(kind string, run func(*session)) (string, error) {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return "", ErrClosed
	}
	token, err := s.tickets.add(kind, run)
	if err != nil {
		return "", err
	}
	return s.base.JoinPath(kind, token).String(), nil
}

// serve gives a connection to the session its token stands for.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	t, ok := s.tickets.take(r.PathValue("kind"), r.PathValue("token"))
	if !ok || !s.enter() {
		http.NotFound(w, r)
		return
	}
	defer s.leave()
	// Not the request's context: it says nothing of a connection that was taken over.
	ctx, end := context.WithCancelCause(s.ctx)
	x := &session{s: s, ctx: ctx, end: end, request: r}
	x.w = &takeover{ResponseWriter: w, x: x}
	defer x.close()
	t.run(x)
}

// enter counts a session in, unless the server is closed.
func (s *Server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.open++
		s.sessions.Add(1)
	}
	return !s.closed
}

func (s *Server) leave() {
	s.mu.Lock()
	s.open--
	s.mu.Unlock()
	s.sessions.Done()
}
