package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"berth/runtime/config"
)

// nodeFiles are files for a configuration to name, good and bad, and the text of
// one that names none and suits the machine of the test.
type nodeFiles struct{ dir, base string }

func (n nodeFiles) path(name string) string { return filepath.Join(n.dir, name) }

func makeNodeFiles(t *testing.T) nodeFiles {
	t.Helper()
	n := nodeFiles{dir: t.TempDir()}
	for name, text := range map[string]string{
		"monitor": "#!/bin/sh\n", "runc": "#!/bin/sh\n", "plain": "nothing of use",
		"spec.json": `{"process": {"env": ["A=b"]}}`, "rootfs.json": `{"root": {"path": "/x"}}`,
		"policy.json": `{"default": [{"type": "reject"}]}`, "registries.conf": "[[registry]]\nlocation = 'a.example'\n",
		"auth.json": `{"auths": {}}`,
		"net.tmpl":  `{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "bridge", "ipam": {"subnet": "{{.PodCIDR}}"}}]}`,
		"half.tmpl": `{"cniVersion": "{{.PodCIDR"}`, "other.tmpl": `{"cniVersion": "1.0.0", "name": "{{.Node}}", "plugins": [{"type": "bridge"}]}`,
	} {
		if err := os.WriteFile(n.path(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{
		os.Chmod(n.path("monitor"), 0o700), os.Chmod(n.path("runc"), 0o700), syscall.Mkfifo(n.path("fifo"), 0o600),
		os.MkdirAll(n.path("plugins/good"), 0o755), os.WriteFile(n.path("plugins/10-good"), nil, 0o700), os.WriteFile(n.path("plugins/notes"), nil, 0o600),
		os.MkdirAll(n.path("waiting/a.example"), 0o755), syscall.Mkfifo(n.path("waiting/a.example/hosts.toml"), 0o600), syscall.Mkfifo(n.path("waiting/x.yaml"), 0o600),
		syscall.Mkfifo(n.path("waiting/ns.json"), 0o600), syscall.Mkfifo(n.path("waiting/runc"), 0o700),
		os.MkdirAll(n.path("policies"), 0o755), os.Symlink("../policy.json", n.path("policies/default.json")),
		os.MkdirAll(n.path("broken"), 0o755), os.Symlink("../plain", n.path("broken/ns.json")),
		os.MkdirAll(n.path("dropin.conf.d"), 0o755), os.Link(n.path("registries.conf"), n.path("dropin.conf")), syscall.Mkfifo(n.path("dropin.conf.d/x.conf"), 0o600),
		os.MkdirAll(n.path("misnamed"), 0o755), os.WriteFile(n.path("misnamed/logger"), nil, 0o700),
		os.MkdirAll(n.path("lib"), 0o755), os.Symlink(n.path("lib"), n.path("link")), os.Symlink("/var", n.path("var")), os.Symlink(".", n.path("here")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	n.keyPair(t, "a")
	n.keyPair(t, "b")
	n.mismatched(t, "certs/r.test/c")
	n.base = "root = '" + n.path("lib/root") + "'\nstate = '" + n.path("run") + "'\nsocket = '" + n.path("s.sock") + "'\nmonitor = '" + n.path("monitor") +
		"'\nruntime.handlers.runc.path = '" + n.path("runc") + "'\nnri.socket_path = '" + n.path("nri.sock") + "'\nnri.plugin_path = '" + n.path("none") +
		"'\nnri.enable = 'on'\n"
	return n
}

// keyPair makes NAME.crt and NAME.key.
func (n nodeFiles) keyPair(t *testing.T, name string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{".crt": {Type: "CERTIFICATE", Bytes: der}, ".key": {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(n.path(name+file), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// mismatched makes NAME.cert with another one's NAME.key, as in a certs.d.
func (n nodeFiles) mismatched(t *testing.T, name string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(n.path(name)), 0o700); err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{"a.crt": ".cert", "b.key": ".key"} {
		data, err := os.ReadFile(n.path(from))
		if err == nil {
			err = os.WriteFile(n.path(name+to), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// What a configuration names is looked at, and each refusal names the key: here
// every key with a value that the node bears out, and one that it does not.
func TestCheckLooksAtTheNode(t *testing.T) {
	n := makeNodeFiles(t)
	for _, tc := range []struct{ key, good, bad, why string }{
		{"image.pinned", `["busybox", "registry.example/base/*", "*pause*"]`, `["registry.example/*/pause"]`, "registry.example/*/pause"},
		{"image.pinned", `[]`, `[""]`, "pinned"},
		{"runtime.default_capabilities", `["CHOWN", "cap_kill", "ALL"]`, `["CHOWN", "FLY"]`, `"FLY" is no capability`},
		{"runtime.default_capabilities", `[]`, `[""]`, `"" is no capability`},
		{"runtime.cgroup_driver", `"auto"`, `"systemd"`, "systemd is not the init"},
		{"monitor", "@monitor", "@plain", "permission denied"},
		{"monitor", "@monitor", "@none", "no such file"},
		{"socket", "@s.sock", "@plain", "is no socket"},
		{"socket", "@new/s.sock", "@plain/s.sock", "is no directory"},
		{"nri.socket_path", "@n.sock", "@here/s.sock", "is already socket"},
		{"nri.socket_path", "@n.sock", "@plain", "is no socket"},
		{"nri.socket_path", "@n.sock", "@plain/n.sock", "plain"},
		{"nri.plugin_path", "@plugins", "@misnamed", `"logger" is not named like 10-name`},
		{"nri.plugin_path", "@plugins", "@plain", "plain"},
		{"nri.plugin_config_path", "@plugins", "@plain", "is no directory"},
		{"root", "@root", "@plain", "is no directory"},
		{"root", "@link/root", "@var/lib", "is not berth's alone"},
		{"state", "@state", "@plain/state", "not a directory"},
		{"state", "@state", "@link/root/state", "is inside root"},
		{"cni.conf_dir", "@none", "@plain", "is no directory"},
		{"cni.bin_dirs", `["/none"]`, `["/none", "/etc/passwd"]`, "/etc/passwd is no directory"},
		{"runtime.cdi_dirs", `["/none"]`, `["/etc/passwd"]`, "/etc/passwd is no directory"},
		{"cni.conf_template", "@net.tmpl", "@none", "no such file"},
		{"cni.conf_template", "@net.tmpl", "@half.tmpl", "half.tmpl"},
		{"cni.conf_template", "@net.tmpl", "@other.tmpl", "Node"},
		{"cni.conf_template", "@net.tmpl", "@plain", "valid configuration"},
		{"cni.conf_template", "@net.tmpl", "@fifo", "is no regular file"},
		{"image.registries_conf", "@registries.conf", "@plain", "plain"},
		{"image.registries_conf", "@registries.conf", "@none", "no such file"},
		{"image.registries_conf", "@registries.conf", "@fifo", "is no regular file"},
		{"image.registries_conf", "@registries.conf", "@dropin.conf", "dropin.conf.d/x.conf is no regular file"},
		{"image.auth_file", "@auth.json", "@fifo", "is no regular file"},
		{"image.hosts_dir", "@plugins", "@waiting", "hosts.toml is no regular file"},
		{"image.certs_dir", "@none", "@plain", "plain"},
		{"image.certs_dir", "@plugins", "@certs", "certs/r.test/c.cert: tls: private key does not match"},
		{"image.hosts_dir", "@plugins", "@certs", "certs/r.test/c.cert: tls: private key does not match"},
		{"image.registries_dir", "@plugins", "@waiting", "x.yaml is no regular file"},
		{"image.policy", "@policy.json", "'/proc/kmsg'", "/proc/kmsg is no regular file"},
		{"image.policy", "@policy.json", "'/dev/zero'", "/dev/zero is no regular file"},
		{"image.policy_dir", "@policies", "@broken", "broken/ns.json"},
		{"image.policy_dir", "@policies", "@waiting", "waiting/ns.json is no regular file"},
		{"runtime.handlers.x.path", "@runc", "@waiting/runc", "is no regular file"},
		{"runtime.handlers.x.base_spec", "@spec.json\nruntime.handlers.x.path = 'sh'", "@fifo\nruntime.handlers.x.path = 'sh'", "is no regular file"},
		{"streaming.tls_cert", "@a.crt\nstreaming.tls_key = @a.key", "@fifo\nstreaming.tls_key = @a.key", "is no regular file"},
		{"monitor", "@monitor", "@waiting/runc", "is no regular file"},
		{"image.policy", "@policy.json", "@plain", "plain"},
		{"image.policy", "@policy.json", "@none", "no such file"},
		{"image.policy", "@policy.json", "@fifo", "is no regular file"},
		{"image.policy_dir", "@plugins", "@none", "no such file"},
		{"image.policy_dir", "@plugins", "@plain", "not a directory"},
		{"image.registries_dir", "@plugins", "@none", "no such file"},
		{"image.auth_file", "@auth.json", "@plain", "plain"},
		{"image.preload_dir", "@none", "@plain", "is no directory"},
		{"image.auth_file", "@auth.json", "@none", "no such file"},
		{"streaming.address", `"127.0.0.1"`, `"192.0.2.7"`, "192.0.2.7 is no address of this node"},
		{"streaming.address", `"0.0.0.0"`, `"2001:db8::7"`, "2001:db8::7 is no address of this node"},
		{"metrics.address", `":9323"`, `"192.0.2.7:9323"`, "192.0.2.7 is no address of this node"},
		{"streaming.tls_cert", "@a.crt\nstreaming.tls_key = @a.key", "@a.crt\nstreaming.tls_key = @b.key", "does not match"},
		{"streaming.tls_cert", "@a.crt\nstreaming.tls_key = @a.key", "@plain\nstreaming.tls_key = @a.key", "PEM"},
		{"streaming.tls_cert", "@a.crt\nstreaming.tls_key = @a.key", "@none\nstreaming.tls_key = @a.key", "no such file"},
		{"streaming.tls_key", "@a.key\nstreaming.tls_cert = @a.crt", "@none\nstreaming.tls_cert = @a.crt", "no such file"},
		{"runtime.handlers.x.path", `"sh"`, `"no-such-runtime"`, "not found"},
		{"runtime.handlers.x.path", "@runc", "@plain", "permission denied"},
		{"runtime.handlers.x.path", "@runc", "@none", "no such file"},
		{"runtime.handlers.x.base_spec", "@spec.json\nruntime.handlers.x.path = 'sh'", "@plain\nruntime.handlers.x.path = 'sh'", "plain"},
		{"runtime.handlers.x.base_spec", "@spec.json\nruntime.handlers.x.path = 'sh'", "@rootfs.json\nruntime.handlers.x.path = 'sh'", "root"},
		{"runtime.handlers.x.base_spec", "@spec.json\nruntime.handlers.x.path = 'sh'", "@none\nruntime.handlers.x.path = 'sh'", "no such file"},
		{"runtime.handlers.x.cni_conf_dir", "@none\nruntime.handlers.x.path = 'sh'", "@plain\nruntime.handlers.x.path = 'sh'", "is no directory"},
	} {
		if tc.key == "runtime.cgroup_driver" {
			if _, err := cgroupDriver(config.Systemd); err == nil {
				continue // this node has the driver
			}
		}
		if _, err := n.load(t, tc.key, tc.good); err != nil {
			t.Errorf("%s = %s: %v", tc.key, tc.good, err)
		}
		file, err := n.load(t, tc.key, tc.bad)
		if err == nil {
			t.Errorf("%s = %s is accepted", tc.key, tc.bad)
			continue
		}
		var problems config.Problems
		if !errors.As(err, &problems) || len(problems) != 1 || problems[0].Key != tc.key || problems[0].Place.File != file ||
			problems[0].Place.Line == 0 || !strings.Contains(err.Error(), tc.why) {
			t.Errorf("%s = %s: %v, want one problem with %q", tc.key, tc.bad, err, tc.why)
		}
	}
}

// load loads the base with one key set, in place of the base's line for it; @name
// is a file's path.
func (n nodeFiles) load(t *testing.T, key, value string) (string, error) {
	t.Helper()
	var b strings.Builder
	for line := range strings.Lines(n.base) {
		if !strings.HasPrefix(line, key+" =") {
			b.WriteString(line)
		}
	}
	words := strings.Split(key+" = "+value+"\n", "@")
	b.WriteString(words[0])
	for _, w := range words[1:] {
		name, rest, _ := strings.Cut(w, "\n")
		b.WriteString("'" + n.path(name) + "'\n" + rest)
	}
	file := n.path("config.toml")
	if err := os.WriteFile(file, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := load(file)
	return file, err
}

// berth config check tells every problem on a line of its own.
func TestConfigCheckPrintsLines(t *testing.T) {
	n := makeNodeFiles(t)
	file := n.path("config.toml")
	text := n.base + "image.policy = '/none/a'\nimage.auth_file = '/none/b'\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c := configCommand()
	var out, problems bytes.Buffer
	c.SetOut(&out)
	c.SetErr(&problems)
	c.SilenceErrors, c.SilenceUsage = true, true
	c.SetArgs([]string{"check", file})
	if err := c.Execute(); !errors.Is(err, config.ErrInvalid) {
		t.Errorf("error %v", err)
	}
	lines := strings.Split(problems.String(), "\n")
	if len(lines) != 3 || out.Len() != 0 || !strings.HasPrefix(lines[0], file+`: line 9: key "image.policy": `) || !strings.HasPrefix(lines[1], file+`: line 10: key "image.auth_file": `) {
		t.Errorf("printed %q and %q", out.String(), lines)
	}
	if err := os.WriteFile(file, []byte(n.base), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.Execute(); err != nil || out.String() != file+": ok\n" {
		t.Errorf("a right file: %v, %q", err, out.String())
	}
}

// The file itself and its drop-ins may be FIFOs and devices too: that is an error
// with the name, not a wait.
func TestConfigIsARegularFile(t *testing.T) {
	n := makeNodeFiles(t)
	main := n.path("config.toml")
	for _, err := range []error{
		os.WriteFile(main, []byte(n.base), 0o600), os.Mkdir(main+".d", 0o700), syscall.Mkfifo(main+".d/10-x.toml", 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for file, named := range map[string]string{main: main + ".d/10-x.toml", n.path("fifo"): n.path("fifo"), "/dev/zero": "/dev/zero"} {
		if _, err := load(file); err == nil || !strings.Contains(err.Error(), named+" is no regular file") {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// A daemon that ends by force says what held it.
func TestForcedEndNamesWhatRuns(t *testing.T) {
	for want, running := range map[string][]string{
		"pull a.example/b:1: resolving; remove c1: umount": {"pull a.example/b:1: resolving", "remove c1: umount"},
		"no operation and no pull":                         nil,
	} {
		var out bytes.Buffer
		log := logrus.New()
		log.SetOutput(&out)
		tellHeld(logrus.NewEntry(log), running)
		if !strings.Contains(out.String(), `running="`+want+`"`) {
			t.Errorf("%v: logged %s", running, out.String())
		}
	}
}
