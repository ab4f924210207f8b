package config

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

// Each refusal names its key and, where the file sets it, the line.
func TestRefusals(t *testing.T) {
	long := "/" + strings.Repeat("s", 110)
	for name, tc := range map[string]struct{ text, want string }{
		"unknown key":             {"root = '/a'\nrot = '/b'\n", `line 2: unknown key "rot"`},
		"unknown nested key":      {"[cni]\nconfdir = '/x'\n", `line 2: unknown key "cni.confdir"`},
		"unknown table":           {"\n[networks]\nconfdir = '/x'\n", `line 2: unknown key "networks"`},
		"unknown handler key":     {"[runtime.handlers.runc]\npath='/x'\nroot='y'\n", `line 3: unknown key "runtime.handlers.runc.root"`},
		"unknown inline key":      {"[runtime]\nhandlers = { runc = { path = '/x', rot = 'y' } }\n", `line 2: unknown key "runtime.handlers.runc.rot"`},
		"number for string":       {"\nroot = 5\n", `line 2: key "root": the number 5 where a string belongs`},
		"string for number":       {"\n[image]\nmax_concurrent_downloads = 'six'\n", `line 3: key "image.max_concurrent_downloads": the string "six" where a whole number belongs`},
		"number for duration":     {"[cni]\ntimeout = 5\n", `line 2: key "cni.timeout": the number 5 where a duration such as "30s" or "5m" belongs`},
		"bad duration":            {"[cni]\ntimeout = '5 parsecs'\n", `line 2: key "cni.timeout": "5 parsecs" where a duration`},
		"string for list":         {"[cni]\nbin_dirs = '/a'\n", `line 2: key "cni.bin_dirs": the string "/a" where a list of strings belongs`},
		"list of numbers":         {"[cni]\nbin_dirs = ['/a', 5]\n", `line 2: key "cni.bin_dirs": a list of something else where a list of strings belongs`},
		"string for switch":       {"[runtime]\nselinux = 'yes'\n", `key "runtime.selinux": the string "yes" where true or false belongs`},
		"value for table":         {"cni = '/x'\n", `line 1: key "cni": the string "/x" where a table belongs`},
		"table for value":         {"[root]\n", `line 1: key "root": a table where a string belongs`},
		"tables for table":        {"[[cni]]\n", `line 1: key "cni": a list of tables where a table belongs`},
		"date":                    {"log_level = 2020-01-01\n", `a date or time where a string belongs`},
		"negative":                {"[runtime]\nnofile_soft = -1\n", `line 2: key "runtime.nofile_soft": -1 is negative`},
		"too large a number":      {"[image]\nmax_concurrent_downloads = 99999999999999999999\n", `line 2: `},
		"not TOML":                {"root = \n", "line 1: column "},
		"twice":                   {"root = '/a'\nroot = '/b'\n", "line 2: column 1: "},
		"relative root":           {"root = 'var'\n", `line 1: key "root": "var" is not an absolute path`},
		"root of all":             {"root = '/'\n", `line 1: key "root": "/" is not berth's alone`},
		"shared root":             {"root = '/var/lib/'\n", `line 1: key "root": "/var/lib" is not berth's alone`},
		"shared state":            {"state = '/run'\n", `line 1: key "state": "/run" is not berth's alone`},
		"same root and state":     {"root = '/a'\nstate = '/a/'\n", `line 2: key "state": "/a" is also root`},
		"state inside root":       {"root = '/a'\nstate = '/a/run'\n", `line 2: key "state": "/a/run" is inside root "/a"`},
		"root inside state":       {"root = '/a/lib'\nstate = '/a'\n", `line 1: key "root": "/a/lib" is inside state "/a"`},
		"default inside":          {"root = '/run/berth/root'\n", `line 1: key "root"`},
		"long socket":             {"socket = '" + long + "'\n", `line 1: key "socket": "` + long + `" is longer than the 107 bytes`},
		"socket is root":          {"root = '/a'\nsocket = '/a'\n", `line 2: key "socket": "/a" is already root`},
		"socket is the monitor's": {"socket = '/run/berth/monitor.sock'\n", `is already the monitor's socket`},
		"log level":               {"log_level = 'loud'\n", `line 1: key "log_level": "loud" is none of trace, debug, info, warning, error`},
		"no such handler":         {"[runtime]\ndefault_handler = 'kata'\n", `line 2: key "runtime.default_handler": there is no table [runtime.handlers.kata]`},
		"no path of handler":      {"[runtime.handlers.runc]\n", `line 1: key "runtime.handlers.runc.path": empty`},
		"relative handler":        {"[runtime.handlers.runc]\npath = 'bin/runc'\n", `line 2: key "runtime.handlers.runc.path": "bin/runc" is not`},
		"relative base spec":      {"[runtime.handlers.runc]\npath = 'runc'\nbase_spec = 'a'\n", `line 3: key "runtime.handlers.runc.base_spec"`},
		"relative handler's CNI":  {"[runtime.handlers.runc]\npath = 'runc'\ncni_conf_dir = 'a'\n", `line 3: key "runtime.handlers.runc.cni_conf_dir"`},
		"handler's name":          {"[runtime.handlers.'a/b']\npath = 'runc'\n[runtime.handlers.runc]\npath = 'runc'\n", `line 1: key "runtime.handlers.\"a/b\""`},
		"half a switch":           {"[runtime.handlers.runc]\npath = 'runc'\nprivileged_all_devices_allowed = true\n", `line 3: key "runtime.handlers.runc.privileged_all`},
		"missing host path":       {"[runtime]\nmissing_host_path = 'ignore'\n", `line 2: key "runtime.missing_host_path": "ignore"`},
		"cgroup driver":           {"[runtime]\ncgroup_driver = 'v2'\n", `line 2: key "runtime.cgroup_driver": "v2"`},
		"relative CDI":            {"[runtime]\ncdi_dirs = ['cdi']\n", `line 2: key "runtime.cdi_dirs": "cdi"`},
		"small shm":               {"[runtime]\nshm_size = 1\n", `line 2: key "runtime.shm_size": 1 is outside 4096 to`},
		"zero downloads":          {"\n[image]\nmax_concurrent_downloads = 0\n", `line 3: key "image.max_concurrent_downloads": 0 is outside 1 to 64`},
		"soft over hard":          {"[runtime]\nnofile_soft = 10\nnofile_hard = 5\n", `line 2: key "runtime.nofile_soft": 10`},
		"relative policy":         {"[image]\npolicy = 'p.json'\n", `line 2: key "image.policy"`},
		"relative policy dir":     {"[image]\npolicy_dir = 'p'\n", `line 2: key "image.policy_dir"`},
		"relative sources":        {"[image]\nregistries_dir = 'd'\n", `line 2: key "image.registries_dir"`},
		"relative template":       {"[cni]\nconf_template = 't'\n", `line 2: key "cni.conf_template"`},
		"NRI switch":              {"[nri]\nenable = 'yes'\n", `line 2: key "nri.enable": "yes"`},
		"NRI timeout":             {"[nri]\nplugin_request_timeout = '5h'\n", `line 2: key "nri.plugin_request_timeout": 5h is outside 100ms to 1m`},
		"long NRI socket":         {"[nri]\nsocket_path = '" + long + "'\n", `key "nri.socket_path"`},
		"relative NRI socket":     {"[nri]\nsocket_path = 'nri.sock'\n", "nri.socket_path"},
		"one socket for two":      {"socket = '/run/a.sock'\n[nri]\nsocket_path = '/run/./a.sock'\n", `line 3: key "nri.socket_path": "/run/a.sock" is already socket`},
		"streaming address":       {"[streaming]\naddress = 'localhost'\n", `line 2: key "streaming.address": "localhost"`},
		"metrics address":         {"[metrics]\naddress = '9323'\n", `line 2: key "metrics.address": "9323" is not host:port or :port`},
		"metrics host":            {"[metrics]\naddress = 'localhost:9323'\n", `line 2: key "metrics.address": "localhost" is not an IP address`},
		"metrics port":            {"[metrics]\naddress = ':70000'\n", `line 2: key "metrics.address": "70000" is not a port`},
		"streaming port":          {"[streaming]\nport = 70000\n", `line 2: key "streaming.port": 70000 is outside 0 to 65535`},
		"TLS without a key":       {"[streaming]\ntls_cert = '/c.pem'\n", `key "streaming.tls_key": empty`},
		"TLS without a cert":      {"[streaming]\ntls_key = '/c.pem'\n", `key "streaming.tls_cert": empty`},
		"relative certificate":    {"[streaming]\ntls_cert = 'c.pem'\ntls_key = '/k.pem'\n", `line 2: key "streaming.tls_cert"`},
		"no life of a URL":        {"[streaming]\nurl_lifetime = '0s'\n", `line 2: key "streaming.url_lifetime": 0s is outside 1s to 1h`},
		"no idle time":            {"[streaming]\nidle_timeout = '1ms'\n", `key "streaming.idle_timeout": 1ms is outside 1s to 1000h`},
		"relative plugins":        {"[cni]\nbin_dirs = ['bin']\n", `line 2: key "cni.bin_dirs": "bin"`},
		"no plugins":              {"[cni]\nbin_dirs = []\n", `line 2: key "cni.bin_dirs": empty`},
		"endless CNI":             {"[cni]\ntimeout = '90m'\n", `line 2: key "cni.timeout": 1h30m is outside 1s to 1h`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := loadText(t, tc.text)
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want ErrInvalid with %q", err, tc.want)
			}
			for _, word := range []string{"Go struct", "cannot ", "unmarshal", "config.Config", " toml:"} {
				if err != nil && strings.Contains(err.Error(), word) {
					t.Errorf("%v has %q, which is the program's own", err, word)
				}
			}
		})
	}
}

// Everything that is wrong is told at once.
func TestAllProblemsAreTold(t *testing.T) {
	for text, keys := range map[string][]string{
		"rot = 1\nlog_level = 5\n[cni]\ntimeout = 'x'\n":                         {"rot", "log_level", "cni.timeout"},
		"log_level = 'loud'\n[cni]\ntimeout = '0s'\n[streaming]\nport = 70000\n": {"cni.timeout", "log_level", "streaming.port"},
	} {
		_, err := loadText(t, text)
		var problems Problems
		if !errors.As(err, &problems) {
			t.Fatalf("%q: %v", text, err)
		}
		var got []string
		for _, p := range problems {
			got = append(got, p.Key)
			if p.Place.Line == 0 || p.Place.File == "" {
				t.Errorf("%s has no place", p)
			}
		}
		for _, k := range keys {
			if !strings.Contains(strings.Join(got, " "), k) {
				t.Errorf("%q: told of %v, want %v", text, got, keys)
			}
		}
		if strings.Contains(err.Error(), "\n") {
			t.Errorf("more than one line for the log: %v", err)
		}
	}
}

// The schema has no type that the checks of a document do not know, and of
// tables that are named only one kind.
func TestSchemaTypesAreKnown(t *testing.T) {
	for _, l := range leaves(nil, reflect.ValueOf(Default())) {
		switch l.value.Kind() {
		case reflect.String, reflect.Bool, reflect.Int, reflect.Int64, reflect.Uint64, reflect.Slice:
		default:
			t.Errorf("key %s is a %s", l.key, l.value.Kind())
		}
	}
}
