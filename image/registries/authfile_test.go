package registries

import (
	"context"
	"encoding/base64"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func encoded(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }

func TestLoginsOfTheAuthFile(t *testing.T) {
	c := config(t, "")
	c.AuthFile = filepath.Join(t.TempDir(), "auth.json")
	write(t, c.AuthFile, `{"auths": {
  "r.test": {"auth": "`+encoded("host:1")+`"},
  "r.test/team": {"auth": "`+encoded("team:2")+`"},
  "r.test/team/app": {"auth": "`+encoded("app:3:4")+`"},
  "https://old.test/v1/": {"auth": "`+encoded("old:5")+`"},
  "https://index.docker.io/v1/": {"auth": "`+encoded("hub:6")+`"},
  "plain.test": {"username": "plain", "password": "7"},
  "id.test": {"identitytoken": "tok"},
  "empty.test": {}
}}`)
	for name, want := range map[string]Login{
		"r.test/x":                {Username: "host", Password: "1"},
		"r.test/teamwork":         {Username: "host", Password: "1"},
		"r.test/team/other":       {Username: "team", Password: "2"},
		"r.test/team/app":         {Username: "app", Password: "3:4"},
		"old.test/x":              {Username: "old", Password: "5"},
		"docker.io/library/x":     {Username: "hub", Password: "6"},
		"plain.test/x":            {Username: "plain", Password: "7"},
		"id.test/x":               {IdentityToken: "tok"},
		"empty.test/x":            {},
		"other.test/x":            {},
		"r.test.evil.test/r.test": {},
	} {
		host, _, _ := strings.Cut(name, "/")
		if got, err := c.storedLogin(t.Context(), host, name); err != nil || got != want {
			t.Errorf("%s: %+v %v, want %+v", name, got, err, want)
		}
	}
	c.AuthFile = ""
	if got, err := c.storedLogin(t.Context(), "r.test", "r.test/x"); err != nil || got != (Login{}) {
		t.Errorf("without a file: %+v %v", got, err)
	}
}

func TestBrokenAuthFiles(t *testing.T) {
	c := config(t, "")
	c.AuthFile = filepath.Join(t.TempDir(), "auth.json")
	for text, says := range map[string]string{
		"{\n\"auths\": {\n\"r.test\": {\"auth\": \"SECRET\",}}}": c.AuthFile + ": line 3: ",
		"{\n\"auths\": [\"SECRET\"]\n}":                          c.AuthFile + ": line 2: auths must be",
		"":                                                       c.AuthFile + ": line 1: ",
		`{"auths":{"r.test":{"auth":"SECRET!"}}}`:                       `auths["r.test"]: auth is not base64`,
		`{"auths":{"other.test":{"auth":"` + encoded("SECRET") + `"}}}`: `auths["other.test"]: auth has no colon`,
	} {
		write(t, c.AuthFile, text)
		for _, err := range []error{fetched(t, c, "r.test/x:1", nil), CheckAuthFile(c.AuthFile)} {
			if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "SECRET") {
				t.Errorf("%q: %v", text, err)
			}
		}
	}
	os.Remove(c.AuthFile)
	if err := fetched(t, c, "r.test/x:1", nil); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), c.AuthFile) {
		t.Errorf("without the file: %v", err)
	}
}

// script puts a credential helper into PATH.
func script(t *testing.T, name, text string) {
	t.Helper()
	dir := t.TempDir()
	write(t, dir+"/docker-credential-"+name, "#!/bin/sh\n"+text)
	if err := os.Chmod(dir+"/docker-credential-"+name, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

func TestCredentialHelpers(t *testing.T) {
	script(t, "one", `read server; [ "$1" = get ] && echo "{\"ServerURL\":\"$server\",\"Username\":\"one\",\"Secret\":\"for $server\"}"`)
	script(t, "id", `echo '{"Username":"<token>","Secret":"tok"}'`)
	script(t, "none", `echo "credentials not found in native keychain"; exit 1`)
	script(t, "broken", `echo SECRET; exit 1`)
	script(t, "odd", `echo SECRET`)
	script(t, "endless", `exec yes SECRET`)
	c := config(t, "")
	c.AuthFile = filepath.Join(t.TempDir(), "auth.json")
	write(t, c.AuthFile, `{"auths":{"b.test":{"auth":"`+encoded("file:1")+`"},"s.test":{}},
		"credHelpers":{"a.test":"one","i.test":"id","n.test":"none","x.test":"broken","o.test":"odd","m.test":"missing","e.test":"endless"},"credsStore":"one"}`)
	for host, want := range map[string]Login{
		"a.test": {Username: "one", Password: "for a.test"}, "i.test": {IdentityToken: "tok"}, "n.test": {},
		"b.test": {Username: "file", Password: "1"}, "s.test": {Username: "one", Password: "for s.test"},
		"docker.io": {Username: "one", Password: "for https://index.docker.io/v1/"},
	} {
		if got, err := c.storedLogin(t.Context(), host, host+"/x"); err != nil || got != want {
			t.Errorf("%s: %+v %v, want %+v", host, got, err, want)
		}
	}
	for host, says := range map[string]string{"x.test": "docker-credential-broken", "o.test": "not JSON", "m.test": "docker-credential-missing", "e.test": "more than 1048576 bytes"} {
		err := fetched(t, c, host+"/x:1", nil)
		if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "SECRET") {
			t.Errorf("%s: %v", host, err)
		}
	}
	// registries.conf may put others before the file.
	write(t, c.RegistriesConf, "credential-helpers = ['none', 'containers-auth.json']\n")
	if err := c.Reload(); err != nil {
		t.Fatal(err)
	}
	if got, err := c.storedLogin(t.Context(), "b.test", "b.test/x"); err != nil || got.Username != "file" {
		t.Errorf("%+v %v", got, err)
	}
}

// A helper that hangs ends with the pull.
func TestAHelperThatHangs(t *testing.T) {
	script(t, "slow", "exec sleep 1000")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	start := time.Now()
	if _, err := config(t, "").runHelper(ctx, "auth.json", "slow", "r.test"); err == nil || time.Since(start) > 20*time.Second {
		t.Errorf("%v after %v", err, time.Since(start))
	}
}
