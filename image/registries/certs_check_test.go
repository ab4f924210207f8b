package registries

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// newPair makes a certificate of its own and its key, as PEM.
func newPair(t *testing.T) (cert, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})
}

// Every file of certs.d that a pull could not use is named, in a directory of hosts
// without a hosts.toml too; what is none of certs.d is left alone.
func TestCheckCerts(t *testing.T) {
	cert, key := newPair(t)
	other, _ := newPair(t)
	dir := t.TempDir()
	for name, data := range map[string][]byte{
		"good.test/ca.crt": cert, "good.test/client.cert": cert, "good.test/client.key": key, "good.test/notes.txt": []byte("x"), "README": []byte("x"),
		"good.test:5000/both.crt": append(append([]byte("-- text\n"), cert...), other...),
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{dir, "", filepath.Join(dir, "none")} {
		if err := CheckCerts(path); err != nil {
			t.Errorf("%q: %v", path, err)
		}
	}
	if err := CheckHosts(dir); err != nil {
		t.Error(err)
	}
	for name, c := range map[string]struct {
		files map[string][]byte
		says  []string
	}{
		"garbage":    {map[string][]byte{"ca.crt": []byte("garbage")}, []string{"ca.crt holds no certificate"}},
		"empty":      {map[string][]byte{"ca.crt": {}}, []string{"ca.crt holds no certificate"}},
		"der":        {map[string][]byte{"ca.crt": {0x30, 0x82, 0, 1}}, []string{"ca.crt holds no certificate"}},
		"key as ca":  {map[string][]byte{"ca.crt": key}, []string{"ca.crt holds no certificate"}},
		"mismatched": {map[string][]byte{"c.cert": other, "c.key": key}, []string{"c.cert", "does not match"}},
		"no key":     {map[string][]byte{"c.cert": cert}, []string{"c.cert has no c.key"}},
		"no cert":    {map[string][]byte{"c.key": key}, []string{"c.key has no c.cert"}},
		"bad key":    {map[string][]byte{"c.cert": cert, "c.key": []byte("x")}, []string{"c.cert", "key"}},
		"bad cert":   {map[string][]byte{"c.cert": []byte("x"), "c.key": key}, []string{"c.cert"}},
		"all":        {map[string][]byte{"a.crt": nil, "b.crt": nil, "c.cert": other, "c.key": key}, []string{"a.crt", "b.crt", "c.cert"}},
		"fifo":       {nil, []string{"ca.crt is no regular file"}},
	} {
		dir := t.TempDir()
		host := filepath.Join(dir, "bad.test")
		if err := os.Mkdir(host, 0o700); err != nil {
			t.Fatal(err)
		}
		for file, data := range c.files {
			if err := os.WriteFile(filepath.Join(host, file), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if c.files == nil {
			if err := syscall.Mkfifo(filepath.Join(host, "ca.crt"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for kind, err := range map[string]error{"certs.d": CheckCerts(dir), "hosts": CheckHosts(dir)} {
			for _, says := range append(c.says, host) {
				if err == nil || !strings.Contains(err.Error(), says) {
					t.Errorf("%s, %s: %v does not say %q", kind, name, err, says)
				}
			}
			if err != nil && strings.Contains(err.Error(), "PRIVATE") {
				t.Errorf("%s, %s: %v tells of a key", kind, name, err)
			}
		}
	}
}
