package image

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Signatures as cosign and as GPG tools make them, with keys made on the spot.

// signer is a key pair and the file of its public half.
type signer struct {
	t    testing.TB
	key  *ecdsa.PrivateKey
	file string
}

func newSigner(t testing.TB) *signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s := &signer{t: t, key: key, file: filepath.Join(t.TempDir(), "cosign.pub")}
	write(t, s.file, string(publicPEM(t, &key.PublicKey)))
	return s
}

func publicPEM(t testing.TB, key any) []byte {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// statement is what a signature says: this manifest has this name.
func statement(kind, name string, manifest digest.Digest) []byte {
	data, err := json.Marshal(map[string]any{
		"critical": map[string]any{
			"type":     kind,
			"image":    map[string]any{"docker-manifest-digest": manifest.String()},
			"identity": map[string]any{"docker-reference": name},
		},
		"optional": map[string]any{"creator": "test", "timestamp": 1},
	})
	if err != nil {
		panic(err)
	}
	return data
}

// raw signs bytes as cosign does.
func (s *signer) raw(payload []byte) string {
	sum := sha256.Sum256(payload)
	sig, err := s.key.Sign(rand.Reader, sum[:], crypto.SHA256)
	if err != nil {
		s.t.Fatal(err)
	}
	return base64.StdEncoding.EncodeToString(sig)
}

// cosigned is one layer of an attachment.
type cosigned struct {
	payload     []byte
	annotations map[string]string
}

func (s *signer) sign(name string, manifest digest.Digest) cosigned {
	payload := statement("cosign container image signature", name, manifest)
	return cosigned{payload, map[string]string{"dev.cosignproject.cosign/signature": s.raw(payload)}}
}

// attach puts signatures where cosign does: a tag made of the manifest's digest.
func (r *registry) attach(repo string, manifest digest.Digest, signatures ...cosigned) {
	m := ispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageManifest}
	for _, s := range signatures {
		m.Layers = append(m.Layers, ispec.Descriptor{
			MediaType: "application/vnd.dev.cosign.simplesigning.v1+json",
			Digest:    r.blob(s.payload), Size: int64(len(s.payload)), Annotations: s.annotations,
		})
	}
	config := []byte("{}")
	m.Config = ispec.Descriptor{MediaType: ispec.MediaTypeImageConfig, Digest: r.blob(config), Size: 2}
	r.doc(repo, ispec.MediaTypeImageManifest, m, strings.Replace(manifest.String(), ":", "-", 1)+".sig")
}

// gpg makes an OpenPGP key, its public file and a way to sign with it.
func gpg(t testing.TB) (file string, sign func(payload []byte) []byte) {
	t.Helper()
	entity, err := openpgp.NewEntity("test", "", "test@example.com", nil)
	if err != nil {
		t.Fatal(err)
	}
	var public bytes.Buffer
	if err := entity.Serialize(&public); err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "key.gpg")
	write(t, file, public.String())
	return file, func(payload []byte) []byte {
		var out bytes.Buffer
		w, err := openpgp.Sign(&out, entity, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(payload); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
}

// lookaside stores a simple signature as the n-th of a manifest.
func lookaside(t testing.TB, dir, repo string, manifest digest.Digest, n string, data []byte) {
	t.Helper()
	at := filepath.Join(dir, repo+"@"+strings.Replace(manifest.String(), ":", "=", 1))
	if err := os.MkdirAll(at, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(at, "signature-"+n), string(data))
}

// rules are a policy's requirements as JSON.
type rules = map[string]any

func need(requirement rules) []any { return []any{requirement} }

var (
	rejected = need(rules{"type": "reject"})
	anything = need(rules{"type": "insecureAcceptAnything"})
)

// sigstoreRule wants a signature of the key.
func sigstoreRule(s *signer, identity rules) []any {
	return need(withIdentity(rules{"type": "sigstoreSigned", "keyPath": s.file}, identity))
}

func withIdentity(r, identity rules) rules {
	if identity != nil {
		r["signedIdentity"] = identity
	}
	return r
}

// policyText is a policy file: what it says by default, and of docker's names.
func policyText(t testing.TB, byDefault []any, docker map[string]any, more ...rules) string {
	t.Helper()
	transports := rules{"docker": docker}
	for _, m := range more {
		for k, v := range m {
			transports[k] = v
		}
	}
	data, err := json.Marshal(rules{"default": byDefault, "transports": transports})
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
