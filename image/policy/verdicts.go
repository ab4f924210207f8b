package policy

import (
	"crypto/sha256"
	"fmt"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// Verdicts remembers what was admitted, so that the second container of an
// image costs no cryptography. Refusals are not remembered. The zero value is
// ready; methods may be called at the same time.
type Verdicts struct {
	mu    sync.Mutex
	until map[[sha256.Size]byte]time.Time // guarded by mu
}

const (
	// verdictLife bounds how long a key that has expired goes on to count: an
	// expiry changes no file.
	verdictLife = 10 * time.Minute
	maxVerdicts = 4096
)

// Key is what a verdict depends on.
type Key struct {
	Image      string // its id
	Name       string // as asked, with its transport
	Signatures []digest.Digest
}

func (p *Policy) key(k Key) (sum [sha256.Size]byte) {
	h := sha256.New()
	fmt.Fprintf(h, "%s\x00%x\x00%s\x00%s\x00%v", p.file, p.sum, k.Image, k.Name, k.Signatures)
	h.Sum(sum[:0])
	return sum
}

// Known says whether the policy has admitted this lately.
func (v *Verdicts) Known(p *Policy, k Key) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return time.Now().Before(v.until[p.key(k)])
}

// Admitted remembers that it has.
func (v *Verdicts) Admitted(p *Policy, k Key) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.until == nil || len(v.until) >= maxVerdicts {
		v.until = map[[sha256.Size]byte]time.Time{} // rare, and cheap to find out again
	}
	v.until[p.key(k)] = time.Now().Add(verdictLife)
}
