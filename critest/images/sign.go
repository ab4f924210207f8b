package images

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"strings"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/critest/registry"
)

// Key signs images as cosign does with a key of its own.
type Key struct {
	private *ecdsa.PrivateKey
	Public  []byte // PEM, for a policy's keyPath
}

// NewKey makes a key.
func NewKey() (Key, error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Key{}, fmt.Errorf("make a signing key: %w", err)
	}
	der, err := x509.MarshalPKIXPublicKey(&private.PublicKey)
	if err != nil {
		return Key{}, fmt.Errorf("encode a signing key: %w", err)
	}
	return Key{private, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})}, nil
}

// Sign serves a signature that says: this manifest of the repository is name.
func (k Key) Sign(r *registry.Registry, repository string, manifest digest.Digest, name string) error {
	payload, err := json.Marshal(map[string]any{
		"critical": map[string]any{
			"type":     "cosign container image signature",
			"image":    map[string]string{"docker-manifest-digest": manifest.String()},
			"identity": map[string]string{"docker-reference": name},
		},
		"optional": map[string]any{},
	})
	if err != nil {
		return fmt.Errorf("encode a signature: %w", err)
	}
	sum := sha256.Sum256(payload)
	signature, err := k.private.Sign(rand.Reader, sum[:], crypto.SHA256)
	if err != nil {
		return fmt.Errorf("sign %s: %w", name, err)
	}
	config := []byte("{}")
	layer := descriptor("application/vnd.dev.cosign.simplesigning.v1+json", payload)
	layer.Annotations = map[string]string{"dev.cosignproject.cosign/signature": base64.StdEncoding.EncodeToString(signature)}
	body, err := json.Marshal(ispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageManifest,
		Config: descriptor(ispec.MediaTypeImageConfig, config), Layers: []ispec.Descriptor{layer},
	})
	if err != nil {
		return fmt.Errorf("encode a signature: %w", err)
	}
	r.PutBlob(payload)
	r.PutBlob(config)
	r.PutManifest(repository, strings.Replace(manifest.String(), ":", "-", 1)+".sig", ispec.MediaTypeImageManifest, body)
	return nil
}
