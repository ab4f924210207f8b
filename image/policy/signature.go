package policy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"go.podman.io/image/v5/image"
)

// What one manifest may have of signatures. A signature is a kilobyte or a few;
// a certificate chain and a transparency log's entry make it ten.
const (
	MaxSignatures    = 64
	MaxSignatureSize = 1 << 20 // of all of a manifest's together
)

// Marks begin a signature in the "dir:" form and say what follows.
const (
	simpleMark   = "\x00simple-signing\n"
	sigstoreMark = "\x00sigstore-json\n"
)

// sigstore is what follows sigstoreMark.
type sigstore struct {
	MIMEType    string            `json:"mimeType"`
	Payload     []byte            `json:"payload"`
	Annotations map[string]string `json:"annotations"`
}

// ReadSignatures asks an image's source for the signatures of one manifest and
// gives them in the form they are kept in. None is no error; too many, or too
// large ones, are. It blocks until ctx ends.
func ReadSignatures(ctx context.Context, u *image.UnparsedImage) ([][]byte, error) {
	read, err := u.UntrustedSignatures(ctx)
	if err != nil {
		return nil, err
	}
	var list [][]byte
	for _, s := range read {
		blob, err := encode(s)
		if err != nil {
			return nil, err
		}
		list = append(list, blob)
	}
	return list, Bounded(list)
}

// Bounded is an error when a manifest has too many signatures or too large ones.
func Bounded(list [][]byte) error {
	if len(list) > MaxSignatures {
		return fmt.Errorf("the manifest has %d signatures, at most %d are read", len(list), MaxSignatures)
	}
	size := 0
	for _, blob := range list {
		size += len(blob)
	}
	if size > MaxSignatureSize {
		return fmt.Errorf("the manifest's signatures have more than %d bytes", MaxSignatureSize)
	}
	return nil
}

// Aside is a signature as a lookaside has it, in the form they are kept in.
func Aside(blob []byte) ([]byte, error) {
	switch {
	case bytes.HasPrefix(blob, []byte(simpleMark)):
		return blob, nil
	case bytes.HasPrefix(blob, []byte(sigstoreMark)):
		var s sigstore
		if err := json.Unmarshal(blob[len(sigstoreMark):], &s); err != nil {
			return nil, fmt.Errorf("read a sigstore signature: %w", err)
		}
		return blob, nil
	case len(blob) == 0 || blob[0]&0x80 == 0: // every OpenPGP packet begins with this bit
		return nil, errors.New("this is no signature")
	}
	return append([]byte(simpleMark), blob...), nil
}

// Sigstore is a signature as cosign attaches them, in the form they are kept in.
func Sigstore(mimeType string, payload []byte, annotations map[string]string) ([]byte, error) {
	data, err := json.Marshal(sigstore{mimeType, payload, annotations})
	return append([]byte(sigstoreMark), data...), err
}

// encode writes a signature whose type the library does not export, but whose
// parts it does.
func encode(s any) ([]byte, error) {
	switch s := s.(type) {
	case interface{ UntrustedSignature() []byte }:
		return append([]byte(simpleMark), s.UntrustedSignature()...), nil
	case interface {
		UntrustedMIMEType() string
		UntrustedPayload() []byte
		UntrustedAnnotations() map[string]string
	}:
		return Sigstore(s.UntrustedMIMEType(), s.UntrustedPayload(), s.UntrustedAnnotations())
	}
	return nil, fmt.Errorf("signature of an unknown kind (%T)", s)
}
