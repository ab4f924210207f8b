package registries

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
)

func hangup(http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) }

func silent(_ http.ResponseWriter, r *http.Request) bool {
	<-r.Context().Done()
	return true
}

// B01: whatever is the matter with a mirror, the next is asked, and when none is
// left the error has the reason of each.
func TestB01WhateverAMirrorDoesTheNextIsAsked(t *testing.T) {
	good := newFake(t, nil)
	for name, c := range map[string]struct {
		host func() string
		says string
	}{
		"503":         {newFake(t, answer(503)).host, "answered 503 Service Unavailable"},
		"500":         {newFake(t, answer(500)).host, "answered 500"},
		"404":         {newFake(t, answer(404)).host, "answered 404 Not Found"},
		"429":         {newFake(t, answer(429)).host, "answered 429 Too Many Requests"},
		"403":         {newFake(t, answer(403)).host, "answered 403 Forbidden"},
		"hangs up":    {newFake(t, hangup).host, "EOF"},
		"closed port": {func() string { return "127.0.0.1:1" }, "connection refused"},
		"silent":      {newFake(t, silent).host, "no data for 300ms"},
		"unknown":     {func() string { return "no-such-host.invalid" }, "no-such-host.invalid"},
	} {
		t.Run(name, func(t *testing.T) {
			conf := config(t, "%s", mirrored(c.host(), good.host()))
			conf.Idle = 3 * time.Second // the good one may be slow too, on a busy machine
			if err := fetched(t, conf, "r.test/x/y:1", nil); err != nil {
				t.Errorf("with a good mirror behind: %v", err)
			}
			conf = config(t, "%s", mirrored(c.host(), "127.0.0.1:2"))
			conf.Idle = 300 * time.Millisecond
			err := fetched(t, conf, "r.test/x/y:1", nil)
			if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("with none behind: %v", err)
			}
			for _, endpoint := range []string{c.host() + "/x/y: ", "127.0.0.1:2/x/y: "} {
				if !strings.Contains(err.Error(), endpoint) {
					t.Errorf("%v does not name %s", err, endpoint)
				}
			}
		})
	}
}

// B01: a mirror that is not told to be insecure and speaks no TLS is left.
func TestB01PlainHTTPWhereTLSIsExpected(t *testing.T) {
	plain, good := newFake(t, nil), newFake(t, nil)
	text := strings.Replace(mirrored(plain.host(), good.host()), fmt.Sprintf("%q\ninsecure = true", plain.host()), fmt.Sprintf("%q", plain.host()), 1)
	if err := fetched(t, config(t, "%s", text), "r.test/x/y:1", nil); err != nil {
		t.Error(err)
	}
	if len(plain.seen()) != 0 || len(good.seen()) == 0 {
		t.Errorf("the plain one answered %q", plain.seen())
	}
}

// What the registry itself says counts: a mirror that is down does not make an
// image that is nowhere a matter of availability, nor the other way round.
func TestTheUpstreamDecidesWhatKindOfErrorItIs(t *testing.T) {
	kinds := map[int]error{404: ErrNotFound, 401: ErrDenied, 403: ErrDenied, 503: ErrUnavailable, 429: ErrUnavailable, 400: ErrInvalid}
	for mirror := range kinds {
		for upstream, want := range kinds {
			c := config(t, "%s", mirrored(newFake(t, answer(mirror)).host(), newFake(t, answer(upstream)).host()))
			if err := fetched(t, c, "r.test/a:1", nil); !errors.Is(err, want) {
				t.Errorf("mirror %d, upstream %d: %v, want %v", mirror, upstream, err, want)
			}
		}
	}
}

// B01: a mirror that fails in the middle of a blob is left for this blob, which
// goes on where it was.
func TestB01ABlobGoesOnAtTheNextEndpoint(t *testing.T) {
	good := newFake(t, nil)
	var broken *fake
	for name, hook := range map[string]func(http.ResponseWriter, *http.Request) bool{
		"missing": answer(404), "503": answer(503), "429": answer(429), "hangs up": hangup,
		"breaks off": func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Length", fmt.Sprint(len(broken.blob)))
			w.Write(broken.blob[:500_000])
			panic(http.ErrAbortHandler)
		},
	} {
		t.Run(name, func(t *testing.T) {
			broken = newFake(t, func(w http.ResponseWriter, r *http.Request) bool {
				return strings.Contains(r.URL.Path, "/blobs/") && hook(w, r)
			})
			s := open(t, config(t, "%s", mirrored(broken.host(), good.host())), "r.test/x/y:1", nil)
			if _, _, err := s.Manifest(t.Context(), ""); err != nil {
				t.Fatal(err)
			}
			before := len(good.seen())
			got, err := readAll(t, s, good.digest())
			if err != nil || !bytes.Equal(got, good.blob) {
				t.Fatalf("%d bytes, %v", len(got), err)
			}
			asked := good.seen("Range")[before:]
			if want := map[bool]string{true: "bytes=500000-", false: ""}[name == "breaks off"]; len(asked) != 1 || !strings.HasSuffix(asked[0], "Range="+want) {
				t.Errorf("the good one was asked %q", asked)
			}
			if slices.ContainsFunc(broken.seen()[1:], func(p string) bool { return strings.Contains(p, "/manifests/") }) {
				t.Error("the pull began anew")
			}
		})
	}
}

func TestABlobThatNobodyHasNamesEveryEndpoint(t *testing.T) {
	noBlobs := func(code int) *fake {
		return newFake(t, func(w http.ResponseWriter, r *http.Request) bool {
			return strings.Contains(r.URL.Path, "/blobs/") && answer(code)(w, r)
		})
	}
	one, two := noBlobs(404), noBlobs(502)
	s := open(t, config(t, "%s", mirrored(one.host(), two.host())), "r.test/x:1", nil)
	_, err := readAll(t, s, one.digest())
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), one.host()+"/x: answered 404") || !strings.Contains(err.Error(), two.host()+"/x: answered 502") {
		t.Error(err)
	}
	if len(two.seen()) != triesAlone {
		t.Errorf("the last was asked %d times", len(two.seen()))
	}
}

// An endpoint that does not know ranges, or answers another one, gives the whole.
func TestRangesThatAreNone(t *testing.T) {
	whole := func(w http.ResponseWriter, r *http.Request) bool { r.Header.Del("Range"); return false }
	wrong := func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Range") == "" {
			return false
		}
		w.Header().Set("Content-Range", "bytes 7-9/20")
		w.WriteHeader(http.StatusPartialContent)
		return true
	}
	for name, hook := range map[string]func(http.ResponseWriter, *http.Request) bool{"ignored": whole, "wrong": wrong} {
		f := newFake(t, hook)
		s := open(t, config(t, "%s", mirrored(f.host())), "r.test/x:1", nil)
		b, err := s.Blob(t.Context(), Range{Digest: f.digest(), Offset: 1000, Length: 10})
		if err != nil || b.Offset != 0 || b.Size != int64(len(f.blob)) {
			t.Errorf("%s: %+v %v", name, b, err)
		} else {
			b.Close()
		}
	}
	f := newFake(t, nil)
	s := open(t, config(t, "%s", mirrored(f.host())), "r.test/x:1", nil)
	b, err := s.Blob(t.Context(), Range{Digest: f.digest(), Offset: 1000, Length: 10})
	if err != nil || b.Offset != 1000 || b.Size != int64(len(f.blob)) || !b.Ranged {
		t.Fatalf("%+v %v", b, err)
	}
	b.Close()
	if got := f.seen("Range"); !strings.HasSuffix(got[0], "bytes=1000-1009") {
		t.Errorf("asked %q", got)
	}
}

// A manifest by digest that has another one is the endpoint's failure.
func TestAManifestOfAnotherDigest(t *testing.T) {
	liar, good := newFake(t, nil), newFake(t, nil)
	liar.manifest = []byte(`{"schemaVersion":2,"x":1}`)
	d := digest.FromBytes(good.manifest).String()
	if err := fetched(t, config(t, "%s", mirrored(liar.host(), good.host())), "r.test/x@"+d, nil); err != nil {
		t.Error(err)
	}
	err := fetched(t, config(t, "%s", mirrored(liar.host())), "r.test/x@"+d, nil)
	if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), d) {
		t.Error(err)
	}
}

// B11: Retry-After is obeyed in both its forms, and one that asks for more time
// than anybody has is an answer.
func TestB11RetryAfterIsObeyed(t *testing.T) {
	for name, value := range map[string]func() string{
		"seconds": func() string { return "1" },
		"date":    func() string { return time.Now().Add(2 * time.Second).UTC().Format(http.TimeFormat) },
	} {
		t.Run(name, func(t *testing.T) {
			left := 2
			f := newFake(t, func(w http.ResponseWriter, r *http.Request) bool {
				if left--; left < 0 {
					return false
				}
				w.Header().Set("Retry-After", value())
				w.WriteHeader(http.StatusTooManyRequests)
				return true
			})
			start := time.Now()
			if err := fetched(t, config(t, "%s", mirrored(f.host())), "r.test/x:1", nil); err != nil {
				t.Error(err)
			}
			if took := time.Since(start); took < time.Second || len(f.seen()) != 3 {
				t.Errorf("%d requests in %v", len(f.seen()), took)
			}
		})
	}
	f := newFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("Retry-After", "3600")
		return answer(429)(w, r)
	})
	err := fetched(t, config(t, "%s", mirrored(f.host())), "r.test/x:1", nil)
	if !errors.Is(err, ErrUnavailable) || len(f.seen()) != 1 || !strings.Contains(err.Error(), "after 1h0m0s") {
		t.Errorf("%d requests, %v", len(f.seen()), err)
	}
	for text, want := range map[string]time.Duration{"": 0, "soon": 0, "-5": 0, "7": 7 * time.Second, "99999999999": 1 << 30 * time.Second} {
		if got := retryAfter(text); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

// A mirror that has had too many requests is not asked before its time while
// others can be.
func TestALimitedMirrorIsLeftAloneForAWhile(t *testing.T) {
	limited := newFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("Retry-After", "30")
		return answer(429)(w, r)
	})
	good := newFake(t, nil)
	s := open(t, config(t, "%s", mirrored(limited.host(), good.host())), "r.test/x:1", nil)
	for range 3 {
		if _, _, err := s.Manifest(t.Context(), ""); err != nil {
			t.Fatal(err)
		}
	}
	if len(limited.seen()) != 1 {
		t.Errorf("it was asked %q", limited.seen())
	}
}

// What fails for a moment is asked again, a bounded number of times.
func TestRetriesAreBounded(t *testing.T) {
	for name, hook := range map[string]func(http.ResponseWriter, *http.Request) bool{"502": answer(502), "hangs up": hangup} {
		f := newFake(t, hook)
		c := config(t, "%s", strings.Replace(mirrored(f.host()), "insecure = true", "", 1))
		c.HostsDir = t.TempDir()
		write(t, c.HostsDir+"/h.test/hosts.toml", "server = 'http://"+f.host()+"'\n")
		if err := fetched(t, c, "h.test/x:1", nil); !errors.Is(err, ErrUnavailable) {
			t.Errorf("%s: %v", name, err)
		}
		if n := len(f.seen()); n != triesAlone {
			t.Errorf("%s: %d requests, want %d", name, n, triesAlone)
		}
	}
}
