package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCheckFiles(t *testing.T) {
	for name, tc := range map[string]struct {
		check func(string) error
		text  string
		want  string // of the error; empty: none
	}{
		"policy":                {CheckPolicy, `{"default": [{"type": "reject"}]}`, ""},
		"policy, no JSON":       {CheckPolicy, `default: reject`, "file"},
		"policy, unknown kind":  {CheckPolicy, `{"default": [{"type": "maybe"}]}`, "maybe"},
		"policy, no default":    {CheckPolicy, `{"transports": {}}`, "default"},
		"registries":            {CheckRegistries, "[[registry]]\nlocation = 'a.example'\n", ""},
		"registries, empty":     {CheckRegistries, "", ""},
		"registries, no TOML":   {CheckRegistries, "[[registry]\n", "file"},
		"registries, no prefix": {CheckRegistries, "[[registry]]\ninsecure = true\n", "location"},
		"auth":                  {CheckAuthFile, `{"auths": {"a.example": {"auth": "dTpw"}, "b.example": {}}}`, ""},
		"auth, no JSON":         {CheckAuthFile, `auths`, "file"},
		"auth, wrong kind":      {CheckAuthFile, `{"auths": []}`, "auths"},
		"auth, no base64":       {CheckAuthFile, `{"auths": {"a.example": {"auth": "top secret"}}}`, "a.example"},
		"auth, no password":     {CheckAuthFile, `{"auths": {"a.example": {"auth": "c2VjcmV0"}}}`, "a.example"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "file")
			if err := os.WriteFile(path, []byte(tc.text), 0o600); err != nil {
				t.Fatal(err)
			}
			err := tc.check(path)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("the error tells a login: %v", err)
			}
			if err := tc.check(path + ".missing"); err == nil || !strings.Contains(err.Error(), "file.missing") {
				t.Errorf("a missing file: %v", err)
			}
		})
	}
}
