package cases

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/critest/node"
)

// proxy is an HTTP proxy that knows where names are.
type proxy struct {
	mu   sync.Mutex
	seen []string
	at   map[string]string // host → address
}

// startProxy serves until the test's end.
func startProxy(t *testing.T, at map[string]string) (p *proxy, address string) {
	t.Helper()
	p = &proxy{at: at}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: p, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	return p, l.Addr().String()
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.seen = append(p.seen, r.Method+" "+r.Host+" "+r.Header.Get("Proxy-Authorization"))
	p.mu.Unlock()
	switch at := p.at[r.Host]; {
	case at == "":
		w.WriteHeader(http.StatusServiceUnavailable)
	case r.Method == http.MethodConnect:
		tunnel(w, at)
	default:
		(&httputil.ReverseProxy{Rewrite: func(q *httputil.ProxyRequest) { q.Out.URL.Host = at }}).ServeHTTP(w, r)
	}
}

// tunnel joins the client to an address until either ends.
func tunnel(w http.ResponseWriter, at string) {
	there, err := net.Dial("tcp", at)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer there.Close()
	here, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer here.Close()
	if _, err := io.WriteString(here, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
		return
	}
	go func() {
		_, _ = io.Copy(there, buffered)
		_ = there.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(here, there)
}

// took tells how often the proxy was asked for a host, and with which words.
func (p *proxy) took(begin string) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.seen {
		if strings.HasPrefix(s, begin) {
			n++
		}
	}
	return n
}

// Proxies are the environment's, with their logins, and without them for whom
// NO_PROXY names.
func TestProxyOfTheEnvironment(t *testing.T) {
	r, _ := besides(t, "x/proxied")
	p, at := startProxy(t, map[string]string{"proxied.test:8080": r.Addr()})
	address := "http://u:PROXYPW@" + at
	e := start(t, node.Options{LogLevel: "trace", Wrap: []string{"env", "HTTP_PROXY=" + address, "HTTPS_PROXY=" + address, "NO_PROXY=direct.test"}})
	e.registriesConf("[[registry]]\nlocation = 'proxied.test:8080'\ninsecure = true\n[[registry]]\nlocation = 'direct.test:8080'\ninsecure = true\n")
	if err := e.pullWith("proxied.test:8080/x/proxied:1", nil); err != nil {
		t.Error(err)
	}
	err := e.pullWith("direct.test:8080/x/proxied:1", nil)
	if err == nil {
		t.Error("a name that nobody knows was pulled")
	}
	for _, method := range []string{"GET", "CONNECT"} {
		if n := p.took(method + " direct.test"); n != 0 {
			t.Errorf("the proxy was asked for a name of NO_PROXY %d times", n)
		}
	}
	if n := p.took("GET proxied.test:8080 Basic "); n < 3 {
		t.Errorf("the proxy saw %q", p.seen)
	}
	e.secretsOf(err, "PROXYPW")
}

// authority makes certificates for tests.
type authority struct {
	t    *testing.T
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t}
	a.cert, a.key = a.sign(&x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

// sign makes a certificate of the template, the authority's own when there is none yet.
func (a *authority) sign(template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	parent, by := a.cert, a.key
	if parent == nil {
		parent, by = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return cert, key
}

// pair writes a new client certificate and its key as PEM.
func (a *authority) pair() (cert, key []byte) {
	a.t.Helper()
	c, k := a.sign(&x509.Certificate{SerialNumber: big.NewInt(3), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	der, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		a.t.Fatal(err)
	}
	return encodePEM(c), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

func encodePEM(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
}

// front serves a plain HTTP server's content over TLS under a name, to those who show
// a certificate of the authority.
func (a *authority) front(name, at string) (address string) {
	a.t.Helper()
	cert, key := a.sign(&x509.Certificate{SerialNumber: big.NewInt(2), DNSNames: []string{name}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	own := x509.NewCertPool()
	own.AddCert(a.cert)
	s := httptest.NewUnstartedServer(httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: at}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: own}
	s.Config.ErrorLog = nil
	s.StartTLS()
	a.t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// certsD makes a directory as certs.d with an authority and a client's certificate for
// a host.
func (a *authority) certsD(host string) string {
	a.t.Helper()
	dir := a.t.TempDir()
	cert, key := a.pair()
	for name, data := range map[string][]byte{"ca.crt": encodePEM(a.cert), "client.cert": cert, "client.key": key} {
		path := filepath.Join(dir, host, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			a.t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	return dir
}

// A registry with TLS is reached through a proxy by CONNECT: the proxy gets its own
// login and sees nothing of what is said, certificates are the registry's and the
// node's; also when a mirror or a redirect leads there.
func TestProxyWithTLS(t *testing.T) {
	r, _ := besides(t, "x/secure")
	a := newAuthority(t)
	secure := a.front("secure.test", r.Addr())
	p, at := startProxy(t, map[string]string{"secure.test:8443": secure})
	address := "http://u:PROXYPW@" + at
	e := start(t, node.Options{LogLevel: "trace", Wrap: []string{"env", "HTTP_PROXY=" + address, "HTTPS_PROXY=" + address, "NO_PROXY=direct.test,.inside.test"},
		Settings: map[string]string{"image": fmt.Sprintf("certs_dir = %q", a.certsD("secure.test:8443"))}})
	e.registriesConf("[[registry]]\nprefix = 'docker.io'\nlocation = '127.0.0.1:2'\ninsecure = true\n[[registry.mirror]]\nlocation = 'secure.test:8443'\n")
	for _, reference := range []string{"secure.test:8443/x/secure:1", "docker.io/x/secure:1"} {
		if err := e.pullWith(reference, nil); err != nil {
			t.Errorf("%s: %v", reference, err)
		}
		if p.took("CONNECT secure.test:8443 Basic ") == 0 {
			t.Errorf("%s: the proxy saw %q", reference, p.seen)
		}
	}
	if p.took("GET ") != 0 {
		t.Errorf("the proxy was asked in plain words: %q", p.seen)
	}
	for _, q := range r.Requests() {
		if q.User != "" {
			t.Errorf("the proxy's login went to the registry: %+v", q)
		}
	}
	for reference, words := range map[string]string{
		"unknown.test:8443/x/secure:1": "Service Unavailable", // says the proxy
		"direct.test:8443/x/secure:1":  "direct.test",
		"a.inside.test/x/secure:1":     "a.inside.test",
	} {
		err := e.pullWith(reference, nil)
		if err == nil || !strings.Contains(err.Error(), "RegistryUnavailable") || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", reference, err)
		}
		e.secretsOf(err, "PROXYPW")
	}
	if p.took("CONNECT direct.test")+p.took("CONNECT a.inside.test") != 0 {
		t.Errorf("the proxy was asked for names of NO_PROXY: %q", p.seen)
	}
}
