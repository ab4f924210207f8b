package registries

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"
)

// newClient makes the HTTP client of an endpoint. Proxies are the environment's.
func newClient(e *endpoint, own *tls.Config) *http.Client {
	// A redirect leads to whoever serves the bytes. It is trusted as the
	// endpoint is, but this node's certificate is not for it.
	other := own.Clone()
	other.Certificates = nil
	return &http.Client{
		Transport:     &transport{host: e.address, own: newTransport(own, e.dial), other: newTransport(other, e.dial)},
		CheckRedirect: e.redirected,
	}
}

func newTransport(conf *tls.Config, dial time.Duration) *http.Transport {
	if dial == 0 {
		dial = 30 * time.Second
	}
	return &http.Transport{
		Proxy:               proxy,
		DialContext:         (&net.Dialer{Timeout: dial, KeepAlive: 30 * time.Second}).DialContext,
		TLSClientConfig:     conf,
		TLSHandshakeTimeout: 10 * time.Second,
		IdleConnTimeout:     30 * time.Second,
		MaxIdleConnsPerHost: 16,
		DisableCompression:  true, // blobs must come as they are
	}
}

// proxy is the environment's. The standard error would print the variable, and
// with it the proxy's password.
func proxy(r *http.Request) (*url.URL, error) {
	u, err := http.ProxyFromEnvironment(r)
	if err != nil {
		return nil, errors.New("the proxy in the environment is not a URL")
	}
	return u, nil
}

// transport sends requests for the endpoint's host with its certificates, and
// those for other hosts without.
type transport struct {
	host       string
	own, other *http.Transport
}

func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Host == t.host {
		return t.own.RoundTrip(r)
	}
	return t.other.RoundTrip(r)
}

func (t *transport) CloseIdleConnections() {
	t.own.CloseIdleConnections()
	t.other.CloseIdleConnections()
}

const maxRedirects = 10

// redirected lets a request follow a redirect, without anything secret when it
// leads to another host or away from TLS.
func (e *endpoint) redirected(r *http.Request, via []*http.Request) error {
	first := via[0]
	if len(via) >= maxRedirects {
		return fmt.Errorf("more than %d redirects", maxRedirects)
	}
	r.Header.Del("Referer") // it would be a signed URL
	if r.URL.Host == first.URL.Host && (r.URL.Scheme == first.URL.Scheme || r.URL.Scheme == "https") {
		return nil
	}
	if first.Method != http.MethodGet {
		return errors.New("the token service redirects to another host")
	}
	r.Header.Del("Authorization")
	for name := range e.header {
		r.Header.Del(name)
	}
	return nil
}

// exchange sends one request and returns the answer's head, whatever it is. An
// endpoint that does not answer within the idle time is given up. The body goes
// on with ctx.
func (e *endpoint) exchange(ctx context.Context, r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(e.idle, func() { cancel(fmt.Errorf("%w for %v", ErrIdle, e.idle)) })
	r.Header.Set("User-Agent", agent)
	res, err := e.client.Do(r.WithContext(ctx))
	if err == nil && timer.Stop() {
		res.Body = &body{ReadCloser: res.Body, cancel: cancel}
		return res, nil
	}
	if err == nil {
		res.Body.Close()
		err = context.Cause(ctx)
	} else if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	timer.Stop()
	cancel(nil)
	return nil, e.withoutURL(err)
}

// withoutURL takes the URL out of a client's error: where a redirect has led it may
// be a signed one. Host and path of another host than the endpoint's stay.
func (e *endpoint) withoutURL(err error) error {
	var at *url.Error
	if !errors.As(err, &at) {
		return err
	}
	if u, parsed := url.Parse(at.URL); parsed == nil && u.Host != "" && u.Host != e.address {
		return fmt.Errorf("%s://%s%s: %w", u.Scheme, u.Host, u.Path, at.Err)
	}
	return at.Err
}

// body frees the request's context when it is closed.
type body struct {
	io.ReadCloser
	cancel context.CancelCauseFunc
}

func (b *body) Close() error {
	err := b.ReadCloser.Close()
	b.cancel(nil)
	return err
}

// readDocument reads a small body whole, within the idle time, and closes it.
func (e *endpoint) readDocument(res *http.Response, most int64) ([]byte, error) {
	defer res.Body.Close()
	var late atomic.Bool
	timer := time.AfterFunc(e.idle, func() {
		late.Store(true)
		if b, ok := res.Body.(*body); ok {
			b.cancel(nil)
		}
	})
	defer timer.Stop()
	data, err := io.ReadAll(io.LimitReader(res.Body, most+1))
	switch {
	case late.Load():
		return nil, fmt.Errorf("%w for %v", ErrIdle, e.idle)
	case err != nil:
		return nil, err
	case int64(len(data)) > most:
		return nil, fmt.Errorf("%w: more than %d bytes", ErrInvalid, most)
	}
	return data, nil
}
