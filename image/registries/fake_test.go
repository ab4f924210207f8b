package registries

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/reference"
)

// fake is a registry with one manifest and one blob under every repository. Its
// hook may answer first.
type fake struct {
	*httptest.Server
	manifest, blob []byte
	hook           func(w http.ResponseWriter, r *http.Request) bool

	mu  sync.Mutex
	log []*http.Request
}

func newFake(t *testing.T, hook func(w http.ResponseWriter, r *http.Request) bool) *fake {
	t.Helper()
	f := unstarted(t, hook)
	f.Start()
	return f
}

func newTLSFake(t *testing.T, hook func(w http.ResponseWriter, r *http.Request) bool) *fake {
	t.Helper()
	f := unstarted(t, hook)
	f.StartTLS()
	return f
}

func unstarted(t *testing.T, hook func(w http.ResponseWriter, r *http.Request) bool) *fake {
	f := &fake{hook: hook, manifest: []byte(`{"schemaVersion":2}`), blob: bytes.Repeat([]byte("0123456789"), 200_000)}
	f.Server = httptest.NewUnstartedServer(f)
	f.Config.ErrorLog = log.New(io.Discard, "", 0) // refused certificates are what some tests are about
	t.Cleanup(f.Close)
	return f
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.log = append(f.log, r.Clone(context.Background()))
	f.mu.Unlock()
	switch {
	case f.hook != nil && f.hook(w, r):
	case strings.Contains(r.URL.Path, "/manifests/"):
		w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
		w.Write(f.manifest)
	case strings.HasSuffix(r.URL.Path, f.digest().String()):
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(f.blob))
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

func (f *fake) host() string          { return f.Listener.Addr().String() }
func (f *fake) digest() digest.Digest { return digest.FromBytes(f.blob) }

// seen are the paths that were asked for, with query and the headers named.
func (f *fake) seen(headers ...string) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []string
	for _, r := range f.log {
		text := r.URL.RequestURI()
		for _, h := range headers {
			text += " " + h + "=" + r.Header.Get(h)
		}
		list = append(list, text)
	}
	return list
}

// certificate writes the server's certificate, and its key where asked for.
func (f *fake) certificate(t *testing.T, cert, key string) {
	t.Helper()
	write(t, cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.Certificate().Raw})))
	if key != "" {
		der, err := x509.MarshalPKCS8PrivateKey(f.TLS.Certificates[0].PrivateKey)
		if err != nil {
			t.Fatal(err)
		}
		write(t, key, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})))
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// config is one with this registries.conf, that does not wait for anything.
func config(t *testing.T, text string, args ...any) Config {
	t.Helper()
	dir := t.TempDir()
	c := Config{RegistriesConf: filepath.Join(dir, "registries.conf"), CertsDir: filepath.Join(dir, "certs.d"),
		Idle: 20 * time.Second, Pause: time.Millisecond}
	write(t, c.RegistriesConf, fmt.Sprintf(text, args...))
	return c
}

// mirrored makes an entry for r.test with these endpoints, the last its own.
func mirrored(hosts ...string) string {
	last := len(hosts) - 1
	text := fmt.Sprintf("[[registry]]\nprefix = 'r.test'\nlocation = %q\ninsecure = true\n", hosts[last])
	for _, h := range hosts[:last] {
		text += fmt.Sprintf("[[registry.mirror]]\nlocation = %q\ninsecure = true\n", h)
	}
	return text
}

func named(t *testing.T, text string) reference.Named {
	t.Helper()
	n, err := reference.ParseNormalizedNamed(text)
	if err != nil {
		t.Fatal(err)
	}
	return reference.TagNameOnly(n)
}

func open(t *testing.T, c Config, name string, caller *Caller) *Source {
	t.Helper()
	s, err := Open(t.Context(), c, named(t, name), caller)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// fetched opens a name and reads its manifest.
func fetched(t *testing.T, c Config, name string, caller *Caller) error {
	t.Helper()
	s, err := Open(t.Context(), c, named(t, name), caller)
	if err != nil {
		return err
	}
	defer s.Close()
	_, _, err = s.Manifest(t.Context(), "")
	return err
}

// readAll reads a blob to its end, as package fetch would.
func readAll(t *testing.T, s *Source, d digest.Digest) ([]byte, error) {
	t.Helper()
	var got []byte
	for {
		b, err := s.Blob(t.Context(), Range{Digest: d, Offset: int64(len(got))})
		if err != nil {
			return got, err
		}
		if _, err := io.CopyN(io.Discard, b, int64(len(got))-b.Offset); err != nil {
			t.Fatal(err)
		}
		more, err := io.ReadAll(b)
		got = append(got, more...)
		b.Close()
		if err == nil {
			return got, nil
		}
		b.Failed(err)
	}
}

func answer(code int) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(code)
		return true
	}
}
