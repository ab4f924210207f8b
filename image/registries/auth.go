package registries

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/docker/distribution/registry/client/auth/challenge"
)

// authState is how an endpoint wants to be told who asks, found out from its
// first refusal.
type authState struct {
	header  string              // to send; empty: nothing yet
	bearer  challenge.Challenge // what tokens are asked for with
	expires time.Time           // of the header's token; zero: unknown
	refresh string              // a newer identity token
}

// soon is how long before its end a token is replaced.
const soon = 500 * time.Millisecond

// authorization is the header for the next request. A token known to be at its
// end is replaced first.
func (e *endpoint) authorization(ctx context.Context) (string, error) {
	if e.login.RegistryToken != "" {
		return "Bearer " + e.login.RegistryToken, nil
	}
	e.mu.Lock()
	state := e.auth
	e.mu.Unlock()
	if state.expires.IsZero() || time.Now().Before(state.expires) {
		return state.header, nil
	}
	return e.newToken(ctx, state.bearer, state.header)
}

// challenged learns from a 401 what to send. It reports false when there is
// nothing better than what was sent.
func (e *endpoint) challenged(ctx context.Context, res *http.Response, sent string) (bool, error) {
	if e.login.RegistryToken != "" {
		return false, nil
	}
	list := challenge.ResponseChallenges(res)
	if len(list) == 0 {
		// Some say what they want only at the root of their API.
		root, err := e.request(ctx, e.path+"/", nil, "")
		if err != nil {
			return false, err
		}
		drain(root.Body)
		if e.own(root.Request.URL) {
			list = challenge.ResponseChallenges(root)
		}
	}
	find := func(scheme string) (challenge.Challenge, bool) {
		i := slices.IndexFunc(list, func(c challenge.Challenge) bool { return strings.EqualFold(c.Scheme, scheme) })
		if i < 0 {
			return challenge.Challenge{}, false
		}
		return list[i], true
	}
	if c, ok := find("bearer"); ok {
		header, err := e.newToken(ctx, c, sent)
		return header != sent, err
	}
	if _, ok := find("basic"); ok && e.login.Username+e.login.Password != "" {
		header := basic(e.login)
		e.mu.Lock()
		e.auth = authState{header: header}
		e.mu.Unlock()
		e.hidden.add(strings.TrimPrefix(header, "Basic "))
		return header != sent, nil
	}
	return false, nil
}

func basic(l Login) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(l.Username+":"+l.Password))
}

// newToken replaces the header old by one with a new token, unless somebody
// else has done so meanwhile.
func (e *endpoint) newToken(ctx context.Context, c challenge.Challenge, old string) (string, error) {
	select {
	case e.turn <- struct{}{}:
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	defer func() { <-e.turn }()
	e.mu.Lock()
	state := e.auth
	e.mu.Unlock()
	if state.header != old && (state.expires.IsZero() || time.Now().Before(state.expires)) {
		return state.header, nil
	}
	t, err := e.fetchToken(ctx, c, state.refresh)
	if err != nil {
		return "", err
	}
	e.hidden.add(t.value(), t.RefreshToken)
	state = authState{header: "Bearer " + t.value(), bearer: c, refresh: state.refresh}
	if t.ExpiresIn > 0 {
		life := time.Duration(t.ExpiresIn) * time.Second
		state.expires = time.Now().Add(max(life-soon, life/2))
	}
	if t.RefreshToken != "" && e.login.IdentityToken != "" {
		state.refresh = t.RefreshToken
	}
	e.mu.Lock()
	e.auth = state
	e.mu.Unlock()
	return state.header, nil
}

// token is what a token service answers.
type token struct {
	Token        string `json:"token"`
	AccessToken  string `json:"access_token"`
	RefreshToken string `json:"refresh_token"`
	ExpiresIn    int    `json:"expires_in"`
}

func (t token) value() string {
	if t.Token != "" {
		return t.Token
	}
	return t.AccessToken
}

// fetchToken asks the token service that a challenge names.
func (e *endpoint) fetchToken(ctx context.Context, c challenge.Challenge, refresh string) (token, error) {
	var t token
	r, err := e.tokenRequest(c, refresh)
	if err != nil {
		return t, err
	}
	service := r.URL.Host
	res, err := e.exchange(ctx, r)
	if err != nil {
		f := asFailure(err)
		return t, &failure{kind: f.kind, text: fmt.Sprintf("token service %s: %s", service, f.text), again: f.again}
	}
	if res.StatusCode != http.StatusOK {
		f := e.refusal(res)
		f.text = fmt.Sprintf("token service %s: %s", service, f.text)
		if f.kind == ErrNotFound || f.kind == ErrInvalid {
			f.kind = ErrDenied // it speaks of the login, not of the image
		}
		return t, f
	}
	data, err := e.readDocument(res, 1<<20)
	if err == nil {
		err = json.Unmarshal(data, &t)
	}
	if err == nil && t.value() == "" {
		err = errors.New("it gave no token")
	}
	if err != nil {
		return t, &failure{kind: ErrUnavailable, text: fmt.Sprintf("token service %s: %v", service, err)}
	}
	return t, nil
}

// tokenRequest is the request of the distribution's token specification, or of
// its OAuth2 form where there is an identity token.
func (e *endpoint) tokenRequest(c challenge.Challenge, refresh string) (*http.Request, error) {
	realm, err := url.Parse(c.Parameters["realm"])
	if err != nil || realm.Host == "" || (realm.Scheme != "https" && realm.Scheme != "http") {
		return nil, &failure{kind: ErrUnavailable, text: "the registry names no usable token service"}
	}
	if realm.Scheme == "http" && e.speaks() == "https" && !e.insecure && e.login != (Login{}) {
		return nil, &failure{kind: ErrDenied, text: fmt.Sprintf("token service %s is not reached by TLS: the login is not sent there", realm.Host)}
	}
	scope := c.Parameters["scope"]
	if scope == "" {
		scope = "repository:" + e.repository + ":pull"
	}
	q := realm.Query()
	q.Set("scope", scope)
	if service := c.Parameters["service"]; service != "" {
		q.Set("service", service)
	}
	if refresh == "" {
		refresh = e.login.IdentityToken
	}
	if refresh != "" {
		q.Set("grant_type", "refresh_token")
		q.Set("refresh_token", refresh)
		q.Set("client_id", agent)
		realm.RawQuery = ""
		r, err := http.NewRequest(http.MethodPost, realm.String(), strings.NewReader(q.Encode()))
		if err == nil {
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		}
		return r, err
	}
	if e.login.Username != "" {
		q.Set("account", e.login.Username)
	}
	realm.RawQuery = q.Encode()
	r, err := http.NewRequest(http.MethodGet, realm.String(), nil)
	if err == nil && e.login.Username+e.login.Password != "" {
		r.Header.Set("Authorization", basic(e.login))
	}
	return r, err
}
