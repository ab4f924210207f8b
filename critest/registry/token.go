package registry

import (
	"fmt"
	"net/http"
	"strings"
	"time"
)

// RequireTokens makes every request need a token, which the registry's own
// service at /token gives to this user and password, to who has the password as
// a refresh token, or to anybody when user is empty. Tokens are good for life; a life of 0 opens the registry again.
func (r *Registry) RequireTokens(user, password string, life time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tokenUser, r.tokenPassword, r.tokenLife, r.tokens = user, password, life, map[string]time.Time{}
}

// Tokens are those that were given out so far, good or not.
func (r *Registry) Tokens() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []string
	for t := range r.tokens {
		list = append(list, t)
	}
	return list
}

// serveToken is the token service.
func (r *Registry) serveToken(w *answer, q *http.Request) {
	user, password, _ := q.BasicAuth()
	refresh := q.Method == http.MethodPost && q.PostFormValue("grant_type") == "refresh_token"
	r.mu.Lock()
	good := r.tokenUser == "" || user == r.tokenUser && password == r.tokenPassword || refresh && q.PostFormValue("refresh_token") == r.tokenPassword
	good = good && r.tokenLife > 0
	token := fmt.Sprintf("registry-token-%d", len(r.tokens)+1)
	if good {
		r.tokens[token] = time.Now().Add(r.tokenLife)
	}
	life := r.tokenLife
	r.mu.Unlock()
	if !good {
		refuse(w, http.StatusUnauthorized, "UNAUTHORIZED", "wrong user or password")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"token":%q,"expires_in":%d}`, token, int(life.Seconds()))
}

// challenge is what a request lacks, as a WWW-Authenticate header; empty: nothing.
func (r *Registry) challenge(q *http.Request) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tokenLife > 0 {
		token, _ := strings.CutPrefix(q.Header.Get("Authorization"), "Bearer ")
		if time.Now().Before(r.tokens[token]) {
			return ""
		}
		return fmt.Sprintf(`Bearer realm="http://%s/token",service="test registry"`, r.listener.Addr())
	}
	user, password, ok := q.BasicAuth()
	if r.user == "" || ok && user == r.user && password == r.password {
		return ""
	}
	return `Basic realm="test registry"`
}
