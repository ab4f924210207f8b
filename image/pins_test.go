package image

import (
	"context"
	"errors"
	"strings"
	"testing"
)

func TestPins(t *testing.T) {
	hex := strings.Repeat("a", 64)
	busybox := &Record{RepoTags: []string{"docker.io/library/busybox:1.36", "docker.io/library/busybox:latest"}, RepoDigests: []string{"docker.io/library/busybox@sha256:" + hex}}
	pause := &Record{RepoTags: []string{"registry.example:5000/base/pause:3"}}
	nameless := &Record{}
	for pattern, want := range map[string][3]bool{ // busybox, pause, nameless
		"busybox":                            {true, false, false},
		"busybox:1.36":                       {true, false, false},
		"busybox:2":                          {false, false, false},
		"docker.io/library/busybox:1.36":     {true, false, false},
		"busybox@sha256:" + hex:              {true, false, false},
		"registry.example:5000/base/pause":   {false, false, false}, // is :latest
		"registry.example:5000/base/pause:3": {false, true, false},
		"registry.example:5000/*":            {false, true, false},
		"registry.example:5000/base*":        {false, true, false},
		"docker.io/*":                        {true, false, false},
		"busy*":                              {true, false, false},
		"box*":                               {false, false, false},
		"*ase/pau*":                          {false, true, false},
		"*box:1*":                            {true, false, false},
		"*sha256:aaaa*":                      {true, false, false},
		"*library*":                          {true, false, false},
		"*":                                  {true, true, false},
		"*nothing of this*":                  {false, false, false},
		"registry.example:5000/base/pause:[0-9]*":  {false, false, false}, // a * alone is special
		"registry.example:5000/base/pause:3.*":     {false, false, false},
		"registry.example:5000/base/pause@sha256*": {false, false, false},
	} {
		p, err := parsePin(pattern)
		if err != nil {
			t.Errorf("%q: %v", pattern, err)
			continue
		}
		s := &Store{}
		s.pins.Store(&[]pin{p})
		if got := [3]bool{s.isPinned(busybox), s.isPinned(pause), s.isPinned(nameless)}; got != want {
			t.Errorf("%q: busybox, pause, nameless are pinned %v, want %v", pattern, got, want)
		}
	}
	for _, bad := range []string{"", "**", "***", "*word", "a*b", "a*b*", "*a*b*", "a**", "UPPER", "a b"} {
		if err := CheckPin(bad); err == nil || bad != "" && !strings.Contains(err.Error(), bad) {
			t.Errorf("%q: %v; want a refusal that names it", bad, err)
		}
		if _, err := Open(context.Background(), Options{Root: t.TempDir(), Pinned: []string{"busybox", bad}}); err == nil {
			t.Errorf("%q: the store opens", bad)
		}
	}
}

func TestAnnotationsOfManifests(t *testing.T) {
	for data, want := range map[string]int{
		`{}`:                                0,
		`{"annotations":null}`:              0,
		`{"annotations":{}}`:                0,
		`{"annotations":{"a":"b","c":"d"}}`: 2,
		`{"annotations":{"a":7}}`:           0,
		`{"annotations":"x"}`:               0,
		`{"annotations":{"a":"` + strings.Repeat("x", maxAnnotations-1) + `"}}`: 1,
		`{"annotations":{"a":"` + strings.Repeat("x", maxAnnotations) + `"}}`:   0,
	} {
		if got := (document{data: []byte(data)}).annotations(); len(got) != want || want == 0 && got != nil {
			t.Errorf("%.60s: %d annotations, want %d", data, len(got), want)
		}
	}
}

// An id is no name: pulling it could only ask Docker Hub for a repository that
// is called sha256.
func TestIDsAreNotPulled(t *testing.T) {
	s := &Store{}
	for _, id := range []string{strings.Repeat("ab", 32), "sha256:" + strings.Repeat("ab", 32)} {
		if _, err := s.Pull(t.Context(), PullRequest{Reference: id}); !errors.Is(err, ErrInvalidReference) || !strings.Contains(err.Error(), id) {
			t.Errorf("pull %s: %v", id, err)
		}
	}
}

// An operator's pin is the image's and lasts: over a restart, a pull, the move of
// one of its tags; not over its removal or the loss of its last tag.
func TestOperatorsPins(t *testing.T) {
	reg := newRegistry(t)
	l := gzipLayer(tarOf(t, file{name: "a", body: "a"}))
	_, id := reg.push("app", "1", l)
	reg.push("app", "2", l)
	s := open(t, t.TempDir(), func(o *Options) { o.Pinned = []string{"*base*"} }, reg)
	mustPull(t, s, reg.ref("app:1"))
	mustPull(t, s, reg.ref("app:2"))
	pinned := func(when string, want bool) {
		t.Helper()
		r, err := s.Resolve(id)
		if err != nil || r.Pinned != want {
			t.Fatalf("%s: %+v, %v; want pinned %v", when, r, err, want)
		}
	}
	pinned("pulled", false)
	for range 2 {
		if r, err := s.Pin(reg.ref("app:1"), true); err != nil || !r.Pinned {
			t.Fatalf("%+v, %v", r, err)
		}
	}
	pinned("pinned", true)
	s = reopen(t, s)
	pinned("restarted", true)
	mustPull(t, s, reg.ref("app:1"))
	pinned("pulled again", true)
	if _, err := s.Pin(id, false); err != nil {
		t.Fatal(err)
	}
	pinned("unpinned", false)
	if _, err := s.Pin(id[:20], true); err != nil {
		t.Fatal(err)
	}
	other := gzipLayer(tarOf(t, file{name: "b", body: "b"}))
	reg.push("app", "1", other)
	mustPull(t, s, reg.ref("app:1"))
	pinned("one tag moved on", true)
	reg.push("app", "2", other)
	mustPull(t, s, reg.ref("app:2"))
	pinned("both moved on", false)

	if _, err := s.Pin(id, true); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Pin(id, true); !errors.Is(err, ErrNotFound) {
		t.Errorf("an image that is gone: %v", err)
	}
	archive, ids := ociArchive(t, plainLayer, "example.org/a:1", "base:1")
	if _, err := s.Import(t.Context(), ImportRequest{File: archive, Pin: true}); err != nil {
		t.Fatal(err)
	}
	for _, id = range ids {
		pinned("imported", true)
	}
	if _, err := s.Pin(ids[1], false); !errors.Is(err, ErrPinnedByConfig) {
		t.Errorf("what the configuration pins: %v", err)
	}
}
