package image

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"path/filepath"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
)

// authority gives out short-lived certificates and keeps a log of what was
// signed, as Fulcio and Rekor do.
type authority struct {
	t             testing.TB
	key, log      *ecdsa.PrivateKey
	cert          *x509.Certificate
	caFile, rekor string // the files a policy names
}

func newAuthority(t testing.TB) authority {
	log := newSigner(t)
	a := authority{t: t, key: newSigner(t).key, log: log.key, rekor: log.file, caFile: filepath.Join(t.TempDir(), "ca.pem")}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	write(t, a.caFile, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	return a
}

// sign makes a signature with a key of ten minutes that was signed and logged
// in its time, half an hour ago.
func (a authority) sign(email, name string, manifest digest.Digest) cosigned {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	begin := time.Now().Add(-30 * time.Minute)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: begin, NotAfter: begin.Add(10 * time.Minute),
		EmailAddresses: []string{email}, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning},
		ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57264, 1, 1}, Value: []byte("https://issuer.example")}},
	}, a.cert, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	payload := statement("cosign container image signature", name, manifest)
	signature := (&signer{t: a.t, key: key}).raw(payload)
	return cosigned{payload, map[string]string{
		"dev.cosignproject.cosign/signature": signature,
		"dev.sigstore.cosign/certificate":    string(cert),
		"dev.sigstore.cosign/bundle":         a.entry(payload, signature, cert, begin.Add(time.Minute)),
	}}
}

// entry is the log's word that it has seen the signature at that time.
func (a authority) entry(payload []byte, signature string, cert []byte, at time.Time) string {
	a.t.Helper()
	encode := func(v any) []byte {
		data, err := json.Marshal(v)
		if err != nil {
			a.t.Fatal(err)
		}
		return data
	}
	sum := sha256.Sum256(payload)
	entry := rules{
		"body": base64.StdEncoding.EncodeToString(encode(rules{"apiVersion": "0.0.1", "kind": "hashedrekord", "spec": rules{
			"data":      rules{"hash": rules{"algorithm": "sha256", "value": hex.EncodeToString(sum[:])}},
			"signature": rules{"content": signature, "publicKey": rules{"content": cert}},
		}})),
		"integratedTime": at.Unix(), "logIndex": 7, "logID": "log",
	}
	promise := (&signer{t: a.t, key: a.log}).raw(encode(entry)) // sorted by key, as the log wants it
	return string(encode(rules{"SignedEntryTimestamp": promise, "Payload": entry}))
}

// Signatures without lasting keys: who signed says a certificate, when says a
// log, and both are checked without asking anybody.
func TestCertificatesAndTransparencyLog(t *testing.T) {
	a, b := newAuthority(t), newAuthority(t)
	const email = "dev@vendor.example"
	for name, tc := range map[string]struct {
		ca, log authority
		email   string
		change  func(c *cosigned)
		want    string
	}{
		"signed":              {a, a, email, nil, ""},
		"by somebody else":    {a, a, "other@vendor.example", nil, "Required email"},
		"another authority":   {b, a, email, nil, "veryfing leaf certificate failed"},
		"another log":         {a, b, email, nil, "verification of Rekor SET failed"},
		"not in the log":      {a, a, email, func(c *cosigned) { delete(c.annotations, "dev.sigstore.cosign/bundle") }, "dev.sigstore.cosign/bundle"},
		"without certificate": {a, a, email, func(c *cosigned) { delete(c.annotations, "dev.sigstore.cosign/certificate") }, "dev.sigstore.cosign/certificate"},
		"another payload":     {a, a, email, func(c *cosigned) { c.payload = append(c.payload, ' ') }, "does not match"},
		"another's log record": {a, a, email, func(c *cosigned) {
			other := a.sign(email, "vendor.example/other:1", digest.FromString("other"))
			c.annotations["dev.sigstore.cosign/bundle"] = other.annotations["dev.sigstore.cosign/bundle"]
		}, "does not match"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newSigning(t)
			e.rule(need(rules{"type": "sigstoreSigned", "rekorPublicKeyPath": tc.log.rekor, "fulcio": rules{
				"caPath": tc.ca.caFile, "oidcIssuer": "https://issuer.example", "subjectEmail": email,
			}}))
			s := a.sign(tc.email, e.ref, e.manifest)
			if tc.change != nil {
				tc.change(&s)
			}
			e.reg.attach("app", e.manifest, s)
			e.wants("pull", e.pull(e.ref, ""), tc.want)
			if tc.want == "" {
				e.wants("use", e.use(e.id, e.ref, ""), "")
			}
		})
	}
}
