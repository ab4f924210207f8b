package network

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
)

// loadFiles writes the files into a directory and loads it.
func loadFiles(t *testing.T, files map[string]string) *loaded {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if i := strings.LastIndexByte(name, '/'); i > 0 {
			must(t, os.MkdirAll(dir+"/"+name[:i], 0o755))
		}
		must(t, os.WriteFile(dir+"/"+name, []byte(text), 0o600))
	}
	return load(dir)
}

func TestLoadTakesTheFirstValid(t *testing.T) {
	l := loadFiles(t, map[string]string{
		"00-readme.txt":         "not for us",
		"05-broken.conflist":    "{",
		"06-dir.conf/x.conf":    "not for us",
		"07-empty.json":         "",
		"10-first.conf":         `{"cniVersion":"0.3.1","name":"first","type":"bridge","bridge":"br0"}`,
		"20-second.conflist":    conflist("second"),
		"30-newer.conflist":     `{"cniVersion":"9.0.0","name":"newer","plugins":[{"type":"x"}]}`,
		"40-nested.d/a.conf":    "not for us",
		"99-third.conflist.bak": "not for us",
	})
	if l.list == nil || l.list.Name != "first" || !strings.HasSuffix(l.file, "/10-first.conf") {
		t.Fatalf("loaded %+v", l)
	}
	if len(l.list.Plugins) != 1 || l.list.Plugins[0].Network.Type != "bridge" || l.list.CNIVersion != "0.3.1" {
		t.Errorf("list %+v", l.list)
	}
	if len(l.refused) != 3 {
		t.Errorf("refused %v, want the broken, the empty and the newer one", l.refused)
	}
}

func TestLoadRefuses(t *testing.T) {
	for name, c := range map[string]struct{ text, reason string }{
		"half":             {`{"name":"a","plugins":[{"ty`, "not a JSON object"},
		"array":            {`[]`, "not a JSON object"},
		"trailing":         {conflist("a") + "x", "not a JSON object"},
		"no name":          {`{"cniVersion":"1.0.0","plugins":[{"type":"x"}]}`, "no name"},
		"bad name":         {conflist("a/b"), `"a/b"`},
		"no plugins":       {`{"cniVersion":"1.0.0","name":"a"}`, "no plugins"},
		"empty plugins":    {`{"cniVersion":"1.0.0","name":"a","plugins":[]}`, "no plugins"},
		"no type":          {`{"cniVersion":"1.0.0","name":"a","plugins":[{"bridge":"x"}]}`, "type"},
		"path as a type":   {`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"../../bin/sh"}]}`, `"../../bin/sh"`},
		"unknown version":  {`{"cniVersion":"2.0.0","name":"a","plugins":[{"type":"x"}]}`, `"2.0.0"`},
		"no number":        {`{"cniVersion":"one","name":"a","plugins":[{"type":"x"}]}`, `"one"`},
		"bad capabilities": {`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"x","capabilities":{"dns":"yes"}}]}`, "capabilities"},
		"too large":        {conflist("a") + strings.Repeat(" ", maxConfig), "larger than"},
	} {
		l := loadFiles(t, map[string]string{"10-x.conflist": c.text})
		err := l.ready("/net.d")
		if l.list != nil || !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), c.reason) || !strings.Contains(err.Error(), "10-x.conflist") {
			t.Errorf("%s: %v; want the file and %q", name, err, c.reason)
		}
	}
}

func TestLoadRefusesWhatIsNoFile(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Symlink("/dev/zero", dir+"/10-x.conf"))
	must(t, os.Symlink("/nonexistent", dir+"/11-x.conf"))
	if l := load(dir); l.list != nil || len(l.refused) != 2 {
		t.Errorf("loaded %+v", l)
	}
}

// TestRecordedConfigIsComplete has plugins in files of their own: the recorded
// list must work when they are gone.
func TestRecordedConfigIsComplete(t *testing.T) {
	l := loadFiles(t, map[string]string{
		"10-x.conflist":   `{"cniVersion":"1.1.0","name":"a","disableCheck":true,"plugins":[{"type":"one","mtu":12345678901234567}]}`,
		"a/20-three.conf": `{"type":"three"}`,
		"a/10-two.conf":   `{"type":"two"}`,
		"b/10-other.conf": `{"type":"other"}`,
	})
	if l.list == nil {
		t.Fatal(l.refused)
	}
	list, err := parseList(l.bytes)
	must(t, err)
	var types []string
	for _, p := range list.Plugins {
		types = append(types, p.Network.Type)
	}
	if strings.Join(types, " ") != "one two three" || !list.LoadOnlyInlinedPlugins || !list.DisableCheck {
		t.Errorf("recorded list %+v with %q", list, types)
	}
	if !strings.Contains(string(l.bytes), "12345678901234567") {
		t.Errorf("a number has changed: %s", l.bytes)
	}
	l = loadFiles(t, map[string]string{
		"10-x.conflist": `{"cniVersion":"1.1.0","name":"a","loadOnlyInlinedPlugins":true,"plugins":[{"type":"one"}]}`,
		"a/10-two.conf": `{"type":"two"}`,
	})
	if l.list == nil || len(l.list.Plugins) != 1 {
		t.Errorf("loadOnlyInlinedPlugins: %+v, %v", l.list, l.refused)
	}
}

func TestDescribe(t *testing.T) {
	dir := t.TempDir()
	m := manager(t, dir)
	if d := m.Describe(); d.Dir != dir || d.NotReady == "" || d.Network != "" {
		t.Errorf("Describe of nothing: %+v", d)
	}
	must(t, os.WriteFile(dir+"/05-x.conf", []byte("{"), 0o600))
	put(t, dir, "a")
	becomes(t, m, "a")
	data, err := json.Marshal(m.Describe())
	must(t, err)
	for _, want := range []string{`"network":"a"`, `"plugins":["fake"]`, `"cniVersion":"1.0.0"`, `10-x.conflist`, `05-x.conf":"not a JSON object`} {
		if !strings.Contains(string(data), want) {
			t.Errorf("description %s lacks %s", data, want)
		}
	}
}
