package streaming

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"sync"
	"time"
)

// maxTickets bounds the URLs that wait for their clients.
const maxTickets = 4096

// ticket is what a token stands for.
type ticket struct {
	kind    string
	expires time.Time
	run     func(*session)
}

// tickets are those not used yet. Whoever knows a token may use it: it has 128
// random bits, works once, and not for long.
type tickets struct {
	lifetime time.Duration

	mu   sync.Mutex
	open map[string]ticket // by token, guarded by mu
}

// add makes a ticket. ErrTooMany.
func (t *tickets) add(kind string, run func(*session)) (token string, err error) {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, see crypto/rand
	token = base64.RawURLEncoding.EncodeToString(b[:])
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for old, x := range t.open {
		if now.After(x.expires) {
			delete(t.open, old)
		}
	}
	if len(t.open) >= maxTickets {
		return "", fmt.Errorf("%w (%d)", ErrTooMany, len(t.open))
	}
	t.open[token] = ticket{kind: kind, expires: now.Add(t.lifetime), run: run}
	return token, nil
}

// take uses a token up, also when it is for something else or too old.
func (t *tickets) take(kind, token string) (ticket, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	x, ok := t.open[token]
	delete(t.open, token)
	return x, ok && x.kind == kind && !time.Now().After(x.expires)
}
