package registry

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// errCut ends a body before its time.
var errCut = errors.New("cut by the script")

// Fault is one line of the script: which requests it touches and what it does
// to their answer. The first fault that matches a request is the one applied.
// The zero value matches everything and changes nothing.
type Fault struct {
	Method string // GET, HEAD; empty: any
	Path   string // part of the URL's path; empty: any
	Skip   int    // this many matching requests pass unharmed first
	Times  int    // then this many are harmed; 0: all that follow

	Delay  time.Duration // before anything is answered
	Status int           // answer this instead, with Header and Body
	Header http.Header
	Body   string

	Hangup      bool  // close the connection without any answer
	CutAfter    int64 // >0: close the connection after so many bytes of the body
	StallAfter  int64 // >0: send so many bytes, then nothing until the client leaves
	Rate        int   // >0: bytes a second
	NoLength    bool  // no Content-Length: chunked
	IgnoreRange bool  // answer 200 with all bytes to a range request
	Garbage     int   // replace the body's first bytes by this many zero bytes

	seen int // matching requests so far; guarded by Registry.mu
}

// Redirect answers with 307 to url.
func Redirect(path, url string) Fault {
	return Fault{Path: path, Status: http.StatusTemporaryRedirect, Header: http.Header{"Location": {url}}}
}

// Challenge answers with 401 and this WWW-Authenticate header.
func Challenge(path, header string) Fault {
	return Fault{Path: path, Status: http.StatusUnauthorized, Header: http.Header{"Www-Authenticate": {header}}}
}

// Script adds a fault at the end of the script. The returned function takes it
// out again; calling it twice does no harm.
func (r *Registry) Script(f Fault) (remove func()) {
	added := &f
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults = append(r.faults, added)
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for i, have := range r.faults {
			if have == added {
				r.faults = append(r.faults[:i:i], r.faults[i+1:]...)
				return
			}
		}
	}
}

// match finds the fault for a request and counts it.
func (r *Registry) match(q *http.Request) *Fault {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.faults {
		if (f.Method != "" && f.Method != q.Method) || !strings.Contains(q.URL.Path, f.Path) {
			continue
		}
		f.seen++
		if f.seen <= f.Skip || (f.Times > 0 && f.seen > f.Skip+f.Times) {
			continue
		}
		return f
	}
	return nil
}

// answer is a ResponseWriter that counts, and hurts where the fault says so.
type answer struct {
	http.ResponseWriter
	request *http.Request
	fault   *Fault
	closed  <-chan struct{}

	status  int
	sent    int64
	broken  bool
	aborted bool
}

// before does what comes ahead of the honest answer; true: nothing is left to do.
func (a *answer) before() (done bool) {
	f := a.fault
	if f == nil {
		return false
	}
	if f.Delay > 0 && !a.wait(f.Delay) {
		a.aborted = true
		return true
	}
	if f.Hangup {
		a.aborted = true
		return true
	}
	if f.Status == 0 {
		return false
	}
	for name, values := range f.Header {
		a.Header()[name] = values
	}
	a.WriteHeader(f.Status)
	_, _ = a.Write([]byte(f.Body)) // a client that left is recorded in broken
	return true
}

// wait sleeps; false when the client or the registry went away.
func (a *answer) wait(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-a.request.Context().Done():
		a.broken = true
	case <-a.closed:
	}
	return false
}

func (a *answer) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
	if a.fault != nil && a.fault.NoLength {
		a.Header().Del("Content-Length")
	}
	a.ResponseWriter.WriteHeader(status)
}

// sendAll writes a whole document, or only its length to HEAD.
func (a *answer) sendAll(q *http.Request, body []byte) {
	a.Header().Set("Content-Length", strconv.Itoa(len(body)))
	a.WriteHeader(http.StatusOK)
	if q.Method != http.MethodHead {
		_, _ = a.Write(body) // a client that left is recorded in broken
	}
}

func (a *answer) Write(p []byte) (int, error) {
	if a.status == 0 {
		a.status = http.StatusOK
	}
	if a.fault == nil || a.fault.Status != 0 {
		return a.pass(p)
	}
	return a.harm(p)
}

// pass writes and counts.
func (a *answer) pass(p []byte) (int, error) {
	n, err := a.ResponseWriter.Write(p)
	a.sent += int64(n)
	if err != nil {
		a.broken = true
	}
	return n, err
}

// harm writes p in the way the fault wants; the bytes sent so far say where it is.
func (a *answer) harm(p []byte) (int, error) {
	f, written := a.fault, 0
	if f.Garbage > 0 && a.sent < int64(f.Garbage) {
		p = append(make([]byte, min(len(p), f.Garbage-int(a.sent))), p[min(len(p), f.Garbage-int(a.sent)):]...)
	}
	for len(p) > 0 {
		room := len(p)
		if f.CutAfter > 0 {
			room = min(room, int(f.CutAfter-a.sent))
		}
		if f.StallAfter > 0 {
			room = min(room, int(f.StallAfter-a.sent))
		}
		if f.Rate > 0 {
			room = min(room, max(1, f.Rate/10))
		}
		if room <= 0 {
			return written, a.end()
		}
		n, err := a.pass(p[:room])
		written += n
		if err != nil {
			return written, err
		}
		p = p[room:]
		if flusher, ok := a.ResponseWriter.(http.Flusher); ok {
			flusher.Flush()
		}
		if f.Rate > 0 && !a.wait(time.Duration(room)*time.Second/time.Duration(f.Rate)) {
			return written, a.end()
		}
	}
	return written, nil
}

// end is the cut: at once, or after the client has lost patience.
func (a *answer) end() error {
	a.aborted = true
	if a.fault.StallAfter > 0 && a.sent >= a.fault.StallAfter {
		select {
		case <-a.request.Context().Done():
			a.broken = true
		case <-a.closed:
		}
	}
	return errCut
}
