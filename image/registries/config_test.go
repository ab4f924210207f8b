package registries

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
)

// hosts are those that a name would be fetched from, in order.
func hosts(t *testing.T, c Config, name string) ([]string, error) {
	t.Helper()
	s, err := Open(t.Context(), c, named(t, name), nil)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var list []string
	for _, e := range s.endpoints {
		list = append(list, e.name)
	}
	return list, nil
}

func TestEntriesOfRegistriesConf(t *testing.T) {
	c := config(t, `
[[registry]]
prefix = "r.test"
location = "inner.test/all"
[[registry.mirror]]
location = "any.test"
[[registry.mirror]]
location = "digests.test/d"
pull-from-mirror = "digest-only"
[[registry.mirror]]
location = "tags.test"
pull-from-mirror = "tag-only"
[[registry]]
prefix = "r.test/special"
location = "r.test/special"
mirror-by-digest-only = true
[[registry.mirror]]
location = "special.test"
[[registry]]
prefix = "*.wild.test"
[[registry.mirror]]
location = "wild-mirror.test"
[[registry]]
prefix = "blocked.test"
location = "blocked.test"
blocked = true
`)
	d := "@" + digest.FromString("x").String()
	for name, want := range map[string][]string{
		"r.test/a/b:1":         {"any.test/a/b", "tags.test/a/b", "inner.test/all/a/b"},
		"r.test/a/b" + d:       {"any.test/a/b", "digests.test/d/a/b", "inner.test/all/a/b"},
		"r.test/special/x:1":   {"r.test/special/x"},
		"r.test/special/x" + d: {"special.test/x", "r.test/special/x"},
		"a.b.wild.test/x:1":    {"wild-mirror.test/x", "a.b.wild.test/x"},
		"other.test/x:1":       {"other.test/x"},
		"busybox":              {"docker.io/library/busybox"},
	} {
		if got, err := hosts(t, c, name); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q %v, want %q", name, got, err, want)
		}
	}
	if _, err := hosts(t, c, "blocked.test/x:1"); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), `blocked by the prefix "blocked.test"`) {
		t.Error(err)
	}
	s := open(t, c, "busybox", nil)
	if s.endpoints[0].address != "registry-1.docker.io" {
		t.Errorf("Docker Hub is %s", s.endpoints[0].address)
	}
}

// A changed file counts for what is opened next; a broken one fails that, says
// where, and is no trouble for what is open.
func TestFilesAreReadEachTime(t *testing.T) {
	first, second := newFake(t, nil), newFake(t, nil)
	c := config(t, "%s", mirrored(first.host()))
	old := open(t, c, "r.test/x:1", nil)
	write(t, c.RegistriesConf+".d/50.conf", mirrored(second.host()))
	if err := fetched(t, c, "r.test/x:1", nil); err != nil || len(second.seen()) == 0 {
		t.Errorf("the drop-in does not count: %v", err)
	}
	write(t, c.RegistriesConf+".d/60.conf", "# fine\n\nlocation = = 1\n")
	err := fetched(t, c, "r.test/x:1", nil)
	if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), c.RegistriesConf+".d/60.conf") || !strings.Contains(err.Error(), "line 3") {
		t.Errorf("a broken drop-in: %v", err)
	}
	if _, _, err := old.Manifest(t.Context(), ""); err != nil || len(first.seen()) == 0 {
		t.Errorf("what was open: %v", err)
	}
	if err := CheckConf(c.RegistriesConf); err == nil || !strings.Contains(err.Error(), "line 3") {
		t.Errorf("the check says %v", err)
	}
	os.Remove(c.RegistriesConf + ".d/60.conf")
	if err := fetched(t, c, "r.test/x:1", nil); err != nil {
		t.Error(err)
	}
	os.Remove(c.RegistriesConf)
	if err := fetched(t, c, "r.test/x:1", nil); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), c.RegistriesConf) {
		t.Errorf("without the file: %v", err)
	}
}

func TestShortNames(t *testing.T) {
	search := "unqualified-search-registries = ['one.test', 'two.test:5000']\n"
	for conf, want := range map[string]map[string]string{
		"":     {"busybox:1": "docker.io/library/busybox:1", "team/app": "docker.io/team/app"},
		search: {"busybox:1": "one.test/busybox:1 two.test:5000/busybox:1", "team/app": "one.test/team/app two.test:5000/team/app"},
		search + "short-name-mode = 'disabled'\n":                                       {"x": "one.test/x two.test:5000/x"},
		search + "short-name-mode = 'enforcing'\n":                                      {"x": "error"},
		"unqualified-search-registries = ['one.test']\nshort-name-mode = 'enforcing'\n": {"x:2": "one.test/x:2"},
		search + "short-name-mode = 'enforcing'\n[aliases]\nx = 'a.test/y/z'\n":         {"x:2": "a.test/y/z:2", "x": "a.test/y/z", "w/x": "error"},
	} {
		c := config(t, "%s", conf)
		for short, names := range want {
			if !IsShort(short) {
				t.Errorf("%s is short", short)
			}
			list, err := c.LongNames(short)
			var got []string
			for _, n := range list {
				got = append(got, n.String())
			}
			if text := strings.Join(got, " "); (names == "error") != errors.Is(err, ErrConfig) || err == nil && text != names {
				t.Errorf("%q: %s is %q %v, want %s", conf, short, text, err, names)
			}
		}
	}
	for _, long := range []string{"docker.io/x", "localhost/x", "r.test/x:1", "127.0.0.1:5000/x", "UPPER", ""} {
		if IsShort(long) {
			t.Errorf("%q is not short", long)
		}
	}
}

// certs.d: the authority makes the server trusted, and it gets the certificate
// that it asks for, which nobody else gets.
func TestCertificates(t *testing.T) {
	f := unstarted(t, nil)
	var presented int
	f.hook = func(_ http.ResponseWriter, r *http.Request) bool {
		presented = len(r.TLS.PeerCertificates)
		return false
	}
	wantCertificates(f)
	c := config(t, "[[registry]]\nprefix = 'r.test'\nlocation = %q\n", f.host())
	if err := fetched(t, c, "r.test/x:1", nil); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("without its authority: %v", err)
	}
	dir := c.CertsDir + "/" + f.host()
	f.certificate(t, dir+"/ca.crt", "")
	if err := fetched(t, c, "r.test/x:1", nil); err != nil || presented != 0 {
		t.Errorf("with its authority: %v, %d certificates", err, presented)
	}
	f.certificate(t, dir+"/node.cert", dir+"/node.key")
	if err := fetched(t, c, "r.test/x:1", nil); err != nil || presented != 1 {
		t.Errorf("with a client certificate: %v, %d certificates", err, presented)
	}
	for file, text := range map[string]string{"ca.crt": "nonsense", "node.key": "nonsense", "lone.cert": "x"} {
		before, _ := os.ReadFile(dir + "/" + file)
		write(t, dir+"/"+file, text)
		if err := fetched(t, c, "r.test/x:1", nil); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s broken: %v", file, err)
		}
		write(t, dir+"/"+file, string(before))
	}
	os.Remove(dir + "/lone.cert")
	// The directory of hosts.toml may hold such files too.
	c.HostsDir, c.CertsDir = c.CertsDir, t.TempDir()
	if err := os.Rename(dir, fmt.Sprintf("%s/127.0.0.1_%s_", c.HostsDir, strings.TrimPrefix(f.host(), "127.0.0.1:"))); err != nil {
		t.Fatal(err)
	}
	if err := fetched(t, c, "r.test/x:1", nil); err != nil || presented != 1 {
		t.Errorf("from the hosts directory: %v, %d certificates", err, presented)
	}
}
