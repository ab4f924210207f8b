package registries

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/go-digest"
)

// Range is a part of a blob.
type Range struct {
	Digest digest.Digest
	Offset int64
	Length int64 // 0: to the end
}

// Blob is a blob that is being read. Its bytes are not checked.
type Blob struct {
	// Offset is where the bytes begin: what was asked for, or 0 from an
	// endpoint that does not know ranges. In that case it also goes on to the
	// blob's end.
	Offset int64
	// Size of the whole blob; -1 when the endpoint does not say.
	Size int64
	// Ranged: the endpoint knows ranges.
	Ranged bool
	// Endpoint that it comes from, for messages.
	Endpoint string

	body     io.ReadCloser
	source   *Source
	endpoint *endpoint
	digest   digest.Digest
	got      int64
}

const (
	goodProgress = 1 << 20 // bytes after which breaking off is forgiven
)

// blobTries is what one blob has been through.
type blobTries struct {
	breaks map[*endpoint]int   // failures so far
	gone   map[*endpoint]bool  // it will not have the blob
	last   map[*endpoint]error // the latest failure
}

// Blob opens a blob, or a part of it, at the best endpoint: the one that gave
// the manifest, then the others, each with a bounded number of requests. After
// a Blob that was given up with Failed it goes on with the next endpoint, and
// comes back to those that failed in the order of how often they did. The wait
// for the answer is bounded; that for bytes is the reader's business, by ctx.
//
// The error is an *Error with the reason of each endpoint, or ctx's.
func (s *Source) Blob(ctx context.Context, r Range) (*Blob, error) {
	if err := r.Digest.Validate(); err != nil {
		return nil, &Error{ErrInvalid, fmt.Sprintf("digest %q: %v", r.Digest, err)}
	}
	breaks, gone := s.triedSoFar(r.Digest)
	list := s.preferred(s.candidates(func(e *endpoint) bool { return !e.noBlobs && !gone[e] }))
	slices.SortStableFunc(list, func(a, b *endpoint) int { return breaks[a] - breaks[b] })
	for i, e := range list {
		b, err := e.blob(ctx, r, i == len(list)-1)
		if err == nil {
			b.source = s
			return b, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		s.note(r.Digest, e, err, kindOf(err) != ErrUnavailable)
	}
	return nil, s.failed(s.attemptsOf(r.Digest))
}

func (s *Source) triesOf(d digest.Digest) *blobTries {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.spent[d]
	if t == nil {
		t = &blobTries{breaks: map[*endpoint]int{}, gone: map[*endpoint]bool{}, last: map[*endpoint]error{}}
		s.spent[d] = t
	}
	return t
}

// triedSoFar is a copy of what Blob decides by.
func (s *Source) triedSoFar(d digest.Digest) (breaks map[*endpoint]int, gone map[*endpoint]bool) {
	t := s.triesOf(d)
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(t.breaks), maps.Clone(t.gone)
}

// note counts a failure; one for good takes the endpoint out for this blob.
func (s *Source) note(d digest.Digest, e *endpoint, err error, forGood bool) {
	t := s.triesOf(d)
	s.mu.Lock()
	defer s.mu.Unlock()
	t.last[e], t.gone[e] = err, forGood
	t.breaks[e]++
}

func (s *Source) attemptsOf(d digest.Digest) []attempt {
	t := s.triesOf(d)
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []attempt
	for _, e := range s.endpoints {
		if err := t.last[e]; err != nil {
			list = append(list, attempt{e, err})
		}
	}
	return list
}

// Read reads on.
func (b *Blob) Read(p []byte) (int, error) {
	n, err := b.body.Read(p)
	b.got += int64(n)
	return n, err
}

// Close ends the connection, or frees it when all has been read.
func (b *Blob) Close() error { return b.body.Close() }

// Failed tells that this Blob could not be read to its end, or that its bytes
// were wrong. The next one of the same digest comes from another endpoint if
// there is one.
func (b *Blob) Failed(err error) {
	if b.got >= goodProgress {
		return // a long way: the same endpoint may go on
	}
	b.source.note(b.digest, b.endpoint, fmt.Errorf("broke off after %d bytes: %w", b.got, err), false)
}

// blob opens a blob at one endpoint. One that answers with another range than
// was asked for is asked for the whole.
func (e *endpoint) blob(ctx context.Context, r Range, alone bool) (*Blob, error) {
	header := http.Header{}
	if r.Offset > 0 || r.Length > 0 {
		text := fmt.Sprintf("bytes=%d-", r.Offset)
		if r.Length > 0 {
			text += strconv.FormatInt(r.Offset+r.Length-1, 10)
		}
		header.Set("Range", text)
	}
	path := "/" + e.repository + "/blobs/" + r.Digest.String()
	res, err := e.get(ctx, path, header, alone)
	if err != nil {
		return nil, err
	}
	b := &Blob{Size: res.ContentLength, Ranged: res.Header.Get("Accept-Ranges") == "bytes", Endpoint: e.name, body: res.Body, endpoint: e, digest: r.Digest}
	if res.StatusCode == http.StatusOK {
		return b, nil
	}
	b.Ranged = true
	b.Offset, b.Size, err = contentRange(res.Header.Get("Content-Range"))
	if err == nil && b.Offset == r.Offset && header.Get("Range") != "" {
		return b, nil
	}
	res.Body.Close()
	if header.Get("Range") == "" {
		return nil, fmt.Errorf("%w: a part of the blob, the whole was asked for", ErrInvalid)
	}
	return e.blob(ctx, Range{Digest: r.Digest}, alone)
}

// contentRange reads "bytes 5-9/100"; the size is -1 when it is not given.
func contentRange(value string) (offset, size int64, err error) {
	rest, ok := strings.CutPrefix(value, "bytes ")
	span, total, ok2 := strings.Cut(rest, "/")
	first, _, ok3 := strings.Cut(span, "-")
	if !ok || !ok2 || !ok3 {
		return 0, 0, fmt.Errorf("range %q", value)
	}
	if offset, err = strconv.ParseInt(first, 10, 64); err != nil {
		return 0, 0, err
	}
	if total == "*" {
		return offset, -1, nil
	}
	size, err = strconv.ParseInt(total, 10, 64)
	return offset, size, err
}
