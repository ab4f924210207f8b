package config

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// write makes a file of a directory and returns its path.
func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func loadText(t *testing.T, text string) (*File, error) {
	t.Helper()
	return Load(write(t, filepath.Join(t.TempDir(), "c.toml"), text))
}

func TestDefaultRoundTrip(t *testing.T) {
	text, err := Default().Text()
	if err != nil {
		t.Fatal(err)
	}
	got, err := loadText(t, text)
	if err != nil {
		t.Fatalf("the printed default is refused: %v\n%s", err, text)
	}
	if !reflect.DeepEqual(got.Config, Default()) {
		t.Errorf("round trip changed the configuration:\n%+v\n%+v", got.Config, Default())
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

// A time is printed so that people read it, and reads back as itself.
func TestDurationText(t *testing.T) {
	for text, d := range map[string]time.Duration{
		"100ms": 100 * time.Millisecond, "5s": 5 * time.Second, "2m": 2 * time.Minute, "1m30s": 90 * time.Second,
		"4h": 4 * time.Hour, "1h30m": 90 * time.Minute, "10m": 10 * time.Minute, "0s": 0, "1h0m1s": time.Hour + time.Second,
	} {
		var back Duration
		if got := Duration(d).String(); got != text || back.UnmarshalText([]byte(got)) != nil || back != Duration(d) {
			t.Errorf("%v is printed as %q and read as %v, want %q", d, got, time.Duration(back), text)
		}
	}
}
