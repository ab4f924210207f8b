// Package keypair reads a TLS certificate and its key from files that an operator
// names. It owns nothing but that: who uses the pair says what it is for. It stands
// apart from package regular so that not every reader of files links TLS.
package keypair

import (
	"crypto/tls"

	"berth/sandbox/regular"
)

// Read is tls.LoadX509KeyPair for files that regular.Read reads.
func Read(certificate, key string) (tls.Certificate, error) {
	pem, err := regular.Read(certificate, regular.Most)
	if err != nil {
		return tls.Certificate{}, err
	}
	secret, err := regular.Read(key, regular.Most)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(pem, secret)
}
