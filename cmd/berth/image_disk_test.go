package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"text/tabwriter"

	"berth/runtime/admin"
)

func TestCheckTable(t *testing.T) {
	r := &admin.CheckReply{Images: 2, Layers: 5, Findings: []admin.Finding{
		{Images: []string{"a:1", "b:1"}, Where: "layers/7", Path: "/etc/odd\nname", Problem: "missing"},
		{Where: "layers/9", Problem: "belongs to no image"},
	}, Repairs: []admin.Repair{{Done: true, Message: "removed"}, {Image: "a:1", Message: "pull a:1"}}}
	var b bytes.Buffer
	checkTable(&b, r)
	want := `2 images, 5 layers checked: 2 findings
layers/7 "/etc/odd\nname": missing (image a:1, b:1)
layers/9: belongs to no image
repaired the rest: removed
not repaired a:1: pull a:1
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	for _, c := range []struct {
		r      *admin.CheckReply
		repair bool
		want   error
	}{
		{r, true, errFindings}, {r, false, errFindings}, {&admin.CheckReply{}, false, nil}, {&admin.CheckReply{}, true, nil},
		{&admin.CheckReply{Findings: r.Findings, Repairs: r.Repairs[:1]}, true, nil},
	} {
		if got := verdict(c.r, c.repair); !errors.Is(got, c.want) {
			t.Errorf("verdict on %+v, repair %v: %v", c.r, c.repair, got)
		}
	}
}

func TestDuTable(t *testing.T) {
	r := &admin.DiskUsageReply{Root: "/images", Total: admin.Usage{Bytes: 3000, Inodes: 30}, Containers: admin.Usage{Bytes: 500, Inodes: 5},
		Kinds: []admin.Kind{{Name: "layers", Usage: admin.Usage{Bytes: 3000, Inodes: 30}}},
		Images: []admin.ImageDisk{
			{ID: "sha256:" + strings.Repeat("a", 64), Names: []string{"a:1", "a:2"}, Total: admin.Usage{Bytes: 2000, Inodes: 20}, Unique: admin.Usage{Bytes: 1000}, SharedWith: []string{"x"}},
			{ID: "sha256:" + strings.Repeat("b", 64), Removed: true},
		}}
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	duTable(w, r)
	w.Flush()
	var got []string
	for line := range strings.Lines(b.String()) {
		got = append(got, strings.TrimRight(line, " \n"))
	}
	want := []string{
		"NAME       ID            TOTAL  UNIQUE  INODES  SHARED WITH  USED BY",
		"a:1        aaaaaaaaaaaa  2kB    1kB     20      1 images",
		"<removed>  bbbbbbbbbbbb  0B     0B      0",
		"",
		"KIND        SIZE  BYTES  INODES",
		"layers      3kB   3000   30",
		"/images     3kB   3000   30",
		"containers  500B  500    5",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
}
