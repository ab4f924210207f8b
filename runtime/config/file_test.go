package config

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestLoad(t *testing.T) {
	path := write(t, filepath.Join(t.TempDir(), "berth.toml"), "root='/x'\n[runtime]\ndefault_handler='crun'\n[runtime.handlers.crun]\npath='/usr/bin/crun'\n")
	f, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if f.Root != "/x" || f.State != "/run/berth" || len(f.Runtime.Handlers) != 1 || f.Runtime.Handlers["crun"].Path != "/usr/bin/crun" {
		t.Errorf("unexpected: %+v", f.Config)
	}
	if _, err := Load(path + ".missing"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
	if f, err := Load(""); err != nil || f.Root != "/var/lib/berth" {
		t.Errorf("defaults: %+v %v", f, err)
	}
}

// A caller's checks come after the file's own, and get the file's lines.
func TestLoadAsksTheCaller(t *testing.T) {
	asked := 0
	more := func(c Config) Problems {
		asked++
		var p Problems
		p.Refuse("image.policy", "%q is not there", c.Image.Policy)
		return p
	}
	path := write(t, filepath.Join(t.TempDir(), "berth.toml"), "[image]\npolicy = '/p'\n")
	_, err := Load(path, more)
	if want := path + `: line 2: key "image.policy": "/p" is not there`; !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	write(t, path, "log_level = 'loud'\n")
	if _, err := Load(path, more); err == nil || asked != 1 {
		t.Errorf("%v; the caller was asked %d times, want once", err, asked)
	}
}

func TestDropIns(t *testing.T) {
	dir := t.TempDir()
	path := write(t, filepath.Join(dir, "c.toml"), "log_level = 'debug'\n[cni]\ntimeout = '1m'\nbin_dirs = ['/a', '/b']\n[runtime.handlers.runc]\npath = 'runc'\n")
	first := write(t, filepath.Join(dir, "c.toml.d", "10-first.toml"), "log_level = 'error'\n[image]\npinned = ['a']\n[runtime.handlers.crun]\npath = 'crun'\n")
	second := write(t, filepath.Join(dir, "c.toml.d", "20-second.toml"), "[cni]\nbin_dirs = ['/c']\n[image]\npinned = ['b']\n[runtime.handlers.runc]\nbase_spec = '/s'\n")
	for _, other := range []string{"30-x.toml~", ".31-x.toml", "32-x.toml.rpmsave", "README"} {
		write(t, filepath.Join(dir, "c.toml.d", other), "this is no TOML")
	}
	f, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.LogLevel, want.CNI.Timeout, want.CNI.BinDirs, want.Image.Pinned = "error", Duration(60e9), []string{"/c"}, []string{"b"}
	want.Runtime.Handlers = map[string]Handler{"runc": {Path: "runc", BaseSpec: "/s"}, "crun": {Path: "crun"}}
	if !reflect.DeepEqual(f.Config, want) {
		t.Errorf("merged:\n%+v\nwant\n%+v", f.Config, want)
	}
	shown := strings.Split(f.Show(), "\n")
	for _, line := range []string{
		"log_level = 'error' # " + first + ":1, over " + path + ":1",
		"cni.timeout = '1m' # " + path + ":3",
		"cni.bin_dirs = ['/c'] # " + second + ":2, over " + path + ":4",
		"runtime.handlers.crun.path = 'crun' # " + first + ":5",
		"runtime.handlers.runc.base_spec = '/s' # " + second + ":6",
		"root = '/var/lib/berth' # default",
	} {
		if !slices.Contains(shown, line) {
			t.Errorf("shown is not\n%s\nbut\n%s", line, f.Show())
		}
	}
	again, err := loadText(t, f.Show())
	if err != nil || !reflect.DeepEqual(again.Config, f.Config) {
		t.Errorf("what is shown does not read back: %v", err)
	}

	write(t, second, "[cni]\nbin_dirs = []\n")
	if _, err := Load(path); err == nil || !strings.Contains(err.Error(), second+`: line 2: key "cni.bin_dirs"`) {
		t.Errorf("a drop-in's mistake: %v", err)
	}
	write(t, second, "rot = 1\n")
	if _, err := Load(path); err == nil || !strings.Contains(err.Error(), second+`: line 1: unknown key "rot"`) {
		t.Errorf("a drop-in's unknown key: %v", err)
	}
	if err := os.Remove(second); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(second, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path); err == nil || !strings.Contains(err.Error(), second) {
		t.Errorf("a directory in place of a drop-in: %v", err)
	}
}

func TestReload(t *testing.T) {
	old := Default()
	next := Default()
	next.LogLevel, next.Image.Pinned, next.Runtime.NofileHard = "debug", []string{"a"}, 600000
	next.Root, next.CNI.Timeout = "/x", Duration(60e9)
	next.Runtime.Handlers = map[string]Handler{"runc": {Path: "/new/runc"}, "crun": {Path: "crun"}}
	got, changes, err := old.Reload(next)
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.LogLevel, want.Image.Pinned, want.Runtime.NofileHard = "debug", []string{"a"}, 600000
	if !reflect.DeepEqual(got, want) {
		t.Errorf("goes on with\n%+v\nwant\n%+v", got, want)
	}
	if !reflect.DeepEqual(old, Default()) {
		t.Error("the old configuration was changed")
	}
	live := map[string]bool{}
	for _, c := range changes {
		live[c.Key] = c.Live
	}
	for key, want := range map[string]bool{"log_level": true, "image.pinned": true, "runtime.nofile_hard": true,
		"root": false, "cni.timeout": false, "runtime.handlers.runc.path": false, "runtime.handlers.crun.path": false} {
		if is, ok := live[key]; !ok || is != want {
			t.Errorf("%s: told %v, live %v, want live %v", key, ok, is, want)
		}
	}
	if _, ok := live["state"]; ok {
		t.Error("a key that is the same is among the changes")
	}
	if i := slices.IndexFunc(changes, func(c Change) bool { return c.Key == "log_level" }); changes[i].Old != "'info'" || changes[i].New != "'debug'" {
		t.Errorf("told as %+v", changes[i])
	}
	if _, changes, err := next.Reload(next); err != nil || len(changes) != 0 {
		t.Errorf("the same again: %v, %v", changes, err)
	}
	gone, changes, err := next.Reload(old)
	if err != nil || len(gone.Runtime.Handlers) != 2 || !slices.ContainsFunc(changes, func(c Change) bool { return c.Key == "runtime.handlers.crun.path" && c.New == "" }) {
		t.Errorf("a handler taken out: %v, %v, %v", gone.Runtime.Handlers, changes, err)
	}
}

// The operator's page lists the live keys, and no other.
func TestLiveKeysAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "| table | live keys |")
	text, _, _ = strings.Cut(text, "\n\n")
	listed := map[string]bool{}
	for line := range strings.Lines(text) {
		if cells := strings.Split(line, "|"); len(cells) == 4 {
			for _, key := range strings.Split(cells[2], ",") {
				listed[strings.TrimPrefix(strings.Trim(cells[1], " `")+"."+strings.Trim(key, " `"), ".")] = true
			}
		}
	}
	for _, l := range leaves(nil, reflect.ValueOf(Default())) {
		table, _, _ := strings.Cut(l.key, ".")
		if said := listed[l.key] || listed[table+".all"]; said != l.live {
			t.Errorf("key %s: live %v, the page says %v", l.key, l.live, said)
		}
	}
}
