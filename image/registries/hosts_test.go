package registries

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
)

// wantCertificates starts the server with TLS; it takes any client certificate.
func wantCertificates(f *fake) {
	f.TLS = &tls.Config{ClientAuth: tls.RequestClientCert}
	f.StartTLS()
}

// hostsFor makes a configuration with a hosts.toml for h.test.
func withHosts(t *testing.T, text string, args ...any) Config {
	t.Helper()
	c := config(t, "")
	c.HostsDir = t.TempDir()
	write(t, c.HostsDir+"/h.test/hosts.toml", fmt.Sprintf(text, args...))
	return c
}

// The hosts are asked in the order of the file, the server last, each at its
// own path, with ns saying whom they stand for.
func TestHostsAreAskedInOrder(t *testing.T) {
	first, second, server := newFake(t, answer(503)), newFake(t, answer(404)), newFake(t, nil)
	c := withHosts(t, `
server = "http://%s"

[host."http://%s"]
  capabilities = ["pull", "resolve"]
  [host."http://%s".header]
    X-Key = "k1"
    X-More = ["a", "b"]

[host."http://%s/v2/proxy"]
  override_path = true
  dial_timeout = "5s"
`, server.host(), second.host(), second.host(), first.host())
	if err := fetched(t, c, "h.test/a/b:1", nil); err != nil {
		t.Fatal(err)
	}
	if got := second.seen("X-Key", "X-More"); !slices.Equal(got, []string{"/v2/a/b/manifests/1?ns=h.test X-Key=k1 X-More=a"}) {
		t.Errorf("the first host was asked %q", got)
	}
	if got := first.seen("X-Key"); len(got) != triesBeside || got[0] != "/v2/proxy/a/b/manifests/1?ns=h.test X-Key=" {
		t.Errorf("the second host was asked %q", got)
	}
	if got := server.seen(); !slices.Equal(got, []string{"/v2/a/b/manifests/1?ns=h.test"}) {
		t.Errorf("the server was asked %q", got)
	}
	if s := open(t, c, "h.test/a/b:1", nil); s.endpoints[1].dial != 5*time.Second {
		t.Errorf("dial_timeout is %v", s.endpoints[1].dial)
	}
}

func TestCapabilitiesOfHosts(t *testing.T) {
	puller, resolver := newFake(t, nil), newFake(t, nil)
	c := withHosts(t, "server = 'http://%s'\ncapabilities = ['resolve', 'push']\n[host.'http://%s']\ncapabilities = ['pull']\n", resolver.host(), puller.host())
	s := open(t, c, "h.test/x:1", nil)
	if _, _, err := s.Manifest(t.Context(), ""); err != nil || len(puller.seen()) != 0 {
		t.Errorf("a tag: %v; who may not resolve was asked %q", err, puller.seen())
	}
	d := digest.FromBytes(puller.manifest)
	if _, _, err := s.Manifest(t.Context(), d); err != nil {
		t.Error(err)
	}
	if _, err := readAll(t, s, puller.digest()); err != nil {
		t.Error(err)
	}
	if got := resolver.seen(); len(got) != 1 {
		t.Errorf("who may not pull was asked %q", got)
	}
	for capability, says := range map[string]string{"pull": "can be pulled by digest only", "resolve": "no host has the capability pull"} {
		c := withHosts(t, "capabilities = ['%s']\n", capability)
		if err := fetched(t, c, "h.test/x:1", nil); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), says) {
			t.Errorf("only %s: %v", capability, err)
		}
	}
}

func TestTLSOfHosts(t *testing.T) {
	f := unstarted(t, nil)
	var presented int
	f.hook = func(_ http.ResponseWriter, r *http.Request) bool {
		presented = len(r.TLS.PeerCertificates)
		return false
	}
	wantCertificates(f)
	dir := t.TempDir()
	f.certificate(t, dir+"/ca.pem", "")
	f.certificate(t, dir+"/node.pem", dir+"/node-key.pem")
	for settings, want := range map[string]int{
		"skip_verify = true":                 0,
		fmt.Sprintf("ca = '%s/ca.pem'", dir): 0,
		fmt.Sprintf("ca = ['%s/ca.pem']\nclient = [['%s/node.pem', '%s/node-key.pem']]", dir, dir, dir): 1,
		"":                    -1,
		"ca = 'none.pem'":     -2,
		"client = 'none.pem'": -2,
	} {
		c := withHosts(t, "server = 'https://%s'\n%s\n", f.host(), settings)
		err := fetched(t, c, "h.test/x:1", nil)
		switch {
		case want >= 0 && (err != nil || presented != want):
			t.Errorf("%q: %v, %d certificates", settings, err, presented)
		case want == -1 && !errors.Is(err, ErrUnavailable):
			t.Errorf("%q: %v", settings, err)
		case want == -2 && (!errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), c.HostsDir+"/h.test/none.pem")):
			t.Errorf("%q: %v", settings, err)
		}
		if (CheckHosts(c.HostsDir) != nil) != (want == -2) {
			t.Errorf("%q: the check says %v", settings, CheckHosts(c.HostsDir))
		}
	}
}

// What is wrong or cannot be honoured is refused by its name, file and line.
func TestBrokenHostsFiles(t *testing.T) {
	for text, says := range map[string]string{
		"server = 'https://a.test'\n[host.'https://b.test']\nrewrite = 'x'\n": `line 3: the key "host.https://b.test.rewrite"`,
		"\nplugin = 1\n":                          `line 2: the key "plugin"`,
		"server = 'x\n":                           "line 1: ",
		"skip_verify = 'yes'\n":                   "line 1: ",
		"server = 'ftp://x'\n":                    `server "ftp://x": not an address`,
		"[host.'https://u:SECRET@b.test']\n":      `host "https://b.test": an address must not hold a login`,
		"[host.'b.test']\ncapabilities=['fly']\n": `"fly" is none of pull`,
		"dial_timeout = '10'\n":                   `dial_timeout: "10" is not a time`,
		"ca = 5\n":                                "ca: neither a text nor a list of texts",
		"client = [['a', 'b', 'c']]\n":            "client: 3 files",
		"[header]\nx = 5\n":                       `header "x": neither a text`,
	} {
		c := withHosts(t, "%s", text)
		err := fetched(t, c, "h.test/x:1", nil)
		if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), c.HostsDir+"/h.test/hosts.toml: ") || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "SECRET") {
			t.Errorf("%q: %v", text, err)
		}
		if err := CheckHosts(c.HostsDir); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: the check says %v", text, err)
		}
		// Others go on.
		if _, err := hosts(t, c, "other.test/x:1"); err != nil {
			t.Errorf("%q: another registry: %v", text, err)
		}
	}
}

// One registry in both is a contradiction; a file for all others gives way.
func TestHostsAgainstRegistriesConf(t *testing.T) {
	c := config(t, "[[registry]]\nprefix = 'h.test/team'\nlocation = 'mirror.test'\n[[registry]]\nprefix='*.wild.test'\n")
	c.HostsDir = t.TempDir()
	write(t, c.HostsDir+"/_default/hosts.toml", "[host.'https://all.test']\n")
	for name, want := range map[string][]string{
		"h.test/team/x:1": {"mirror.test/x"}, "h.test/x:1": {"all.test/x", "h.test/x"},
		"a.wild.test/x:1": {"a.wild.test/x"}, "busybox": {"all.test/library/busybox", "docker.io/library/busybox"},
	} {
		if got, err := hosts(t, c, name); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q %v, want %q", name, got, err, want)
		}
	}
	write(t, c.HostsDir+"/h.test/hosts.toml", "[host.'https://own.test']\n")
	_, err := hosts(t, c, "h.test/team/x:1")
	if !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
	for _, part := range []string{"h.test is configured twice", c.HostsDir + "/h.test/hosts.toml", `"h.test/team"`, c.RegistriesConf} {
		if !strings.Contains(fmt.Sprint(err), part) {
			t.Errorf("%v does not say %s", err, part)
		}
	}
	if got, err := hosts(t, c, "h.test/x:1"); err != nil || !slices.Equal(got, []string{"own.test/x", "h.test/x"}) {
		t.Errorf("a name of its own: %q %v", got, err)
	}
	write(t, c.HostsDir+"/port.test_5000_/hosts.toml", "[host.'https://own.test']\n")
	if got, err := hosts(t, c, "port.test:5000/x:1"); err != nil || !slices.Equal(got, []string{"own.test/x", "port.test:5000/x"}) {
		t.Errorf("a registry with a port: %q %v", got, err)
	}
}
