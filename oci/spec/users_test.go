package spec

import (
	"errors"
	"testing"
)

// TestB43ParseID: what looks like a number is a number in range or refused.
func TestB43ParseID(t *testing.T) {
	for s, want := range map[string]ID{
		"0": {}, "1000": {Number: 1000}, "2147483647": {Number: 2147483647}, "01000": {Number: 1000}, "00": {},
		"nobody": {Name: "nobody"}, "www-data": {Name: "www-data"}, "2fa": {Name: "2fa"}, "x0": {Name: "x0"},
		"user.name@host": {Name: "user.name@host"}, "1e3": {Name: "1e3"}, "$x": {Name: "$x"}, "ü": {Name: "ü"},
	} {
		got, err := ParseID("user", s)
		if err != nil || got != want {
			t.Errorf("ParseID(%q) = %+v, %v; want %+v", s, got, err, want)
		}
	}
	for _, s := range []string{
		"", "2147483648", "4294967295", "4294967296", "99999999999", "99999999999999999999999", "-1", "+1", "-0", "0x0", "0X1F",
		"0o17", "0b1", "1_000", "a:b", "a/b", "../x", "a\nb", "a\x00", "\r",
	} {
		if got, err := ParseID("user", s); !errors.Is(err, ErrInvalid) {
			t.Errorf("ParseID(%q) = %+v, %v; want a refusal", s, got, err)
		}
	}
}

func TestB43ImageUser(t *testing.T) {
	for s, want := range map[string]struct {
		uid  int64 // -1: none
		name string
	}{
		"": {-1, ""}, "0": {0, ""}, "1000": {1000, ""}, "1000:50": {1000, ""}, "1000:grp": {1000, ""}, "www-data:grp": {-1, "www-data"},
		"nobody": {-1, "nobody"}, ":50": {-1, ""}, "user:": {-1, "user"},
		// No container runs as these; a name makes a kubelet that wants "not root" refuse them too.
		"2147483648": {-1, "2147483648"}, "4294967296": {-1, "4294967296"}, "-1": {-1, "-1"}, "0x0": {-1, "0x0"}, "1000:4294967296": {-1, "1000"},
		"1:2:3": {-1, "1"},
	} {
		uid, name := ImageUser(s)
		got := int64(-1)
		if uid != nil {
			got = uid.Value
		}
		if got != want.uid || name != want.name {
			t.Errorf("ImageUser(%q) = %d, %q; want %d, %q", s, got, name, want.uid, want.name)
		}
		if uid != nil && name != "" {
			t.Errorf("ImageUser(%q) has a uid and a name", s)
		}
	}
}

func TestB43ParseImageUser(t *testing.T) {
	group := func(g ID) *ID { return &g }
	for s, want := range map[string]struct {
		user  ID
		group *ID
	}{
		"": {}, "5": {ID{Number: 5}, nil}, "5:": {ID{Number: 5}, nil}, "5:6": {ID{Number: 5}, group(ID{Number: 6})},
		"u:g": {ID{Name: "u"}, group(ID{Name: "g"})}, ":6": {ID{}, group(ID{Number: 6})},
	} {
		user, g, err := ParseImageUser(s)
		if err != nil || user != want.user || (g == nil) != (want.group == nil) || g != nil && *g != *want.group {
			t.Errorf("ParseImageUser(%q) = %+v, %+v, %v", s, user, g, err)
		}
	}
	for _, s := range []string{"1000:4294967296", "2147483648:5", "u:-1", "-1:5", "1:2:3", "u:g:", "0x0:0"} {
		if user, g, err := ParseImageUser(s); !errors.Is(err, ErrInvalid) {
			t.Errorf("ParseImageUser(%q) = %+v, %+v, %v", s, user, g, err)
		}
	}
}
