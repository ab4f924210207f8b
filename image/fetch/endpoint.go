package fetch

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"time"

	"oras.land/oras-go/v2/registry/remote/auth"
)

// Endpoint is one place that has a repository's blobs.
type Endpoint struct {
	Host       string      // host or host:port, as it is dialled
	Repository string      // its path below /v2/
	Insecure   bool        // any certificate will do, and plain HTTP where HTTPS is not spoken
	TLS        *tls.Config // nil: the system's roots. Never changed.
	Header     http.Header // sent to Host with each request, and to nobody else
	Namespace  string      // the registry that a proxying mirror stands for: query parameter ns
	Credential Credential
}

// Credential is what one endpoint is shown when it asks.
type Credential struct {
	Username, Password string
	IdentityToken      string // exchanged for an access token (OAuth2 refresh token)
	RegistryToken      string // sent as bearer token as it is
}

// host talks to one endpoint. All methods may be called at the same time.
type host struct {
	Endpoint
	client    *auth.Client
	transport *http.Transport

	mu     sync.Mutex
	scheme string // guarded by mu; "" until an insecure endpoint has answered
}

const (
	dialTimeout      = 30 * time.Second
	handshakeTimeout = 30 * time.Second
	maxRedirects     = 10
)

func newHost(e Endpoint, agent string) *host {
	tlsConfig := &tls.Config{}
	if e.TLS != nil {
		tlsConfig = e.TLS.Clone()
	}
	tlsConfig.InsecureSkipVerify = e.Insecure
	h := &host{Endpoint: e, transport: &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSClientConfig:     tlsConfig,
		TLSHandshakeTimeout: handshakeTimeout,
		DisableCompression:  true, // a blob is what it is
		ReadBufferSize:      64 << 10,
	}}
	if !e.Insecure {
		h.scheme = "https"
	}
	h.client = &auth.Client{
		Client:               &http.Client{Transport: h.transport, CheckRedirect: h.redirect},
		Credential:           h.credential,
		Cache:                auth.NewCache(),
		ClientID:             agent,
		BlockedRealmPrefixes: blockedRealms(),
	}
	h.client.SetUserAgent(agent)
	return h
}

// blockedRealms are where no token service is: a registry must not make the
// node send credentials to a cloud's metadata service. A token service on the
// node itself is nothing odd.
func blockedRealms() []netip.Prefix {
	return slices.DeleteFunc(auth.DefaultBlockedRealmPrefixes(), func(p netip.Prefix) bool { return p.Addr().IsLoopback() })
}

// credential answers for this endpoint only. The auth client asks by host.
func (h *host) credential(_ context.Context, hostport string) (auth.Credential, error) {
	if hostport != h.Host {
		return auth.EmptyCredential, nil
	}
	c := h.Endpoint.Credential
	return auth.Credential{Username: c.Username, Password: c.Password, RefreshToken: c.IdentityToken, AccessToken: c.RegistryToken}, nil
}

// redirect takes the endpoint's own headers off a request that leaves it. The
// auth client does so with the credentials.
func (h *host) redirect(q *http.Request, via []*http.Request) error {
	if len(via) >= maxRedirects {
		return errors.New("too many redirects")
	}
	if q.URL.Host != h.Host {
		for name := range h.Header {
			q.Header.Del(name)
		}
	}
	return nil
}

// schemes are what to try, in this order.
func (h *host) schemes() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.scheme != "" {
		return []string{h.scheme}
	}
	return []string{"https", "http"}
}

func (h *host) speaks(scheme string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.scheme = scheme
}

// do sends a request for a path below the repository. Whatever the answer's
// status, it is no error.
func (h *host) do(ctx context.Context, path string, header http.Header) (*http.Response, error) {
	ctx = auth.WithScopesForHost(ctx, h.Host, auth.ScopeRepository(h.Repository, auth.ActionPull))
	var first error
	for _, scheme := range h.schemes() {
		u := url.URL{Scheme: scheme, Host: h.Host, Path: "/v2/" + h.Repository + path}
		if h.Namespace != "" {
			u.RawQuery = url.Values{"ns": {h.Namespace}}.Encode()
		}
		q, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
		if err != nil {
			return nil, err
		}
		for _, more := range []http.Header{h.Header, header} {
			for name, values := range more {
				q.Header[name] = values
			}
		}
		answer, err := h.client.Do(q)
		if err == nil {
			h.speaks(scheme)
			return answer, nil
		}
		if first == nil || errors.Is(first, http.ErrSchemeMismatch) {
			first = err
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, first
}

func (h *host) close() { h.transport.CloseIdleConnections() }
