package exporter

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// What one client may cost: scrapes at once, and how long one may take.
const (
	maxScrapes = 4
	scrapeTime = 10 * time.Second
)

// Server serves metrics over HTTP, at /metrics.
type Server struct {
	listener net.Listener
	http     http.Server
	done     chan struct{}
}

// Address completes one of the configuration: without a host it is loopback.
func Address(address string) (string, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", err
	}
	if host == "" {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port), nil
}

// Listen serves at address (see Address) until Close. Port 0 is any free one.
func (m *Metrics) Listen(address string) (*Server, error) {
	address, err := Address(address)
	if err != nil {
		return nil, fmt.Errorf("listen for scrapes: %w", err)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen for scrapes: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes, Timeout: scrapeTime}))
	s := &Server{listener: l, done: make(chan struct{}), http: http.Server{Handler: mux,
		ReadTimeout: scrapeTime, WriteTimeout: 2 * scrapeTime, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10}}
	go func() {
		defer close(s.done)
		_ = s.http.Serve(l) // ends with Close
	}()
	return s, nil
}

// Addr is the address that is served, with its port.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Close ends the server; scrapes that run get a second. Idempotent.
func (s *Server) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := s.http.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = s.http.Close()
	}
	<-s.done
	return err
}
