package main

import (
	"bytes"
	"strings"
	"testing"
	"text/tabwriter"

	"berth/runtime/admin"
)

func ptr(f float64) *float64 { return &f }

// examples are pulls in every state.
func examples() []admin.Pull {
	return []admin.Pull{
		{Op: "pull", Image: "docker.io/library/app:1", Seconds: 72, Stage: "fetching", Bytes: 25_000_000, Total: 100_000_000,
			Rate: 2_500_000, Left: ptr(30), Layers: []admin.PullLayer{
				{Blob: "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", Stage: "fetching", Bytes: 25_000_000, Total: 50_000_000, Rate: 2_500_000, Left: ptr(10)},
				{Blob: "sha256:1123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", Stage: "waiting", Total: 50_000_000},
				{Blob: "sha256:2123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", Stage: "reused", Total: 999},
			}},
		{Op: "pull", Image: "docker.io/library/new:1", Seconds: 0.31, Stage: "resolving"},
		{Op: "import", Image: "docker.io/library/bad:1", Seconds: 3, Stage: "failed", Ended: true, Error: "invalid image"},
	}
}

func TestPullTable(t *testing.T) {
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	pullTable(w, examples())
	w.Flush()
	var got []string
	for line := range strings.Lines(b.String()) {
		got = append(got, strings.TrimRight(line, " \n"))
	}
	want := []string{
		"IMAGE / LAYER             STAGE       AGE     BYTES   OF      RATE      LEFT",
		"docker.io/library/app:1   fetching    1m12s   25MB    100MB   2.5MB/s   30s",
		"  0123456789ab            fetching            25MB    50MB    2.5MB/s   10s",
		"  1123456789ab            waiting             0B      50MB",
		"  2123456789ab            reused              0B      999B",
		"docker.io/library/new:1   resolving   0.3s",
		"docker.io/library/bad:1   failed      3.0s",
		"  invalid image",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// The live view has a bar for what is to come only.
func TestPullView(t *testing.T) {
	got := pullView(examples(), 90)
	want := []string{
		"docker.io/library/app:1  fetching, 1m12s; layers: 3, done: 0, reused: 1",
		"  all                     [####-------------]  25%      25MB / 100MB       2.5MB/s     30s",
		"  0123456789ab  fetching  [########---------]  50%      25MB / 50MB        2.5MB/s     10s",
		"  1123456789ab  waiting   [-----------------]   0%        0B / 50MB                       ",
		"docker.io/library/new:1  resolving, 0.3s; layers: 0, done: 0, reused: 0",
		"docker.io/library/bad:1  failed, 3.0s; layers: 0, done: 0, reused: 0",
		"  invalid image",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for _, line := range pullView(examples(), 20)[1:4] { // no room for bars
		if strings.ContainsAny(line, "[#") {
			t.Errorf("a bar without room: %q", line)
		}
	}
}

// What was drawn is replaced, and never more is drawn than fits.
func TestScreen(t *testing.T) {
	var b bytes.Buffer
	s := &screen{out: &b}
	draw := func(width, height int, lines ...string) string {
		b.Reset()
		if err := s.draw(lines, width, height); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	for i, c := range []struct {
		got, want string
	}{
		{draw(80, 24, "one", "two"), "\r\x1b[Jone\ntwo\n"},
		{draw(3, 24, "äbcd"), "\x1b[2A\r\x1b[Jäbc\n"},
		{draw(80, 4, "1", "2", "3", "4", "5"), "\x1b[1A\r\x1b[J1\n2\n(3 more lines)\n"},
		{draw(80, 4, "1", "2", "3"), "\x1b[3A\r\x1b[J1\n2\n3\n"},
	} {
		if c.got != c.want {
			t.Errorf("%d: drew %q, want %q", i, c.got, c.want)
		}
	}
}

func TestAge(t *testing.T) {
	for seconds, want := range map[float64]string{0: "0.0s", 9.96: "10.0s", 59.9: "59s", 3599: "59m59s", 7260: "2h01m", 172800: "2d"} {
		if got := age(seconds); got != want {
			t.Errorf("%v: %s, want %s", seconds, got, want)
		}
	}
}
