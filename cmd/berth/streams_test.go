package main

import (
	"os"
	"testing"
)

// A renewed certificate is served; a broken one leaves the old in place.
func TestCertificateReload(t *testing.T) {
	n := makeNodeFiles(t)
	c := &certificate{cert: n.path("a.crt"), key: n.path("a.key")}
	if err := c.reload(); err != nil {
		t.Fatal(err)
	}
	first, _ := c.get(nil)
	n.keyPair(t, "a")
	if err := c.reload(); err != nil {
		t.Fatal(err)
	}
	second, _ := c.get(nil)
	if string(first.Certificate[0]) == string(second.Certificate[0]) {
		t.Error("the old certificate is still served")
	}
	if err := os.WriteFile(c.key, []byte("no key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.reload(); err == nil {
		t.Error("a broken key is accepted")
	}
	if third, _ := c.get(nil); third != second {
		t.Error("a broken key took the certificate away")
	}
	if err := (*certificate)(nil).reload(); err != nil {
		t.Errorf("without TLS: %v", err)
	}
}
