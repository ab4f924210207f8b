package config

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestDefaultRoundTrip(t *testing.T) {
	text, err := Default().Text()
	if err != nil {
		t.Fatal(err)
	}
	got, err := parse([]byte(text))
	if err != nil {
		t.Fatalf("the printed default is refused: %v\n%s", err, text)
	}
	if !reflect.DeepEqual(got, Default()) {
		t.Errorf("round trip changed the configuration:\n%+v\n%+v", got, Default())
	}
}

// Every key that the schema has must be printed, with a comment above it.
func TestDefaultPrintsEveryKeyWithComment(t *testing.T) {
	text, err := Default().Text()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(text, "\n")
	var keys func(reflect.Type) []string
	keys = func(ty reflect.Type) (out []string) {
		for i := range ty.NumField() {
			f := ty.Field(i)
			out = append(out, f.Tag.Get("toml"))
			if f.Tag.Get("comment") == "" {
				t.Errorf("key %s has no comment", f.Name)
			}
			if f.Type.Kind() == reflect.Struct {
				out = append(out, keys(f.Type)...)
			}
		}
		return out
	}
	for _, k := range keys(reflect.TypeOf(Config{})) {
		at := -1
		for i, l := range lines {
			l = strings.TrimSpace(l)
			if strings.HasPrefix(l, k+" =") || strings.HasSuffix(l, k+"]") {
				at = i
				break
			}
		}
		if at < 1 || !strings.HasPrefix(strings.TrimSpace(lines[at-1]), "#") {
			if k != "handlers" { // a table of tables has no line of its own
				t.Errorf("key %q is not printed under a comment", k)
			}
		}
	}
}

func TestRefusals(t *testing.T) {
	for name, tc := range map[string]struct{ text, want string }{
		"unknown key":          {"root = '/a'\nrot = '/b'\n", `line 2: unknown key "rot"`},
		"unknown nested key":   {"[cni]\nconfdir = '/x'\n", `line 2: unknown key "cni.confdir"`},
		"unknown handler key":  {"[runtime.handlers.runc]\npath='/x'\nroot='y'\n", `line 3: unknown key "runtime.handlers.runc.root"`},
		"wrong type":           {"\nroot = 5\n", "line 2"},
		"wrong type names key": {"\n[image]\nmax_concurrent_downloads = 'six'\n", "max_concurrent_downloads"},
		"bad duration":         {"[cni]\ntimeout = '5 parsecs'\n", "cni.timeout"},
		"not TOML":             {"root = \n", "line 1"},
		"relative root":        {"root = 'var'\n", `key "root"`},
		"same root and state":  {"root = '/a'\nstate = '/a/'\n", `"root" and "state"`},
		"long socket":          {"socket = '/" + strings.Repeat("s", 110) + "'\n", `key "socket"`},
		"log level":            {"log_level = 'loud'\n", `key "log_level": "loud"`},
		"no such handler":      {"[runtime]\ndefault_handler = 'kata'\n", `"kata"`},
		"missing host path":    {"[runtime]\nmissing_host_path = 'ignore'\n", `key "runtime.missing_host_path": "ignore"`},
		"zero downloads":       {"[image]\nmax_concurrent_downloads = 0\n", "image.max_concurrent_downloads"},
		"soft over hard":       {"[runtime]\nnofile_soft = 10\nnofile_hard = 5\n", "nofile_soft"},
		"relative policy":      {"[image]\npolicy = 'p.json'\n", "image.policy"},
		"NRI switch":           {"[nri]\nenable = 'yes'\n", `key "nri.enable": "yes"`},
		"NRI timeout":          {"[nri]\nplugin_request_timeout = '5h'\n", "nri.plugin_request_timeout"},
		"long NRI socket":      {"[nri]\nsocket_path = '/" + strings.Repeat("s", 110) + "'\n", `key "nri.socket_path"`},
		"relative NRI socket":  {"[nri]\nsocket_path = 'nri.sock'\n", "nri.socket_path"},
		"streaming address":    {"[streaming]\naddress = 'localhost'\n", `key "streaming.address": "localhost"`},
		"streaming port":       {"[streaming]\nport = 70000\n", "streaming.port"},
		"TLS without a key":    {"[streaming]\ntls_cert = '/c.pem'\n", "streaming.tls_key"},
		"relative certificate": {"[streaming]\ntls_cert = 'c.pem'\ntls_key = '/k.pem'\n", "streaming.tls_cert"},
		"no life of a URL":     {"[streaming]\nurl_lifetime = '0s'\n", "streaming.url_lifetime"},
		"no idle time":         {"[streaming]\nidle_timeout = '1ms'\n", "streaming.idle_timeout"},
		"relative plugins":     {"[cni]\nbin_dirs = ['bin']\n", "cni.bin_dirs"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parse([]byte(tc.text))
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want ErrInvalid with %q", err, tc.want)
			}
		})
	}
}

func TestLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "berth.toml")
	if err := os.WriteFile(path, []byte("root='/x'\n[runtime]\ndefault_handler='crun'\n[runtime.handlers.crun]\npath='/usr/bin/crun'\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if c.Root != "/x" || c.State != "/run/berth" || len(c.Runtime.Handlers) != 1 || c.Runtime.Handlers["crun"].Path != "/usr/bin/crun" {
		t.Errorf("unexpected: %+v", c)
	}
	if _, err := Load(path + ".missing"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
	if c, err := Load(""); err != nil || c.Root != "/var/lib/berth" {
		t.Errorf("defaults: %v %v", c.Root, err)
	}
}
