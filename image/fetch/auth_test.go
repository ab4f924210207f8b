package fetch

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// A token that runs out in the middle of a blob is fetched anew, and the blob
// goes on from where it was.
func TestATokenIsRenewedBetweenTheParts(t *testing.T) {
	var s *server
	var tokens atomic.Int32
	s = newServer(t, 600_000, func(w http.ResponseWriter, q *http.Request) bool {
		if q.URL.Path == "/token" {
			if user, password, _ := q.BasicAuth(); user != "u" || password != "p" || q.URL.Query().Get("scope") != "repository:app:pull" {
				w.WriteHeader(http.StatusForbidden)
				return true
			}
			fmt.Fprintf(w, `{"token":"t%d"}`, tokens.Add(1))
			return true
		}
		if q.Header.Get("Authorization") != fmt.Sprintf("Bearer t%d", tokens.Load()) || tokens.Load() == 0 {
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token",service="x",scope="repository:app:pull"`, s.URL))
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}
		if tokens.Load() == 1 {
			s.serve(&short{ResponseWriter: w, left: 300_000}, q)
			tokens.Add(1) // the old one is void
			panic(http.ErrAbortHandler)
		}
		return false
	})
	e := s.endpoint()
	e.Credential = Credential{Username: "u", Password: "p"}
	c := newPatient(e)
	defer c.Close()
	got, err := readFrom(t.Context(), c, s.it(), 0)
	if err != nil || !bytes.Equal(got, s.blob) || tokens.Load() != 3 {
		t.Errorf("%d bytes, %d tokens, error %v", len(got), tokens.Load(), err)
	}
	e.Credential.Password = "wrong"
	c = newPatient(e)
	defer c.Close()
	if _, err = readFrom(t.Context(), c, s.it(), 0); err == nil || !strings.Contains(err.Error(), "403 Forbidden: by the token service") {
		t.Errorf("a wrong password: %v", err)
	}
}

// What is for the endpoint does not follow a redirect to another one.
func TestARedirectTakesNoSecretsAlong(t *testing.T) {
	var leaked http.Header
	store := newServer(t, 100_000, nil)
	store.hook = func(_ http.ResponseWriter, q *http.Request) bool {
		leaked = q.Header.Clone()
		return false
	}
	var asked http.Header
	s := newServer(t, 100_000, func(w http.ResponseWriter, q *http.Request) bool {
		if _, _, ok := q.BasicAuth(); !ok {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}
		asked = q.Header.Clone()
		http.Redirect(w, q, store.URL+"/signed?sig=secret", http.StatusTemporaryRedirect)
		return true
	})
	e := s.endpoint()
	e.Credential = Credential{Username: "u", Password: "p"}
	e.Header = http.Header{"X-Key": {"secret"}}
	e.Namespace = "quay.io"
	c := newPatient(e)
	defer c.Close()
	got, err := readFrom(t.Context(), c, s.it(), 50_000)
	if err != nil || !bytes.Equal(got, s.blob[50_000:]) {
		t.Fatalf("%d bytes, error %v", len(got), err)
	}
	if asked.Get("X-Key") != "secret" {
		t.Errorf("the endpoint got %v", asked)
	}
	if leaked.Get("Authorization") != "" || leaked.Get("X-Key") != "" || leaked.Get("Range") != "bytes=50000-" {
		t.Errorf("the other got %v", leaked)
	}
	store.Close()
	if _, err = readFrom(t.Context(), c, s.it(), 0); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("the error tells %v", err)
	}
}

func newPatient(e Endpoint) *Client {
	c := New([]Endpoint{e}, "test", Patience{Idle: time.Minute})
	c.pause = time.Millisecond
	return c
}
