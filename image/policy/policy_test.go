package policy

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/go-digest"
)

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const reject = `{"default": [{"type": "reject"}]}`

func TestPathOfANamespace(t *testing.T) {
	dir := t.TempDir()
	own := write(t, filepath.Join(dir, "own.json"), reject)
	dangling := filepath.Join(dir, "dangling.json")
	if err := os.Symlink("/nowhere", dangling); err != nil {
		t.Fatal(err)
	}
	f := Files{Default: "/default.json", Dir: dir}
	for namespace, want := range map[string]string{"": "/default.json", "own": own, "other": "/default.json", "dangling": dangling} {
		if got, err := f.Path(namespace); err != nil || got != want {
			t.Errorf("namespace %q: %q %v, want %q", namespace, got, err, want)
		}
	}
	for _, namespace := range []string{"..", ".", "a/b", "../own", "/own", "own/"} {
		if got, err := f.Path(namespace); !errors.Is(err, ErrRefused) {
			t.Errorf("namespace %q: %q %v", namespace, got, err)
		}
	}
	f.Dir = filepath.Join(dir, "none")
	if got, err := f.Path("own"); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), f.Dir) {
		t.Errorf("missing directory: %q %v", got, err)
	}
	if f.Dir = ""; !f.Set() || (Files{}).Set() || !(Files{Dir: dir}).Set() {
		t.Error("whether there is a policy")
	}
}

func TestReadRefusesByName(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{
		filepath.Join(dir, "none"), fifo, dir, write(t, filepath.Join(dir, "half"), `{"default": [`),
		write(t, filepath.Join(dir, "empty"), ""), write(t, filepath.Join(dir, "kind"), `{"default": [{"type": "maybe"}]}`),
		write(t, filepath.Join(dir, "field"), `{"default": [{"type": "reject"}], "defaults": []}`),
	} {
		if p, err := Read(file); p != nil || !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: %v %v", file, p, err)
		}
	}
	if p, err := Read(""); p != nil || err != nil {
		t.Errorf("no file: %v %v", p, err)
	}
}

// Every kind of file that a policy may name belongs to it.
func TestAVerdictLastsAsLongAsItsFiles(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"a", "b", "c", "ca", "rekor", "gpg"} {
		write(t, at(name), name)
	}
	file := write(t, at("policy"), strings.ReplaceAll(`{"default": [{"type": "reject"}], "transports": {"docker": {
		"x.example": [{"type": "sigstoreSigned", "keyPath": "DIR/a"}],
		"y.example": [{"type": "sigstoreSigned", "keyPaths": ["DIR/b", "DIR/c"]}, {"type": "signedBy", "keyType": "GPGKeys", "keyPath": "DIR/gpg"}],
		"z.example": [{"type": "sigstoreSigned", "rekorPublicKeyPath": "DIR/rekor",
			"fulcio": {"caPath": "DIR/ca", "oidcIssuer": "https://i.example", "subjectEmail": "a@b.example"}}]}}}`, "DIR", dir))
	if err := Check(file); err != nil {
		t.Fatal(err)
	}
	var v Verdicts
	k := Key{Image: "i", Name: "n", Signatures: []digest.Digest{"s"}}
	known := func(k Key) bool {
		p, err := Read(file)
		if err != nil {
			t.Fatal(err)
		}
		return v.Known(p, k)
	}
	for _, name := range []string{"a", "b", "c", "ca", "rekor", "gpg"} {
		p, err := Read(file)
		if err != nil {
			t.Fatal(err)
		}
		if known(k) {
			t.Errorf("known before %s", name)
		}
		v.Admitted(p, k)
		if !known(k) {
			t.Errorf("%s: not remembered", name)
		}
		for _, other := range []Key{{"j", "n", k.Signatures}, {"i", "m", k.Signatures}, {"i", "n", nil}} {
			if known(other) {
				t.Errorf("%v is known by another's verdict", other)
			}
		}
		write(t, at(name), "changed")
		if known(k) {
			t.Errorf("known after a change of %s", name)
		}
	}
	if err := os.Remove(at("ca")); err != nil {
		t.Fatal(err)
	}
	if err := Check(file); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), at("ca")) {
		t.Errorf("check without a file it names: %v", err)
	}
}
