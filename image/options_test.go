package image

import (
	"context"
	"testing"
	"time"
)

// Other options count at once, also for what is already known of images; wrong
// ones change nothing.
func TestReconfigure(t *testing.T) {
	s, err := Open(context.Background(), Options{Root: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	root := s.root
	if err := s.Reconfigure(Options{Root: "/other", PolicyPath: "/p", IdleTimeout: time.Second, Pinned: []string{"busybox"}}); err != nil {
		t.Fatal(err)
	}
	o := *s.options()
	if o.Root != root || o.PolicyPath != "/p" || o.IdleTimeout != time.Second || o.MaxConcurrentDownloads != 3 || len(*s.pins.Load()) != 1 {
		t.Errorf("in force: %+v", o)
	}
	if err := s.Reconfigure(Options{Pinned: []string{"a*b"}}); err == nil {
		t.Error("a wrong pin is accepted")
	}
	if got := *s.options(); got.PolicyPath != "/p" || len(*s.pins.Load()) != 1 {
		t.Errorf("a refused change left %+v", got)
	}
}
