package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// write makes a tree of one file and returns its folder.
func write(t *testing.T, name, text string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestOffences(t *testing.T) {
	for name, c := range map[string]struct{ file, text, want string }{
		"clean":       {"a.go", "// Package a is.\npackage a\n\nfunc f(a, b, c, d, e int) {}\n", ""},
		"no comment":  {"a.go", "package a\n", "no comment"},
		"parameters":  {"a.go", "// Package a is.\npackage a\n\nfunc f(a, b, c, d, e, g int) {}\n", "6 parameters"},
		"long":        {"a.go", "// Package a is.\npackage a\n\nfunc f() {\n" + strings.Repeat("\t_ = 1\n", 59) + "}\n", "61 lines"},
		"at limit":    {"a.go", "// Package a is.\npackage a\n\nfunc f() {\n" + strings.Repeat("\t_ = 1\n", 58) + "}\n", ""},
		"long file":   {"a.go", "// Package a is.\npackage a\n" + strings.Repeat("\n", 500), "502 lines"},
		"unfinished":  {"a.go", "// Package a is.\npackage a\n\n// TO" + "DO: more\n", "says TO" + "DO"},
		"test's long": {"a_test.go", "package a\n\nfunc f() {\n" + strings.Repeat("\t_ = 1\n", 99) + "}\n", ""},
	} {
		got, err := check(write(t, c.file, c.text))
		if err != nil {
			t.Fatal(err)
		}
		all := strings.Join(got, "\n")
		if (c.want == "") != (all == "") || !strings.Contains(all, c.want) {
			t.Errorf("%s: offences %q, want %q", name, all, c.want)
		}
	}
}

func TestBrokenFileIsAnError(t *testing.T) {
	if _, err := check(write(t, "a.go", "package")); err == nil {
		t.Error("a file that is no Go passed")
	}
}
