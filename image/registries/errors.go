package registries

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"sync"
)

// What callers tell apart. Every error of this package but a done context's is
// one of them for errors.Is.
var (
	// ErrNotFound: the registry does not have it.
	ErrNotFound = errors.New("not found in the registry")
	// ErrDenied: the registry wants other credentials.
	ErrDenied = errors.New("access denied by the registry")
	// ErrUnavailable: no answer, or none that helps, for now.
	ErrUnavailable = errors.New("registry unavailable")
	// ErrInvalid: what was answered cannot be what was asked for.
	ErrInvalid = errors.New("invalid answer of the registry")
	// ErrConfig: the node's configuration does not allow the request, or cannot
	// be read.
	ErrConfig = errors.New("registry configuration")
	// ErrHangs: what the pull needs of the node does not answer.
	ErrHangs = errors.New("needed by the pull")
	// ErrIdle: an endpoint sent nothing for too long. It is ErrUnavailable too.
	ErrIdle = fmt.Errorf("%w: no data", ErrUnavailable)
)

// Error is a request that no endpoint could fulfil.
type Error struct {
	kind error
	text string
}

func (e *Error) Error() string { return e.text }

// Unwrap gives the sentinel only: what lies below may print secrets.
func (e *Error) Unwrap() error { return e.kind }

// attempt is what became of asking one endpoint.
type attempt struct {
	endpoint *endpoint
	err      error
}

// failed makes the error of a request from its attempts, in the order of the
// endpoints. What the last endpoint says counts: it is the upstream, which
// knows best whether there is such a thing.
func (s *Source) failed(attempts []attempt) error {
	if len(attempts) == 0 {
		return &Error{ErrUnavailable, "no endpoint is left to ask"}
	}
	kind := kindOf(attempts[len(attempts)-1].err)
	for _, a := range attempts {
		if errors.Is(a.err, context.Canceled) {
			return a.err
		}
		if a.endpoint == s.endpoints[len(s.endpoints)-1] {
			kind = kindOf(a.err)
		}
	}
	parts := make([]string, len(attempts))
	for i, a := range attempts {
		parts[i] = a.endpoint.name + ": " + s.hidden.redact(a.err.Error())
	}
	return &Error{kind, strings.Join(parts, "; ")}
}

func kindOf(err error) error {
	for _, kind := range []error{ErrHangs, ErrIdle, ErrNotFound, ErrDenied, ErrInvalid, ErrConfig} {
		if errors.Is(err, kind) {
			return kind
		}
	}
	return ErrUnavailable
}

// secrets are the strings that must not be printed, as far as they are known.
type secrets struct {
	mu   sync.Mutex
	list []string // guarded by mu
}

// shortest is the length below which a secret is none: taking out every "a" of
// a message would hide the message.
const shortest = 4

func (s *secrets) add(values ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range values {
		if len(v) >= shortest {
			s.list = append(s.list, v)
		}
	}
}

func (s *secrets) redact(text string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Redact(text, s.list)
}

var (
	queryString = regexp.MustCompile(`([a-zA-Z][a-zA-Z0-9+.-]*://[^\s"'?#]+)[?#][^\s"']*`)
	userInfo    = regexp.MustCompile(`([a-zA-Z][a-zA-Z0-9+.-]*://)[^\s"'/]*@`)
)

// Redact takes out of a text what must not reach a log or a pod's events: the
// query strings and logins of URLs, and the secrets, also as a URL spells them.
func Redact(text string, secrets []string) string {
	text = queryString.ReplaceAllString(text, "$1")
	text = userInfo.ReplaceAllString(text, "$1")
	for _, secret := range secrets {
		if secret == "" {
			continue
		}
		for _, form := range []string{secret, url.QueryEscape(secret), url.PathEscape(secret)} {
			text = strings.ReplaceAll(text, form, "[redacted]")
		}
	}
	return text
}
