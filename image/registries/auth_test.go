package registries

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// tokens is a token service, and the registry's side of it.
type tokens struct {
	*httptest.Server
	issued atomic.Int32
	life   time.Duration // that the service tells of
	valid  time.Duration // that the registry goes by
	check  func(r *http.Request) bool

	mu    sync.Mutex
	until map[string]time.Time // by Authorization header
	asked []string             // queries and forms, with the login
}

func newTokens(t *testing.T, life, valid time.Duration) *tokens {
	s := &tokens{life: life, valid: valid, until: map[string]time.Time{}}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

func (s *tokens) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_ = r.ParseForm()
	user, password, _ := r.BasicAuth()
	text := fmt.Sprintf("token-%d", s.issued.Add(1))
	s.mu.Lock()
	s.asked = append(s.asked, fmt.Sprintf("%s %s:%s %s", r.Method, user, password, r.Form.Encode()))
	s.until["Bearer "+text] = time.Now().Add(s.valid)
	s.mu.Unlock()
	if s.check != nil && !s.check(r) {
		w.WriteHeader(http.StatusUnauthorized)
		fmt.Fprintf(w, `{"details":"wrong: %s"}`, password)
		return
	}
	fmt.Fprintf(w, `{"token":%q,"expires_in":%d}`, text, int(s.life.Seconds()))
}

// gate is the registry's hook: a challenge unless the token is good.
func (s *tokens) gate(w http.ResponseWriter, r *http.Request) bool {
	s.mu.Lock()
	good := time.Now().Before(s.until[r.Header.Get("Authorization")])
	s.mu.Unlock()
	if !good {
		w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token?x=y",service="srv",scope="repository:a/b:pull"`, s.URL))
		w.WriteHeader(http.StatusUnauthorized)
	}
	return !good
}

// B11: a token that ends while blobs are read is replaced, by its time or by a
// challenge, once for all who need it.
func TestB11TokensAreReplacedInTheMiddle(t *testing.T) {
	for name, life := range map[string]time.Duration{"the service says when": 2 * time.Second, "it says too much": time.Hour, "it says nothing": 0} {
		t.Run(name, func(t *testing.T) {
			service := newTokens(t, life, 300*time.Millisecond)
			if life == 2*time.Second {
				service.valid = life
			}
			f := newFake(t, service.gate)
			s := open(t, config(t, "%s", mirrored(f.host())), "r.test/a/b:1", nil)
			if _, _, err := s.Manifest(t.Context(), ""); err != nil {
				t.Fatal(err)
			}
			if n := service.issued.Load(); n != 1 {
				t.Errorf("%d tokens for the manifest", n)
			}
			time.Sleep(service.valid + 100*time.Millisecond)
			var wg sync.WaitGroup
			for range 5 {
				wg.Go(func() {
					if _, err := readAll(t, s, f.digest()); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if n := service.issued.Load(); n < 2 || n > 3 {
				t.Errorf("%d tokens, want one more for five blobs", n)
			}
			if got := service.asked[0]; got != "GET : scope=repository%3Aa%2Fb%3Apull&service=srv&x=y" {
				t.Errorf("asked for a token with %q", got)
			}
			// Another pull does not know the token.
			if err := fetched(t, config(t, "%s", mirrored(f.host())), "r.test/a/b:1", nil); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestATokenThatIsNeverGoodEnds(t *testing.T) {
	service := newTokens(t, time.Hour, 0)
	f := newFake(t, service.gate)
	if err := fetched(t, config(t, "%s", mirrored(f.host())), "r.test/a:1", nil); !errors.Is(err, ErrDenied) || service.issued.Load() > 2 {
		t.Errorf("%d tokens, %v", service.issued.Load(), err)
	}
}

func TestLoginsOfAllKinds(t *testing.T) {
	basic := func(user, password string) string {
		return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
	}
	wantBasic := func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") == basic("u", "p:w") {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		return answer(401)(w, r)
	}
	bearer := func(w http.ResponseWriter, r *http.Request) bool {
		return r.Header.Get("Authorization") != "Bearer REGTOKEN" && answer(401)(w, r)
	}
	service := newTokens(t, time.Hour, time.Hour)
	service.check = func(r *http.Request) bool {
		user, password, _ := r.BasicAuth()
		return r.Form.Get("refresh_token") == "IDTOKEN" && r.Form.Get("grant_type") == "refresh_token" && r.Method == "POST" || user == "u" && password == "p:w"
	}
	for name, c := range map[string]struct {
		hook  func(http.ResponseWriter, *http.Request) bool
		login Login
		ok    bool
	}{
		"basic":                {wantBasic, Login{Username: "u", Password: "p:w"}, true},
		"basic, wrong":         {wantBasic, Login{Username: "u", Password: "SECRET"}, false},
		"basic, none":          {wantBasic, Login{}, false},
		"token service":        {service.gate, Login{Username: "u", Password: "p:w"}, true},
		"token service, wrong": {service.gate, Login{Username: "u", Password: "SECRET"}, false},
		"identity token":       {service.gate, Login{IdentityToken: "IDTOKEN"}, true},
		"identity token, bad":  {service.gate, Login{IdentityToken: "SECRET"}, false},
		"registry token":       {bearer, Login{RegistryToken: "REGTOKEN"}, true},
		"registry token, bad":  {bearer, Login{RegistryToken: "SECRET"}, false},
	} {
		f := newFake(t, c.hook)
		conf := config(t, "[[registry]]\nlocation = %q\ninsecure = true\n", f.host())
		err := fetched(t, conf, f.host()+"/a/b:1", &Caller{Login: c.login})
		if c.ok != (err == nil) || err != nil && (!errors.Is(err, ErrDenied) || strings.Contains(err.Error(), "SECRET")) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A caller's login goes to whom it is for: not to a mirror of another host, not
// where a redirect leads, not without TLS to a token service.
func TestLoginsGoNowhereElse(t *testing.T) {
	wantAny := func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") != "" {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		return answer(401)(w, r)
	}
	mirror, upstream := newFake(t, wantAny), newFake(t, wantAny)
	c := config(t, "[[registry]]\nlocation = %q\ninsecure = true\n[[registry.mirror]]\nlocation = %q\ninsecure = true\n", upstream.host(), mirror.host())
	login := Login{Username: "u", Password: "pw"}
	for server, want := range map[string][2]bool{
		"": {false, true}, mirror.host(): {true, false}, "http://" + upstream.host() + "/v2/": {false, true}, "else.test": {false, false},
	} {
		err := fetched(t, c, upstream.host()+"/x:1", &Caller{Login: login, Server: server})
		got := func(f *fake) bool {
			return slices.ContainsFunc(f.seen("Authorization"), func(s string) bool { return strings.Contains(s, "Authorization=Basic") })
		}
		if got(mirror) != want[0] || got(upstream) != want[1] || (err == nil) != (want != [2]bool{}) {
			t.Errorf("for %q: the mirror got it %v, the registry %v; %v", server, got(mirror), got(upstream), err)
		}
		mirror.log, upstream.log = nil, nil
	}
	// The mirror's own, from the auth file.
	c.AuthFile = t.TempDir() + "/auth.json"
	write(t, c.AuthFile, fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, mirror.host(), base64.StdEncoding.EncodeToString([]byte("m:mirrorpw"))))
	if err := fetched(t, c, upstream.host()+"/x:1", &Caller{Login: login}); err != nil || len(upstream.log) != 0 {
		t.Errorf("the mirror with its own login: %v", err)
	}
	if user, password, _ := mirror.log[len(mirror.log)-1].BasicAuth(); user != "m" || password != "mirrorpw" {
		t.Errorf("the mirror got %s:%s", user, password)
	}
}

func TestRedirectsTakeNothingAlong(t *testing.T) {
	store := newFake(t, nil)
	f := newFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") == "" {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			return answer(401)(w, r)
		}
		http.Redirect(w, r, store.URL+r.URL.Path+"?sig=SECRET1", http.StatusTemporaryRedirect)
		return true
	})
	c := withHosts(t, "server = 'http://%s'\n[header]\nX-Key = 'SECRET2'\n", f.host())
	caller := &Caller{Login: Login{Username: "u", Password: "SECRET3"}, Server: f.host()}
	s := open(t, c, "h.test/x:1", caller)
	if _, err := readAll(t, s, store.digest()); err != nil {
		t.Fatal(err)
	}
	got := store.seen("Authorization", "X-Key", "Referer")
	if len(got) != 1 || !strings.HasSuffix(got[0], "?sig=SECRET1 Authorization= X-Key= Referer=") {
		t.Errorf("the store was asked %q", got)
	}
	if got := f.seen("X-Key"); !strings.HasSuffix(got[0], "X-Key=SECRET2") {
		t.Errorf("the registry was asked %q", got)
	}
	// B09: nothing of it is told either.
	store.Close()
	_, err := readAll(t, s, store.digest())
	if !errors.Is(err, ErrUnavailable) || strings.Contains(err.Error(), "SECRET") || !strings.Contains(err.Error(), store.host()) {
		t.Errorf("got %v", err)
	}
	// A loop of redirects ends.
	loop := newFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		http.Redirect(w, r, "/again?sig=SECRET1", http.StatusFound)
		return true
	})
	if err := fetched(t, config(t, "%s", mirrored(loop.host())), "r.test/x:1", nil); err == nil || strings.Contains(err.Error(), "SECRET") || !strings.Contains(err.Error(), "redirects") {
		t.Errorf("a loop: %v", err)
	}
}

// Where a redirect leads, nobody may ask for the login, neither for itself nor
// for a token service of its own (CVE-2020-15157 by another way).
func TestWhereARedirectLeadsNobodyAsks(t *testing.T) {
	thief := newFake(t, nil)
	thief.hook = func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Add("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="s"`, thief.host()))
		w.Header().Add("WWW-Authenticate", `Basic realm="x"`)
		return answer(401)(w, r)
	}
	for _, part := range []string{"/manifests/", "/blobs/"} {
		f := newFake(t, func(w http.ResponseWriter, r *http.Request) bool {
			if r.Header.Get("Authorization") == "" {
				w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
				return answer(401)(w, r)
			}
			if strings.Contains(r.URL.Path, part) {
				http.Redirect(w, r, thief.URL+r.URL.Path, http.StatusTemporaryRedirect)
				return true
			}
			return false
		})
		c, caller := config(t, "%s", mirrored(f.host())), &Caller{Login: Login{Username: "u", Password: "SECRET"}, Server: f.host()}
		err := fetched(t, c, "r.test/x:1", caller)
		if part == "/blobs/" {
			_, err = readAll(t, open(t, c, "r.test/x:1", caller), f.digest())
		}
		if !errors.Is(err, ErrDenied) || !strings.Contains(err.Error(), thief.host()) {
			t.Errorf("%s: %v, want that %s denies", part, err, thief.host())
		}
	}
	for _, got := range thief.seen("Authorization") {
		if strings.Contains(got, "Basic") || strings.Contains(got, "Bearer") || strings.Contains(got, "/token") {
			t.Errorf("the other host was asked %q", got)
		}
	}
	if len(thief.log) == 0 {
		t.Error("the redirect was not followed")
	}
}

// A login is not sent to a token service without TLS by a registry with it, and
// an identity token not on to another host.
func TestTokenServicesThatAreRefused(t *testing.T) {
	service := newTokens(t, time.Hour, time.Hour)
	f := newTLSFake(t, service.gate)
	c := withHosts(t, "server = 'https://%s'\nca = 'ca.pem'\n", f.host())
	f.certificate(t, c.HostsDir+"/h.test/ca.pem", "")
	caller := &Caller{Login: Login{Username: "u", Password: "SECRET"}, Server: f.host()}
	if err := fetched(t, c, "h.test/x:1", caller); !errors.Is(err, ErrDenied) || service.issued.Load() != 0 || !strings.Contains(err.Error(), "not reached by TLS") {
		t.Errorf("%d requests, %v", service.issued.Load(), err)
	}
	elsewhere := newFake(t, nil)
	plain := newFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasPrefix(r.URL.Path, "/token") {
			http.Redirect(w, r, elsewhere.URL+"/token", http.StatusTemporaryRedirect)
			return true
		}
		w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+r.Host+`/token"`)
		return answer(401)(w, r)
	})
	conf := config(t, "[[registry]]\nlocation = %q\ninsecure = true\n", plain.host())
	if err := fetched(t, conf, plain.host()+"/x:1", &Caller{Login: Login{IdentityToken: "SECRET"}}); err == nil || len(elsewhere.seen()) != 0 || strings.Contains(err.Error(), "SECRET") {
		t.Errorf("%q, %v", elsewhere.seen(), err)
	}
}

func TestB09Redact(t *testing.T) {
	for in, want := range map[string]string{
		`Get "https://cdn.test/blob?X-Sig=abc&t=1": EOF`:      `Get "https://cdn.test/blob": EOF`,
		"http://user:p@w@host/v2/: refused":                   "http://host/v2/: refused",
		"socks5://user:pw@proxy:1080 refused":                 "socks5://proxy:1080 refused",
		"https://h/p#frag x":                                  "https://h/p x",
		"token s3cr3t/+ was refused, as s3cr3t%2F%2B was too": "token [redacted] was refused, as [redacted] was too",
		"nothing here": "nothing here",
	} {
		if got := Redact(in, []string{"s3cr3t/+", ""}); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
}
