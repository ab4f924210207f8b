package fetch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/errcode"
)

// ErrSize: the registry has another number of bytes under the digest than the
// manifest says.
var ErrSize = errors.New("wrong size")

// errRange: what was asked for by Range is not what came.
var errRange = errors.New("unexpected range")

// StatusError is an answer that brings no blob.
type StatusError struct {
	Host       string
	Code       int           // HTTP status
	RetryAfter time.Duration // what the registry asks for; 0: nothing
	Text       string        // the registry's own words, shortened; may be empty
}

func (e *StatusError) Error() string {
	text := fmt.Sprintf("%s answers %d %s", e.Host, e.Code, http.StatusText(e.Code))
	if e.Text != "" {
		text += ": " + e.Text
	}
	return text
}

// Blob is what to read, as its manifest describes it.
type Blob struct {
	Digest digest.Digest
	Size   int64 // bytes
}

// Client reads blobs of one image. All methods may be called at the same time.
type Client struct {
	hosts    []*host
	good     atomic.Int32 // index of the endpoint that answered last
	patience Patience
	pause    time.Duration // after a break; doubled with each in a row
}

// New makes a client of an image's endpoints, the first one preferred. Nothing
// is connected yet. Close frees what is kept open.
func New(endpoints []Endpoint, agent string, p Patience) *Client {
	c := &Client{patience: p, pause: 200 * time.Millisecond}
	for _, e := range endpoints {
		c.hosts = append(c.hosts, newHost(e, agent))
	}
	return c
}

// Close closes the connections that no stream uses. Idempotent.
func (c *Client) Close() {
	for _, h := range c.hosts {
		h.close()
	}
}

// part is one answer.
type part struct {
	io.ReadCloser
	from    int64 // the byte it begins with: as asked, or 0 when Range was ignored
	ranged  bool  // the endpoint knows ranges
	endless bool  // no length was announced
}

// get asks the endpoints in turn, from the one that answered last, for a blob
// from a byte on; length < 0: to its end. The error names each endpoint.
func (c *Client) get(ctx context.Context, b Blob, from, length int64) (*part, error) {
	var failed []error
	start := int(c.good.Load())
	for i := range c.hosts {
		at := (start + i) % len(c.hosts)
		p, err := c.hosts[at].get(ctx, b, from, length)
		if err == nil {
			c.good.Store(int32(at))
			return p, nil
		}
		failed = append(failed, err)
		if ctx.Err() != nil {
			break
		}
	}
	if len(failed) == 1 {
		return nil, failed[0]
	}
	return nil, errors.Join(failed...)
}

func (h *host) get(ctx context.Context, b Blob, from, length int64) (*part, error) {
	header := http.Header{}
	switch {
	case length >= 0:
		header.Set("Range", fmt.Sprintf("bytes=%d-%d", from, from+length-1))
	case from > 0:
		header.Set("Range", fmt.Sprintf("bytes=%d-", from))
	}
	answer, err := h.do(ctx, "/blobs/"+b.Digest.String(), header)
	if err != nil {
		return nil, h.plain(err)
	}
	p, err := h.accept(answer, b, from, length)
	if err != nil {
		answer.Body.Close()
		return nil, err
	}
	return p, nil
}

func (h *host) accept(answer *http.Response, b Blob, from, length int64) (*part, error) {
	p := &part{ReadCloser: answer.Body}
	size := answer.ContentLength
	switch answer.StatusCode {
	case http.StatusOK:
		p.ranged = answer.Header.Get("Accept-Ranges") == "bytes"
	case http.StatusPartialContent:
		want := b.Size
		if length >= 0 {
			want = from + length
		}
		first, last, total, err := contentRange(answer.Header.Get("Content-Range"))
		if err != nil || first != from || last+1 != want {
			return nil, fmt.Errorf("%w: %s answers with %q to a request for bytes %d to %d", errRange, h.Host, answer.Header.Get("Content-Range"), from, want-1)
		}
		p.from, p.ranged, size = from, true, total
	case http.StatusRequestedRangeNotSatisfiable:
		return nil, fmt.Errorf("%w: %w", errRange, h.refusal(answer))
	default:
		return nil, h.refusal(answer)
	}
	p.endless = size < 0
	if size >= 0 && size != b.Size {
		return nil, fmt.Errorf("%w: %s has %d bytes for %s, the manifest says %d", ErrSize, h.Host, size, b.Digest, b.Size)
	}
	return p, nil
}

// contentRange reads "bytes 0-499/1234"; total is -1 for "*".
func contentRange(s string) (first, last, total int64, err error) {
	span, ok := strings.CutPrefix(s, "bytes ")
	span, all, ok2 := strings.Cut(span, "/")
	from, to, ok3 := strings.Cut(span, "-")
	if !ok || !ok2 || !ok3 {
		return 0, 0, 0, fmt.Errorf("no content range: %q", s)
	}
	total = -1
	if all != "*" {
		total, err = strconv.ParseInt(all, 10, 64)
	}
	first, err1 := strconv.ParseInt(from, 10, 64)
	last, err2 := strconv.ParseInt(to, 10, 64)
	return first, last, total, errors.Join(err, err1, err2)
}

const maxRefusal = 4 << 10 // bytes of an error document that are looked at

// refusal reads the protocol's error document, as far as there is one.
func (h *host) refusal(answer *http.Response) error {
	e := &StatusError{Host: h.Host, Code: answer.StatusCode, RetryAfter: retryAfter(answer.Header.Get("Retry-After"))}
	var doc struct {
		Errors []struct{ Code, Message string }
	}
	data, err := io.ReadAll(io.LimitReader(answer.Body, maxRefusal))
	if err == nil && json.Unmarshal(data, &doc) == nil && len(doc.Errors) > 0 {
		e.Text = strconv.QuoteToGraphic(doc.Errors[0].Code + ": " + doc.Errors[0].Message)
	}
	return e
}

// retryAfter knows both forms of the header: seconds and a date.
func retryAfter(s string) time.Duration {
	if seconds, err := strconv.Atoi(s); err == nil && seconds >= 0 {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(s); err == nil {
		return max(0, time.Until(at))
	}
	return 0
}

// plain takes the URL out of a transport's error: after a redirect it may be a
// signed one. What a token service answers is the endpoint's answer.
func (h *host) plain(err error) error {
	var refused *errcode.ErrorResponse
	if errors.As(err, &refused) {
		return &StatusError{Host: h.Host, Code: refused.StatusCode, Text: "by the token service"}
	}
	if errors.Is(err, auth.ErrBasicCredentialNotFound) {
		return &StatusError{Host: h.Host, Code: http.StatusUnauthorized, Text: "there are no credentials for it"}
	}
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	return fmt.Errorf("%s: %w", h.Host, err)
}
