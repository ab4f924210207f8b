// Package registry is a container registry for tests: the pull half of the
// distribution protocol, in memory, on loopback, with every request logged and
// every answer open to a scripted fault (see Fault).
//
// It owns blobs by digest (shared by all repositories), manifests by repository
// and reference, the fault script and the request log. It does not check what
// it is given: hostile manifests, wrong digests and lying media types are what
// it is for. Nothing is written to disk; Close frees everything.
//
// Names are flat: a repository is the path without a host, so that one registry
// can stand as mirror for registry.k8s.io, gcr.io and others at once.
package registry

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// Registry serves until Close. All methods may be called from many goroutines.
type Registry struct {
	listener net.Listener
	server   *http.Server
	closed   chan struct{} // ends stalled answers

	mu        sync.Mutex
	blobs     map[digest.Digest][]byte
	manifests map[string]manifest // "repository@digest" and "repository:tag"
	faults    []*Fault
	requests  []Request
	user      string
	password  string

	tokenUser, tokenPassword string               // guarded by mu, as the next two
	tokenLife                time.Duration        // 0: no tokens are wanted
	tokens                   map[string]time.Time // token → its end
}

type manifest struct {
	mediaType string
	body      []byte
}

// Request is one line of the log.
type Request struct {
	At     time.Time
	Method string
	Path   string
	Range  string // the Range header
	User   string // of basic authentication; empty when none was sent
	Status int    // what was answered; 0 when the connection was cut before a status
	Sent   int64  // bytes of body written
	Fault  bool   // a fault had a hand in the answer
	Broken bool   // the client went away before the body's end
}

// Start listens on a free port of 127.0.0.1.
func Start() (*Registry, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for the registry: %w", err)
	}
	r := &Registry{
		listener:  l,
		closed:    make(chan struct{}),
		blobs:     map[digest.Digest][]byte{},
		manifests: map[string]manifest{},
	}
	r.server = &http.Server{Handler: r, ReadHeaderTimeout: time.Minute}
	go func() { _ = r.server.Serve(l) }() // ends with Close
	return r, nil
}

// Addr is host:port.
func (r *Registry) Addr() string { return r.listener.Addr().String() }

// Close stops at once; answers in flight are cut. Call it once.
func (r *Registry) Close() error {
	close(r.closed)
	return r.server.Close()
}

// PutBlob stores data under its own digest.
func (r *Registry) PutBlob(data []byte) digest.Digest {
	d := digest.FromBytes(data)
	r.PutBlobAs(d, data)
	return d
}

// PutBlobAs stores data under any digest, true or not.
func (r *Registry) PutBlobAs(d digest.Digest, data []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.blobs[d] = data
}

// PutManifest stores body under its digest and, unless empty, under tag.
func (r *Registry) PutManifest(repository, tag, mediaType string, body []byte) digest.Digest {
	r.mu.Lock()
	defer r.mu.Unlock()
	d := digest.FromBytes(body)
	m := manifest{mediaType: mediaType, body: body}
	r.manifests[repository+"@"+d.String()] = m
	if tag != "" {
		r.manifests[repository+":"+tag] = m
	}
	return d
}

// RequireBasic makes every request need this user and password; an empty user
// opens the registry again.
func (r *Registry) RequireBasic(user, password string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.user, r.password = user, password
}

// Requests returns the log so far, in order of arrival. A request that is still
// being answered is not in it yet.
func (r *Registry) Requests() []Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]Request(nil), r.requests...)
}

// ResetLog forgets the log.
func (r *Registry) ResetLog() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests = nil
}

// Count tells how many logged requests have this method and a path that contains part.
func (r *Registry) Count(method, part string) int {
	n := 0
	for _, q := range r.Requests() {
		if q.Method == method && strings.Contains(q.Path, part) {
			n++
		}
	}
	return n
}

// ServeHTTP answers one request and logs it.
func (r *Registry) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	user, _, _ := q.BasicAuth()
	entry := Request{At: time.Now(), Method: q.Method, Path: q.URL.Path, Range: q.Header.Get("Range"), User: user}
	fault := r.match(q)
	entry.Fault = fault != nil
	out := &answer{ResponseWriter: w, request: q, fault: fault, closed: r.closed}
	cut := true
	defer func() {
		entry.Status, entry.Sent, entry.Broken = out.status, out.sent, out.broken
		r.mu.Lock()
		r.requests = append(r.requests, entry)
		r.mu.Unlock()
		if cut {
			panic(http.ErrAbortHandler) // closes the connection without an end of the body
		}
	}()
	if out.before() {
		cut = out.aborted
		return
	}
	r.route(out, q)
	cut = out.aborted
}

// route answers as an honest registry would.
func (r *Registry) route(w *answer, q *http.Request) {
	w.Header().Set("Docker-Distribution-API-Version", "registry/2.0")
	if q.URL.Path == "/token" {
		r.serveToken(w, q)
		return
	}
	if lacks := r.challenge(q); lacks != "" {
		w.Header().Set("WWW-Authenticate", lacks)
		refuse(w, http.StatusUnauthorized, "UNAUTHORIZED", "authentication required")
		return
	}
	path := strings.TrimPrefix(q.URL.Path, "/v2/")
	if path == "" {
		w.WriteHeader(http.StatusOK)
		return
	}
	if name, ref, ok := cutLast(path, "/manifests/"); ok {
		r.serveManifest(w, q, name, ref)
		return
	}
	if _, ref, ok := cutLast(path, "/blobs/"); ok {
		r.serveBlob(w, q, digest.Digest(ref))
		return
	}
	if name, ok := strings.CutSuffix(path, "/tags/list"); ok {
		r.serveTags(w, name)
		return
	}
	refuse(w, http.StatusNotFound, "UNSUPPORTED", "no such endpoint")
}

func (r *Registry) serveManifest(w *answer, q *http.Request, name, ref string) {
	r.mu.Lock()
	key := name + ":" + ref
	if strings.Contains(ref, ":") {
		key = name + "@" + ref
	}
	m, ok := r.manifests[key]
	r.mu.Unlock()
	if !ok {
		refuse(w, http.StatusNotFound, "MANIFEST_UNKNOWN", "manifest unknown")
		return
	}
	w.Header().Set("Content-Type", m.mediaType)
	w.Header().Set("Docker-Content-Digest", digest.FromBytes(m.body).String())
	w.sendAll(q, m.body)
}

func (r *Registry) serveBlob(w *answer, q *http.Request, d digest.Digest) {
	r.mu.Lock()
	data, ok := r.blobs[d]
	r.mu.Unlock()
	if !ok {
		refuse(w, http.StatusNotFound, "BLOB_UNKNOWN", "blob unknown")
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Docker-Content-Digest", d.String())
	if w.fault != nil && (w.fault.IgnoreRange || w.fault.NoLength) {
		w.sendAll(q, data)
		return
	}
	http.ServeContent(w, q, "", time.Time{}, bytes.NewReader(data))
}

func (r *Registry) serveTags(w *answer, name string) {
	r.mu.Lock()
	var tags []string
	for key := range r.manifests {
		if tag, ok := strings.CutPrefix(key, name+":"); ok {
			tags = append(tags, strconv.Quote(tag))
		}
	}
	r.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"name":%q,"tags":[%s]}`, name, strings.Join(tags, ","))
}

// refuse writes the protocol's error document.
func refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"errors":[{"code":%q,"message":%q}]}`, code, message)
}

// cutLast splits around the last occurrence of sep.
func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return "", "", false
	}
	return s[:i], s[i+len(sep):], true
}
