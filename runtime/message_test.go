package runtime

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc/status"
)

func TestReadable(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	for text, want := range map[string]string{
		"":                             "",
		"container: not found: \"a\"":  "container: not found: \"a\"",
		"first\nsecond":                "first; second",
		"a\x1b[31mred\x00":             `a\x1b[31mred\x00`,
		"ä 日本 \u202eback":              "ä 日本 \\u202eback",
		"bad \xff byte":                `bad � byte`,
		"no such id " + long + " here": "no such id " + long[:maxWord] + "…(1048576 bytes) here",
	} {
		if got := readable(text); got != want {
			t.Errorf("%.60q: %.400q, want %.400q", text, got, want)
		}
	}
	for name, text := range map[string]string{"words": strings.Repeat("ab ", 1<<19), "runes": strings.Repeat("日 ", 1<<19), "control": strings.Repeat("\x00 ", 1<<19)} {
		got := readable("beginning " + text + "the cause")
		if len(got) > maxMessage || !strings.HasPrefix(got, "beginning ") || !strings.HasSuffix(got, "the cause") || !utf8.ValidString(got) {
			t.Errorf("%s: %d bytes, %.80q", name, len(got), got)
		}
	}
	if got := status.Convert(statusOf(errors.New(long))).Message(); len(got) > 2*maxWord {
		t.Errorf("an error of %d bytes gives a message of %d", len(long), len(got))
	}
}
