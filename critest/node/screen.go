package node

import (
	"bytes"
	"sync"
)

// Screen keeps what a client got, of a stream that is read meanwhile. The zero
// value is empty.
type Screen struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

// Write implements io.Writer.
func (s *Screen) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

// String is all so far.
func (s *Screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
