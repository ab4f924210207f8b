package network

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// dualTemplate is in the form that containerd documents for its own.
const dualTemplate = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "fake", "ipam": {"type": "host-local", "subnet": "{{.PodCIDR}}",
  "ranges": [{{range $i, $range := .PodCIDRRanges}}{{if $i}}, {{end}}[{"subnet": "{{$range}}"}]{{end}}],
  "routes": [{{range $i, $route := .Routes}}{{if $i}}, {{end}}{"dst": "{{$route}}"}{{end}}]}}]}
`

// templateManager has a template and an empty configuration directory.
func templateManager(t *testing.T, template string) (m *Manager, conf string) {
	t.Helper()
	dir, bin := t.TempDir(), t.TempDir()
	must(t, writeScript(bin+"/fake", "exit 0"))
	conf = dir + "/net.d"
	o := Options{ConfDir: conf, BinDirs: []string{bin}, CacheDir: t.TempDir()}
	if template != "" {
		o.Template = dir + "/template"
		must(t, os.WriteFile(o.Template, []byte(template), 0o600))
	}
	m, err := New(o)
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return m, conf
}

func TestApplyPodCIDR(t *testing.T) {
	m, conf := templateManager(t, dualTemplate)
	file := conf + "/10-berth-net.conflist"
	for _, c := range []struct{ cidrs, want string }{
		{"10.244.1.0/24", `"subnet": "10.244.1.0/24", "ranges": [[{"subnet": "10.244.1.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]`},
		{"fd00:1::/64", `"subnet": "fd00:1::/64", "ranges": [[{"subnet": "fd00:1::/64"}]], "routes": [{"dst": "::/0"}]`},
		{"10.244.2.7/24,fd00:2::7/64", `"subnet": "10.244.2.0/24", "ranges": [[{"subnet": "10.244.2.0/24"}], [{"subnet": "fd00:2::/64"}]],
			"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]`},
	} {
		for _, wrote := range []string{file, ""} { // the second time there is nothing to do
			got, err := m.ApplyPodCIDR(c.cidrs)
			if err != nil || got != wrote {
				t.Errorf("%s: wrote %q, %v; want %q", c.cidrs, got, err, wrote)
			}
		}
		squeeze := strings.NewReplacer(" ", "", "\n", "", "\t", "")
		if text := read(t, file); !strings.Contains(squeeze.Replace(text), squeeze.Replace(c.want)) {
			t.Errorf("%s gave %s\nwant %s", c.cidrs, text, c.want)
		}
		if err := m.Ready(); err != nil {
			t.Errorf("%s: not ready at once: %v", c.cidrs, err)
		}
	}
	if files, _ := filepath.Glob(conf + "/*"); len(files) != 1 {
		t.Errorf("files %q", files)
	}
	if hidden, _ := filepath.Glob(conf + "/.*"); len(hidden) != 0 {
		t.Errorf("files %q", hidden)
	}
}

// Another file's network is its owner's.
func TestApplyPodCIDRLeavesOthersAlone(t *testing.T) {
	m, conf := templateManager(t, dualTemplate)
	must(t, os.Mkdir(conf, 0o755))
	must(t, os.WriteFile(conf+"/99-own.conflist", []byte(conflist("own")), 0o600))
	if file, err := m.ApplyPodCIDR("10.244.1.0/24"); err != nil || file != "" {
		t.Errorf("wrote %q, %v beside another network", file, err)
	}
	must(t, os.WriteFile(conf+"/99-own.conflist", []byte("{"), 0o600)) // not a network
	if file, err := m.ApplyPodCIDR("10.244.1.0/24"); err != nil || file == "" {
		t.Errorf("wrote %q, %v beside a broken file", file, err)
	}
}

func TestApplyPodCIDRRefuses(t *testing.T) {
	for _, template := range []string{"", dualTemplate} {
		m, conf := templateManager(t, template)
		for _, bad := range []string{"10.244.1.0", "10.244.1.0/33", "x", "10.244.1.0/24,", `10.244.1.0/24"}`, "10.244.1.0/24;fd00::/64", " 10.244.1.0/24", "10.244.1.0/24, fd00::/64",
			"10.244.1.0/24,10.245.1.0/24", "fd00::/64,fd01::/64", "10.244.1.0/24,fd00::/64,10.245.1.0/24", "::ffff:10.244.1.0/120", "fe80::1%eth0/64"} {
			if file, err := m.ApplyPodCIDR(bad); !errors.Is(err, ErrInvalid) || file != "" {
				t.Errorf("%q: wrote %q, %v", bad, file, err)
			}
		}
		if _, err := os.Stat(conf); err == nil {
			t.Error("a refusal made the directory")
		}
		file, err := m.ApplyPodCIDR("10.244.1.0/24")
		if err != nil || (file == "") != (template == "") {
			t.Errorf("with template %.10q: wrote %q, %v", template, file, err)
		}
	}
	for name, template := range map[string]string{
		"syntax": `{{.PodCIDR`, "unknown name": `{{.Nosuch}}`, "not JSON": `subnet {{.PodCIDR}}`, "no network": `{"name": "x", "cniVersion": "1.0.0"}`,
	} {
		m, conf := templateManager(t, template)
		file, err := m.ApplyPodCIDR("10.244.1.0/24")
		if !errors.Is(err, ErrTemplate) || file != "" || !strings.Contains(err.Error(), m.o.Template) {
			t.Errorf("%s: wrote %q, %v", name, file, err)
		}
		if files, _ := filepath.Glob(conf + "/*"); len(files) != 0 {
			t.Errorf("%s: files %q", name, files)
		}
	}
	m, _ := templateManager(t, dualTemplate)
	must(t, os.Remove(m.o.Template))
	if _, err := m.ApplyPodCIDR("10.244.1.0/24"); !errors.Is(err, ErrTemplate) || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without the file: %v", err)
	}
}
