package main

import (
	"bytes"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"berth/runtime/admin"
)

func TestImageTable(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	created := now.Add(-100 * 24 * time.Hour)
	user := admin.User{Container: "c1", Name: "web", Pod: "shop/web-0"}
	images := []admin.Image{
		{ID: "sha256:" + strings.Repeat("a", 64), Tags: []string{"docker.io/library/a:1", "docker.io/library/a:2"}, Size: 12_345_678, Pinned: true,
			PulledAt: now.Add(-90 * time.Second), Created: &created, UsedBy: []admin.User{user}},
		{ID: "sha256:" + strings.Repeat("b", 64), Digests: []string{"docker.io/library/b@sha256:bb"}, Size: 1000, PulledAt: now.Add(time.Hour),
			UsedBy: []admin.User{user, user}},
		{ID: "sha256:" + strings.Repeat("c", 64), PulledAt: now},
	}
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	imageTable(w, images, now)
	w.Flush()
	var got []string
	for line := range strings.Lines(b.String()) {
		got = append(got, strings.TrimRight(line, " \n"))
	}
	want := []string{
		"NAME                            ID             SIZE     PINNED   PULLED   CREATED   USED BY",
		"docker.io/library/a:1           aaaaaaaaaaaa   12.3MB   pinned   1m30s    100d      shop/web-0/web",
		"docker.io/library/a:2           aaaaaaaaaaaa   12.3MB   pinned   1m30s    100d      shop/web-0/web",
		"docker.io/library/b@sha256:bb   bbbbbbbbbbbb   1kB               0.0s               2 containers",
		"<none>                          cccccccccccc   0B                0.0s",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// An error of a call is told with its code, and what a caller can do about it.
func TestErrorsOfCalls(t *testing.T) {
	d := &daemon{socket: "/run/berth/berth.sock"}
	for _, c := range []struct {
		err  error
		want string
	}{
		{status.Error(codes.NotFound, "image not found: x"), "image not found: x (NotFound)"},
		{status.Error(codes.Unavailable, "connection refused"), "the daemon at /run/berth/berth.sock does not answer: connection refused (Unavailable)"},
		{status.Error(codes.Unimplemented, "unknown method Why for service berth.v1.Admin"),
			"the daemon at /run/berth/berth.sock is of another version: unknown method Why for service berth.v1.Admin (Unimplemented)"},
		{status.Error(codes.Unimplemented, "not on this node"), "not on this node (Unimplemented)"},
	} {
		if got := d.explain(c.err); got == nil || got.Error() != c.want {
			t.Errorf("%v: %v, want %q", c.err, got, c.want)
		}
	}
	if d.explain(nil) != nil {
		t.Error("no error is one")
	}
}
