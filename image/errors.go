package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"berth/image/fetch"
	"berth/image/layer"
	"berth/image/policy"
	"berth/image/registries"
)

// What callers tell apart. Every error of this package that has one of these
// meanings is one of them for errors.Is.
var (
	// ErrNotFound: the image is not here, or the registry does not have it.
	ErrNotFound = errors.New("image not found")
	// ErrInvalidReference: not a name, digest or id.
	ErrInvalidReference = errors.New("invalid image reference")
	// ErrInvalidImage: what the registry or archive holds is refused:
	// malformed, out of bounds, not for this platform, not matching its digest.
	ErrInvalidImage = errors.New("invalid image")
	// ErrNoSpace: the filesystem is full, or its inodes or a quota are used up.
	ErrNoSpace = errors.New("no space left")
	// ErrUnauthorized: the registry wants other credentials.
	ErrUnauthorized = registries.ErrDenied
	// ErrRegistryUnavailable: no answer, or none that helps, for now.
	ErrRegistryUnavailable = registries.ErrUnavailable
	// ErrRegistryConfig: the node's configuration of registries is broken,
	// contradicts itself or blocks the name.
	ErrRegistryConfig = registries.ErrConfig
	// ErrSignature: the signature policy does not admit the image.
	ErrSignature = policy.ErrRefused
	// ErrPinnedByConfig: the configuration pins the image.
	ErrPinnedByConfig = errors.New("the configuration pins it")
	// ErrFileExists: an export would replace a file.
	ErrFileExists = errors.New("the file exists")
)

// Error is a failed pull or import. Its text names the image and holds no
// credentials and no query strings.
type Error struct {
	Op, Image string
	kind      error // a sentinel, or nil
	text      string
}

func (e *Error) Error() string { return e.Op + " " + e.Image + ": " + e.text }

// Unwrap gives the sentinel only: what lies below may print secrets.
func (e *Error) Unwrap() error { return e.kind }

// describe makes an Error of whatever went wrong. secrets are strings that
// must not appear.
func (s *Store) describe(op, image string, err error, secrets []string) error {
	kind := classify(err)
	text := err.Error()
	if kind == ErrNoSpace {
		text = fmt.Sprintf("filesystem %s is full: %s", mountPoint(s.root), text)
		if left, err := freeOf(s.root); err == nil { // by now the partial image is gone
			text += fmt.Sprintf(" (free without the image: %v)", left)
		}
	}
	return &Error{Op: op, Image: image, kind: kind, text: registries.Redact(text, secrets)}
}

// together is the error of several names that were tried for a short one.
func together(text string, failed []error) error {
	last := failed[len(failed)-1]
	var e *Error
	if len(failed) == 1 || !errors.As(last, &e) {
		return last
	}
	parts := make([]string, len(failed))
	for i, err := range failed {
		parts[i] = strings.TrimPrefix(err.Error(), e.Op+" ")
	}
	return &Error{Op: e.Op, Image: text, kind: e.kind, text: strings.Join(parts, "; ")}
}

func classify(err error) error {
	switch {
	case errors.Is(err, context.Canceled):
		return context.Canceled
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return ErrNoSpace
	case errors.Is(err, registries.ErrHangs):
		return context.DeadlineExceeded
	case errors.Is(err, layer.ErrInvalid), errors.Is(err, fetch.ErrSize):
		return ErrInvalidImage
	case errors.Is(err, fetch.ErrIdle), errors.Is(err, fetch.ErrSlow):
		return ErrRegistryUnavailable
	}
	for _, known := range []error{ErrNotFound, ErrInvalidReference, ErrInvalidImage, ErrNoSpace,
		ErrUnauthorized, ErrRegistryUnavailable, ErrRegistryConfig, ErrSignature} {
		if errors.Is(err, known) {
			return known
		}
	}
	switch {
	case errors.Is(err, registries.ErrNotFound):
		return ErrNotFound
	case errors.Is(err, registries.ErrInvalid):
		return ErrInvalidImage
	}
	for _, text := range []string{"exceeded maximum allowed size", "Digest did not match", "does not match provided manifest digest"} {
		if strings.Contains(err.Error(), text) {
			return ErrInvalidImage // the library has no types for these
		}
	}
	if isNetwork(err) {
		return ErrRegistryUnavailable
	}
	return nil
}

func isNetwork(err error) bool {
	var netErr net.Error
	var opErr *net.OpError
	var dns *net.DNSError
	var urlErr *url.Error
	switch {
	case errors.As(err, &opErr), errors.As(err, &dns), errors.As(err, &netErr), errors.As(err, &urlErr):
		return true
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET),
		errors.Is(err, syscall.EPIPE), errors.Is(err, io.ErrUnexpectedEOF),
		errors.Is(err, context.DeadlineExceeded):
		return true
	}
	return false
}

// mountPoint is the root of the filesystem that holds path.
func mountPoint(path string) string {
	device := func(p string) (uint64, bool) {
		st, err := os.Stat(p)
		if err != nil {
			return 0, false
		}
		sys, ok := st.Sys().(*syscall.Stat_t)
		if !ok {
			return 0, false
		}
		return uint64(sys.Dev), true
	}
	here, ok := device(path)
	for ok && path != "/" {
		above, ok := device(filepath.Dir(path))
		if !ok || above != here {
			break
		}
		path = filepath.Dir(path)
	}
	return path
}
