package registries

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
)

// endpoint is a place with what is needed to talk to it.
type endpoint struct {
	name string // for messages
	place
	address string // host that is connected to
	login   Login
	client  *http.Client
	idle    time.Duration
	pause   time.Duration // after a first failure
	hidden  *secrets

	turn   chan struct{} // held by whoever asks for a token
	mu     sync.Mutex
	spoken string    // scheme that was found out; guarded by mu
	auth   authState // guarded by mu
	ready  time.Time // not to be asked before; guarded by mu
}

const (
	triesAlone   = 4                // requests to an endpoint that nobody can stand in for
	triesBeside  = 2                // to one of several
	triesLimited = 6                // while it says that there are too many
	longestPause = 60 * time.Second // one that wants more is left alone
)

// failure is an answer that does not help, or none.
type failure struct {
	kind    error // a sentinel
	text    string
	again   bool          // asking again may help
	limited bool          // there were too many requests
	after   time.Duration // wish of the endpoint; 0: none
}

func (f *failure) Error() string { return f.text }
func (f *failure) Unwrap() error { return f.kind }

func (e *endpoint) readyAt() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ready.Before(time.Now()) {
		return time.Time{}
	}
	return e.ready
}

// get asks until there is an answer or no sense in asking. alone says that no
// other endpoint is left, which makes it more patient.
func (e *endpoint) get(ctx context.Context, path string, header http.Header, alone bool) (*http.Response, error) {
	for n := 1; ; n++ {
		res, err := e.once(ctx, path, header)
		if err == nil {
			return res, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		f := asFailure(err)
		pause := f.pause(n, e.pause)
		if f.limited && !alone {
			e.mu.Lock()
			e.ready = time.Now().Add(pause)
			e.mu.Unlock()
		}
		if !f.retried(n, alone) {
			return nil, f
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, context.Cause(ctx)
		}
	}
}

// retried says whether an endpoint is asked once more after n times.
func (f *failure) retried(n int, alone bool) bool {
	switch {
	case !f.again, f.after > longestPause:
		return false
	case f.limited:
		return alone && n < triesLimited
	case alone:
		return n < triesAlone
	}
	return n < triesBeside
}

// pause is how long to wait after n requests: as long as the endpoint says, or
// ever longer.
func (f *failure) pause(n int, first time.Duration) time.Duration {
	if f.after > 0 {
		return f.after
	}
	p := first << (n - 1)
	return p + rand.N(p/4+1)
}

// once sends one request, with what the endpoint wants to know about who asks.
// A token that is not good any more is replaced once.
func (e *endpoint) once(ctx context.Context, path string, header http.Header) (*http.Response, error) {
	for round := 1; ; round++ {
		auth, err := e.authorization(ctx)
		if err != nil {
			return nil, err
		}
		res, err := e.request(ctx, e.path+path, header, auth)
		if err != nil {
			return nil, err
		}
		if res.StatusCode == http.StatusOK || res.StatusCode == http.StatusPartialContent {
			return res, nil
		}
		refused := e.refusal(res)
		if u := res.Request.URL; !e.own(u) { // it may not say where the login is to be sent
			refused.text = u.Host + ", where a redirect led, " + refused.text
			return nil, refused
		}
		if res.StatusCode != http.StatusUnauthorized || round > 1 {
			return nil, refused
		}
		if learned, err := e.challenged(ctx, res, auth); err != nil || !learned {
			return nil, errors.Join(err, refused)
		}
	}
}

// own tells whether an answer from there is the endpoint's, and not that of a
// place where a redirect has led.
func (e *endpoint) own(u *url.URL) bool {
	return u.Host == e.address && (u.Scheme == "https" || e.speaks() != "https")
}

// request sends a GET to a path of the endpoint. Where it is not known yet
// whether an insecure one speaks TLS, that is tried first.
func (e *endpoint) request(ctx context.Context, path string, header http.Header, auth string) (*http.Response, error) {
	scheme := e.speaks()
	res, err := e.send(ctx, scheme, path, header, auth)
	if err != nil && scheme == "https" && e.undecided() && ctx.Err() == nil && !errors.Is(err, ErrIdle) {
		scheme = "http"
		res, err = e.send(ctx, scheme, path, header, auth)
	}
	if err == nil {
		e.mu.Lock()
		e.spoken = scheme
		e.mu.Unlock()
	}
	return res, err
}

func (e *endpoint) undecided() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.scheme == "" && e.insecure && e.spoken == ""
}

// speaks is the scheme as far as it is known.
func (e *endpoint) speaks() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.scheme != "":
		return e.scheme
	case e.spoken != "":
		return e.spoken
	}
	return "https"
}

func (e *endpoint) send(ctx context.Context, scheme, path string, header http.Header, auth string) (*http.Response, error) {
	u := url.URL{Scheme: scheme, Host: e.address, Path: path}
	if e.namespace != "" {
		u.RawQuery = url.Values{"ns": {e.namespace}}.Encode()
	}
	r, err := http.NewRequest(http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrConfig, err)
	}
	for _, from := range []http.Header{e.header, header} {
		for name, values := range from {
			r.Header[http.CanonicalHeaderKey(name)] = values
		}
	}
	if auth != "" {
		r.Header.Set("Authorization", auth)
	}
	return e.exchange(ctx, r)
}

// asFailure judges an error of the connection; a failure stays what it is.
func asFailure(err error) *failure {
	var f *failure
	if errors.As(err, &f) {
		return f
	}
	kind := kindOf(err)
	var certificate *tls.CertificateVerificationError
	var alert tls.AlertError
	var timeout net.Error
	late := errors.As(err, &timeout) && timeout.Timeout() // it has been waited for already
	again := kind == ErrUnavailable && !late && !errors.As(err, &certificate) && !errors.As(err, &alert) &&
		!errors.Is(err, http.ErrSchemeMismatch) && !errors.Is(err, context.Canceled)
	return &failure{kind: kind, text: err.Error(), again: again}
}

// refusal reads an answer that is none, and closes it.
func (e *endpoint) refusal(res *http.Response) *failure {
	f := &failure{kind: kindOfStatus(res.StatusCode), text: "answered " + strconv.Itoa(res.StatusCode)}
	if name := http.StatusText(res.StatusCode); name != "" {
		f.text += " " + name
	}
	if data, err := e.readDocument(res, 64<<10); err == nil {
		if said := message(data); said != "" {
			f.text += " (" + said + ")"
		}
	}
	f.limited = res.StatusCode == http.StatusTooManyRequests
	f.again = f.limited || res.StatusCode >= 500
	if f.again {
		f.after = retryAfter(res.Header.Get("Retry-After"))
	}
	if f.after > longestPause {
		f.text += fmt.Sprintf(", to be asked again after %v", f.after.Round(time.Second))
	}
	return f
}

func kindOfStatus(code int) error {
	switch {
	case code == http.StatusUnauthorized, code == http.StatusForbidden:
		return ErrDenied
	case code == http.StatusNotFound, code == http.StatusGone:
		return ErrNotFound
	case code == http.StatusTooManyRequests, code >= 500:
		return ErrUnavailable
	}
	return ErrInvalid
}

// retryAfter reads the header's two forms, seconds and a date.
func retryAfter(value string) time.Duration {
	if n, err := strconv.Atoi(value); err == nil {
		return time.Duration(min(max(n, 0), 1<<30)) * time.Second
	}
	if at, err := http.ParseTime(value); err == nil {
		return max(time.Until(at), time.Millisecond)
	}
	return 0
}

// message is what a registry's error document says, made harmless.
func message(data []byte) string {
	var doc struct {
		Errors []struct{ Code, Message string }
		// Of token services.
		Details string
		Message string
	}
	if json.Unmarshal(data, &doc) != nil {
		return ""
	}
	said := doc.Details + doc.Message
	if len(doc.Errors) > 0 {
		said = strings.TrimSuffix(doc.Errors[0].Code+": "+doc.Errors[0].Message, ": ")
	}
	said = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, said)
	if runes := []rune(said); len(runes) > 200 {
		said = string(runes[:200]) + "…"
	}
	return said
}

// drain makes the connection of a small answer usable again.
func drain(r io.ReadCloser) {
	_, _ = io.CopyN(io.Discard, r, 64<<10) // only a courtesy to the next request
	r.Close()
}
