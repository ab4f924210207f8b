package hostport

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOverlaps(t *testing.T) {
	all, four, six := mapping("tcp", "", 80, 1), mapping("tcp", "0.0.0.0", 80, 1), mapping("tcp", "::", 80, 1)
	one4, two4, one6 := mapping("tcp", "10.0.0.1", 80, 1), mapping("tcp", "10.0.0.2", 80, 1), mapping("tcp", "fd00::1", 80, 1)
	for _, c := range []struct {
		a, b Mapping
		want bool
	}{
		{all, all, true}, {all, four, true}, {all, six, true}, {all, one4, true}, {all, one6, true},
		{four, six, false}, {four, one4, true}, {four, one6, false}, {six, one6, true}, {six, one4, false},
		{one4, one4, true}, {one4, two4, false}, {one4, one6, false},
		{all, mapping("udp", "", 80, 1), false}, {all, mapping("tcp", "", 81, 1), false},
	} {
		if c.a.overlaps(c.b) != c.want || c.b.overlaps(c.a) != c.want {
			t.Errorf("%s and %s: want overlap %v", c.a, c.b, c.want)
		}
	}
}

// A process that may not use nftables, or a kernel without: pods that need them
// are refused, others are not, and the reason is told.
func TestUnavailable(t *testing.T) {
	allowed := false
	m := New(Options{Table: "berth", Enter: func(func() error) error {
		if allowed {
			return nil
		}
		return unix.EPERM
	}})
	if err := m.Restore(nil); err != nil {
		t.Errorf("Restore of nothing: %v", err)
	}
	if err := m.Available(); !errors.Is(err, ErrUnavailable) || !errors.Is(err, unix.EPERM) {
		t.Errorf("Available: %v", err)
	}
	if d := m.Describe(); !strings.Contains(d.Unavailable, "operation not permitted") {
		t.Errorf("%+v", d)
	}
	err := m.Restore([]Pod{{ID: "own", Ports: []Mapping{mapping("tcp", "", 80, 1)}, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.9")}},
		{ID: "cni", Ports: []Mapping{mapping("tcp", "", 81, 1)}}})
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "own") || strings.Contains(err.Error(), "cni") {
		t.Errorf("Restore: %v", err)
	}
	for _, port := range []uint16{80, 81} {
		if err := m.Claim("new", []Mapping{mapping("tcp", "", port, 1)}); !errors.Is(err, ErrTaken) {
			t.Errorf("port %d of an earlier daemon's pod: %v", port, err)
		}
	}
	for _, id := range []string{"own", "cni", "nosuch"} {
		if err := m.Close(id); err != nil {
			t.Errorf("Close of %s: %v", id, err)
		}
	}
	if err := m.Claim("new", []Mapping{mapping("tcp", "", 80, 1), mapping("tcp", "", 81, 1)}); err != nil {
		t.Error(err)
	}
	allowed = true
	if err := m.Available(); err != nil {
		t.Errorf("Available, once it is: %v", err)
	}
}
