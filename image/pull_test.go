package image

import (
	"os"
	"path/filepath"
	"testing"
)

func TestPullAndRemove(t *testing.T) {
	reg := newRegistry(t)
	base := gzipLayer(tarOf(t, file{name: "etc/"}, file{name: "etc/hello", body: "hi"}))
	m, want := reg.push("app", "1", base, zstdLayer(tarOf(t, file{name: "etc/"}, file{name: "etc/more", body: "x"})))
	s := open(t, t.TempDir(), nil, reg)
	id := mustPull(t, s, reg.ref("app:1"))
	if id != want {
		t.Fatalf("id %s, want %s", id, want)
	}
	r, err := s.Resolve(reg.ref("app:1"))
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Layers) != 2 || r.RepoDigests[0] != reg.ref("app@"+m.Digest.String()) || r.Size == 0 {
		t.Fatalf("record %+v", r)
	}
	data, err := os.ReadFile(filepath.Join(r.Layers[0], "etc/hello"))
	if err != nil || string(data) != "hi" {
		t.Fatalf("%q %v", data, err)
	}
	if err := s.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if len(s.List()) != 0 {
		t.Error("still listed")
	}
	empty(t, s)
}
